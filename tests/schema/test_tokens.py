from contextlib import nullcontext
from typing import Any

import pytest
from leasehold.errors import BadInput, Forbidden, NotFound, Unauthorised

from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.tenancy import tokens


def audited(database: Database) -> list[tuple[str, str, str]]:
    query = Statement("SELECT actor, action, subject FROM audit ORDER BY id")
    return [tuple(row) for row in database.run(lambda c: c.execute(query).all())]


def test_a_token_that_was_created_is_verified_and_only_its_digest_is_stored(database: Database) -> None:
    token = database.run(lambda c: tokens.create(c, "submitter", instance="ci", priority_ceiling=-5))
    found = database.run(lambda c: tokens.verify(c, token))
    identity = token.split("_")[2]
    assert (found.kind, found.id, found.instance, found.priority_ceiling) == ("submitter", identity, "ci", -5)
    stored = database.run(lambda c: c.execute(Statement("SELECT t::text FROM tokens t")).scalar_one())
    assert token.split("_")[3][:64] not in stored
    assert tokens.digest(token).hex() in stored
    assert audited(database) == [("local", "token.create", identity)]


def test_a_typing_error_is_told_apart_without_asking_the_database(database: Database) -> None:
    token = database.run(lambda c: tokens.create(c, "operator"))
    wrong = token[:30] + ("0" if token[30] != "0" else "1") + token[31:]
    with pytest.raises(Unauthorised, match="typing error"):
        tokens.parse(wrong)
    for nonsense in ("", "lh_", "lh_root_" + token[12:], token + "0", token.upper(), "é" * 90, token + "\n"):
        with pytest.raises(Unauthorised):
            tokens.parse(nonsense)


def test_an_absent_token_and_one_with_another_secret_answer_alike(database: Database) -> None:
    token = database.run(lambda c: tokens.create(c, "operator"))
    other = database.run(lambda c: tokens.create(c, "operator"))
    body = token[:24] + other[24:-8]
    forged = body + tokens._checksum(body)
    database.run(lambda c: c.execute(Statement("DELETE FROM tokens WHERE id = :id"), {"id": tokens.parse(other)}))
    for unknown in (forged, other):
        with pytest.raises(Unauthorised, match=r"^the token is not known$"):
            database.run(lambda c, unknown=unknown: tokens.verify(c, unknown))


def test_a_revoked_or_expired_token_is_refused(database: Database) -> None:
    revoked = database.run(lambda c: tokens.create(c, "operator"))
    database.run(lambda c: tokens.revoke(c, tokens.parse(revoked)))
    with pytest.raises(Unauthorised, match="revoked"):
        database.run(lambda c: tokens.verify(c, revoked))
    expired = database.run(lambda c: tokens.create(c, "operator", expires_in=0.000001, note="Ann's laptop"))
    with pytest.raises(Unauthorised, match="expired"):
        database.run(lambda c: tokens.verify(c, expired))
    assert ("local", "token.revoke", tokens.parse(revoked)) in audited(database)
    listed = database.run(tokens.list_tokens)
    assert {one.id: (one.revoked_at is not None, one.note) for one in listed} == {
        tokens.parse(revoked): (True, None),
        tokens.parse(expired): (False, "Ann's laptop"),
    }


def test_revoking_what_does_not_exist_is_an_error(database: Database) -> None:
    for absent in ("0" * 12, "nonsense", "\x00", ""):
        with pytest.raises(NotFound):
            database.run(lambda c, absent=absent: tokens.revoke(c, absent))
    assert audited(database) == []


SENSELESS: list[tuple[str, dict[str, Any]]] = [
    ("kind", {"kind": "root"}),
    ("bot", {"kind": "bot"}),
    ("bot", {"kind": "bot", "bot": "Bad Name"}),
    ("bot", {"kind": "submitter", "bot": "b1"}),
    ("properties", {"kind": "submitter", "properties": {"os": "linux"}}),
    ("priority_ceiling", {"kind": "bot", "bot": "b1", "priority_ceiling": 0}),
    ("priority_ceiling", {"kind": "submitter", "priority_ceiling": -1001}),
    ("instance", {"kind": "operator", "instance": "ci"}),
    ("instance", {"kind": "submitter", "instance": "No"}),
    ("expires_in", {"kind": "operator", "expires_in": 0}),
    ("expires_in", {"kind": "operator", "expires_in": float("nan")}),
    ("labels", {"kind": "submitter", "labels": ["gpu"]}),
    ("labels", {"kind": "bot", "bot": "b1", "labels": [""]}),
    ("pool", {"kind": "operator", "pool": "blue"}),
    ("pool", {"kind": "bot", "bot": "b1", "pool": "No"}),
    ("pool", {"kind": "bot", "bot": "b1", "pool": "blue", "instance": "ci"}),
    ("properties.os", {"kind": "bot", "bot": "b1", "properties": {"os": []}}),
    *(("note", {"kind": "operator", "note": note}) for note in ("", " ", "two\nlines", "\x00", "\ud800", "é" * 101)),
]


def test_a_scope_that_makes_no_sense_is_refused_and_nothing_is_written(database: Database) -> None:
    for field, scope in SENSELESS:
        with pytest.raises(BadInput) as refused:
            database.run(lambda c, scope=scope: tokens.create(c, **scope))  # type: ignore[misc]
        assert refused.value.field == field, scope
    assert database.run(tokens.list_tokens) == []


def test_a_bot_token_covers_its_names_its_instance_and_its_properties(database: Database) -> None:
    allowed = {"os": ["linux"], "rack": ["*"]}
    token = database.run(lambda c: tokens.create(c, "bot", bot="ci-*", instance="ci", properties=allowed))
    bot = database.run(lambda c: tokens.verify(c, token))
    bot.check_session("ci-7", instance="ci", properties={"os": "linux", "rack": ["r1", "r2"]})
    for name, instance, properties in (
        ("other", "ci", {}),
        ("ci-7", None, {}),
        ("ci-7", "qa", {}),
        ("ci-7", "ci", {"os": ["linux", "mac"]}),
        ("ci-7", "ci", {"gpu": "1"}),
    ):
        with pytest.raises(Forbidden):
            bot.check_session(name, instance=instance, properties=properties)
    exact = tokens.Principal(tokens.Kind.BOT, "x", bot="b1")
    assert (exact.may_be_bot("b1"), exact.may_be_bot("b12")) == (True, False)
    assert not exact.may_use_instance("ci")


LIMITED: list[tuple[dict[str, Any], list[str], str | None, bool]] = [
    ({}, ["secure"], "blue", True),
    ({"properties": {"os": ["linux"]}}, [], None, True),
    ({"properties": {"os": ["linux"]}}, ["secure"], None, False),
    ({"properties": {"os": ["linux"]}}, [], "blue", False),
    ({"instance": "ci"}, ["secure"], None, False),
    ({"labels": ["gpu", "fast"]}, ["gpu"], None, True),
    ({"labels": ["gpu"]}, ["gpu", "secure"], None, False),
    ({"labels": ["gpu"]}, ["gpu"], "blue", False),
    ({"labels": ["*"]}, ["secure"], None, True),
    ({"pool": "blue"}, [], "blue", True),
    ({"pool": "blue"}, ["secure"], "blue", False),
    ({"pool": "blue"}, [], "red", False),
    ({"pool": "blue"}, [], None, False),
]


def test_a_limited_bot_token_covers_only_the_labels_and_the_pool_it_names(database: Database) -> None:
    for scope, labels, pool, allowed in LIMITED:
        token = database.run(lambda c, scope=scope: tokens.create(c, "bot", bot="*", **scope))  # type: ignore[misc]
        bot = database.run(lambda c, token=token: tokens.verify(c, token))  # type: ignore[misc]
        with nullcontext() if allowed else pytest.raises(Forbidden, match=r"labels:|pool:"):
            bot.check_session("b1", instance=scope.get("instance"), properties={}, labels=labels, pool=pool)
