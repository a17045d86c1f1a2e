"""Picks from the front give what picks queue by queue give."""

import random

import pytest
from sqlalchemy import Connection

from schema import fetching, ready
from schema.clock import monotonic
from schema.fetching import Fetcher
from schema.front import Front
from schema.ready import JOBS_LOOK, Order, ReadyJob, Scope
from tests.pool import Pool
from tests.tenancy import Tenancy

INSTANCES = ("one", "two", "three")


def names(jobs: list[ReadyJob]) -> list[str]:
    return [job.public_id for job in jobs]


def fetched(pool: Pool, limit: int, line: Front | None) -> list[str]:
    """What the first bot would be given."""
    bot = pool.rows("SELECT id, capacity FROM bots ORDER BY id")[0]
    fetcher = Fetcher(bot.id, "bot-1", 0, None, None, bot.capacity, bot.capacity)

    def work(connection: Connection) -> list[ReadyJob]:
        return fetching.pick_for_bot(
            connection, fetcher, limit=limit, any_wait=False, literal=False, cooldown=600, line=line
        )

    return names(pool.database.run(work))


def picked(pool: Pool, batch: int, line: Front | None, order: Order = Order.PRIORITY) -> list[str]:
    def work(connection: Connection) -> list[ReadyJob]:
        return ready.pick(connection, Scope(), order=order, batch=batch, chance=random.Random(1), line=line)

    return names(pool.database.run(work))


@pytest.mark.parametrize("seed", range(6))
def test_any_pool_is_picked_from_alike(pool: Pool, tenancy: Tenancy, seed: int) -> None:
    chance = random.Random(seed)
    pool.bot(capacity=chance.choice([3, 40]), properties={"kind": ["a"]})
    pool.bot("bot-2", capacity=5, properties={"kind": ["b"]})
    line = Front(monotonic)
    for turn in range(6):
        for _ in range(chance.randint(1, 6)):
            pool.submit(
                chance.randint(1, 8),
                priority=chance.randint(-12, 12),
                properties={"kind": chance.choice("aaabz")},
                instance=chance.choice(INSTANCES),
            )
        if turn == 1:
            tenancy.quota("one", maximum=7)
        batch = chance.choice([1, 3, 10])
        assert picked(pool, batch, line) == picked(pool, batch, None)
        assert fetched(pool, 2, Front(monotonic)) == fetched(pool, 2, None)


def test_a_bot_is_not_given_a_job_at_rest_before_a_more_urgent_one_behind_the_front(pool: Pool) -> None:
    pool.bot(capacity=100, properties={"kind": ["a"]})
    pool.submit(5, priority=0, properties={"kind": "b"})
    urgent = pool.submit(priority=3, properties={"kind": "a"})
    pool.submit(priority=5, properties={"kind": "a"})
    pool.change("UPDATE jobs SET considered = 1, schedule_after = now() + interval '60 s' WHERE priority = 5")
    assert fetched(pool, 1, Front(monotonic)) == urgent


def test_by_age_an_old_job_that_fits_is_found_behind_large_ones_of_its_urgency(pool: Pool, tenancy: Tenancy) -> None:
    pool.bot(capacity=1000)
    tenancy.quota("default", maximum=3)
    pool.submit(JOBS_LOOK + 100, priority=0, units=5)
    (old,) = pool.submit(priority=0)
    pool.submit(30, priority=9)
    assert picked(pool, 2, None, Order.AGE)[0] == old
