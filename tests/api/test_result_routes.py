"""Results over HTTP: one, many at once, none, and those of others."""

from random import Random
from typing import Any

import httpx
import pytest
from leasehold import wire
from leasehold.client import Client

from assigner.api import results as result_routes
from schema.postgres.statements import Statement
from schema.timing import Timing
from tests.support.http import JOB, audited, granted, submitted
from tests.support.servers import Bot, Served

ABSENT = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0009"


def ended(served: Served, bot: Bot, job: str, **outcome: Any) -> int:
    """Let the bot run the job and end it; return the fence."""
    # The call that ended another job may have fetched it.
    known = Statement("SELECT state, fence FROM jobs WHERE public_id = :id")
    row = served.database.run(lambda c: c.execute(known, {"id": job}).one())
    fence: int = granted(served.database, Timing(), job)[1] if row.state == "queued" else row.fence
    told = {"verdict": "succeeded", "exit_code": 0} | outcome
    answer = bot.sync(leases=[{"job": job, "fence": fence, "state": "completed", "outcome": told}])
    assert answer.status_code == 200, answer.text
    return fence


def test_a_result_is_returned_as_the_command_wrote_it(operator: httpx.Client, served: Served) -> None:
    (job,) = submitted(operator, JOB)
    before = operator.get(f"/v1/jobs/{job}")
    assert before.json()["has_result"] is False
    refused = operator.get(f"/v1/jobs/{job}/result")
    said = f"id: job '{job}' has no result: it is queued and has not ended"
    assert (refused.status_code, refused.json()["detail"]) == (404, said)
    fence = ended(served, Bot(served), job, result='{"n": 12345678901234567890, "x": 1.0, "é": [1e2]}')
    assert operator.get(f"/v1/jobs/{job}").json()["has_result"] is True
    answer = operator.get(f"/v1/jobs/{job}/result")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"result": {"n": 12345678901234567890, "x": 1.0, "é": [100.0]}, "fence": fence}
    assert '"x": 1.0, "é": [1e2]' in answer.text
    assert audited(served.database)[-1] == "result.read"
    assert operator.get("/v1/jobs/nonsense/result").status_code == 404


def test_the_results_of_many_jobs_come_in_one_answer(operator: httpx.Client, served: Served) -> None:
    first, second, third = submitted(operator, JOB, JOB, JOB)
    bot = Bot(served)
    ended(served, bot, first, result="null")
    ended(served, bot, second, verdict="failed", exit_code=3, reason="exit code 3", result="1")
    why = f"{wire.NO_RESULT} it is not JSON"
    ended(served, bot, third, reason=why)
    (waiting,) = submitted(operator, JOB)
    answer = operator.post("/v1/results", json={"ids": [waiting, second, first, third, second]}).json()
    none = {"exit_code": None, "reason": None, "has_result": False, "result": None}
    failed = {"exit_code": 3, "reason": "exit code 3", "has_result": True, "result": 1}
    assert answer["jobs"] == [
        {"id": waiting, "state": "queued"} | none,
        {"id": second, "state": "failed"} | failed,
        {"id": first, "state": "succeeded"} | none | {"exit_code": 0, "has_result": True},
        {"id": third, "state": "succeeded"} | none | {"exit_code": 0},
    ]
    assert answer["more"] is False
    assert audited(served.database)[-1] == "results.read"
    shown = operator.get(f"/v1/jobs/{third}").json()
    assert (shown["has_result"], shown["result"]["reason"]) == (False, why)
    refused = operator.get(f"/v1/jobs/{third}/result")
    said = f"id: job '{third}' has no result: it is succeeded and {why}"
    assert (refused.status_code, refused.json()["detail"]) == (404, said)
    refused = operator.post("/v1/results", json={"ids": [first, ABSENT]})
    assert (refused.status_code, refused.json()["detail"]) == (404, f"id: there is no job '{ABSENT}'")
    assert operator.post("/v1/results", json={"ids": [first] * 1001}).status_code == 422


def test_results_that_are_too_large_for_one_answer_come_in_several(
    operator: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_routes, "MAX_ANSWER_BYTES", 25)
    jobs = submitted(operator, *[JOB] * 5)
    bot = Bot(served)
    for number, job in enumerate(jobs):
        ended(served, bot, job, result=f'"{number}{"x" * 9}"')
    answer = operator.post("/v1/results", json={"ids": jobs}).json()
    assert ([each["id"] for each in answer["jobs"]], answer["more"]) == (jobs[:2], True)
    with Client(served.url, served.token("operator"), chance=Random(1)) as client:
        assert [each["result"] for each in client.results(jobs)] == [f"{number}{'x' * 9}" for number in range(5)]
        assert client.result(jobs[3]) == "3xxxxxxxxx"


def test_a_withdrawn_submission_has_no_result(operator: httpx.Client, served: Served) -> None:
    shared = JOB | {"dedup_key": "same"}
    (job,), (joined,) = submitted(operator, shared), submitted(operator, shared)
    assert operator.post("/v1/jobs/cancel", json={"ids": [joined]}).status_code == 200
    ended(served, Bot(served), job, result="42")
    assert operator.get(f"/v1/jobs/{job}/result").json()["result"] == 42
    assert operator.get(f"/v1/jobs/{joined}/result").status_code == 404
    (told,) = operator.post("/v1/results", json={"ids": [joined]}).json()["jobs"]
    assert (told["state"], told["exit_code"], told["has_result"]) == ("cancelled", None, False)
