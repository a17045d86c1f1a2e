"""Signed tokens of other issuers: which count, what they may do, and how their keys are read and exchanged."""

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from leasehold.errors import Forbidden, LeaseholdError, NotReady, Unauthorised
from pydantic import ValidationError

from bots.gateway.identity import key_sets
from bots.gateway.identity.issuers import Issuers, fits
from bots.gateway.identity.key_sets import KeySet, Unreadable
from bots.gateway.identity.settings import IdentitySettings
from schema import clock
from schema.postgres.engine import Database
from schema.tenancy.tokens import Kind
from schema.timing import Timing
from tests.support.servers import serving

RSA, OTHER, EC = rsa.generate_private_key(65537, 2048), rsa.generate_private_key(65537, 2048), ec.generate_private_key(
    ec.SECP256R1()
)  # fmt: skip
ISSUER = "https://login.example.com"
HOLDERS: list[dict[str, Any]] = [
    {"claims": {"groups": ["admins", "owners"]}, "kind": "operator"},
    {"claims": {"realm_access": {"roles": "bots"}}, "kind": "bot", "bot": "ci-*", "labels": ["gpu"]},
    {"claims": {"repository": "example/*", "protected": True}, "kind": "submitter", "instance_claim": "project"},
    {"claims": {"repository": "example/*"}, "kind": "submitter", "instance": "ci", "priority_ceiling": 5},
]


def document(**keys: Any) -> bytes:
    """A key set with the public halves of these keys."""
    found = []
    for name, key in keys.items():
        algorithm = jwt.algorithms.RSAAlgorithm if key is not EC else jwt.algorithms.ECAlgorithm
        found.append(algorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": name, "use": "sig"})
    return json.dumps({"keys": found}).encode()


def settings(place: Path | str, **changed: Any) -> IdentitySettings:
    one = {"name": "login", "issuer": ISSUER, "audience": "pool", "jwks": str(place), "holders": HOLDERS, **changed}
    return IdentitySettings.model_validate({"issuers": [one]})


def signed(key: Any = RSA, algorithm: str = "RS256", kid: str | None = "a", **claims: Any) -> str:
    said = {"iss": ISSUER, "aud": "pool", "sub": "ann", "exp": int(time.time()) + 300, **claims}
    said = {name: value for name, value in said.items() if value is not None}
    return jwt.encode(said, key, algorithm=algorithm, headers=None if kid is None else {"kid": kid})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "keys.json").write_bytes(document(a=RSA, e=EC))
    return tmp_path / "keys.json"


def test_the_first_holder_whose_claims_a_token_has_says_what_it_may_do(keys: Path) -> None:
    issuers = Issuers(settings(keys))

    def holder(**claims: Any) -> Any:
        return asyncio.run(issuers.holder(signed(**claims)))[0]

    assert holder(groups=["dev", "owners"]).kind is Kind.OPERATOR
    assert holder(groups="admins", repository="example/app").kind is Kind.OPERATOR
    bot = holder(realm_access={"roles": ["users", "bots"]}, key=EC, algorithm="ES256", kid="e")
    assert (bot.kind, bot.bot, bot.labels, bot.actor) == (Kind.BOT, "ci-*", ("gpu",), "bot:login/ann")
    own = holder(repository="example/app", protected=True, project="web", sub="x\n" + "y" * 300)
    assert (own.kind, own.instance, own.priority_ceiling) == (Kind.SUBMITTER, "web", None)
    assert own.actor.isprintable()
    assert len(own.actor) < 200
    subjects = ["x\n", "x\\n", "gr\xf6\xdfe", "gr\\xf6\\xdfe", *(f"repo:{'a' * 300}:ref:{branch}" for branch in "ab")]
    known = {holder(groups="admins", sub=each).id for each in subjects}
    assert len(known) == len(subjects), "two people are never one in a history or before a rule on who may do what"
    assert r"login/gr\xf6\xdfe" in known
    assert (holder(repository="example/app").instance, holder(repository="example/app").priority_ceiling) == ("ci", 5)
    for claims in (
        {}, {"repository": "examples"}, {"repository": "other/example/app"}, {"groups": [["admins"]]},
        {"groups": "admin"},
        {"groups": {"admins": 1}}, {"realm_access": ["bots"]}, {"realm_access": {"roles": None}},
        {"repository": "example/app", "protected": True},
        {"repository": "example/app", "protected": True, "project": "N O"},
        {"repository": "example/app", "protected": True, "project": ["web"]},
    ):  # fmt: skip
        with pytest.raises(Forbidden):
            holder(**claims)
    assert [fits(1, True), fits(True, "true"), fits("a*", "a*")] == [False, False, True]


def test_only_a_token_counts_that_the_issuer_has_signed_for_this_pool_and_for_now(keys: Path) -> None:
    issuers = Issuers(settings(keys))
    good = signed(groups="admins")
    head, _, signature = good.split(".")
    symmetric = jwt.encode({"iss": ISSUER, "aud": "pool", "sub": "x", "exp": 2**40}, "k" * 40, headers={"kid": "a"})
    wrong = {
        "signature": signed(OTHER), "body": f"{head}.{signed(groups='x').split('.')[1]}.{signature}",
        "symmetric": symmetric, "none": signed(None, "none"), "algorithm": signed(RSA, "RS512"), "kid": signed(kid="z"),
        "no kid": signed(kid=None), "kid of another kind": signed(RSA, "RS256", kid="e"), "issuer": signed(iss="https://x"),
        "no issuer": signed(iss=None), "audience": signed(aud="other"), "no audience": signed(aud=None),
        "no subject": signed(sub=None), "no end": signed(exp=None), "expired": signed(exp=int(time.time()) - 60),
        "early": signed(nbf=int(time.time()) + 600), "endless": signed(exp=1e400), "form": "a.b.c",
        "long": signed(x="y" * 9000), "deep": f"{head}.{jwt.utils.base64url_encode(b'[' * 3000).decode()}.{signature}",
    }  # fmt: skip
    for name, token in wrong.items():
        with pytest.raises(Unauthorised) as refused:
            asyncio.run(issuers.holder(token))
        assert str(refused.value).isprintable(), name
        assert len(str(refused.value)) < 300, name
    holder, valid = asyncio.run(issuers.holder(good))
    assert holder.is_operator
    assert 300 <= valid <= 330
    assert asyncio.run(issuers.holder(signed(groups="admins", exp=10**3000)))[1] > 300
    assert not Issuers(IdentitySettings()).may_be(good)


def test_keys_are_exchanged_and_outlast_an_issuer_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    at, served, reads = 1000.0, [document(a=RSA)], list[str]()
    monkeypatch.setattr(clock, "monotonic", lambda: at)

    async def read(place: str) -> bytes:
        reads.append(place)
        if not served[-1]:
            raise Unreadable("the server answers 500")
        return served[-1]

    async def lives() -> None:
        nonlocal at
        keys = KeySet(settings("https://login.example.com/keys").issuers[0], read=read)
        found = await asyncio.gather(*(keys.key("a") for _ in range(5)))
        assert (len(reads), found[0]["kid"]) == (1, "a")
        served.append(document(a=RSA, b=OTHER))
        with pytest.raises(Unauthorised):  # whoever invents names of keys causes no more reads than this
            await keys.key("b")
        at += key_sets.AGAIN
        assert ((await keys.key("b"))["kid"], len(reads)) == ("b", 2)
        served.append(document(b=OTHER))
        at += key_sets.REFRESH
        assert (await keys.key("a"))["kid"] == "a"  # in use until the new ones are there
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Unauthorised):
            await keys.key("a")
        served.append(document(c=OTHER))
        at += 2 * key_sets.REFRESH
        with pytest.raises(Unauthorised):  # nobody has asked meanwhile, so it is not known whether it still counts
            await keys.key("b")
        served.append(document(b=OTHER))
        at += key_sets.AGAIN
        assert (await keys.key("b"))["kid"] == "b"
        served.append(b"")
        at += key_sets.OLDEST - 1
        assert (await keys.key("b"))["kid"] == "b"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        at += key_sets.AGAIN
        with pytest.raises(NotReady, match="keys of issuer 'login'"):
            await keys.key("b")
        count = len(reads)
        with pytest.raises(NotReady):
            await keys.key("b")
        assert len(reads) == count
        served.append(document(b=OTHER))
        at += key_sets.AGAIN
        assert (await keys.key("b"))["kid"] == "b"

    asyncio.run(lives())


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    answers: dict[str, tuple[int, bytes]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path]
            self.send_response(status)
            self.send_header("Location", "/good")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", answers
        running.shutdown()


def test_what_is_no_key_set_is_not_taken(tmp_path: Path, server: tuple[str, dict[str, tuple[int, bytes]]]) -> None:
    url, answers = server
    answers |= {
        "/good": (200, document(a=RSA)), "/moved": (302, b""), "/away": (503, b""), "/long": (200, b" " * 2_000_000),
        "/html": (200, b"<html>"), "/list": (200, b"[]"), "/none": (200, b'{"keys": []}'),
        "/deep": (200, b"[" * 99_999),
    }  # fmt: skip
    (tmp_path / "long").write_bytes(b" " * 2_000_000)
    places = [*(url + path for path in answers), str(tmp_path / "absent"), str(tmp_path / "long"), str(tmp_path)]
    for place in [*places, "http://127.0.0.1:1/keys"]:
        keys = KeySet(settings(place).issuers[0])
        if place.endswith("/good"):
            assert asyncio.run(keys.key("a"))["kid"] == "a"
        else:
            with pytest.raises(NotReady):
                asyncio.run(keys.key("a"))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("jwks", {"jwks": "http://login.example.com/keys"}),
    ("jwks", {"jwks": "keys.json"}),
    ("algorithms", {"algorithms": ["HS256"]}),
    ("algorithms", {"algorithms": ["none"]}),
    ("name", {"name": "No Name"}),
    ("holders", {"holders": []}),
    *(
        ("holders.0", {"holders": [holder]})
        for holder in (
            {"claims": {}, "kind": "operator"},
            {"claims": {"sub": "*"}, "kind": "submitter"},
            {"claims": {"sub": []}, "kind": "submitter"},
            {"claims": {"sub": ["x", "*"]}, "kind": "submitter"},
            {"claims": {"realm_access": {"roles": "*"}}, "kind": "submitter"},
            {"claims": {"sub": "x"}, "kind": "bot"},
            {"claims": {"sub": "x"}, "kind": "operator", "instance_claim": "project"},
            {"claims": {"sub": "x"}, "kind": "submitter", "instance": "a", "instance_claim": "project"},
            {"claims": {"sub": "x"}, "kind": "submitter", "priority_ceiling": 2000},
            {"claims": {"sub": 1}, "kind": "submitter"},
        )
    ),
]


def test_an_issuer_that_would_trust_everybody_or_makes_no_sense_is_refused() -> None:
    for field, changed in REFUSED:
        with pytest.raises(ValidationError) as refused:
            settings("/keys.json", **changed)
        assert any(".".join(map(str, each["loc"])).startswith(f"issuers.0.{field}") for each in refused.value.errors())
    one = settings("/keys.json").issuers[0]
    with pytest.raises(ValidationError, match="same issuer"):
        IdentitySettings(issuers=(one, one.model_copy(update={"name": "second"})))


def test_a_gateway_takes_signed_tokens_beside_its_own(database: Database, timing: Timing, keys: Path) -> None:
    with serving(database, timing, signed=Issuers(settings(keys))) as served:
        with httpx.Client(base_url=served.url) as client:

            def call(token: str, method: str = "GET", path: str = "/v1/jobs", **more: Any) -> httpx.Response:
                return client.request(method, path, headers={"Authorization": f"Bearer {token}"}, **more)

            mine = signed(repository="example/app", sub="repo:example/app")
            request = {"instance": "ci", "command": ["true"], "priority": 5}
            taken = call(mine, "POST", json={"jobs": [request]})
            assert taken.status_code == 200, taken.text
            assert call(signed(groups="admins"), path="/v1/bots").status_code == 200
            assert call(mine, path="/v1/bots").status_code == 403
            assert call(signed(sub="nobody")).status_code == 403
            assert call(signed(exp=1, groups="admins")).status_code == 401
            assert call("lh_x").status_code == 401
            keys.unlink()
            assert call(mine).status_code == 200
            (event, *_) = call(mine, path=f"/v1/jobs/{taken.json()['jobs'][0]['id']}").json()["events"]
            assert event["actor"] == "submitter:login/repo:example/app"
    fresh = Issuers(settings(keys))
    with pytest.raises(LeaseholdError, match="log of this process"):
        asyncio.run(fresh.holder(signed(groups="admins")))
