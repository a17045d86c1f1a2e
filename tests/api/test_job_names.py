"""What stands for a job's id: the short form, @last and @failed, with the rights of the caller."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from schema.postgres.statements import Statement
from schema.readable import short_ids
from tests.support.http import JOB, submitted
from tests.support.pool import Pool, completed
from tests.support.servers import Served

RENAME = Statement("UPDATE jobs SET public_id = CAST(:new AS uuid) WHERE public_id = CAST(:old AS uuid)")


def find(http: httpx.Client, *names: str) -> httpx.Response:
    return http.post("/v1/jobs/find", json={"names": names})


def renamed(pool: Pool, job: str, *, days: float = 0, end: str) -> str:
    """Give a job the id that it would have if it had been submitted so many days ago; return it."""
    at = datetime.now(UTC) - timedelta(days=days)
    new = str(uuid.UUID(f"{int(at.timestamp() * 1000):012x}70008000{end:0>12}"))
    pool.database.run(lambda connection: connection.execute(RENAME, {"new": new, "old": job}))
    return new


def test_the_short_form_of_a_list_is_found_whatever_the_case_and_however_old(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    ids = submitted(operator, JOB, JOB, JOB)
    ids[1] = renamed(pool, ids[1], days=70, end="abcdef")
    (listed,) = [[job["id"] for job in operator.get("/v1/jobs?order=asc").json()["jobs"]]]
    short = short_ids(listed)
    assert [len(each) for each in short] == [11] * 3
    assert find(operator, *map(str.upper, short), short[0]).json() == {"ids": [*ids, ids[0]]}
    for wrong, status in (("2c8a", 400), ("@first", 400), (f"{short[0][:4]}-000000", 404), (ids[0], 400)):
        assert (find(operator, wrong).status_code, wrong in find(operator, wrong).text) == (status, True)


def test_a_short_form_of_several_jobs_is_refused_with_those_that_the_caller_may_see(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    (own,) = submitted(mine, JOB)
    first, second = submitted(operator, JOB, JOB)
    own, first, second = (renamed(pool, each, end=f"{nth}234567") for nth, each in enumerate((own, first, second), 1))
    short = f"{own[4:8]}-234567"
    told = find(operator, short)
    assert (told.status_code, told.json()["field"]) == (400, "id")
    assert f"'{short}' is short for 3 jobs: " in told.text
    assert all(each in told.text for each in (own, first, second))
    assert find(mine, short).json() == {"ids": [own]}
    assert find(mine, f"{own[4:8]}-2234567").status_code == 404, "what it may not see is not there"
    assert find(operator, f"{own[4:8]}-2234567").json() == {"ids": [first]}
    assert [len(each) for each in short_ids([own, first])] == [12, 12], "a list tells its jobs apart"


def test_the_words_stand_for_what_the_token_itself_submitted(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    assert find(mine, "@last").status_code == find(mine, "@failed").status_code == 404
    shared = JOB | {"dedup_key": "all"}
    failed, other, joinable = submitted(mine, JOB)[0], submitted(operator, JOB)[0], submitted(mine, shared)[0]
    assert (find(mine, "@last").json(), find(operator, "@last").json()) == ({"ids": [joinable]}, {"ids": [other]})
    (joined,) = submitted(operator, shared | {"instance": "ci"})
    assert find(operator, "@last").json() == {"ids": [joined]}
    bot = pool.bot(capacity=3)
    pool.assigner().run_once()
    bot.sync(*(completed(work, "failed") for work in bot.take()))
    assert {each["state"] for each in operator.get("/v1/jobs").json()["jobs"]} == {"failed"}
    assert find(operator, "@failed").json() == {"ids": [other]}
    assert find(mine, "@failed").json()["ids"][0] in (failed, joinable)


@pytest.mark.parametrize(
    ("wanted", "held", "why"),
    [
        ({}, "SELECT", "its turn"),
        ({"owner": "ann"}, "SELECT", "its turn"),
        ({}, "UPDATE instances SET draining = true", "its instance is drained"),
        ({}, "UPDATE jobs SET attempts = 1, schedule_after = now() + interval '1 d'", "tried again in 1 d"),
        ({}, "UPDATE jobs SET schedule_after = now() + interval '1 d'", "may start in 1 d"),
        ({}, "INSERT INTO quotas (cohort, instance, min_quota, max_quota) SELECT cohort, instance, 0, 0 FROM jobs",
         "its quota is used up"),
        ({}, "UPDATE bots SET draining = true", "no bot of its cohort takes work"),
        ({"properties": {"os": ["mac"]}}, "UPDATE bots SET draining = name = 'mac'",
         "each such bot is drained or leaves"),
        ({"properties": {"os": ["beos"]}, "owner": "ann"}, "SELECT", "no such bot"),
        ({"units": 9}, "UPDATE queues SET schedule_after = now() + interval '1 d', looks = 1",
         "no such bot is large enough"),
        ({"preferred_hours": [(datetime.now(UTC).hour + 12) % 24]}, "SELECT", "it may start from"),
    ],
)  # fmt: skip
def test_a_list_tells_what_runs_how_long_it_waits_and_why(
    operator: httpx.Client, pool: Pool, wanted: dict[str, Any], held: str, why: str
) -> None:
    for name in ("linux", "mac"):
        pool.bot(name, properties={"os": [name]}).sync()
    submitted(operator, {"command": ["echo", "x" * 250 + "z" * 250, *"y" * 99, "end"], **wanted})
    pool.database.run(lambda connection: connection.execute_sql(held))
    (job,) = operator.get("/v1/jobs").json()["jobs"]
    assert (job["command"], job["ran_seconds"]) == (
        ["echo", f"{'x' * 40}…{'z' * 39}", *"yyyy…yyyy", "end"],
        None,
    )
    assert 0 <= job["waited_seconds"] < 3600
    assert job["why"].startswith(why)


@pytest.mark.parametrize(("given", "why"), [({"reason": "disk is full"}, "held: disk is full"), ({}, "held")])
def test_a_list_tells_once_that_a_job_is_held(operator: httpx.Client, given: dict[str, str], why: str) -> None:
    ids = submitted(operator, {"command": ["true"]})
    assert operator.post("/v1/jobs/hold", json={"ids": ids, **given}).status_code == 200
    (listed,) = operator.get("/v1/jobs").json()["jobs"]
    assert listed["why"] == why
