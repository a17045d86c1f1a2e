"""Assigners with much to place keep to parts of the bots, and only as long as these suffice."""

import random

import pytest
from sqlalchemy import Connection, text

from assigner import snapshot
from assigner.offers import Offers
from assigner.snapshot import CROWD
from schema import ready
from schema.ready import Order, Scope
from schema.windows import PARTS
from tests import filling
from tests.pool import Pool

SAMPLE = 5
BOTS = 20 * PARTS


@pytest.fixture
def many(pool: Pool) -> Pool:
    """Many bots and many jobs."""
    pool.submit(4 * CROWD, properties={"kind": "one"})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"one": BOTS}))
    return pool


def sampled(pool: Pool, connection: Connection, jobs: int) -> set[int]:
    """The bots that somebody who places so many jobs looks at."""
    picked = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=jobs, chance=pool.chance)
    assert len(picked) == jobs
    seen = snapshot.sampled(
        connection, picked, sample_size=SAMPLE, offers=Offers(), chance=random.Random(pool.chance.random())
    )
    (found,) = seen.candidates
    return {bot.id for bot in found}


def widen(pool: Pool, capacity: int) -> None:
    pool.change("UPDATE bots SET capacity = :capacity", capacity=capacity)


def test_those_who_place_many_jobs_at_once_look_at_different_bots(many: Pool) -> None:
    widen(many, 100)
    with many.database.engine.begin() as one, many.database.engine.begin() as other:
        first, second = sampled(many, one, CROWD), sampled(many, other, CROWD)
    assert min(len(first), len(second)) >= SAMPLE
    assert not first & second


def test_where_a_part_has_not_plenty_of_room_all_bots_are_looked_at(many: Pool) -> None:
    widen(many, 1)
    with many.database.engine.begin() as one:
        found = sampled(many, one, 2 * CROWD)
    assert len(found) == SAMPLE + 2 * CROWD - 1


def test_who_finds_all_parts_claimed_does_without(many: Pool) -> None:
    widen(many, 100)
    with many.database.engine.begin() as others, many.database.engine.begin() as one:
        everything = text(
            "SELECT pg_advisory_xact_lock(hashtext('leasehold.part'), n) FROM generate_series(0, :last) n"
        )
        others.execute(everything, {"last": PARTS - 1})
        found = sampled(many, one, CROWD)
    assert len(found) == SAMPLE + CROWD - 1
