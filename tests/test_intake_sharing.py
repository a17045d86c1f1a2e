"""One job under several ids, over the wire: reading, waiting, following and cancelling what others share."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from schema.engine import Database
from schema.timing import Timing
from tests.calling import JOB, audited, granted, submitted
from tests.patience import NEWS, eventually
from tests.serving import Bot, Served, serving

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


def finish(bot: Bot, job: str, fence: int) -> None:
    work = {"job": job, "fence": fence, "state": "completed", "outcome": {"verdict": "succeeded", "exit_code": 0}}
    assert bot.sync(leases=[work]).status_code == 200


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


def test_a_submission_that_joined_is_seen_only_in_its_own_instance(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    theirs = served.client(served.token("submitter", instance="qa"))
    _, joined = submitted(operator, SHARED | {"instance": "ci"}, SHARED | {"instance": "ci"})
    assert mine.get(f"/v1/jobs/{joined}").json()["id"] == joined
    for path in ("/v1/jobs/{}", "/v1/jobs/{}/output", "/v1/jobs?before={}"):
        assert theirs.get(path.format(joined)).status_code == 404
    assert theirs.post("/v1/jobs/wait", json={"ids": [joined]}).status_code == 404
    assert cancel(theirs, joined).status_code == 404
    assert states(mine, joined) == ["queued"]


def test_a_key_of_another_instance_is_not_joined(served: Served) -> None:
    mine, theirs = (served.client(served.token("submitter", instance=name)) for name in ("ci", "qa"))
    first = mine.post("/v1/jobs", json={"jobs": [SHARED]}).json()["jobs"][0]
    second = theirs.post("/v1/jobs", json={"jobs": [SHARED]}).json()["jobs"][0]
    assert (first["created"], second["created"]) == (True, True)


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
    assert [(each["id"], each["joined"], each["state"]) for each in both["jobs"]] == [
        (job, None, "succeeded"),
        (joined, job, "succeeded"),
    ]
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
        assert cancel(http, joined).json() == {"jobs": [{"id": joined, "state": "cancelled", "changed": True}]}
        assert leaves.result(NEWS).json()["done"] is True
        eventually(lambda: either.waits("done") == 2)
        assert not stays.done()
        assert not both.done()
        assert states(http, job, joined) == ["queued", "cancelled"]
        cancel(http, job)
        assert [job["state"] for job in both.result(NEWS).json()["jobs"]] == ["cancelled", "cancelled"]
        assert stays.result(NEWS).json()["done"] is True


def test_output_is_followed_under_every_id_until_its_submission_is_over(
    either: Served, database: Database, timing: Timing
) -> None:
    http = either.client(either.token("operator"))
    bot = Bot(either)
    job, joined, left = submitted(http, SHARED, SHARED, SHARED)
    _, fence = granted(database, timing, job)
    report = {**bot.identity, "job": job, "fence": fence, "output": [{"start": 0, "data": "aGkK"}]}
    with ThreadPoolExecutor() as threads:
        held = [threads.submit(http.get, f"/v1/jobs/{each}/output?wait=60") for each in (job, joined)]
        eventually(lambda: either.waits("done") == 2)
        assert bot.http.post("/v1/output", json=report).status_code == 204
        pieces = [each.result(NEWS).json() for each in held]
        assert [base64.b64decode(piece["data"]) for piece in pieces] == [b"hi\n", b"hi\n"]
        assert [piece["final"] for piece in pieces] == [False, False]
        ends, ends_early = (
            threads.submit(http.get, f"/v1/jobs/{each}/output?start=3&wait=60") for each in (joined, left)
        )
        eventually(lambda: either.waits("done") == 2)
        cancel(http, left)
        over = ends_early.result(NEWS).json()
        assert (over["state"], over["final"], over["data"]) == ("cancelled", True, "")
        assert not ends.done()
        finish(bot, job, fence)
        assert (ends.result(NEWS).json()["state"], ends.result(NEWS).json()["final"]) == ("succeeded", True)


def test_a_cancelled_submission_is_shown_as_such_while_the_job_goes_on(
    operator: httpx.Client, database: Database
) -> None:
    job, joined = submitted(operator, SHARED, SHARED)
    assert cancel(operator, job).json()["jobs"] == [{"id": job, "state": "cancelled", "changed": True}]
    assert cancel(operator, job).json()["jobs"] == [{"id": job, "state": "cancelled", "changed": False}]
    mine, theirs = (operator.get(f"/v1/jobs/{each}").json() for each in (job, joined))

    assert (mine["state"], mine["reason"], mine["waiting"]) == (
        "cancelled",
        "cancelled; the job goes on for others who share it",
        None,
    )
    assert mine["finished_at"] is not None
    assert (theirs["state"], theirs["finished_at"], theirs["submissions"]) == ("queued", None, 1)
    assert theirs["events"][-1]["move"] == "withdraw"
    assert [row["state"] for row in operator.get("/v1/jobs").json()["jobs"]] == ["queued"]
    assert audited(database).count("jobs.cancel") == 2


def test_only_an_operator_may_cancel_what_others_share(
    served: Served, operator: httpx.Client, database: Database
) -> None:
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
