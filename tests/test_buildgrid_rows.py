"""What BuildGrid's assigners promise, row by row: their loop, its pauses, which job is next, and the backoff."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from assigner.config import Reloader
from assigner.installation import PoolSettings
from assigner.loops import Loop
from assigner.running import AssignerProcess
from assigner.tuning import AssignerSettings
from schema.wakeups import Wakeups, wake
from tests.patience import eventually
from tests.pool import Pool, completed
from tests.racing import Race, books, cancel
from tests.tenancy import Tenancy

UNTOUCHED = {"job": ("queued", 0, None), "attempts": (0, 0), "leases": [], "in_use": [0], "last": "submit"}
HOUR = 3600.0


def granted(pool: Pool) -> list[str]:
    """Public ids of the jobs that were given to bots, in that order."""
    return [
        str(row.public_id)
        for row in pool.rows(
            "SELECT j.public_id FROM job_events e JOIN jobs j ON j.id = e.job_id WHERE e.move = 'grant' ORDER BY e.id"
        )
    ]


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


def test_bg_01_an_assigner_in_the_background_gives_waiting_jobs_to_bots(pool: Pool) -> None:
    """Whoever submits need do nothing more: an assigner finds the job, and what it decided is in the database."""
    bot = pool.bot()
    with looping(pool, interval=0.01, jitter=0.0):
        (job,) = pool.submit()
        eventually(lambda: pool.job(job).state == "leased")
    assert [work["job"] for work in bot.take()] == [job]


def test_bg_01_an_iteration_that_is_cut_short_has_done_nothing(pool: Pool, race: Race) -> None:
    """One iteration is one transaction: killed before its end it leaves neither half a lease nor a bot in use."""
    (job,) = pool.submit()
    pool.bot()
    with race.first() as killed:
        killed.assigner().run_once()
        assert killed.job(job).state == "leased"
        killed.roll_back()
    assert books(pool, job) == UNTOUCHED


def test_bg_02_assigners_side_by_side_neither_wait_for_each_other_nor_share_a_job(pool: Pool, race: Race) -> None:
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


def test_bg_03_the_interval_is_at_most_what_a_job_waits_for_an_assigner(pool: Pool, wakeups: Wakeups) -> None:
    """It is slept on an event: a job that comes meanwhile is given to a bot at once, be the interval an hour."""
    pool.bot()
    with looping(pool, wakeups, interval=HOUR):
        eventually(lambda: pool.database.run(lambda connection: wake(connection, "jobs")), what="it sleeps")
        (job,) = pool.submit()
        eventually(lambda: pool.job(job).state == "leased")
    assert AssignerSettings().interval == 1.0


def test_bg_04_the_sleep_is_interval_plus_random_times_jitter(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assigners that start together drift apart; both numbers are 1.0 unless they are set."""
    monkeypatch.setattr(pool.chance, "random", lambda: 0.25)
    assert pool.assigner(interval=2.0, jitter=4.0).run_once() == 3.0
    assert pool.assigner().run_once() == 1.25


def test_bg_05_the_sleep_is_a_hundredth_while_there_is_work(pool: Pool) -> None:
    """A backlog is worked off at full speed, and the assigner is calm again once it is gone."""
    pool.submit(2)
    pool.bot(capacity=2)
    assigner = pool.assigner(interval=2.0, jitter=0.0, batch=1)
    assert [assigner.run_once() for _ in range(3)] == pytest.approx([0.02, 0.02, 2.0])


def test_bg_06_after_an_error_it_tells_when_it_tries_again_and_goes_on_by_itself(pool: Pool) -> None:
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


def test_bg_07_the_next_job_is_the_most_urgent_and_of_those_the_oldest(pool: Pool) -> None:
    """A lower number is more urgent; among equals nobody overtakes."""
    (calm,) = pool.submit(priority=5)
    (urgent,) = pool.submit(priority=-5)
    (ordinary,) = pool.submit()
    (urgent_too,) = pool.submit(priority=-5)
    pool.bot(capacity=4)
    assigner = pool.assigner(batch=1)
    for _ in range(4):
        assigner.run_once()
    assert granted(pool) == [urgent, urgent_too, ordinary, calm]


@pytest.mark.parametrize(("draw", "urgent_first"), [(1, True), (30, True), (31, False), (100, False)])
def test_bg_08_so_many_iterations_in_a_hundred_go_by_priority_and_the_others_by_age(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, draw: int, urgent_first: bool
) -> None:
    """Work of low priority cannot starve under a stream of urgent work."""
    (oldest,) = pool.submit(priority=5)
    (urgent,) = pool.submit(priority=-5)
    pool.bot()
    monkeypatch.setattr(pool.chance, "randint", lambda low, high: {(1, 100): draw}[low, high])
    pool.assigner(priority_percentage=30).run_once()
    assert granted(pool) == [urgent if urgent_first else oldest]
    assert AssignerSettings().priority_percentage == 100


def test_bg_09_only_jobs_that_are_queued_unassigned_and_not_at_rest_are_given_away(pool: Pool) -> None:
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
    assert granted(pool) == [held]
    pool.bot("bot-2", capacity=5)
    for _ in range(4):
        assigner.run_once()
    assert granted(pool)[1:] == [new, due]


def test_bg_10_a_job_that_no_bot_can_run_rests_and_lets_the_others_pass(pool: Pool) -> None:
    """It is left alone for 5 s unless set otherwise, with the reason on the job."""
    (impossible,) = pool.submit(priority=-10, properties={"os": "plan9"})
    (behind,) = pool.submit()
    pool.bot()
    assigner = pool.assigner(batch=1)
    assigner.run_once()
    assigner.run_once()
    assert granted(pool) == [behind]
    row = pool.row(
        "SELECT considered, reason, extract(epoch FROM schedule_after - now()) AS rest FROM jobs WHERE considered > 0"
    )
    assert (row.considered, row.reason) == (1, "no healthy bot offers what it requires")
    assert 4 < row.rest <= 5.5
    assert AssignerSettings().failure_backoff == 5.0
    assert pool.job(impossible).state == "queued"


def test_bg_10_without_backoff_it_is_tried_again_in_the_next_iteration(pool: Pool) -> None:
    """0 turns the rest off, as BuildGrid's does; ours does not block the queue even so."""
    (impossible,) = pool.submit(priority=-10, properties={"os": "plan9"})
    assigner = pool.assigner(batch=1, failure_backoff=0.0, failure_backoff_cap=0.0)
    for _ in range(3):
        assigner.run_once()
    assert pool.job(impossible).considered == 3
    (behind,) = pool.submit()
    pool.bot()
    assigner.run_once()
    assert granted(pool) == [behind]


def test_bg_10_a_job_whose_bots_are_merely_full_keeps_its_place(pool: Pool) -> None:
    """Better than to back off: it starts as soon as a bot is free, and nobody younger passes it while it rests."""
    pool.submit()
    bot = pool.bot(desk=pool.desk(enabled=False))
    assigner = pool.assigner()
    assigner.run_once()
    (work,) = bot.take()
    (first,) = pool.submit()
    assigner.run_once()
    assert (pool.job(first).considered, pool.job(first).schedule_after) == (0, None)
    pool.submit()
    bot.sync(completed(work))
    assigner.run_once()
    assert granted(pool)[1:] == [first]


def test_bg_10_a_job_of_an_instance_at_its_maximum_keeps_its_place(pool: Pool) -> None:
    """Better than to back off: it starts as soon as its instance has something back, and others are not held up."""
    Tenancy(pool).quota("team-a", maximum=1)
    (running, first) = pool.submit(2, instance="team-a")
    bot = pool.bot(capacity=3, desk=pool.desk(enabled=False))
    assigner = pool.assigner()
    assigner.run_once()
    (other,) = pool.submit(instance="team-b")
    assigner.run_once()
    assert (pool.job(first).considered, pool.job(first).schedule_after) == (0, None)
    assert granted(pool) == [running, other]
    (work,) = [work for work in bot.take() if work["job"] == running]
    bot.sync(completed(work))
    assigner.run_once()
    assert pool.job(first).state == "leased"
