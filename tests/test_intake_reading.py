"""What callers and operators can read of jobs, bots and the pool, and what is hidden from them."""

from typing import Any

import httpx
import pytest
from sqlalchemy import text

from schema import moves
from schema.engine import Database
from schema.moves import Ending, Verdict
from schema.timing import Timing
from tests.calling import JOB, audited, granted, submitted
from tests.serving import Bot, Served


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
    assert waiting(large) == {"unmatchable": True, "sentence": "it needs 3 units, the largest of 1 matching bots has 2"}
    assert waiting(fits)["unmatchable"] is False
    assert "next assigner cycle" in waiting(fits)["sentence"]
    assert operator.get("/v1/status").json()["unmatchable"] == 2
    operator.post("/v1/bots/b1/drain", json={})
    assert "draining" in waiting(fits)["sentence"]
    database.run(
        lambda c: c.execute(text("UPDATE jobs SET schedule_after = now() + interval '1 hour' WHERE label = 'fits'"))
    )
    assert waiting(fits)["sentence"].startswith("in backoff for another 3")


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
