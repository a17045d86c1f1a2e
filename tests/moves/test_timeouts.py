"""Queue timeouts: a job that nobody starts in time is dead, one that was started once is not."""

import queue

import pytest
from leasehold.states import EndKind, end_kind

from schema.moves.waiting import timeouts
from schema.postgres.notify import Wakeups
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, completed
from tests.support.race import Race, park

LATE = "UPDATE jobs SET queue_deadline = now() - interval '1 s' WHERE queue_deadline IS NOT NULL"
NO_GRACE = "UPDATE ticks SET grace_until = at"


def time_out(pool: Pool, limit: int = 500) -> int:
    return pool.database.run(lambda c: timeouts.time_out(c, limit, actor="upkeep"))


def test_a_job_that_waited_longer_than_its_queue_timeout_is_dead(pool: Pool) -> None:
    (patient,) = pool.submit()
    (waiting,) = pool.submit(queue_timeout_seconds=60)
    pool.upkeep().run_once()
    assert pool.job(waiting).state == "queued"
    pool.change(LATE)
    pool.upkeep().run_once()
    row = pool.job(waiting)
    assert (row.state, row.reason) == ("dead", "waited longer than its queue timeout")
    assert end_kind(row.state, row.reason) is EndKind.QUEUE_TIMEOUT
    assert row.finished_at is not None
    assert pool.history(waiting) == ["submit", "time_out"]
    assert pool.job(patient).state == "queued"


def test_a_timeout_passes_in_backoff_too_and_in_batches(pool: Pool) -> None:
    pool.submit(5, queue_timeout_seconds=60)
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 h'")
    pool.change(LATE)
    assert [time_out(pool, 3), time_out(pool, 3), time_out(pool, 3)] == [3, 2, 0]
    assert {row.schedule_after for row in pool.rows("SELECT schedule_after FROM jobs")} == {None}


def test_who_waits_for_the_job_is_woken(pool: Pool, wakeups: Wakeups) -> None:
    (job,) = pool.submit(queue_timeout_seconds=60)
    pool.change(LATE)
    heard: queue.Queue[frozenset[str]] = queue.Queue()
    wakeups.subscribe("done", heard.put)
    with wakeups.idle("done"):
        eventually(lambda: wakeups.connected)
        eventually(lambda: pool.row("SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory'").n)
        time_out(pool)
        assert eventually(lambda: job in heard.get(timeout=MINUTE))


def test_a_job_that_lost_its_bot_after_it_was_started_is_not_killed_by_its_queue_timeout(pool: Pool) -> None:
    job, _, _ = pool.running(queue_timeout_seconds=60)
    assert pool.job(job).queue_deadline is None
    pool.upkeep().run_once()
    pool.change(NO_GRACE)
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    pool.upkeep().run_once()
    assert (pool.job(job).state, time_out(pool)) == ("queued", 0)


@pytest.mark.parametrize("started", [True, False], ids=["failed", "given back unstarted"])
def test_a_job_of_which_its_bot_never_said_that_it_began_has_a_queue_timeout_only_if_it_did_not(
    pool: Pool, started: bool
) -> None:
    (job,) = pool.submit(queue_timeout_seconds=60, retry_failed=True)
    bot = pool.bot()
    pool.assigner().run_once()
    (work,) = bot.sync()["leases"]
    bot.sync(completed(work, "failed" if started else "released"), status="draining")
    assert pool.job(job).state == "queued"
    assert (pool.job(job).queue_deadline is None) == started
    pool.change(LATE)
    assert time_out(pool) == (0 if started else 1)


def test_a_parked_job_does_not_time_out(pool: Pool) -> None:
    (job,) = pool.submit(queue_timeout_seconds=60)
    park(pool, job)
    pool.change(LATE)
    assert (time_out(pool), pool.job(job).state) == (0, "parked")


def test_a_job_that_is_about_to_be_granted_is_passed_by(pool: Pool, race: Race) -> None:
    (job,) = pool.submit(queue_timeout_seconds=60)
    pool.bot()
    pool.change(LATE)
    with race.first() as ahead:
        ahead.assigner().run_once()
        assert race.unhindered(lambda: time_out(pool), by=ahead) == 0
        ahead.commit()
    assert (time_out(pool), pool.job(job).state) == (0, "leased")
