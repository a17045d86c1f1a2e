"""Picks among many queues: none is read whole, and the order over all of them is kept."""

import random

import pytest
from sqlalchemy import Connection

from schema import clock, ready
from schema.front import Front
from schema.ready import LEAST_HEADS, Order, Scope
from tests.pool import Pool

QUEUES, EACH = 40, 30
BATCH = 25


def fill(pool: Pool, chance: random.Random, *, urgent: int) -> None:
    """Jobs of random urgency in every queue, and so many in one queue that come before all others."""
    for number in range(QUEUES):
        for priority in sorted({chance.randint(-5, 5) for _ in range(6)}):
            pool.submit(count=EACH // 6, properties={"kind": f"kind-{number}"}, priority=priority)
    if urgent:
        pool.submit(count=urgent, properties={"kind": "kind-7"}, priority=-20)


@pytest.mark.parametrize(
    "urgent", [0, BATCH, 3 * LEAST_HEADS * BATCH], ids=["mixed", "a few urgent", "one queue first"]
)
@pytest.mark.parametrize("order", list(Order), ids=["priority", "age"])
@pytest.mark.parametrize("by_queue", [True, False], ids=["queue by queue", "from the front"])
def test_what_is_picked_comes_first_over_all_queues(pool: Pool, order: Order, urgent: int, by_queue: bool) -> None:
    line = None if by_queue else Front(clock.monotonic)
    fill(pool, random.Random(urgent), urgent=urgent)
    pool.bot(capacity=1000, properties={"kind": [f"kind-{number}" for number in range(QUEUES)]})
    first = [row.id for row in pool.rows(f"SELECT id FROM jobs ORDER BY {order.value} LIMIT {BATCH}")]

    def picked(connection: Connection) -> list[int]:
        jobs = ready.pick(connection, Scope(), order=order, batch=BATCH, chance=random.Random(1), line=line)
        return [job.id for job in jobs]

    found = pool.database.run(picked)
    assert found == first[: len(found)]
    assert len(found) >= BATCH // 2


def test_jobs_behind_those_that_others_hold_are_found_among_many_queues(pool: Pool) -> None:
    fill(pool, random.Random(3), urgent=4 * BATCH)
    pool.bot(capacity=1000, properties={"kind": [f"kind-{number}" for number in range(QUEUES)]})
    with pool.database.engine.begin() as other:
        held = {
            job.id for job in ready.pick(other, Scope(), order=Order.PRIORITY, batch=BATCH, chance=random.Random(1))
        }
        found = pool.database.run(
            lambda connection: ready.pick(
                connection, Scope(), order=Order.PRIORITY, batch=BATCH, chance=random.Random(2)
            )
        )
    assert held
    assert found
    assert not held & {job.id for job in found}
    assert {job.priority for job in found} == {-20}
