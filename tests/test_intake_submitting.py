"""Submitting over the wire: what is kept, what is refused, and what is safe to repeat."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from assigner import submission
from schema import tokens
from schema.engine import Database
from tests.calling import JOB, audited, submitted
from tests.pool import Pool
from tests.serving import Served, counts


def test_a_job_is_shown_as_it_was_submitted(operator: httpx.Client, database: Database) -> None:
    job = {
        "command": ["make", "-j"],
        "env": {"A": "1"},
        "stdin": "yes\n",
        "instance": "ci",
        "properties": {"os": "linux", "arch": ["x86", "arm"]},
        "priority": -3,
        "units": 2,
        "label": "nightly",
        "locality_hint": "core",
        "timeout_seconds": 60,
        "queue_timeout_seconds": 3600,
        "dedup_key": "nightly",
        "max_attempts": 7,
        "retry_failed": True,
    }
    (identity,) = submitted(operator, job)
    shown = operator.get(f"/v1/jobs/{identity}").json()
    assert shown["payload"] == {"command": ["make", "-j"], "env": {"A": "1"}, "stdin": "yes\n"}
    assert shown["properties"] == {"os": ["linux"], "arch": ["arm", "x86"]}
    same = (
        "instance",
        "priority",
        "units",
        "label",
        "locality_hint",
        "timeout_seconds",
        "dedup_key",
        "max_attempts",
        "retry_failed",
    )
    assert {name: shown[name] for name in same} == {name: job[name] for name in same}
    assert (shown["state"], shown["attempts"], shown["result"], shown["bot"]) == ("queued", 0, None, None)
    created, deadline = (datetime.fromisoformat(shown[name]) for name in ("created_at", "queue_deadline"))
    assert (deadline - created).total_seconds() == 3600
    (event,) = shown["events"]
    assert (event["move"], event["from"], event["to"]) == ("submit", None, "queued")
    assert event["actor"].startswith("operator:")
    assert audited(database)[-2:] == ["jobs.submit", "job.read"]


def test_the_flat_and_the_nested_form_of_a_request_are_the_same_job(operator: httpx.Client) -> None:
    flat = {
        "command": ["ship", "42"],
        "key": "order-42",
        "units": 2,
        "locks": ["dock"],
        "resources": {"gpu_milli": 500},
    }
    nested = {
        "payload": {"command": ["ship", "42"]},
        "key": "order-42",
        "units": 2,
        "terms": {"locks": ["dock"], "resources": {"gpu_milli": 500}, "units": 2},
    }
    (first,), (again,) = submitted(operator, flat), submitted(operator, nested)
    assert again == first
    refused = operator.post("/v1/jobs", json={"jobs": [flat, {"payload": {"command": ["a"]}, "terms": {"locks": [5]}}]})
    assert (refused.status_code, refused.json()["field"]) == (422, "jobs.1.locks.0")


def test_a_key_makes_a_submit_safe_to_repeat(operator: httpx.Client) -> None:
    body = {"jobs": [JOB | {"key": "k1"}]}
    first, again = (operator.post("/v1/jobs", json=body).json()["jobs"][0] for _ in range(2))
    assert (first["created"], again["created"], first["id"] == again["id"]) == (True, False, True)
    other = operator.post("/v1/jobs", json={"jobs": [JOB, {"command": ["false"], "key": "k1"}]})
    assert (other.status_code, other.json()["code"]) == (409, "key_reused")
    assert len(operator.get("/v1/jobs").json()["jobs"]) == 1


BAD_JOBS: list[tuple[str, dict[str, Any]]] = [
    ("command", {"command": []}),
    ("command", {"command": [""]}),
    ("command", {"command": "true"}),
    ("command.0", {"command": [1]}),
    ("env", {"env": {"A=B": "1"}}),
    ("env", {"env": {"": "1"}}),
    ("env.A", {"env": {"A": 1}}),
    ("instance", {"instance": "Not A Name"}),
    ("instance", {"instance": "x" * 64}),
    ("instance", {"instance": "ci\n"}),
    ("properties", {"properties": {str(n): "x" for n in range(65)}}),
    ("properties.k", {"properties": {"k": "x" * 1025}}),
    ("properties.k", {"properties": {"k": []}}),
    ("key", {"key": ""}),
    ("key", {"key": "k" * 201}),
    ("priority", {"priority": 1001}),
    ("priority", {"priority": -1001}),
    ("priority", {"priority": "0"}),
    ("priority", {"priority": 0.5}),
    ("priority", {"priority": True}),
    ("priority", {"priority": 10**40}),
    ("units", {"units": 0}),
    ("units", {"units": 2**31}),
    ("label", {"label": "é" * 33}),
    ("locality_hint", {"locality_hint": "h" * 201}),
    ("timeout_seconds", {"timeout_seconds": 0}),
    ("timeout_seconds", {"timeout_seconds": 31536001}),
    ("timeout_seconds", {"timeout_seconds": 10**400}),
    ("queue_timeout_seconds", {"queue_timeout_seconds": 0}),
    ("queue_timeout_seconds", {"queue_timeout_seconds": 31536001}),
    ("queue_timeout_seconds", {"queue_timeout_seconds": "60"}),
    ("dedup_key", {"dedup_key": ""}),
    ("dedup_key", {"dedup_key": "é" * 101}),
    ("dedup_key", {"dedup_key": 1}),
    ("max_attempts", {"max_attempts": 0}),
    ("max_attempts", {"max_attempts": 101}),
    ("retry_failed", {"retry_failed": "yes"}),
    ("comand", {"comand": ["true"]}),
    ("command", {"stdin": "x" * 256 * 1024}),
]


def test_every_bad_job_is_named_by_its_place_and_nothing_is_written(operator: httpx.Client, database: Database) -> None:
    before = counts(database)
    for field, change in BAD_JOBS:
        answer = operator.post("/v1/jobs", json={"jobs": [JOB, JOB | change]})
        assert answer.status_code in (400, 422), (change, answer.text)
        named = answer.json()["field"]
        assert named == f"jobs.1.{field}" or named.startswith(f"jobs.1.{field}."), named
        assert len(answer.json()["detail"]) < 500
    assert operator.post("/v1/jobs", json={"jobs": []}).json()["field"] == "jobs"
    assert operator.post("/v1/jobs", json={"jobs": [JOB] * 10_001}).status_code == 422
    assert counts(database) == before


@pytest.mark.parametrize("kind", ["operator", "submitter"])
def test_a_commit_that_came_with_a_warning_is_not_acknowledged(served: Served, database: Database, kind: str) -> None:
    caller = served.client(served.token(kind))
    warning = """
        CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE WARNING 'canceling wait for synchronous replication due to user request'; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION warn();
    """
    database.run(lambda c: c.execute(text(warning)))
    unsure = caller.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]})
    assert (unsure.status_code, unsure.json()["code"]) == (503, "outcome_unknown")
    assert unsure.headers["retry-after"] == "1"
    database.run(lambda c: c.execute(text("DROP TRIGGER late ON jobs; DROP FUNCTION warn()")))
    sure = caller.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]}).json()["jobs"][0]
    assert sure["created"] is False


@pytest.mark.parametrize("kind", [tokens.Kind.OPERATOR, tokens.Kind.SUBMITTER])
def test_a_submit_without_a_key_is_not_tried_again_when_its_commit_may_have_happened(
    database: Database, monkeypatch: pytest.MonkeyPatch, kind: tokens.Kind
) -> None:
    caller = tokens.Principal(kind, "x")
    keyless = submission.normalised([submission.JobRequest(**JOB)], caller=caller)
    run = database.run

    def twice(once: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def repeated(work: Any) -> Any:
            once(work)  # the commit happened, the connection broke before anybody was told
            return once(work)

        return repeated

    for name in ("run", "run_alone"):
        monkeypatch.setattr(database, name, twice(getattr(database, name)))
    with pytest.raises(submission.OutcomeUnknown):
        submission.submit(database, keyless, caller=caller)
    keyed = submission.normalised([submission.JobRequest(**JOB, key="k")], caller=caller)
    (again,) = submission.submit(database, keyed, caller=caller)
    assert again.created is False
    assert run(lambda c: c.execute(text("SELECT count(*) FROM jobs")).scalar_one()) == 2


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_submit_inside_a_callers_transaction_leaves_its_settings_alone(pool: Pool, setting: str) -> None:
    with pool.database.engine.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL enable_nestloop = {setting}")
        connection.exec_driver_sql("""SELECT * FROM submit('[{"payload": {"command": ["true"]}}]')""")
        assert connection.exec_driver_sql("SHOW enable_nestloop").scalar_one() == setting
