"""How many jobs an assigner places together: few while it is quiet, ever more while it cannot keep up."""

import pytest

from assigner.batching import LEAST, QUICK, SLOW, Batch
from assigner.cycle import PriorityAgeAssigner
from assigner.tuning import AssignerSettings
from tests.filling import fill_bots, fill_jobs, fill_queues
from tests.pool import Pool

LIMIT = 5000


def after(*cycles: tuple[int, float], limit: int = LIMIT) -> int:
    """The size after cycles that placed so many jobs, each in so many seconds."""
    batch = Batch()
    for placed, seconds in cycles:
        batch.learn(placed=placed, seconds=seconds, limit=limit)
    return batch.size(limit)


def grown(batch: Batch, limit: int = LIMIT) -> Batch:
    """The batch after many cycles that were quick and full."""
    for _ in range(20):
        batch.learn(placed=batch.size(limit), seconds=0.0, limit=limit)
    return batch


def test_a_quiet_pool_begins_with_a_small_batch() -> None:
    assert after() == LEAST


@pytest.mark.parametrize(
    ("placed", "seconds", "size"),
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
def test_a_batch_grows_after_a_cycle_that_was_quick_and_mostly_full(placed: int, seconds: float, size: int) -> None:
    assert after((placed, seconds)) == size


@pytest.mark.parametrize(
    ("placed", "seconds", "size"),
    [(400, SLOW + 0.01, 200), (100, 0.01, 200), (101, 0.01, 400), (0, 0.01, 200), (300, (QUICK + SLOW) / 2, 400)],
)
def test_a_grown_batch_is_halved_by_a_cycle_that_was_slow_or_mostly_empty(
    placed: int, seconds: float, size: int
) -> None:
    assert after((100, 0.0), (200, 0.0), (placed, seconds)) == size


def test_a_batch_doubles_up_to_its_limit_and_not_beyond() -> None:
    sizes, batch = [], Batch()
    for _ in range(8):
        sizes.append(batch.size(LIMIT))
        batch.learn(placed=sizes[-1], seconds=0.0, limit=LIMIT)
    assert sizes == [100, 200, 400, 800, 1600, 3200, 5000, 5000]


def test_a_batch_shrinks_to_the_least_and_not_below() -> None:
    batch, sizes = grown(Batch()), []
    for _ in range(8):
        batch.learn(placed=0, seconds=0.0, limit=LIMIT)
        sizes.append(batch.size(LIMIT))
    assert sizes == [2500, 1250, 625, 312, 156, 100, 100, 100]


def test_a_limit_below_the_least_is_kept() -> None:
    assert after(limit=1) == 1
    assert after((1, 0.0), (1, 0.0), limit=1) == 1
    assert grown(Batch(), 7).size(7) == 7


def test_a_limit_that_is_lowered_holds_at_once_and_one_that_is_raised_is_grown_into() -> None:
    batch = grown(Batch())
    assert batch.size(300) == 300
    batch.learn(placed=0, seconds=0.0, limit=300)
    assert batch.size(LIMIT) == 150
    batch.learn(placed=150, seconds=0.0, limit=LIMIT)
    assert batch.size(LIMIT) == 300


def test_an_assigner_under_backlog_takes_ever_more_and_places_everything(pool: Pool) -> None:
    with pool.database.engine.begin() as connection:
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
