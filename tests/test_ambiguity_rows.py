"""Where what BuildGrid's scheduler does was ambiguous: what ours does, row by row."""

import time

import pytest
from structlog.testing import capture_logs

from schema import rooms, verify
from schema.errors import Conflict
from tests.pool import Pool, active, completed
from tests.racing import Race, cancel


def test_a_07_a_failed_match_earns_half_an_interval_that_grows_while_nothing_matches(pool: Pool) -> None:
    """A queue that nobody can serve does not keep an assigner, and the database, busy."""
    assigner = pool.assigner(interval=2.0, jitter=0.0, failure_backoff=0.0, failure_backoff_cap=0.0)
    (impossible,) = pool.submit(properties={"os": "plan9"})
    assert [assigner.run_once() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert pool.job(impossible).considered == 4
    pool.submit()
    pool.bot()
    assert assigner.run_once() == pytest.approx(0.02), "only a job that was assigned makes it busy"


def test_a_13_jobs_of_one_priority_go_by_queue_time_and_then_in_the_order_of_submission(pool: Pool) -> None:
    """Ids that callers see are random and sort by nothing; a job that comes back keeps the age it had."""
    together = pool.submit(20)
    pool.change(
        "UPDATE jobs SET queued_at = queued_at - interval '1 s' WHERE public_id = CAST(:id AS uuid)", id=together[-1]
    )
    pool.bot(capacity=20)
    assigner = pool.assigner(batch=1)
    for _ in together:
        assigner.run_once()
    order = pool.rows(
        "SELECT j.public_id FROM job_events e JOIN jobs j ON j.id = e.job_id WHERE e.move = 'grant' ORDER BY e.id"
    )
    assert [str(row.public_id) for row in order] == [together[-1], *together[:-1]]


def test_a_28_room_comes_back_when_the_bot_confirms_and_not_when_somebody_cancels(pool: Pool) -> None:
    """A cancelled job may still run: until its bot has stopped it, nobody else gets its place."""
    pool.submit()
    bot = pool.bot(desk=pool.desk(enabled=False))
    assigner = pool.assigner()
    assigner.run_once()
    (work,) = bot.take()
    (following,) = pool.submit()
    cancel(pool, work["job"])
    assigner.run_once()
    assert (pool.job(following).state, pool.row("SELECT in_use FROM bots").in_use) == ("queued", 1)
    bot.sync(completed(work, "stopped"))
    assigner.run_once()
    assert pool.job(following).state == "leased"


def test_a_28_units_that_are_not_what_the_leases_make_them_are_found_repaired_and_reported(pool: Pool) -> None:
    """The leases are the truth and the units in use a copy: a wrong one neither idles a bot nor overloads it."""
    pool.running()
    pool.bot("idle", capacity=3)
    pool.change("UPDATE bots SET in_use = CASE name WHEN 'idle' THEN 2 ELSE 0 END, held = in_use + 4, reserved = 1")
    assert {finding.id: finding.rows for finding in verify.verify(pool.database) if finding.rows} == {"S3": 2}
    upkeep = pool.upkeep()
    with capture_logs() as logs:
        upkeep.run_once()
    shown = ("bot", "in_use", "leased", "held", "leases", "reserved", "kept")
    told = [tuple(entry[key] for key in shown) for entry in logs]
    assert sorted(told) == [("bot-1", 0, 1, 5, 1, 1, 0), ("idle", 2, 0, 4, 0, 1, 0)]
    assert {entry["log_level"] for entry in logs} == {"error"}
    assert pool.database.run(rooms.reconcile) == []


def test_a_28_a_bot_that_is_just_being_given_work_is_not_mended(pool: Pool, race: Race) -> None:
    """What somebody else has begun and not ended looks wrong to nobody."""
    pool.submit()
    pool.bot()
    with race.first() as ahead:
        ahead.assigner().run_once()
        assert race.unhindered(lambda: pool.database.run(rooms.reconcile), by=ahead) == []
        ahead.commit()
    assert pool.row("SELECT in_use FROM bots").in_use == 1
    assert pool.database.run(rooms.reconcile) == []


@pytest.mark.parametrize("hours", [-24, 24], ids=["behind", "ahead"])
def test_a_35_a_host_whose_clock_is_wrong_decides_as_any_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Due times, ages and expiry are judged by the database's clock alone."""
    wrong = time.time() + hours * 3600
    monkeypatch.setattr(time, "time", lambda: wrong)
    resting, due = pool.submit(2)
    rest = (
        "UPDATE jobs SET schedule_after = now() + make_interval(secs => :seconds) WHERE public_id = CAST(:id AS uuid)"
    )
    pool.change(rest, seconds=60, id=resting)
    pool.change(rest, seconds=-1, id=due)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    pool.upkeep().run_once()
    pool.change("UPDATE ticks SET grace_until = at")
    pool.upkeep().run_once()
    (work,) = bot.take()
    answer = bot.sync(completed(work))
    assert work["job"] == due
    assert 0 < answer["expires_in"] <= pool.timing.ttl + 1
    assert pool.job(resting).state == "queued"
    row = pool.row(
        "SELECT now() - finished_at AS age, finished_at >= queued_at AS later FROM jobs WHERE result_fence = 1"
    )
    assert row.later
    assert 0 <= row.age.total_seconds() < 60


def test_a_39_a_bot_that_registers_twice_runs_nothing_twice(pool: Pool) -> None:
    """The older session is told to stop what it runs, and what it says later counts for nothing; its jobs are given to
    nobody before it must have stopped."""
    job, older, work = pool.running()
    newer = pool.bot(capacity=2)
    row = pool.job(job)
    assert (row.state, row.fence) == ("queued", work["fence"] + 1)
    pool.assigner().run_once()
    assert newer.sync(active(work))["leases"] == [], (
        "neither by its own claim nor by an assigner, while the older may run"
    )
    with pytest.raises(Conflict) as refused:
        older.sync(completed(work))
    assert refused.value.code == "session_superseded"
    assert pool.job(job).state == "queued"
    pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s'")
    pool.assigner().run_once()
    (again,) = newer.take()
    assert (again["job"], again["fence"]) == (job, work["fence"] + 2)
    newer.sync(completed(again))
    row = pool.job(job)
    assert (row.state, row.result_fence) == ("succeeded", again["fence"])
