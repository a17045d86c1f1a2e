"""What bots and callers see of scheduling: who gets which job, when its room comes back, and whose clock counts."""

import queue
import time

import pytest
from structlog.testing import capture_logs

from schema.accounting import quotas
from schema.diagnostics import invariants
from schema.postgres.notify import Wakeups
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, cancel
from tests.support.tenancy import Tenancy

REST = "UPDATE jobs SET schedule_after = now() + make_interval(secs => :seconds) WHERE public_id = CAST(:id AS uuid)"


def holders(pool: Pool) -> list[str]:
    """The bots that hold leases, in the order in which those were granted."""
    return [row.name for row in pool.rows("SELECT b.name FROM live l JOIN bots b ON b.id = l.bot_id ORDER BY l.job_id")]


def test_only_healthy_bots_with_room_that_offer_what_is_required_get_jobs_the_preferred_first(pool: Pool) -> None:
    """An operator keeps dear bots as a reserve; a bot that says nothing has the priority 0."""
    fit = {"os": "linux", "gpu": "a100"}
    for status in ("unhealthy", "draining", "gone"):
        pool.bot(status, properties=fit).sync(status=status)
    pool.bot("without-capacity", capacity=0, properties=fit)
    pool.bot("without-gpu", properties={"os": "linux"})
    (job,) = pool.submit(properties=fit)
    assigner = pool.assigner(batch=1)
    assigner.run_once()
    assert pool.job(job).state == "queued"
    for name, priority in (("reserve", {"priority": 5}), ("ordinary", {}), ("preferred", {"priority": -5})):
        pool.bot(name, properties={**fit, "cpu": "x86"}, **priority)
    for _ in range(3):
        assigner.run_once()
        pool.submit(properties=fit)
    assert holders(pool) == ["preferred", "ordinary", "reserve"]


@pytest.mark.parametrize("ending", ["succeeded", "failed", "error", "released", "cancelled"])
def test_a_bot_holds_as_much_as_its_capacity_and_every_ending_gives_room_back(pool: Pool, ending: str) -> None:
    pool.submit(3, units=2)
    bot = pool.bot(capacity=5, sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner()
    assigner.run_once()
    first, second = bot.take()
    assigner.run_once()
    assert pool.row("SELECT in_use, capacity FROM bots") == (4, 5)
    if ending == "cancelled":
        cancel(pool, first["job"])
    bot.sync(completed(first, "stopped" if ending == "cancelled" else ending), active(second))
    assert pool.row("SELECT in_use FROM bots").in_use == 2
    assigner.run_once()
    assert pool.row("SELECT in_use FROM bots").in_use == 4


def test_a_bot_hears_of_its_job_and_a_caller_of_its_result(pool: Pool, wakeups: Wakeups) -> None:
    bot = pool.bot(sync_service=pool.sync_service(enabled=False))
    heard: dict[str, queue.Queue[frozenset[str]]] = {"bots": queue.Queue(), "done": queue.Queue()}
    for topic, news in heard.items():
        wakeups.subscribe(topic, news.put)
    eventually(lambda: wakeups.connected)
    with wakeups.idle("bots"), wakeups.idle("done"):
        (job,) = pool.submit()
        pool.assigner().run_once()
        assert heard["bots"].get(timeout=MINUTE) == {str(pool.row("SELECT id FROM bots").id)}
        (work,) = bot.take()
        bot.sync(completed(work))
        assert heard["done"].get(timeout=MINUTE) == {job}


@pytest.mark.parametrize(("draw", "urgent_first"), [(1, True), (30, True), (31, False), (100, False)])
def test_so_many_cycles_in_a_hundred_go_by_priority_and_the_others_by_age(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, draw: int, urgent_first: bool
) -> None:
    """Work of low priority cannot starve under a stream of urgent work."""
    oldest, urgent = pool.submit(priority=5)[0], pool.submit(priority=-5)[0]
    pool.bot()
    monkeypatch.setattr(pool.chance, "randint", lambda low, high: {(1, 100): draw}[low, high])
    pool.assigner(priority_percentage=30).run_once()
    assert pool.granted() == [urgent if urgent_first else oldest]


def test_jobs_of_one_priority_go_by_queue_time_and_then_in_the_order_of_submission(pool: Pool) -> None:
    """Ids that callers see sort by nothing; a job that comes back keeps the age it had. Those that rest wait."""
    resting, due, *others = pool.submit(8)
    pool.change(REST, seconds=3600, id=resting)
    pool.change(REST, seconds=-1, id=due)
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '1 s' WHERE public_id::text = :id", id=others[-1])
    pool.bot(capacity=20)
    assigner = pool.assigner(batch=1)
    for _ in range(9):
        assigner.run_once()
    granted = pool.granted()
    assert [job for job in granted if job != due] == [others[-1], *others[:-1]]
    assert due in granted


def test_a_job_of_an_instance_at_its_maximum_keeps_its_place_and_others_pass(pool: Pool) -> None:
    Tenancy(pool).quota("team-a", maximum=1)
    running, first = pool.submit(2, instance="team-a")
    bot = pool.bot(capacity=3, sync_service=pool.sync_service(enabled=False))
    pool.assigner().run_once()
    (other,) = pool.submit(instance="team-b")
    pool.assigner().run_once()
    assert (pool.queue_of(first).looks, pool.queue_of(first).schedule_after) == (0, None)
    assert pool.granted() == [running, other]
    (work,) = [work for work in bot.take() if work["job"] == running]
    bot.sync(completed(work))
    pool.assigner().run_once()
    assert pool.job(first).state == "leased"


def test_units_that_are_not_what_the_leases_make_them_are_found_repaired_and_reported(pool: Pool) -> None:
    """The leases are the truth and the units in use a copy: a wrong one neither idles a bot nor overloads it."""
    pool.running()
    pool.bot("idle", capacity=3)
    pool.change("UPDATE bots SET in_use = CASE name WHEN 'idle' THEN 2 ELSE 0 END, held = in_use + 4")
    assert {finding.id: finding.rows for finding in invariants.verify(pool.database) if finding.rows} == {"S3": 2}
    upkeep = pool.upkeep()
    with capture_logs() as logs:
        upkeep.run_once()
    shown = ("log_level", "bot", "in_use", "leased", "held", "leases")
    told = sorted(tuple(entry[key] for key in shown) for entry in logs)
    assert told == [("error", "bot-1", 0, 1, 5, 1), ("error", "idle", 2, 0, 4, 0)]
    assert pool.database.run(quotas.reconcile_capacity) == []


def test_a_bot_that_is_just_being_given_work_is_not_mended(pool: Pool, race: Race) -> None:
    pool.submit()
    pool.bot()
    with race.first() as ahead:
        ahead.assigner().run_once()
        assert race.unhindered(lambda: pool.database.run(quotas.reconcile_capacity), by=ahead) == []
        ahead.commit()
    assert pool.row("SELECT in_use FROM bots").in_use == 1
    assert pool.database.run(quotas.reconcile_capacity) == []


@pytest.mark.parametrize("hours", [-24, 24], ids=["behind", "ahead"])
def test_a_host_with_a_wrong_clock_decides_as_any_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Due times, ages and expiry are judged by the database's clock alone."""
    wrong = time.time() + hours * 3600
    monkeypatch.setattr(time, "time", lambda: wrong)
    resting, due = pool.submit(2)
    pool.change(REST, seconds=60, id=resting)
    pool.change(REST, seconds=-1, id=due)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    pool.upkeep().run_once()
    pool.change("UPDATE ticks SET grace_until = at")
    pool.upkeep().run_once()
    (work,) = bot.take()
    answer = bot.sync(completed(work))
    assert (work["job"], pool.job(resting).state) == (due, "queued")
    assert 0 < answer["expires_in"] <= pool.timing.ttl + 1
    row = pool.row("SELECT now() - finished_at AS age, finished_at >= queued_at AS later FROM jobs WHERE fence = 1")
    assert row.later
    assert 0 <= row.age.total_seconds() < 60
