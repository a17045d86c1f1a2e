"""One assigner, cycle by cycle, and how many jobs it places together: few while it is quiet, ever more under load."""

import os
import random
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from assigner.admission.controller import AdmissionController
from assigner.cycle.assigner import RETRY_SECONDS, PriorityAgeAssigner
from assigner.cycle.pacing import HINDERED, LEAST, MIN_CONCURRENT_BATCHES, QUICK, SLOW, Batch, concurrent_batches
from assigner.cycle.settings import AssignerSettings
from assigner.loops import Again
from assigner.placement.fleet import SMALL
from assigner.preemption.plan import QuotaSettings
from schema.picking import ready
from schema.picking.pick import Order
from schema.picking.ready import Scope
from schema.postgres import advisory
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support.filling import fill_bots, fill_jobs, fill_queues
from tests.support.pool import Pool, completed
from tests.support.race import Race, cancel
from tests.support.tenancy import Tenancy


@pytest.mark.parametrize(("percentage", "order"), [(100, [1, 2, 0]), (0, [0, 1, 2])])
def test_the_most_urgent_job_goes_first_or_the_oldest_in_a_share_of_the_cycles(
    pool: Pool, percentage: int, order: list[int]
) -> None:
    jobs = [pool.submit(priority=priority)[0] for priority in (5, -5, -5)]
    pool.bot(capacity=3)
    for _ in range(3):
        pool.assigner(batch=1, priority_percentage=percentage).run_once()
    assert pool.granted() == [jobs[nth] for nth in order]


def test_the_pause_is_interval_plus_jitter_and_short_after_work(pool: Pool) -> None:
    assigner = pool.assigner(interval=2.0, jitter=3.0, busy_sleep_factor=0.01)
    pauses = [assigner.run_once() for _ in range(20)]
    assert all(2.0 <= pause <= 5.0 for pause in pauses)
    assert len(set(pauses)) > 1
    pool.submit()
    pool.bot()
    assert 0.02 <= assigner.run_once() <= 0.05


def test_a_failed_match_earns_half_an_interval_that_grows_while_nothing_matches(pool: Pool) -> None:
    assigner = pool.assigner(interval=2.0, jitter=0.0, failure_backoff=0.0, failure_backoff_cap=0.0)
    pool.submit(properties={"os": "plan9"})
    assert [assigner.run_once() for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_job_that_no_bot_offers_waits_longer_after_each_failure_up_to_a_cap(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "plan9"})
    pool.bot(properties={"os": "linux"})
    assigner = pool.assigner(failure_backoff=5.0, failure_backoff_cap=12.0)
    waits = []
    for _ in range(3):
        assigner.run_once()
        row = pool.row("SELECT looks, reason, extract(epoch FROM schedule_after - now()) AS wait FROM queues")
        waits.append(float(row.wait))
        pool.rest_queues(-1)
    assert (row.looks, row.reason) == (3, "no healthy bot offers what it requires")
    assert 4 < waits[0] < 6 < 9 < waits[1] < 11.1 < 11.5 < waits[2] < 13.3
    assert pool.job(job).state == "queued"


def test_a_job_larger_than_any_free_bot_backs_off_and_does_not_hold_up_smaller_ones(pool: Pool) -> None:
    (large,) = pool.submit(units=8, priority=-10)
    (small,) = pool.submit(units=1)
    pool.bot(capacity=4)
    assigner = pool.assigner()
    assigner.run_once()
    assert pool.granted() == [small]
    row = pool.queue_of(large)
    assert (row.looks, row.reason) == (1, "no bot that offers what it requires has enough free units")


@pytest.mark.parametrize("units", [1, 2])
def test_a_job_whose_bots_are_merely_locked_keeps_its_place_without_backoff(pool: Pool, race: Race, units: int) -> None:
    (job,) = pool.submit(units=units)
    pool.bot(capacity=2)
    assigner = pool.assigner(interval=1.0, jitter=0.0, busy_sleep_factor=0.01)
    with race.first() as other:
        other.row("SELECT id FROM bots FOR UPDATE")
        pause = race.unhindered(assigner.run_once, by=other)
        assert pause == pytest.approx(0.01), "a lost race is tried again at once"
        row = pool.queue_of(job)
        assert (row.looks, row.schedule_after, pool.granted()) == (0, None, [])
    assigner.run_once()
    assert pool.granted() == [job]


def test_requirements_are_matched_by_containment_with_any_number_of_properties(pool: Pool) -> None:
    """Whether the requirement set was there before the bot or not."""
    offered = {f"p{number}": ["a", "b"] for number in range(30)}
    wanted = {f"p{number}": "b" for number in range(0, 30, 2)}
    (matching,) = pool.submit(properties=wanted)
    pool.submit(properties={**wanted, "p1": "c"})
    pool.bot(capacity=2, properties=offered)
    (late,) = pool.submit(properties={"p1": "a"})
    pool.assigner().run_once()
    assert pool.granted() == [matching, late]
    assert pool.row("SELECT count(*) AS links FROM kind_platforms").links == 2


@pytest.mark.parametrize(("assigner", "bot"), [({"instances": ("b", "unknown")}, {}), ({}, {"instance": "b"})])
def test_an_assigner_or_a_bot_of_some_instances_leaves_the_others_alone(
    pool: Pool, assigner: dict[str, Any], bot: dict[str, Any]
) -> None:
    pool.submit(instance="a")
    (mine,) = pool.submit(instance="b")
    pool.bot(capacity=2, **bot)
    pool.assigner(**assigner).run_once()
    assert pool.granted() == [mine]


def test_a_batch_fills_the_bots_there_are_and_no_more(pool: Pool) -> None:
    """Jobs whose bots are merely full keep their places without a rest."""
    pool.submit(50)
    for number in range(4):
        pool.bot(f"bot-{number}", capacity=5)
    assigner = pool.assigner(batch=100)
    for _ in range(2):
        assigner.run_once()
        assert [row.in_use for row in pool.rows("SELECT in_use FROM bots")] == [5, 5, 5, 5]
        assert pool.row("SELECT count(*) AS n FROM jobs WHERE state = 'queued'").n == 30
        row = pool.row("SELECT looks, schedule_after FROM queues")
        assert (row.looks, row.schedule_after) == (0, None)


def test_a_job_that_waited_for_room_goes_on_when_its_bot_has_room_again(pool: Pool) -> None:
    (small,) = pool.submit(priority=-1)
    bot = pool.bot(capacity=4, sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner(failure_backoff=60.0)
    assigner.run_once()
    (work,) = bot.take()
    (large,) = pool.submit(units=4)
    assigner.run_once()
    assert pool.queue_of(large).schedule_after is not None

    bot.sync(completed(work, "released"), capacity=4)
    cancel(pool, small)
    assigner.run_once()

    assert pool.job(large).state == "leased"


def test_a_retry_that_is_due_goes_before_a_crowd_that_nobody_can_place(pool: Pool) -> None:
    pool.submit(500, properties={"os": "plan9"}, priority=-10)
    (retry,) = pool.submit()
    pool.bot()
    pool.rest_queues(-1, "priority = -10")
    pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s' WHERE priority = 0")
    pool.assigner(batch=10).run_once()
    assert pool.granted() == [retry]


def test_any_number_of_jobs_that_nobody_can_run_rest_with_their_queues_in_one_cycle(pool: Pool) -> None:
    for number in range(30):
        pool.submit(100, properties={"os": f"plan{number}"})
    before = pool.rows("SELECT id, xmin FROM jobs ORDER BY id")
    pool.assigner().run_once()
    assert pool.row("SELECT count(*) AS n FROM queues WHERE looks = 1").n == 30
    assert pool.rows("SELECT id, xmin FROM jobs ORDER BY id") == before, "not one job was written"


def test_a_job_that_comes_into_a_queue_that_rests_waits_with_it_until_a_bot_arrives(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "plan9"})
    assigner = pool.assigner(failure_backoff=60.0, failure_backoff_cap=60.0)
    assigner.run_once()
    (late,) = pool.submit(properties={"os": "plan9"})
    assert pool.queue_of(late).schedule_after is not None
    pool.bot(capacity=2, properties={"os": ["plan9", "linux"]})
    assigner.run_once()
    assert pool.granted() == [job, late]


def test_a_minimum_is_reached_in_one_cycle_however_many_queues_are_open(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("needy", minimum=40)
    needed = set(pool.submit(40, instance="needy", priority=5))
    for number in range(120):
        pool.submit(instance=f"team-{number}")
    pool.bot(capacity=60)
    pool.assigner(batch=50).run_once()
    assert needed <= set(pool.granted())


# How many jobs an assigner places together.


LIMIT = 5000
GROWN = [(100, 0.0), (200, 0.0)]


def after(*cycles: tuple[int, float], limit: int = LIMIT) -> int:
    """The size after cycles that chose bots for so many jobs, each in so many seconds."""
    batch = Batch()
    for chosen, seconds in cycles:
        batch.learn(chosen=chosen, seconds=seconds, limit=limit)
    return batch.size(limit)


@pytest.mark.parametrize(
    ("cycles", "limit", "size"),
    [
        pytest.param([], LIMIT, LEAST, id="small at first"),
        ([(LEAST, 0.01)], LIMIT, 2 * LEAST),
        ([(LEAST // 2 + 1, 0.01)], LIMIT, 2 * LEAST),
        ([(LEAST // 2, 0.01)], LIMIT, LEAST),
        ([(LEAST, QUICK)], LIMIT, LEAST),
        ([(LEAST, SLOW)], LIMIT, LEAST),
        ([(LEAST, SLOW + 1)], LIMIT, LEAST),
        ([(0, 0.01)], LIMIT, LEAST),
        ([*GROWN, (400, SLOW + 0.01)], LIMIT, 200),
        ([*GROWN, (100, 0.01)], LIMIT, 200),
        ([*GROWN, (101, 0.01)], LIMIT, 400),
        ([*GROWN, (0, 0.01)], LIMIT, 200),
        ([*GROWN, (300, (QUICK + SLOW) / 2)], LIMIT, 400),
        ([], 1, 1),
        ([(1, 0.0), (1, 0.0)], 1, 1),
        ([(7, 0.0)] * 20, 7, 7),
    ],
)
def test_a_batch_grows_after_a_quick_and_full_cycle_and_is_halved_by_a_slow_or_empty_one(
    cycles: list[tuple[int, float]], limit: int, size: int
) -> None:
    assert after(*cycles, limit=limit) == size


def test_a_batch_doubles_up_to_its_limit_and_shrinks_to_the_least() -> None:
    batch = Batch()
    sizes = []
    for full in [True] * 8 + [False] * 8:
        sizes.append(batch.size(LIMIT))
        batch.learn(chosen=sizes[-1] if full else 0, seconds=0.0, limit=LIMIT)
    assert sizes == [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000, 2500, 1250, 625, 312, 156, 100, 100]


def test_a_limit_that_is_lowered_holds_at_once_and_one_that_is_raised_is_grown_into() -> None:
    batch = Batch()
    for _ in range(20):
        batch.learn(chosen=batch.size(LIMIT), seconds=0.0, limit=LIMIT)
    assert batch.size(300) == 300
    batch.learn(chosen=0, seconds=0.0, limit=300)
    assert batch.size(LIMIT) == 150
    batch.learn(chosen=150, seconds=0.0, limit=LIMIT)
    assert batch.size(LIMIT) == 300


def test_an_assigner_under_backlog_takes_ever_more_and_places_everything(pool: Pool) -> None:
    with pool.database.begin() as connection:
        fill_queues(connection, instances=1, kinds=["k"])
        fill_jobs(connection, 2000, instances=1, kinds=["k"])
        fill_bots(connection, {"k": 25}, capacity=100)
    quick = pool.assigner(batch=800, now=lambda: 0.0)
    placed = [placed_by(pool, quick) for _ in range(6)]
    assert placed == [100, 200, 400, 800, 500, 0]
    assert pool.row("SELECT count(*) AS n FROM jobs WHERE state <> 'leased'").n == 0


def placed_by(pool: Pool, assigner: PriorityAgeAssigner) -> int:
    """How many jobs the assigner places in its next cycle."""
    count = "SELECT count(*) AS n FROM live"
    before: int = pool.row(count).n
    assigner.run_once()
    after_it: int = pool.row(count).n
    return after_it - before


# Slots: who places many jobs needs one, and nobody waits for one.


JOBS = 4 * LEAST


def taken(connection: Connection, number: int) -> int | None:
    return advisory.try_take_slot(connection, number, chance=random.Random(1))


@pytest.fixture
def busy(pool: Pool) -> PriorityAgeAssigner:
    """An assigner, one at a time, that has had much to place, and has more."""
    pool.bot(capacity=JOBS)
    pool.submit(JOBS)
    assigner = pool.assigner(at_once=1, name="assigner:busy", now=lambda: 0.0)
    assigner.run_once()
    assert len(queued(pool)) == JOBS - LEAST
    return assigner


def queued(pool: Pool) -> list[str]:
    """The jobs that wait and that nobody holds."""

    def work(connection: Connection) -> list[str]:
        found = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=JOBS)
        return [job.public_id for job in found]

    return pool.database.run(work)


def test_who_gets_no_slot_comes_again_and_places_nothing_meanwhile(
    pool: Pool, busy: PriorityAgeAssigner, race: Race
) -> None:
    with race.first() as first:
        assert taken(first.connection, 1) == 0
        for _ in range(3):
            pause = race.unhindered(busy.run_once, by=first)
            assert isinstance(pause, Again)
            assert RETRY_SECONDS / 2 <= pause <= 2 * RETRY_SECONDS
        assert len(queued(pool)) == JOBS - LEAST
        first.commit()
    busy.run_once()
    assert len(queued(pool)) == JOBS - 3 * LEAST


def test_who_places_other_jobs_needs_no_slot_of_theirs(pool: Pool, busy: PriorityAgeAssigner, race: Race) -> None:
    busy.reconfigure(AssignerSettings(at_once=1, instances=("default",)), QuotaSettings())
    with race.first() as first:
        assert taken(first.connection, 1) == 0
        race.unhindered(busy.run_once, by=first)
    assert len(queued(pool)) == JOBS - 3 * LEAST


def test_who_loses_a_whole_batch_to_others_takes_a_larger_one_next(
    pool: Pool, busy: PriorityAgeAssigner, race: Race
) -> None:
    with race.first() as first:
        first.connection.execute(Statement("SELECT FROM bots FOR UPDATE"))
        race.unhindered(busy.run_once, by=first)
        assert len(queued(pool)) == JOBS - LEAST
    assert placed_by(pool, busy) == JOBS - LEAST


def test_who_has_little_to_place_needs_no_slot(pool: Pool, race: Race) -> None:
    pool.bot(capacity=1)
    pool.submit(1)
    with race.first() as first:
        assert taken(first.connection, 1) == 0
        race.unhindered(pool.assigner(at_once=1).run_once, by=first)
    assert not queued(pool)


def test_each_slot_is_taken_once(pool: Pool) -> None:
    for number, expected in ((2, {0, 1}), (1, {0, None})):
        with pool.database.begin() as one, pool.database.begin() as other:
            assert {taken(one, number), taken(other, number)} == expected


@pytest.mark.parametrize(
    ("cores", "bots", "number"),
    [
        (None, 9000, MIN_CONCURRENT_BATCHES),
        (1, 9000, MIN_CONCURRENT_BATCHES),
        (12, 9000, 12),
        (12, 6 * SMALL, 6),
        (12, 0, MIN_CONCURRENT_BATCHES),
    ],
)
def test_there_are_as_many_slots_as_cores_or_parts_of_the_fleet_unless_configured(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, bots: int, number: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert (concurrent_batches(None, bots=bots), concurrent_batches(3, bots=bots)) == (number, 3)


def test_on_a_fleet_that_is_too_small_for_parts_a_large_batch_waits_for_another_one(pool: Pool, race: Race) -> None:
    """Both want all bots. The second one to come would lose each of its placements to the first."""
    for number in range(4):
        pool.bot(f"bot-{number}", capacity=500)

    def grown(of: Pool) -> PriorityAgeAssigner:
        assigner = of.assigner(batch=2 * LEAST)
        of.submit(LEAST)
        assigner.run_once()
        return assigner

    def lost() -> float | None:
        return REGISTRY.get_sample_value("leasehold_races_lost_total", {"kind": "grant"})

    before, first_come = lost(), grown(pool)
    with race.first() as ahead:
        ahead_of_it = grown(ahead)
        pool.submit(4 * LEAST)
        ahead_of_it.run_once()
        late = race.second(first_come.run_once, behind=ahead)
        ahead.commit()
        late.result()
    assert pool.row("SELECT count(*) AS jobs FROM jobs WHERE state = 'leased'").jobs == 6 * LEAST
    assert lost() == before


def test_after_an_error_of_jobs_with_constraints_the_others_start(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    (constrained,), (plain,) = pool.submit(terms={"locks": ["tree"]}), pool.submit()
    pool.bot(capacity=2)

    def fails(*_: object, **__: object) -> None:
        raise TypeError("a stored value is none of this version")

    monkeypatch.setattr(AdmissionController, "read_front", fails)
    moment = 0.0
    assigner = pool.assigner(now=lambda: moment)
    with capture_logs() as logs:
        with pytest.raises(TypeError):
            assigner.run_once()
        assigner.run_once()
    assert pool.granted() == [plain]
    assert [line["event"] for line in logs] == ["a cycle failed, so jobs with constraints do not start"]
    monkeypatch.undo()
    moment = HINDERED
    assigner.run_once()
    assert pool.granted() == [plain, constrained]
