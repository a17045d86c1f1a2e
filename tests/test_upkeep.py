"""Upkeep, round by round: expiry with its grace, overdue leases, retention."""

import queue

import pytest
from prometheus_client import REGISTRY

from assigner.upkeep import THOROUGH_INTERVAL, Upkeep, UpkeepSettings
from bots import sessions
from bots.protocol import OpenSession
from schema.errors import Conflict
from schema.wakeups import Wakeups
from tests.patience import MINUTE, eventually
from tests.pool import Pool, active, completed

EXPIRE = "UPDATE bots SET expires_at = now() - interval '1 s' WHERE status <> 'gone'"
NO_GRACE = "UPDATE ticks SET grace_until = at"
OVERDUE = "UPDATE leases SET due_at = now() - interval '1 s' WHERE due_at IS NOT NULL"


def test_a_session_that_expired_is_closed_and_its_jobs_are_queued_again(pool: Pool) -> None:
    job, bot, work = pool.running()
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(NO_GRACE)
    pool.change(EXPIRE)

    assert upkeep.run_once() == pool.timing.reap

    row = pool.job(job)
    assert (row.state, row.attempts, row.kills, row.fence) == ("queued", 1, 1, 2)
    assert pool.row("SELECT status FROM bots").status == "gone"
    assert pool.rows("SELECT * FROM bot_platforms") == []
    with pytest.raises(Conflict) as refused:
        bot.sync(completed(work))
    assert refused.value.code == "session_over"


def test_after_a_silence_of_upkeep_nobody_is_expired_for_one_session_life(pool: Pool) -> None:
    job, _, _ = pool.running()
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(NO_GRACE)
    pool.change("UPDATE ticks SET at = at - interval '1 h'")
    pool.change(EXPIRE)

    upkeep.run_once()

    assert pool.job(job).state == "running"
    grace = pool.row("SELECT extract(epoch FROM grace_until - at) AS grace FROM ticks").grace
    assert float(grace) == pytest.approx(pool.timing.ttl)


def test_a_database_clock_that_went_back_starts_the_grace_too(pool: Pool) -> None:
    job, _, _ = pool.running()
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change("UPDATE ticks SET at = at + interval '1 h', grace_until = at + interval '1 h'")
    pool.change(EXPIRE)
    upkeep.run_once()
    assert pool.job(job).state == "running"
    grace = pool.row("SELECT extract(epoch FROM grace_until - at) AS grace FROM ticks").grace
    assert float(grace) == pytest.approx(pool.timing.ttl)


def test_a_lease_that_is_never_acknowledged_is_taken_back_uncharged(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    pool.assigner().run_once()
    bot.sync()
    pool.change(OVERDUE)
    pool.upkeep().run_once()
    row = pool.row("SELECT state, stop_reason FROM live")
    assert (row.state, row.stop_reason) == ("cancelling", "unacknowledged")

    bot.sync(status="draining")

    assert (pool.job(job).state, pool.job(job).attempts) == ("queued", 0)


def test_a_job_that_outlives_its_timeout_is_stopped_by_the_server_and_dead(pool: Pool) -> None:
    job, bot, work = pool.running(timeout_seconds=1.0)
    pool.change(OVERDUE)
    pool.upkeep().run_once()
    (told,) = bot.sync(active(work))["leases"]
    assert told["state"] == "cancelling"
    bot.sync(completed(work, "stopped"))
    row = pool.job(job)
    assert (row.state, row.reason) == ("dead", "ran longer than its timeout")


def test_a_lease_that_was_missed_when_it_became_overdue_is_found_within_a_minute(pool: Pool) -> None:
    moment = 0.0
    upkeep = Upkeep(pool.database, UpkeepSettings(), timing=pool.timing, name="upkeep:test", now=lambda: moment)
    pool.running(timeout_seconds=1.0)
    upkeep.run_once()
    pool.change("UPDATE leases SET due_at = now() - interval '1 h'")
    upkeep.run_once()
    assert pool.row("SELECT state FROM live").state == "active", "rounds look at what is newly overdue"
    moment = THOROUGH_INTERVAL
    upkeep.run_once()
    assert pool.row("SELECT state FROM live").state == "cancelling"


def test_a_bot_that_ignores_a_stop_is_not_renewed_and_its_job_waits_for_the_expiry(pool: Pool) -> None:
    job, bot, work = pool.running(timeout_seconds=1.0)
    upkeep = pool.upkeep()
    pool.change(OVERDUE)
    upkeep.run_once()
    bot.sync(active(work))
    pool.change(OVERDUE)
    upkeep.run_once()
    with pytest.raises(Conflict):
        bot.sync(active(work))
    assert pool.job(job).state == "running", "the bot may still run it"

    pool.change(NO_GRACE)
    pool.change(EXPIRE)
    upkeep.run_once()
    assert pool.job(job).state == "dead"


def test_finished_jobs_leave_after_their_time_with_everything_of_theirs(pool: Pool) -> None:
    job, bot, work = pool.running(key="once")
    bot.sync(completed(work))
    (waiting,) = pool.submit(priority=3)
    pool.upkeep(keep_succeeded=3600).run_once()
    assert pool.job(job).state == "succeeded"

    pool.upkeep(keep_succeeded=0).run_once()

    assert [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs")] == [waiting]
    for table in ("job_payloads", "job_events"):
        assert pool.row(f"SELECT count(*) AS n FROM {table}").n == 1
    assert pool.rows("SELECT * FROM leases UNION ALL SELECT * FROM leases") == []
    assert pool.submit(key="once") != [job]


def test_an_age_is_kept_by_state(pool: Pool) -> None:
    job, bot, work = pool.running()
    bot.sync(completed(work, "failed", exit_code=1))
    pool.upkeep(keep_succeeded=0, keep_cancelled=0, keep_dead=0).run_once()
    assert pool.job(job).state == "failed"


def test_a_round_is_told_to_the_gauge(pool: Pool) -> None:
    pool.upkeep().run_once()
    age = REGISTRY.get_sample_value("leasehold_upkeep_tick_age_seconds")
    assert age is not None
    assert 0 <= age < 10


@pytest.mark.parametrize(("count", "named"), [(205, True), (300, False)], ids=["all fit", "too many"])
def test_waiters_hear_of_every_ending_or_are_told_to_look(
    pool: Pool, count: int, named: bool, wakeups: Wakeups
) -> None:
    jobs = pool.submit(count=count, max_attempts=1)
    bot = pool.bot(capacity=count)
    assigner = pool.assigner()
    while pool.row("SELECT count(*) AS n FROM jobs WHERE state = 'queued'").n:
        assigner.run_once()
    assert len(bot.take()) == count
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(NO_GRACE)
    pool.change(EXPIRE)
    heard: queue.Queue[frozenset[str]] = queue.Queue()
    wakeups.subscribe("done", heard.put)
    eventually(lambda: wakeups.connected)
    with wakeups.idle("done"):
        upkeep.run_once()
        assert heard.get(timeout=MINUTE) == (frozenset(jobs) if named else frozenset())
    assert {pool.job(job).state for job in jobs[:3]} == {"dead"}


def test_a_bot_that_leaves_without_a_word_of_its_work_gives_it_back_uncharged(pool: Pool) -> None:
    job, bot, _ = pool.running()
    bot.sync(status="gone")
    row = pool.job(job)
    assert (row.state, row.attempts, row.kills) == ("queued", 0, 0)


def test_a_repeated_opening_finds_the_session_it_opened(pool: Pool) -> None:
    request = OpenSession(bot="bot-1", secret="s" * 40)
    first = sessions.open_session(pool.database, request, timing=pool.timing)
    (job,) = pool.submit()
    pool.assigner().run_once()
    assert sessions.open_session(pool.database, request, timing=pool.timing) == first
    assert pool.job(job).state == "leased"
    other = sessions.open_session(pool.database, OpenSession(bot="bot-1"), timing=pool.timing)
    assert (other.epoch, pool.job(job).state) == (first.epoch + 1, "queued")
