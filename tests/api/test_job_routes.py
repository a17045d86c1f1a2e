"""Submitting over the wire: what is kept, what is refused, and what is safe to repeat."""

import base64
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from assigner.api import submission
from bots.sync import sessions
from schema import clock, outputs, requests
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.tenancy import tokens
from schema.timing import Timing
from tests.support.explain import preempted
from tests.support.http import JOB, audited, granted, submitted
from tests.support.patience import NEWS, eventually
from tests.support.pool import Pool
from tests.support.requests import FULL
from tests.support.servers import Bot, Served, serving
from tests.support.tenancy import Tenancy


def test_a_job_is_shown_as_it_was_submitted(operator: httpx.Client, database: Database) -> None:
    job = FULL | {"stdin": "yes\n", "metadata": {"build": "12", "target://a": "x=y"}}
    (identity,) = submitted(operator, job)
    shown = operator.get(f"/v1/jobs/{identity}").json()
    assert shown["payload"] == {"command": ["make", "-j"], "env": {"A": "1"}, "stdin": "yes\n"}
    assert shown["properties"] == {"os": ["linux"], "arch": ["arm", "x86"]}
    same = job.keys() - {"command", "env", "stdin", "properties", "key", "queue_timeout_seconds"}
    assert {name: shown[name] for name in same} == {name: job[name] for name in same}
    assert (shown["state"], shown["attempts"], shown["result"], shown["bot"]) == ("queued", 0, None, None)
    created, deadline = (datetime.fromisoformat(shown[name]) for name in ("created_at", "queue_deadline"))
    assert (deadline - created).total_seconds() == 3600
    (event,) = shown["events"]
    assert (event["move"], event["from"], event["to"]) == ("submit", None, "queued")
    assert event["actor"].startswith("operator:")
    assert audited(database)[-2:] == ["jobs.submit", "job.read"]


def test_the_flat_and_the_nested_form_of_a_request_are_the_same_job(operator: httpx.Client) -> None:
    both, terms = {"key": "order-42", "units": 2}, {"locks": ["dock"], "resources": {"gpu_milli": 500}}
    flat = {"command": ["ship", "42"]} | both | terms
    nested = {"payload": {"command": ["ship", "42"]}, "terms": terms | {"units": 2}} | both
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


@pytest.mark.parametrize("kind", ["operator", "submitter"])
def test_a_commit_that_came_with_a_warning_is_not_acknowledged(served: Served, database: Database, kind: str) -> None:
    caller = served.client(served.token(kind))
    warning = """
        CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE WARNING 'canceling wait for synchronous replication due to user request'; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION warn();
    """
    database.run(lambda c: c.execute_sql(warning))
    unsure = caller.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]})
    assert (unsure.status_code, unsure.json()["code"]) == (503, "outcome_unknown")
    assert unsure.headers["retry-after"] == "1"
    database.run(lambda c: c.execute_sql("DROP TRIGGER late ON jobs; DROP FUNCTION warn()"))
    sure = caller.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]}).json()["jobs"][0]
    assert sure["created"] is False


@pytest.mark.parametrize("kind", [tokens.Kind.OPERATOR, tokens.Kind.SUBMITTER])
def test_a_submit_without_a_key_is_not_tried_again_when_its_commit_may_have_happened(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, kind: tokens.Kind
) -> None:
    def submit(**fields: Any) -> list[Any]:
        caller = tokens.Principal(kind, "x")
        requests_ = submission.normalised_requests([requests.JobRequest(**JOB, **fields)], caller=caller)
        return submission.submit(pool.database, requests_, caller=caller)

    def twice(once: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def repeated(work: Any) -> Any:
            once(work)  # the commit happened, the connection broke before anybody was told
            return once(work)

        return repeated

    with monkeypatch.context() as broken:
        for name in ("run", "run_alone"):
            broken.setattr(pool.database, name, twice(getattr(pool.database, name)))
        with pytest.raises(submission.OutcomeUnknown):
            submit()
        assert submit(key="k")[0].created is False
    assert pool.row("SELECT count(*) FROM jobs")[0] == 2


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_submit_inside_a_callers_transaction_leaves_its_settings_alone(pool: Pool, setting: str) -> None:
    with pool.database.begin() as connection:
        connection.execute_sql(f"SET LOCAL enable_nestloop = {setting}")
        connection.execute_sql("""SELECT * FROM submit('[{"command": ["true"]}]')""")
        assert connection.execute_sql("SHOW enable_nestloop").scalar_one() == setting


# What callers and operators can read of jobs, bots and the pool, and what is hidden from them.


ABSENT = "0" * 32
BAD_QUERIES = {
    "/v1/jobs?": "limit=0 limit=1001 limit=x state=asleep instance=%00 label=%00 before=nonsense nonsense=1"
    " sort=nonsense order=nonsense cursor=nonsense cursor=%00 metadata=nonsense metadata=a%20b%3D1 metadata=a%3D%00"
    " properties=os owner=%C3%9C min_priority=x ended_after=yesterday ended_after=2026-03-01T12:00:00 before=%00 label="
    + "x"
    * 65,
    "/v1/jobs/": f"nonsense %00 %ff {ABSENT} {ABSENT}/output",
    f"/v1/jobs/{ABSENT}/output?": "start=-1 start=99999999999999999999 wait=nan wait=61",
    "/v1/bots?": "limit=0 after=%00",
}


def test_bad_queries_are_refused(operator: httpx.Client) -> None:
    for path, queries in BAD_QUERIES.items():
        for query in queries.split():
            answer = operator.get(path + query)
            assert 400 <= answer.status_code < 500, (path, query, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"


def test_a_submitter_sees_and_submits_only_to_its_own_instance(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", instance="ci", priority_ceiling=-10))
    (own,) = submitted(mine, JOB)
    (foreign,) = submitted(operator, JOB | {"instance": "qa"})
    assert mine.get(f"/v1/jobs/{own}").json()["instance"] == "ci"
    assert [job["id"] for job in mine.get("/v1/jobs").json()["jobs"]] == [own]
    assert mine.get("/v1/jobs?instance=qa").json() == {"jobs": [], "next": None}
    assert mine.get("/v1/status").json()["instances"] == {"ci": {"queued": 1}}
    assert operator.get("/v1/status").json()["jobs"] == {"queued": 2}
    urgent = mine.post("/v1/jobs", json={"jobs": [JOB | {"priority": -11}]})
    assert (urgent.status_code, mine.post("/v1/jobs", json={"jobs": [JOB | {"instance": "qa"}]}).status_code) == (
        403,
        403,
    )
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
    assert operator.get("/v1/jobs?state=running").json() == {"jobs": [], "next": None}


def test_a_queued_job_says_why_it_waits(served: Served, operator: httpx.Client, pool: Pool) -> None:
    Tenancy(pool).quota("full", maximum=0)
    nobody, large, fits, over = submitted(
        operator,
        *(
            JOB | own
            for own in ({"properties": {"gpu": "h100"}}, {"units": 3}, {"label": "fits"}, {"instance": "full"})
        ),
    )
    Bot(served)

    def waiting(job: str) -> tuple[bool, str]:
        found: dict[str, Any] = operator.get(f"/v1/jobs/{job}").json()["waiting"]
        explained = operator.get(f"/v1/jobs/{job}/explain").json()["sentence"]
        assert re.sub(r"\d+", "", found["sentence"]) == re.sub(r"\d+", "", explained), "but for the seconds that pass"
        return found["unmatchable"], found["sentence"]

    assert waiting(nobody) == (True, "it does not run because no bot of cohort 'default' offers gpu=h100")
    assert waiting(large)[0]
    assert waiting(large)[1].endswith("no healthy matching bot has 3 units: the largest has 2")
    assert waiting(over)[0] is False
    assert "'full' in cohort 'default' uses 0 of 0, this job needs 1: 0 + 1 > 0" in waiting(over)[1]
    assert waiting(fits)[0] is False
    assert waiting(fits)[1].startswith("nothing stands in its way: ")
    assert operator.get("/v1/status").json()["unmatchable"] == 2
    unmatchable = [job["id"] for job in operator.get("/v1/jobs?unmatchable=true").json()["jobs"]]
    assert unmatchable == [nobody, large]
    assert operator.get("/v1/jobs?unmatchable=true&state=parked").json()["jobs"] == []
    operator.post("/v1/bots/b1/drain", json={})
    assert waiting(fits)[1].endswith("0 of 1 bot healthy, 1 draining or closing")
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 hour' WHERE label = 'fits'")
    assert waiting(fits)[1].startswith("it does not run because ")


def test_status_and_the_list_of_bots(served: Served, operator: httpx.Client, pool: Pool) -> None:
    Bot(served, "b1", properties={"os": "linux"})
    Bot(served, "b2", instance="ci")
    submitted(operator, JOB, JOB | {"instance": "ci"})
    for name, age in (("reaper", "3 d"), ("reaper-2", "3 s")):
        pool.change(f"INSERT INTO ticks VALUES ('{name}', now() - interval '{age}', now())")
    status = operator.get("/v1/status").json()
    assert (status["jobs"], status["instances"]) == ({"queued": 2}, {"ci": {"queued": 1}, "default": {"queued": 1}})
    assert status["oldest_queued_seconds"] >= 0
    assert status["bots"] == {"ok": {"bots": 2, "capacity": 4, "in_use": 0}}
    assert (status["capacity"], status["in_use"], status["unmatchable"]) == (4, 0, 0)
    (tick,) = status["upkeep"]
    assert (tick["name"], tick["grace"]) == ("reaper-2", False)
    assert 3 <= tick["age_seconds"] < 60
    assert status["rates"]["submitted"] == pytest.approx(2 / 60, abs=0.001)
    listed = {bot["name"]: bot for bot in operator.get("/v1/bots").json()["bots"]}
    assert (listed["b1"]["draining"], listed["b1"]["properties"]) == (False, {"os": ["linux"]})
    assert (listed["b2"]["draining"], listed["b2"]["instance"]) == (False, "ci")


# Cancelling, waiting for the end and following the output over the wire.


def test_cancel_tells_what_became_of_each_and_keeps_what_ended(operator: httpx.Client, database: Database) -> None:
    one, two = submitted(operator, JOB, JOB)
    ended = {"id": one, "state": "cancelled", "changed": True, "why": None}
    assert operator.post("/v1/jobs/cancel", json={"ids": [one]}).json() == {"jobs": [ended], "next": None}
    answer = operator.post("/v1/jobs/cancel", json={"ids": [two.upper(), "nonsense", one]}).json()
    told = [(job["state"], job["changed"]) for job in answer["jobs"]]
    assert told == [("cancelled", True), (None, False), ("cancelled", False)]
    assert operator.post("/v1/jobs/cancel", json={"ids": ["nonsense"]}).status_code == 404
    assert operator.get(f"/v1/jobs/{one}").json()["events"][-1]["move"] == "cancel"
    assert audited(database).count("jobs.cancel") == 2


def test_many_jobs_can_be_cancelled_while_somebody_waits(operator: httpx.Client, served: Served) -> None:
    ids = submitted(operator, *[JOB] * 500)
    waiter = served.client(served.token("submitter"))
    with ThreadPoolExecutor() as threads:
        held = threads.submit(waiter.post, "/v1/jobs/wait", json={"ids": ids, "wait": 60})
        eventually(lambda: served.waits("done") == 1)
        answer = operator.post("/v1/jobs/cancel", json={"ids": ids})
        assert answer.status_code == 200, answer.text
        assert held.result(NEWS).json()["done"] is True


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
            held = threads.submit(waiter.post, "/v1/jobs/wait", json={"ids": ids, "wait": 60})
            eventually(lambda: served.waits("done") == 1)
            http.post("/v1/jobs/cancel", json={"ids": ids[:1]})
            assert not held.done()
            http.post("/v1/jobs/cancel", json={"ids": ids[1:]})
            answer = held.result(NEWS).json()
        assert answer["done"] is True
        assert [job["id"] for job in answer["jobs"]] == ids
        assert {job["state"] for job in answer["jobs"]} == {"cancelled"}
        assert waiter.post("/v1/jobs/wait", json={"ids": [ids[0], "0" * 32]}).status_code == 404


# One job under several ids, over the wire: reading, waiting, following and cancelling what others share.


SHARED = JOB | {"dedup_key": "nightly"}


@pytest.fixture(params=[True, False], ids=["wake-ups", "poll only"])
def either(request: pytest.FixtureRequest, database: Database, timing: Timing) -> Iterator[Served]:
    """A gateway with wake-ups, and one that only looks."""
    with serving(database, timing, wakeups=request.param) as served:
        yield served


def states(http: httpx.Client, *ids: str) -> list[str]:
    return [job["state"] for job in http.post("/v1/jobs/wait", json={"ids": ids}).json()["jobs"]]


def cancel(http: httpx.Client, *ids: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/jobs/cancel", json={"ids": ids, **fields})


def finish(bot: Bot, job: str, fence: int, **outcome: Any) -> None:
    told = {"verdict": "succeeded", "exit_code": 0} | outcome
    assert bot.sync(leases=[{"job": job, "fence": fence, "state": "completed", "outcome": told}]).status_code == 200


def test_a_submission_that_joined_is_answered_under_its_own_id_and_names_the_job(operator: httpx.Client) -> None:
    taken = operator.post("/v1/jobs", json={"jobs": [SHARED, SHARED]}).json()["jobs"]
    assert [one["created"] for one in taken] == [True, False]
    job, joined = (one["id"] for one in taken)
    (plain,) = submitted(operator, JOB)
    first, second, other = (operator.get(f"/v1/jobs/{each}").json() for each in (job, joined, plain))

    assert [each["id"] for each in (first, second)] == [job, joined]
    assert [each["joined"] for each in (first, second, other)] == [None, job, None]
    assert [each["submissions"] for each in (first, second, other)] == [2, 2, 1]
    assert [each["dedup_key"] for each in (first, second, other)] == ["nightly", "nightly", None]
    assert second["events"] == first["events"]
    assert [event["move"] for event in second["events"]] == ["submit", "join"]
    assert [row["id"] for row in operator.get("/v1/jobs").json()["jobs"]] == [plain, job], "a shared job is listed once"
    assert [row["id"] for row in operator.get(f"/v1/jobs?before={plain}").json()["jobs"]] == [job]
    assert operator.get(f"/v1/jobs?before={joined}").json()["jobs"] == []


def test_a_submission_joins_and_is_seen_only_in_its_own_instance(served: Served) -> None:
    mine, theirs = (served.client(served.token("submitter", instance=name)) for name in ("ci", "qa"))
    assert [each.post("/v1/jobs", json={"jobs": [SHARED]}).json()["jobs"][0]["created"] for each in (mine, theirs)] == [
        True, True
    ]  # fmt: skip
    (joined,) = submitted(mine, SHARED)
    assert mine.get(f"/v1/jobs/{joined}").json()["joined"] is not None
    for path in ("/v1/jobs/{}", "/v1/jobs/{}/output", "/v1/jobs?before={}"):
        assert theirs.get(path.format(joined)).status_code == 404
    assert theirs.post("/v1/jobs/wait", json={"ids": [joined]}).status_code == 404
    assert cancel(theirs, joined).status_code == 404
    assert states(mine, joined) == ["queued"]


def test_everybody_who_shares_a_job_is_told_of_its_end(either: Served, database: Database, timing: Timing) -> None:
    http = either.client(either.token("operator"))
    bot = Bot(either)
    job, joined = submitted(http, SHARED, SHARED)
    _, fence = granted(database, timing, job)
    with ThreadPoolExecutor() as threads:
        held = [
            threads.submit(http.post, "/v1/jobs/wait", json={"ids": ids, "wait": 60})
            for ids in ([joined], [job, joined])
        ]
        eventually(lambda: either.waits("done") == 2)
        finish(bot, job, fence)
        one, both = (each.result(NEWS).json() for each in held)
    assert (one["done"], both["done"]) == (True, True)
    told = [(each["id"], each["joined"], each["state"]) for each in both["jobs"]]
    assert told == [(job, None, "succeeded"), (joined, job, "succeeded")]
    assert one["jobs"][0]["result"]["exit_code"] == 0


def test_who_waits_is_told_of_a_withdrawal_and_the_others_wait_on(either: Served) -> None:
    http = either.client(either.token("operator"))
    job, joined = submitted(http, SHARED, SHARED)
    with ThreadPoolExecutor() as threads:
        leaves, stays, both = (
            threads.submit(http.post, "/v1/jobs/wait", json={"ids": ids, "wait": 60})
            for ids in ([joined], [job], [job, joined])
        )
        eventually(lambda: either.waits("done") == 3)
        assert cancel(http, joined).json()["jobs"] == [
            {"id": joined, "state": "cancelled", "changed": True, "why": None}
        ]
        assert leaves.result(NEWS).json()["done"] is True
        eventually(lambda: either.waits("done") == 2)
        assert not stays.done()
        assert not both.done()
        assert states(http, job, joined) == ["queued", "cancelled"]
        cancel(http, job)
        assert [job["state"] for job in both.result(NEWS).json()["jobs"]] == ["cancelled", "cancelled"]
        assert stays.result(NEWS).json()["done"] is True


def test_output_is_followed_under_every_id_until_it_is_over(either: Served, database: Database, timing: Timing) -> None:
    http = either.client(either.token("operator"))
    bot = Bot(either)
    job, joined, left = submitted(http, SHARED, SHARED, SHARED)
    nothing = {"start": 0, "data": "", "next": 0, "state": "queued", "attempt": 0, "final": False, "lost": False}
    assert http.get(f"/v1/jobs/{job}/output").json() == nothing
    row, fence = granted(database, timing, job)
    report = {**bot.identity, "job": job, "fence": fence, "output": [{"start": 0, "data": "aGkK"}]}
    with ThreadPoolExecutor() as threads:
        held = [threads.submit(http.get, f"/v1/jobs/{each}/output?wait=60") for each in (job, joined)]
        eventually(lambda: either.waits("done") == 2)
        assert bot.http.post("/v1/output", json=report).status_code == 204
        pieces = [each.result(NEWS).json() for each in held]
        assert [base64.b64decode(piece["data"]) for piece in pieces] == [b"hi\n", b"hi\n"]
        assert [(piece["next"], piece["attempt"], piece["final"]) for piece in pieces] == [(3, 1, False)] * 2
        ends, ends_early = (
            threads.submit(http.get, f"/v1/jobs/{each}/output?start=3&wait=60") for each in (joined, left)
        )
        eventually(lambda: either.waits("done") == 2)
        cancel(http, left)
        over = ends_early.result(NEWS).json()
        assert (over["state"], over["final"], over["data"]) == ("cancelled", True, "")
        assert not ends.done()
        finish(bot, job, fence, verdict="failed", exit_code=3)
        last = ends.result(NEWS).json()
    assert (last["data"], last["state"], last["final"]) == ("", "failed", True)
    shown = http.get(f"/v1/jobs/{job}").json()
    assert (shown["state"], shown["bot"], shown["result"]["exit_code"]) == ("failed", "b1", 3)
    assert [event["to"] for event in shown["events"] if event["from"] != event["to"]] == ["queued", "leased", "failed"]
    assert database.run(lambda c: outputs.read(c, row, fence=fence, start=0, limit=100)) == b"hi\n"


def test_what_a_lost_bot_had_sent_can_be_read_when_the_job_runs_again(
    served: Served, operator: httpx.Client, database: Database, timing: Timing
) -> None:
    (job,) = submitted(operator, JOB)
    bot = Bot(served)
    _, fence = granted(database, timing, job)
    bot.sync(leases=[{"job": job, "fence": fence, "state": "active"}])
    report = {**bot.identity, "job": job, "fence": fence, "output": [{"start": 0, "data": "aGkK"}]}
    assert bot.http.post("/v1/output", json=report).status_code == 204

    def read(**query: int) -> tuple[Any, ...]:
        found = operator.get(f"/v1/jobs/{job}/output", params=query)
        return tuple(found.json().get(each) for each in ("attempt", "data", "final", "lost"))

    assert read(attempt=1) == read() == (1, "aGkK", False, False)
    Bot(served, dead_session=sessions.digest(bot.identity["secret"]).hex())  # the agent was killed and begins anew
    assert read() == (1, "aGkK", False, True)
    database.run(lambda c: c.execute(Statement("UPDATE jobs SET schedule_after = NULL")))
    granted(database, timing, job)
    assert read() == (2, "", False, False)
    assert read(attempt=1, wait=60) == (1, "aGkK", True, True)
    absent = operator.get(f"/v1/jobs/{job}/output?attempt=3")
    assert (absent.status_code, absent.json()["detail"]) == (404, f"attempt: job '{job}' has no attempt 3")


def test_a_cancelled_submission_is_shown_so_while_the_job_goes_on(operator: httpx.Client, database: Database) -> None:
    job, joined = submitted(operator, SHARED, SHARED)
    assert cancel(operator, job).json()["jobs"] == [{"id": job, "state": "cancelled", "changed": True, "why": None}]
    assert cancel(operator, job).json()["jobs"] == [
        {"id": job, "state": "cancelled", "changed": False, "why": "it is cancelled"}
    ]
    mine, theirs = (operator.get(f"/v1/jobs/{each}").json() for each in (job, joined))

    reason = "cancelled; the job goes on for others who share it"
    assert (mine["state"], mine["reason"], mine["waiting"]) == ("cancelled", reason, None)
    assert mine["finished_at"] is not None
    assert (theirs["state"], theirs["finished_at"], theirs["submissions"]) == ("queued", None, 1)
    assert theirs["events"][-1]["move"] == "withdraw"
    assert [row["state"] for row in operator.get("/v1/jobs").json()["jobs"]] == ["queued"]
    assert audited(database).count("jobs.cancel") == 2


def test_only_operators_cancel_what_others_share(served: Served, operator: httpx.Client, database: Database) -> None:
    submitter = served.client(served.token("submitter"))
    job, joined = submitted(submitter, SHARED, SHARED)
    refused = cancel(submitter, joined, all_submissions=True)
    assert (refused.status_code, states(operator, job, joined)) == (403, ["queued", "queued"])
    assert cancel(operator, joined, all_submissions=True).json()["jobs"][0]["state"] == "cancelled"
    assert states(submitter, job, joined) == ["cancelled", "cancelled"]
    assert "jobs.cancel" in audited(database)


def test_a_duplicate_may_not_be_more_urgent_than_its_token_allows(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", priority_ceiling=0))
    (job,) = submitted(operator, SHARED | {"priority": 5})
    assert mine.post("/v1/jobs", json={"jobs": [SHARED | {"priority": -1}]}).status_code == 403
    submitted(mine, SHARED)
    assert operator.get(f"/v1/jobs/{job}").json()["priority"] == 0


# Why a job waits, in full


def test_a_submitter_is_told_why_its_job_waits_without_names_of_bots(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    (own,) = submitted(mine, JOB)
    Bot(served, "bot-one")
    answer = mine.get(f"/v1/jobs/{own}/explain")
    assert answer.json()["sentence"].startswith("nothing stands in its way: 1 bot with room")
    assert "bot-one" not in answer.text
    assert "bot-one" in operator.get(f"/v1/jobs/{own}/explain").text
    assert operator.get("/v1/jobs/nonsense/explain").status_code == 404


def test_show_keeps_other_tenants_out_of_a_receipt(served: Served, pool: Pool, operator: httpx.Client) -> None:
    job, victim = preempted(pool, Tenancy(pool))
    for own, other, instance in ((job, victim, "team-a"), (victim, job, "team-b")):
        mine = served.client(served.token("submitter", instance=instance))
        events = mine.get(f"/v1/jobs/{own}").json()["events"]
        (receipt,) = [event["details"] for event in events if event["move"].startswith("preempt")]
        assert receipt["rule"] == "lower_priority_only"
        assert other not in str(events)
        assert other in operator.get(f"/v1/jobs/{own}").text


def test_a_stored_value_that_cannot_be_judged_hides_no_list(operator: httpx.Client, pool: Pool) -> None:
    (job,) = pool.submit()
    pool.change("INSERT INTO assigners (name, serves) VALUES ('of another version', '{}')")
    with capture_logs() as logs:
        found = operator.get("/v1/jobs").json()["jobs"]
        (group,) = operator.get("/v1/forecasts").json()["waiting"]
    assert [(each["id"], each["why"]) for each in found] == [(job, "a bot, a limit or its turn")]
    assert group["forecast"]["reason"] == "a stored value keeps it from being foreseen"
    assert [line["event"] for line in logs] == [
        *("why the jobs of a list wait could not be judged", "the start of a job could not be foreseen"),
    ]
