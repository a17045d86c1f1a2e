"""How many jobs an assigner places together: few while it is quiet, ever more while it cannot keep up."""

import os
import random

import pytest

from assigner.cycle.assigner import RETRY_SECONDS, PriorityAgeAssigner
from assigner.cycle.pacing import LEAST, MIN_CONCURRENT_BATCHES, QUICK, SLOW, Batch, concurrent_batches
from assigner.cycle.settings import AssignerSettings
from assigner.loops import Again
from assigner.preemption.plan import QuotaSettings
from schema.picking import ready
from schema.picking.pick import Order
from schema.picking.ready import Scope
from schema.postgres import advisory
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support.filling import fill_bots, fill_jobs, fill_queues
from tests.support.pool import Pool
from tests.support.race import Race

LIMIT = 5000


def after(*cycles: tuple[int, float], limit: int = LIMIT) -> int:
    """The size after cycles that chose bots for so many jobs, each in so many seconds."""
    batch = Batch()
    for chosen, seconds in cycles:
        batch.learn(chosen=chosen, seconds=seconds, limit=limit)
    return batch.size(limit)


def grown(batch: Batch, limit: int = LIMIT) -> Batch:
    """The batch after many cycles that were quick and full."""
    for _ in range(20):
        batch.learn(chosen=batch.size(limit), seconds=0.0, limit=limit)
    return batch


def test_a_quiet_pool_begins_with_a_small_batch() -> None:
    assert after() == LEAST


@pytest.mark.parametrize(
    ("chosen", "seconds", "size"),
    [
        (LEAST, 0.01, 2 * LEAST),
        (LEAST // 2 + 1, 0.01, 2 * LEAST),
        (LEAST // 2, 0.01, LEAST),
        (LEAST, QUICK, LEAST),
        (LEAST, SLOW, LEAST),
        (LEAST, SLOW + 1, LEAST),
        (0, 0.01, LEAST),
    ],
)
def test_a_batch_grows_after_a_cycle_that_was_quick_and_mostly_full(chosen: int, seconds: float, size: int) -> None:
    assert after((chosen, seconds)) == size


@pytest.mark.parametrize(
    ("chosen", "seconds", "size"),
    [(400, SLOW + 0.01, 200), (100, 0.01, 200), (101, 0.01, 400), (0, 0.01, 200), (300, (QUICK + SLOW) / 2, 400)],
)
def test_a_grown_batch_is_halved_by_a_cycle_that_was_slow_or_mostly_empty(
    chosen: int, seconds: float, size: int
) -> None:
    assert after((100, 0.0), (200, 0.0), (chosen, seconds)) == size


def test_a_batch_doubles_up_to_its_limit_and_not_beyond() -> None:
    sizes, batch = [], Batch()
    for _ in range(8):
        sizes.append(batch.size(LIMIT))
        batch.learn(chosen=sizes[-1], seconds=0.0, limit=LIMIT)
    assert sizes == [100, 200, 400, 800, 1600, 3200, 5000, 5000]


def test_a_batch_shrinks_to_the_least_and_not_below() -> None:
    batch, sizes = grown(Batch()), []
    for _ in range(8):
        batch.learn(chosen=0, seconds=0.0, limit=LIMIT)
        sizes.append(batch.size(LIMIT))
    assert sizes == [2500, 1250, 625, 312, 156, 100, 100, 100]


def test_a_limit_below_the_least_is_kept() -> None:
    assert after(limit=1) == 1
    assert after((1, 0.0), (1, 0.0), limit=1) == 1
    assert grown(Batch(), 7).size(7) == 7


def test_a_limit_that_is_lowered_holds_at_once_and_one_that_is_raised_is_grown_into() -> None:
    batch = grown(Batch())
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
    quick = PriorityAgeAssigner(
        pool.database,
        AssignerSettings(batch=800),
        timing=pool.timing,
        chance=pool.chance,
        name="assigner:test",
        now=lambda: 0.0,
    )
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


class Busy:
    """An assigner, one at a time, that has had much to place, and has more."""

    def __init__(self, pool: Pool) -> None:
        pool.bot(capacity=JOBS)
        pool.submit(JOBS)
        self.assigner = PriorityAgeAssigner(
            pool.database,
            AssignerSettings(at_once=1),
            timing=pool.timing,
            chance=pool.chance,
            name="assigner:busy",
            now=lambda: 0.0,
        )
        self.assigner.run_once()
        assert len(queued(pool)) == JOBS - LEAST


@pytest.fixture
def busy(pool: Pool) -> Busy:
    return Busy(pool)


def queued(pool: Pool) -> list[str]:
    """The jobs that wait and that nobody holds."""

    def work(connection: Connection) -> list[str]:
        found = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=JOBS)
        return [job.public_id for job in found]

    return pool.database.run(work)


def test_who_gets_no_slot_comes_again_and_places_nothing_meanwhile(pool: Pool, busy: Busy, race: Race) -> None:
    with race.first() as first:
        assert taken(first.connection, 1) == 0
        for _ in range(3):
            pause = race.unhindered(busy.assigner.run_once, by=first)
            assert isinstance(pause, Again)
            assert RETRY_SECONDS / 2 <= pause <= 2 * RETRY_SECONDS
        assert len(queued(pool)) == JOBS - LEAST
        first.commit()
    busy.assigner.run_once()
    assert len(queued(pool)) == JOBS - 3 * LEAST


def test_who_places_other_jobs_needs_no_slot_of_theirs(pool: Pool, busy: Busy, race: Race) -> None:
    busy.assigner.reconfigure(AssignerSettings(at_once=1, instances=("default",)), QuotaSettings())
    with race.first() as first:
        assert taken(first.connection, 1) == 0
        race.unhindered(busy.assigner.run_once, by=first)
    assert len(queued(pool)) == JOBS - 3 * LEAST


def test_who_loses_a_whole_batch_to_others_takes_a_larger_one_next(pool: Pool, busy: Busy, race: Race) -> None:
    with race.first() as first:
        first.connection.execute(Statement("SELECT FROM bots FOR UPDATE"))
        race.unhindered(busy.assigner.run_once, by=first)
        assert len(queued(pool)) == JOBS - LEAST
    assert placed_by(pool, busy.assigner) == JOBS - LEAST


def test_who_has_little_to_place_needs_no_slot(pool: Pool, race: Race) -> None:
    pool.bot(capacity=1)
    pool.submit(1)
    with race.first() as first:
        assert taken(first.connection, 1) == 0
        race.unhindered(pool.assigner(at_once=1).run_once, by=first)
    assert not queued(pool)


def test_each_slot_is_taken_once(pool: Pool) -> None:
    with pool.database.begin() as one, pool.database.begin() as other:
        first = taken(one, 2)
        assert {first, taken(other, 2)} == {0, 1}
    with pool.database.begin() as one, pool.database.begin() as other:
        assert (taken(one, 1), taken(other, 1)) == (0, None)


@pytest.mark.parametrize(("cores", "number"), [(None, MIN_CONCURRENT_BATCHES), (1, MIN_CONCURRENT_BATCHES), (12, 12)])
def test_there_are_as_many_slots_as_cores_unless_configured(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, number: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert (concurrent_batches(None), concurrent_batches(3)) == (number, 3)
