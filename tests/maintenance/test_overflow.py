"""Overflow: while more jobs wait than may, the newest of the low level are deferred, and the oldest return first."""

import httpx

from schema.policy import priority_classes
from schema.policy.priority_classes import Policy
from schema.policy.queue_limits import COUNT_WAITING
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support.patience import MINUTE
from tests.support.plans import statements
from tests.support.pool import Pool
from tests.support.race import cancel


def limited(pool: Pool, most: int | None) -> None:
    pool.database.run(lambda c: priority_classes.put_policy(c, Policy(max_queue_size=most), actor="test"))


def states(pool: Pool) -> dict[str, int]:
    return {row.state: row.jobs for row in pool.rows("SELECT state, count(*) AS jobs FROM jobs GROUP BY state")}


def test_jobs_of_many_batches_are_deferred_newest_first_and_return_oldest_first(pool: Pool) -> None:
    limited(pool, 400)
    background = JobRequest(command=["true"], job_class="background").normal()
    for _ in range(4):
        pool.submit(200, priority=70)
        pool.submit(200, **background)
    upkeep = pool.upkeep()
    upkeep.run_once()
    assert states(pool) == {"queued": 400, "deferred": 1200}
    ids = "SELECT id FROM jobs WHERE state = :state ORDER BY queued_at, id"
    kept, off = ([row.id for row in pool.rows(ids, state=state)] for state in ("queued", "deferred"))
    assert max(kept) < min(off), "those that have waited longest go on waiting"
    pool.change(
        "WITH gone AS (UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE state = 'queued' RETURNING *)"
        " INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)"
        " SELECT id, 'cancel', 'queued', 'cancelled', fence, 'test' FROM gone"
    )
    pool.upkeep().run_once()
    assert states(pool) == {"cancelled": 400, "queued": 360, "deferred": 840}
    assert [row.id for row in pool.rows(ids, state="queued")] == off[:360]
    limited(pool, None)
    upkeep.run_once()
    assert states(pool) == {"cancelled": 400, "queued": 1200}


def test_nothing_is_deferred_that_is_not_low_or_that_somebody_may_join(pool: Pool) -> None:
    limited(pool, 2)
    pool.submit(3)
    pool.submit(3, priority=60)
    (shared,) = pool.submit(priority=99, dedup_key="k")
    pool.submit(**JobRequest(command=["true"], job_class="random").normal())
    (low,) = pool.submit(**JobRequest(command=["true"], job_class="auto_generated").normal())
    (last,) = pool.submit(priority=61)
    pool.upkeep().run_once()
    deferred = {str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'deferred'")}
    assert deferred == {low, last}
    assert pool.job(shared).state == "queued"


def test_without_a_limit_nobody_counts_and_below_it_hardly_ever(pool: Pool) -> None:
    upkeep = pool.upkeep()

    def counted() -> int:
        with statements() as sent:
            upkeep.run_once()
        return sent.count(COUNT_WAITING.query.decode())

    pool.submit(20, priority=70)
    assert counted() == 0
    limited(pool, 30)
    assert counted() == 1
    pool.submit(9, priority=70)
    assert counted() == 0, "one more would still be within the limit"
    pool.submit(2, priority=70)
    assert counted() == 1
    assert states(pool) == {"queued": 30, "deferred": 1}


def test_who_listens_is_told_the_list_of_deferred_jobs(pool: Pool) -> None:
    limited(pool, 1)
    jobs = pool.submit(450, priority=70)
    with pool.database.connect() as listening:
        driver = listening.session
        driver.execute("LISTEN leasehold_deferred")
        driver.execute("SELECT pg_advisory_lock_shared(hashtext('leasehold.idle'), hashtext('deferred'))")
        pool.upkeep().run_once()
        told = [name for notice in driver.notifies(timeout=MINUTE, stop_after=3) for name in notice.payload.split(",")]
        driver.execute("SELECT pg_advisory_unlock_all()")
    assert sorted(told) == sorted(jobs[1:])


def test_deferred_jobs_are_counted_listed_explained_and_can_be_cancelled(pool: Pool, operator: httpx.Client) -> None:
    limited(pool, 1)
    _, one, other = pool.submit(3, priority=70)
    pool.upkeep().run_once()
    assert operator.get("/v1/status").json()["jobs"]["deferred"] == 2
    assert len(operator.get("/v1/jobs", params={"state": "deferred"}).json()["jobs"]) == 2
    told = operator.get(f"/v1/jobs/{one}/explain").json()
    sentences = [gate["sentence"] for gate in told["gates"] if gate["open"] is False]
    assert sentences[0] == "it is deferred (more jobs wait than may)"
    (done,) = cancel(pool, one)
    assert (done.state, done.changed) == ("cancelled", True)
    assert pool.history(one) == ["submit", "defer", "cancel"]
    limited(pool, None)
    pool.upkeep().run_once()
    assert (pool.history(other), pool.job(other).state) == (["submit", "defer", "return"], "queued")


def test_what_an_assigner_is_about_to_place_is_not_deferred(pool: Pool) -> None:
    limited(pool, 1)
    jobs = pool.submit(3, priority=70)

    def placing(connection: Connection) -> None:
        connection.execute(
            Statement("SELECT FROM jobs WHERE public_id = CAST(:id AS uuid) FOR NO KEY UPDATE"), {"id": jobs[2]}
        )
        pool.upkeep().run_once()

    pool.database.run(placing)
    assert [pool.job(job).state for job in jobs] == ["queued", "deferred", "queued"]
    pool.upkeep().run_once()
    assert [pool.job(job).state for job in jobs] == ["queued", "deferred", "deferred"]
