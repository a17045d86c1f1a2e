import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from assigner import submission
from schema import clock, moves, outputs, tokens
from schema.engine import Database
from schema.moves import Ending, Verdict
from schema.timing import Timing
from tests.serving import Served, serving
from tests.test_gateway import Bot, counts, until

JOB: dict[str, Any] = {"command": ["true"]}


@pytest.fixture
def served(database: Database, timing: Timing) -> Iterator[Served]:
    with serving(database, timing) as running:
        yield running


@pytest.fixture
def operator(served: Served) -> Iterator[httpx.Client]:
    with served.client(served.token("operator")) as http:
        yield http


def submitted(http: httpx.Client, *jobs: dict[str, Any]) -> list[str]:
    answer = http.post("/v1/jobs", json={"jobs": list(jobs)})
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["jobs"]]


def audited(database: Database) -> list[str]:
    return list(database.run(lambda c: c.execute(text("SELECT action FROM audit ORDER BY id")).scalars()))


def granted(database: Database, timing: Timing, job: str) -> tuple[int, int]:
    """Give the job to the only bot; returns its row id and fence."""

    def work(connection: Any) -> tuple[int, int]:
        row = connection.execute(text("SELECT id FROM jobs WHERE public_id = :id FOR UPDATE"), {"id": job}).scalar_one()
        bot = connection.execute(text("SELECT id FROM bots")).scalar_one()
        lease = moves.grant(connection, [moves.Placement(row, bot, {})], assigner="a", strategy="s", ack=timing.ack)
        return row, lease[0].fence

    return database.run(work)


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
        "max_attempts",
        "retry_failed",
    )
    assert {name: shown[name] for name in same} == {name: job[name] for name in same}
    assert (shown["state"], shown["attempts"], shown["result"], shown["bot"]) == ("queued", 0, None, None)
    (event,) = shown["events"]
    assert (event["move"], event["from"], event["to"]) == ("submit", None, "queued")
    assert event["actor"].startswith("operator:")
    assert audited(database)[-2:] == ["jobs.submit", "job.read"]


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


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs?limit=0",
        "/v1/jobs?limit=1001",
        "/v1/jobs?limit=x",
        "/v1/jobs?state=asleep",
        "/v1/jobs?instance=%00",
        "/v1/jobs?label=%00",
        "/v1/jobs?label=" + "x" * 65,
        "/v1/jobs?before=nonsense",
        "/v1/jobs?before=%00",
        "/v1/jobs/nonsense",
        "/v1/jobs/%00",
        "/v1/jobs/%ff",
        "/v1/jobs/" + "0" * 32,
        "/v1/jobs/" + "0" * 32 + "/output",
        "/v1/jobs/" + "0" * 32 + "/output?start=-1",
        "/v1/jobs/" + "0" * 32 + "/output?start=99999999999999999999",
        "/v1/jobs/" + "0" * 32 + "/output?wait=nan",
        "/v1/jobs/" + "0" * 32 + "/output?wait=61",
        "/v1/bots?limit=0",
        "/v1/bots?after=%00",
    ],
)
def test_bad_queries_are_refused(operator: httpx.Client, path: str) -> None:
    answer = operator.get(path)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_submitter_sees_and_submits_only_to_its_own_instance(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", instance="ci", priority_ceiling=-10))
    (own,) = submitted(mine, JOB)
    (foreign,) = submitted(operator, JOB | {"instance": "qa"})
    assert mine.get(f"/v1/jobs/{own}").json()["instance"] == "ci"
    absent = "0" * 8 + foreign[8:]
    for path in ("/v1/jobs/{}", "/v1/jobs/{}/output", "/v1/jobs?before={}"):
        hidden, missing = mine.get(path.format(foreign)), mine.get(path.format(absent))
        assert hidden.status_code == missing.status_code == 404
        assert hidden.text.replace(foreign, "") == missing.text.replace(absent, "")
    for path in ("/v1/jobs/cancel", "/v1/jobs/wait"):
        assert mine.post(path, json={"ids": [foreign]}).status_code == 404
    assert [job["id"] for job in mine.get("/v1/jobs").json()["jobs"]] == [own]
    assert mine.get("/v1/jobs?instance=qa").json() == {"jobs": []}
    assert mine.get("/v1/status").json()["instances"] == {"ci": {"queued": 1}}
    assert operator.get("/v1/status").json()["jobs"] == {"queued": 2}
    refused = mine.post("/v1/jobs", json={"jobs": [JOB | {"instance": "qa"}]})
    urgent = mine.post("/v1/jobs", json={"jobs": [JOB | {"priority": -11}]})
    assert (refused.status_code, urgent.status_code) == (403, 403)
    assert urgent.json()["detail"] == "jobs.0.priority: this token may not be more urgent than -10"
    assert operator.get(f"/v1/jobs/{foreign}").json()["state"] == "queued"


def test_pages_follow_each_other_without_gaps(operator: httpx.Client) -> None:
    ids = submitted(operator, *[JOB | {"label": "odd" if n % 2 else "even"} for n in range(9)])
    first = [job["id"] for job in operator.get("/v1/jobs?limit=5").json()["jobs"]]
    second = [job["id"] for job in operator.get(f"/v1/jobs?limit=5&before={first[-1]}").json()["jobs"]]
    every = [job["id"] for job in operator.get("/v1/jobs").json()["jobs"]]
    assert (first + second, sorted(every)) == (every, sorted(ids))
    odd = operator.get("/v1/jobs?label=odd&state=queued&instance=default").json()["jobs"]
    assert [job["id"] for job in odd] == [job for job in every if job in ids[1::2]]
    assert operator.get("/v1/jobs?state=running").json() == {"jobs": []}


def test_a_queued_job_says_why_it_waits(served: Served, operator: httpx.Client, database: Database) -> None:
    nobody, large, fits = submitted(
        operator, JOB | {"properties": {"gpu": "h100"}}, JOB | {"units": 3}, JOB | {"label": "fits"}
    )
    Bot(served)

    def waiting(job: str) -> dict[str, Any]:
        found: dict[str, Any] = operator.get(f"/v1/jobs/{job}").json()["waiting"]
        return found

    assert waiting(nobody) == {
        "unmatchable": True,
        "sentence": "no bot that serves the instance 'default' offers gpu=h100",
    }
    assert waiting(large) == {
        "unmatchable": True,
        "sentence": "it needs 3 units, the largest of 1 matching bots has 2",
    }
    assert waiting(fits)["unmatchable"] is False
    assert "next assigner cycle" in waiting(fits)["sentence"]
    assert operator.get("/v1/status").json()["unmatchable"] == 2
    operator.post("/v1/bots/b1/drain", json={})
    assert "draining" in waiting(fits)["sentence"]
    database.run(
        lambda c: c.execute(text("UPDATE jobs SET schedule_after = now() + interval '1 hour' WHERE label = 'fits'"))
    )
    assert waiting(fits)["sentence"].startswith("in backoff for another 3")


def test_cancel_tells_what_became_of_each_and_keeps_what_is_finished(
    operator: httpx.Client, database: Database
) -> None:
    one, two = submitted(operator, JOB, JOB)
    assert operator.post("/v1/jobs/cancel", json={"ids": [one]}).json() == {
        "jobs": [{"id": one, "state": "cancelled", "changed": True}]
    }
    answer = operator.post("/v1/jobs/cancel", json={"ids": [two.upper(), "nonsense", one]}).json()
    assert [(job["state"], job["changed"]) for job in answer["jobs"]] == [
        ("cancelled", True),
        (None, False),
        ("cancelled", False),
    ]
    assert operator.post("/v1/jobs/cancel", json={"ids": ["nonsense"]}).status_code == 404
    assert operator.get(f"/v1/jobs/{one}").json()["events"][-1]["move"] == "cancel"
    assert audited(database).count("jobs.cancel") == 2


def test_many_jobs_can_be_cancelled_while_somebody_waits(operator: httpx.Client, served: Served) -> None:
    ids = submitted(operator, *[JOB] * 500)
    waiter = served.client(served.token("submitter"))
    with ThreadPoolExecutor() as threads:
        held = threads.submit(waiter.post, "/v1/jobs/wait", json={"ids": ids, "wait": 30})
        until(lambda: served.app.state.metrics.waits.labels("done")._value.get() == 1)
        answer = operator.post("/v1/jobs/cancel", json={"ids": ids})
        assert answer.status_code == 200, answer.text
        assert held.result(10).json()["done"] is True


@pytest.mark.parametrize("wakeups", [True, False], ids=["wake-ups", "poll only"])
def test_wait_returns_once_all_are_final_and_not_before(database: Database, timing: Timing, wakeups: bool) -> None:
    with serving(database, timing, wakeups=wakeups) as served, served.client(served.token("operator")) as http:
        ids = submitted(http, JOB, JOB)
        waiter = served.client(served.token("submitter"))
        began = clock.monotonic()
        short = waiter.post("/v1/jobs/wait", json={"ids": ids, "wait": 0.3}).json()
        assert (short["done"], [job["state"] for job in short["jobs"]]) == (False, ["queued", "queued"])
        assert clock.monotonic() - began >= 0.3
        with ThreadPoolExecutor() as threads:
            held = threads.submit(waiter.post, "/v1/jobs/wait", json={"ids": ids, "wait": 30})
            until(lambda: served.app.state.metrics.waits.labels("done")._value.get() == 1)
            http.post("/v1/jobs/cancel", json={"ids": ids[:1]})
            assert not held.done()
            http.post("/v1/jobs/cancel", json={"ids": ids[1:]})
            answer = held.result(10).json()
        assert answer["done"] is True
        assert [job["id"] for job in answer["jobs"]] == ids
        assert {job["state"] for job in answer["jobs"]} == {"cancelled"}
        assert waiter.post("/v1/jobs/wait", json={"ids": [ids[0], "0" * 32]}).status_code == 404


def test_output_is_followed_while_it_is_written(
    served: Served, operator: httpx.Client, database: Database, timing: Timing
) -> None:
    bot = Bot(served)
    (job,) = submitted(operator, JOB)
    assert operator.get(f"/v1/jobs/{job}/output").json() == {
        "start": 0,
        "data": "",
        "next": 0,
        "state": "queued",
        "attempt": 0,
        "final": False,
    }
    row, fence = granted(database, timing, job)
    with ThreadPoolExecutor() as threads:
        held = threads.submit(operator.get, f"/v1/jobs/{job}/output?start=0&wait=30")
        until(lambda: served.app.state.metrics.waits.labels("done")._value.get() == 1)
        report = {
            **bot.identity,
            "job": job,
            "fence": fence,
            "output": [{"start": 0, "data": base64.b64encode(b"hello\n").decode()}],
        }
        assert bot.http.post("/v1/output", json=report).status_code == 204
        first = held.result(10).json()
    assert (base64.b64decode(first["data"]), first["next"], first["attempt"], first["final"]) == (
        b"hello\n",
        6,
        1,
        False,
    )
    finished = bot.sync(
        leases=[{"job": job, "fence": fence, "state": "completed", "outcome": {"verdict": "succeeded"}}]
    )
    assert finished.status_code == 200
    last = operator.get(f"/v1/jobs/{job}/output?start=6&wait=30").json()
    assert (last["data"], last["state"], last["final"]) == ("", "succeeded", True)
    shown = operator.get(f"/v1/jobs/{job}").json()
    assert (shown["state"], shown["bot"], shown["events"][-1]["to"]) == ("succeeded", "b1", "succeeded")
    assert database.run(lambda c: outputs.read(c, row, fence=fence, start=0, limit=100)) == b"hello\n"


def test_status_bots_and_drain(served: Served, operator: httpx.Client, database: Database) -> None:
    Bot(served, "b1", properties={"os": "linux"})
    Bot(served, "b2", instance="ci")
    submitted(operator, JOB, JOB | {"instance": "ci"})
    database.run(lambda c: c.execute(text("INSERT INTO ticks VALUES ('reap', now() - interval '3 s', now())")))
    status = operator.get("/v1/status").json()
    assert status["jobs"] == {"queued": 2}
    assert status["instances"] == {"ci": {"queued": 1}, "default": {"queued": 1}}
    assert status["oldest_queued_seconds"] >= 0
    assert status["bots"] == {"ok": {"bots": 2, "capacity": 4, "in_use": 0}}
    assert (status["capacity"], status["in_use"], status["unmatchable"]) == (4, 0, 0)
    assert status["upkeep"][0]["name"] == "reap"
    assert 3 <= status["upkeep"][0]["age_seconds"] < 60
    assert status["rates"]["submitted"] == pytest.approx(2 / 60, abs=0.001)
    assert operator.post("/v1/bots/b1/drain", json={"draining": True, "reason": "disk"}).json() == {
        "name": "b1",
        "draining": True,
    }
    listed = {bot["name"]: bot for bot in operator.get("/v1/bots").json()["bots"]}
    assert (listed["b1"]["draining"], listed["b1"]["properties"]) == (True, {"os": ["linux"]})
    assert (listed["b2"]["draining"], listed["b2"]["instance"]) == (False, "ci")
    assert operator.post("/v1/bots/absent/drain", json={}).status_code == 404
    assert operator.post("/v1/bots/Bad%20Name/drain", json={}).status_code == 400
    assert "drain" in audited(database)


def test_a_commit_that_came_with_a_warning_is_not_acknowledged(operator: httpx.Client, database: Database) -> None:
    warning = """
        CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE WARNING 'canceling wait for synchronous replication due to user request'; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION warn();
    """
    database.run(lambda c: c.execute(text(warning)))
    unsure = operator.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]})
    assert (unsure.status_code, unsure.json()["code"]) == (503, "outcome_unknown")
    assert unsure.headers["retry-after"] == "1"
    database.run(lambda c: c.execute(text("DROP TRIGGER late ON jobs; DROP FUNCTION warn()")))
    sure = operator.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]}).json()["jobs"][0]
    assert sure["created"] is False


def test_a_submit_without_a_key_is_not_tried_again_when_its_commit_may_have_happened(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = tokens.Principal(tokens.Kind.OPERATOR, "x")
    keyless = submission.normalised([submission.JobRequest(**JOB)], caller=caller)
    run = database.run

    def twice(work: Any, *, urgent: bool = False) -> Any:
        run(work, urgent=urgent)  # the commit happened, the connection broke before anybody was told
        return run(work, urgent=urgent)

    monkeypatch.setattr(database, "run", twice)
    with pytest.raises(submission.OutcomeUnknown):
        submission.submit(database, keyless, caller=caller)
    keyed = submission.normalised([submission.JobRequest(**JOB, key="k")], caller=caller)
    (again,) = submission.submit(database, keyed, caller=caller)
    assert again.created is False
    assert run(lambda c: c.execute(text("SELECT count(*) FROM jobs")).scalar_one()) == 2


def test_endings_show_up_as_events_with_their_details(
    served: Served, operator: httpx.Client, database: Database, timing: Timing
) -> None:
    Bot(served)
    (job,) = submitted(operator, JOB)
    row, fence = granted(database, timing, job)

    def work(connection: Any) -> None:
        bot = connection.execute(text("SELECT id, epoch FROM bots")).one()
        ending = Ending(row, fence, bot.id, bot.epoch, Verdict.FAILED, {"verdict": "failed", "exit_code": 3})
        moves.end(connection, [ending], actor="bot:b1", pace=moves.RetryPace())

    database.run(work)
    shown = operator.get(f"/v1/jobs/{job}").json()
    assert (shown["state"], shown["result"]["exit_code"]) == ("failed", 3)
    assert [event["to"] for event in shown["events"]] == ["queued", "leased", "failed"]
