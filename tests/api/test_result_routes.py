"""Results over HTTP: one, many at once, none, and those of others."""

from typing import Any

import httpx
import pytest
from leasehold.client import Client

from assigner.api import results as result_routes
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.timing import Timing
from tests.support.http import audited, client_for, granted, submitted
from tests.support.servers import Bot, Served

ABSENT = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0009"


def ended(database: Database, timing: Timing, bot: Bot, job: str, **outcome: Any) -> int:
    """Let the bot run the job and end it; return the fence."""
    # The call that ended another job may have fetched it.
    known = Statement("SELECT state, fence FROM jobs WHERE public_id = :id")
    row = database.run(lambda c: c.execute(known, {"id": job}).one())
    fence = granted(database, timing, job)[1] if row.state == "queued" else row.fence
    lease = {"job": job, "fence": fence, "state": "completed"}
    told = {"verdict": "succeeded", "exit_code": 0} | outcome
    answer = bot.sync(leases=[lease | {"outcome": told}])
    assert answer.status_code == 200, answer.text
    return fence


def test_a_result_is_returned_as_the_command_wrote_it(
    operator: httpx.Client, served: Served, database: Database, timing: Timing
) -> None:
    (job,) = submitted(operator, {"command": ["true"]})
    before = operator.get(f"/v1/jobs/{job}")
    assert before.json()["has_result"] is False
    refused = operator.get(f"/v1/jobs/{job}/result")
    assert (refused.status_code, refused.json()["detail"]) == (
        404,
        f"id: job '{job}' is queued and has no result: it is not final",
    )
    fence = ended(database, timing, Bot(served), job, result='{"n": 12345678901234567890, "x": 1.0, "é": [1e2]}')
    assert operator.get(f"/v1/jobs/{job}").json()["has_result"] is True
    answer = operator.get(f"/v1/jobs/{job}/result")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"result": {"n": 12345678901234567890, "x": 1.0, "é": [100.0]}, "fence": fence}
    assert '"x": 1.0, "é": [1e2]' in answer.text
    assert audited(database)[-1] == "result.read"


def test_a_final_job_without_a_result_says_so(
    operator: httpx.Client, served: Served, database: Database, timing: Timing
) -> None:
    (job,) = submitted(operator, {"command": ["true"]})
    ended(database, timing, Bot(served), job, reason="no result is stored, because it is not JSON")
    answer = operator.get(f"/v1/jobs/{job}/result")
    assert (answer.status_code, answer.json()["detail"]) == (
        404,
        f"id: job '{job}' is succeeded and has no result: none is stored",
    )
    shown = operator.get(f"/v1/jobs/{job}").json()
    assert (shown["has_result"], shown["result"]["reason"]) == (False, "no result is stored, because it is not JSON")
    assert operator.get("/v1/jobs/nonsense/result").status_code == 404


def test_the_results_of_many_jobs_come_in_one_answer(
    operator: httpx.Client, served: Served, database: Database, timing: Timing
) -> None:
    first, second, third = submitted(operator, *[{"command": ["true"]}] * 3)
    bot = Bot(served)
    ended(database, timing, bot, first, result="null")
    ended(database, timing, bot, second, verdict="failed", exit_code=3, reason="exit code 3", result="1")
    ended(database, timing, bot, third)
    (waiting,) = submitted(operator, {"command": ["true"]})
    answer = operator.post("/v1/results", json={"ids": [waiting, second, first, third, second]}).json()
    none = {"exit_code": None, "reason": None, "has_result": False, "result": None}
    assert answer == {
        "jobs": [
            {"id": waiting, "state": "queued"} | none,
            {
                "id": second,
                "state": "failed",
                "exit_code": 3,
                "reason": "exit code 3",
                "has_result": True,
                "result": 1,
            },
            {"id": first, "state": "succeeded", "exit_code": 0, "reason": None, "has_result": True, "result": None},
            {"id": third, "state": "succeeded"} | none | {"exit_code": 0},
        ],
        "more": False,
    }
    assert audited(database)[-1] == "results.read"
    refused = operator.post("/v1/results", json={"ids": [first, ABSENT]})
    assert (refused.status_code, refused.json()["detail"]) == (404, f"id: there is no job '{ABSENT}'")
    assert operator.post("/v1/results", json={"ids": [first] * 1001}).status_code == 422


def test_results_that_are_too_large_for_one_answer_come_in_several(
    operator: httpx.Client, served: Served, database: Database, timing: Timing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_routes, "MAX_ANSWER_BYTES", 25)
    jobs = submitted(operator, *[{"command": ["true"]}] * 5)
    bot = Bot(served)
    for number, job in enumerate(jobs):
        ended(database, timing, bot, job, result=f'"{number}{"x" * 9}"')
    answer = operator.post("/v1/results", json={"ids": jobs}).json()
    assert ([each["id"] for each in answer["jobs"]], answer["more"]) == (jobs[:2], True)
    with Client(served.url, served.token("operator"), chance=client_for(served.url)._chance) as client:
        assert [each["result"] for each in client.results(jobs)] == [f"{number}{'x' * 9}" for number in range(5)]
        assert client.result(jobs[3]) == "3xxxxxxxxx"


def test_a_result_is_found_by_its_own_instance_only(served: Served, database: Database, timing: Timing) -> None:
    with (
        served.client(served.token("submitter", instance="ours")) as ours,
        served.client(served.token("submitter", instance="theirs")) as theirs,
    ):
        (job,) = submitted(ours, {"command": ["true"]})
        (other,) = submitted(theirs, {"command": ["true"]})
        bot = Bot(served)
        ended(database, timing, bot, job, result="42")
        assert ours.get(f"/v1/jobs/{job}/result").json()["result"] == 42
        absent = theirs.get(f"/v1/jobs/{ABSENT}/result").text.replace(ABSENT, job)
        refused = theirs.get(f"/v1/jobs/{job}/result")
        assert (refused.status_code, refused.text) == (404, absent)
        refused = theirs.post("/v1/results", json={"ids": [other, job]})
        assert (refused.status_code, refused.json()["detail"]) == (404, f"id: there is no job '{job}'")


def test_a_withdrawn_submission_has_no_result(
    operator: httpx.Client, served: Served, database: Database, timing: Timing
) -> None:
    shared = {"command": ["true"], "dedup_key": "same"}
    (job,), (joined,) = submitted(operator, shared), submitted(operator, shared)
    assert operator.post("/v1/jobs/cancel", json={"ids": [joined]}).status_code == 200
    ended(database, timing, Bot(served), job, result="42")
    assert operator.get(f"/v1/jobs/{job}/result").json()["result"] == 42
    assert operator.get(f"/v1/jobs/{joined}/result").status_code == 404
    (told,) = operator.post("/v1/results", json={"ids": [joined]}).json()["jobs"]
    assert (told["state"], told["exit_code"], told["has_result"]) == ("cancelled", None, False)
