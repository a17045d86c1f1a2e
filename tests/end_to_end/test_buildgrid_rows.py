"""What BuildGrid's assigners promise, row by row: their loop, its pauses, which job is next, and the backoff."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from leasehold.errors import Conflict
from structlog.testing import capture_logs

from assigner.config.loading import Reloader
from assigner.cycle.settings import AssignerSettings
from assigner.loops import Loop
from assigner.process.assign import AssignerProcess
from assigner.settings import PoolSettings
from schema.accounting import quotas
from schema.diagnostics import invariants
from schema.postgres.notify import Wakeups, wake
from tests.support.patience import eventually
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, cancel, counted_state
from tests.support.tenancy import Tenancy

UNTOUCHED = {"job": ("queued", 0, None), "attempts": (0, 0), "leases": [], "in_use": [0], "last": "submit"}
HOUR = 3600.0


@contextmanager
def looping(pool: Pool, wakeups: Wakeups | None = None, **settings: float) -> Iterator[None]:
    """An assigner in the background, which sleeps until its interval is over or, with `wakeups`, until it is woken."""
    loop = Loop(
        "assigner-test",
        pool.assigner(**settings).run_once,
        chance=random.Random(0),
        signal=wakeups.signal("jobs") if wakeups else None,
        idle=(lambda: wakeups.idle("jobs")) if wakeups else None,
    )
    loop.start()
    try:
        yield
    finally:
        assert loop.stop(10)


def test_an_assigner_in_the_background_gives_waiting_jobs_to_bots(pool: Pool) -> None:
    """Whoever submits need do nothing more: an assigner finds the job, and what it decided is in the database."""
    bot = pool.bot()
    with looping(pool, interval=0.01, jitter=0.0):
        (job,) = pool.submit()
        eventually(lambda: pool.job(job).state == "leased")
    assert [work["job"] for work in bot.take()] == [job]


def test_an_iteration_that_is_cut_short_has_done_nothing(pool: Pool, race: Race) -> None:
    """One iteration is one transaction: killed before its end it leaves neither half a lease nor a bot in use."""
    (job,) = pool.submit()
    pool.bot()
    with race.first() as killed:
        killed.assigner().run_once()
        assert killed.job(job).state == "leased"
        killed.roll_back()
    assert counted_state(pool, job) == UNTOUCHED


def test_assigners_side_by_side_neither_wait_for_each_other_nor_share_a_job(pool: Pool, race: Race) -> None:
    """Any number of assigners, no leader: what one is about to give away, the others pass over."""
    pool.submit(2)
    pool.bot("bot-1")
    pool.bot("bot-2")
    with race.first() as ahead:
        ahead.assigner(batch=1).run_once()
        race.unhindered(pool.assigner(batch=1).run_once, by=ahead)
        ahead.commit()
    row = pool.row("SELECT count(DISTINCT job_id) AS jobs, count(DISTINCT bot_id) AS bots FROM live")
    assert (row.jobs, row.bots) == (2, 2)


def test_the_interval_is_at_most_what_a_job_waits_for_an_assigner(pool: Pool, wakeups: Wakeups) -> None:
    """It is slept on an event: a job that comes meanwhile is given to a bot at once, be the interval an hour."""
    pool.bot()
    with looping(pool, wakeups, interval=HOUR):
        eventually(lambda: pool.database.run(lambda connection: wake(connection, "jobs")), what="it sleeps")
        (job,) = pool.submit()
        eventually(lambda: pool.job(job).state == "leased")
    assert AssignerSettings().interval == 1.0


def test_the_sleep_is_interval_plus_random_times_jitter(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assigners that start together drift apart; both numbers are 1.0 unless they are set."""
    monkeypatch.setattr(pool.chance, "random", lambda: 0.25)
    assert pool.assigner(interval=2.0, jitter=4.0).run_once() == 3.0
    assert pool.assigner().run_once() == 1.25


def test_the_sleep_is_a_hundredth_while_there_is_work(pool: Pool) -> None:
    """A backlog is worked off at full speed, and the assigner is calm again once it is gone."""
    pool.submit(2)
    pool.bot(capacity=2)
    assigner = pool.assigner(interval=2.0, jitter=0.0, batch=1)
    assert [assigner.run_once() for _ in range(3)] == pytest.approx([0.02, 0.02, 2.0])


def test_after_an_error_it_tells_when_it_tries_again_and_goes_on_by_itself(pool: Pool) -> None:
    """A database in trouble gets one interval to recover, ours twice as long after each further error in a row."""
    settings = PoolSettings(assigners=(AssignerSettings(interval=0.02, threads=1),), timing=pool.timing)
    reloader = Reloader(None, PoolSettings, {}, current=settings)
    process = AssignerProcess(pool.database, reloader, name="test", chance=pool.chance)
    (job,) = pool.submit()
    pool.bot()
    pool.change("ALTER TABLE quotas RENAME TO mislaid")
    with capture_logs() as logs:
        process.start()
        try:
            eventually(lambda: sum(entry.get("loop") == "assigner-0-0" for entry in logs) >= 3)
            pool.change("ALTER TABLE mislaid RENAME TO quotas")
            eventually(lambda: pool.job(job).state == "leased")
        finally:
            process.stop()
    told = [entry["retry_in"] for entry in logs if entry.get("loop") == "assigner-0-0"]
    for delay, whole in zip(told[:3], (0.02, 0.04, 0.08), strict=True):
        assert whole / 2 - 0.001 <= delay <= whole + 0.001


def test_the_next_job_is_the_most_urgent_and_of_those_the_oldest(pool: Pool) -> None:
    """A lower number is more urgent; among equals nobody overtakes."""
    (calm,) = pool.submit(priority=5)
    (urgent,) = pool.submit(priority=-5)
    (ordinary,) = pool.submit()
    (urgent_too,) = pool.submit(priority=-5)
    pool.bot(capacity=4)
    assigner = pool.assigner(batch=1)
    for _ in range(4):
        assigner.run_once()
    assert pool.granted() == [urgent, urgent_too, ordinary, calm]


@pytest.mark.parametrize(("draw", "urgent_first"), [(1, True), (30, True), (31, False), (100, False)])
def test_so_many_iterations_in_a_hundred_go_by_priority_and_the_others_by_age(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, draw: int, urgent_first: bool
) -> None:
    """Work of low priority cannot starve under a stream of urgent work."""
    (oldest,) = pool.submit(priority=5)
    (urgent,) = pool.submit(priority=-5)
    pool.bot()
    monkeypatch.setattr(pool.chance, "randint", lambda low, high: {(1, 100): draw}[low, high])
    pool.assigner(priority_percentage=30).run_once()
    assert pool.granted() == [urgent if urgent_first else oldest]
    assert AssignerSettings().priority_percentage == 100


def test_only_jobs_that_are_queued_unassigned_and_not_at_rest_are_given_away(pool: Pool) -> None:
    """A job whose time has come is made ready by the assigner itself, so that the jobs it looks through hold none
    that rest, however many there are."""
    held, new, due, resting, cancelled = pool.submit(5)
    rest = (
        "UPDATE jobs SET schedule_after = now() + make_interval(secs => :seconds) WHERE public_id = CAST(:id AS uuid)"
    )
    pool.change(rest, seconds=-1, id=due)
    pool.change(rest, seconds=HOUR, id=resting)
    cancel(pool, cancelled)
    pool.bot("bot-1")
    assigner = pool.assigner(batch=1)
    assigner.run_once()
    assert pool.granted() == [held]
    pool.bot("bot-2", capacity=5)
    for _ in range(4):
        assigner.run_once()
    assert pool.granted()[1:] == [new, due]


def test_a_job_that_no_bot_can_run_rests_and_lets_the_others_pass(pool: Pool) -> None:
    """It is left alone for 5 s unless set otherwise, with the reason on the job."""
    (impossible,) = pool.submit(priority=-10, properties={"os": "plan9"})
    (behind,) = pool.submit()
    pool.bot()
    assigner = pool.assigner(batch=1)
    assigner.run_once()
    assigner.run_once()
    assert pool.granted() == [behind]
    row = pool.row(
        "SELECT looks, reason, extract(epoch FROM schedule_after - now()) AS rest FROM queues WHERE looks > 0"
    )
    assert (row.looks, row.reason) == (1, "no healthy bot offers what it requires")
    assert 4 < row.rest <= 5.5
    assert AssignerSettings().failure_backoff == 5.0
    assert pool.job(impossible).state == "queued"


def test_without_backoff_it_is_tried_again_in_the_next_iteration(pool: Pool) -> None:
    """0 turns the rest off, as BuildGrid's does; ours does not block the queue even so."""
    (impossible,) = pool.submit(priority=-10, properties={"os": "plan9"})
    assigner = pool.assigner(batch=1, failure_backoff=0.0, failure_backoff_cap=0.0)
    for _ in range(3):
        assigner.run_once()
    assert pool.queue_of(impossible).looks == 3
    (behind,) = pool.submit()
    pool.bot()
    assigner.run_once()
    assert pool.granted() == [behind]


def test_a_job_whose_bots_are_merely_full_keeps_its_place(pool: Pool) -> None:
    """Better than to back off: it starts as soon as a bot is free, and nobody younger passes it while it rests."""
    pool.submit()
    bot = pool.bot(sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner()
    assigner.run_once()
    (work,) = bot.take()
    (first,) = pool.submit()
    assigner.run_once()
    assert (pool.queue_of(first).looks, pool.queue_of(first).schedule_after) == (0, None)
    pool.submit()
    bot.sync(completed(work))
    assigner.run_once()
    assert pool.granted()[1:] == [first]


def test_a_job_of_an_instance_at_its_maximum_keeps_its_place(pool: Pool) -> None:
    """Better than to back off: it starts as soon as its instance has something back, and others are not held up."""
    Tenancy(pool).quota("team-a", maximum=1)
    (running, first) = pool.submit(2, instance="team-a")
    bot = pool.bot(capacity=3, sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner()
    assigner.run_once()
    (other,) = pool.submit(instance="team-b")
    assigner.run_once()
    assert (pool.queue_of(first).looks, pool.queue_of(first).schedule_after) == (0, None)
    assert pool.granted() == [running, other]
    (work,) = [work for work in bot.take() if work["job"] == running]
    bot.sync(completed(work))
    assigner.run_once()
    assert pool.job(first).state == "leased"


# Where what BuildGrid's scheduler does was ambiguous: what ours does, row by row.


def test_a_failed_match_earns_half_an_interval_that_grows_while_nothing_matches(pool: Pool) -> None:
    """A queue that nobody can serve does not keep an assigner, and the database, busy."""
    assigner = pool.assigner(interval=2.0, jitter=0.0, failure_backoff=0.0, failure_backoff_cap=0.0)
    (impossible,) = pool.submit(properties={"os": "plan9"})
    assert [assigner.run_once() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert pool.queue_of(impossible).looks == 4
    pool.submit()
    pool.bot()
    assert assigner.run_once() == pytest.approx(0.02), "only a job that was assigned makes it busy"


def test_jobs_of_one_priority_go_by_queue_time_and_then_in_the_order_of_submission(pool: Pool) -> None:
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


def test_room_comes_back_when_the_bot_confirms_and_not_when_somebody_cancels(pool: Pool) -> None:
    """A cancelled job may still run: until its bot has stopped it, nobody else gets its place."""
    pool.submit()
    bot = pool.bot(sync_service=pool.sync_service(enabled=False))
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


def test_units_that_are_not_what_the_leases_make_them_are_found_repaired_and_reported(pool: Pool) -> None:
    """The leases are the truth and the units in use a copy: a wrong one neither idles a bot nor overloads it."""
    pool.running()
    pool.bot("idle", capacity=3)
    pool.change("UPDATE bots SET in_use = CASE name WHEN 'idle' THEN 2 ELSE 0 END, held = in_use + 4")
    assert {finding.id: finding.rows for finding in invariants.verify(pool.database) if finding.rows} == {"S3": 2}
    upkeep = pool.upkeep()
    with capture_logs() as logs:
        upkeep.run_once()
    shown = ("bot", "in_use", "leased", "held", "leases")
    told = [tuple(entry[key] for key in shown) for entry in logs]
    assert sorted(told) == [("bot-1", 0, 1, 5, 1), ("idle", 2, 0, 4, 0)]
    assert {entry["log_level"] for entry in logs} == {"error"}
    assert pool.database.run(quotas.reconcile_capacity) == []


def test_a_bot_that_is_just_being_given_work_is_not_mended(pool: Pool, race: Race) -> None:
    """What somebody else has begun and not ended looks wrong to nobody."""
    pool.submit()
    pool.bot()
    with race.first() as ahead:
        ahead.assigner().run_once()
        assert race.unhindered(lambda: pool.database.run(quotas.reconcile_capacity), by=ahead) == []
        ahead.commit()
    assert pool.row("SELECT in_use FROM bots").in_use == 1
    assert pool.database.run(quotas.reconcile_capacity) == []


@pytest.mark.parametrize("hours", [-24, 24], ids=["behind", "ahead"])
def test_a_host_whose_clock_is_wrong_decides_as_any_other(
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


def test_a_bot_that_registers_twice_runs_nothing_twice(pool: Pool) -> None:
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
    (again,) = pool.given(newer)
    assert (again["job"], again["fence"]) == (job, work["fence"] + 2)
    newer.sync(completed(again))
    row = pool.job(job)
    assert (row.state, row.result_fence) == ("succeeded", again["fence"])
