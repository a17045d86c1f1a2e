"""Placement without sampling: the first healthy bot with room, in the order of priority and age."""

import pytest

from schema.postgres.statements import Statement
from tests.support.pool import Pool
from tests.support.race import Race

NO_SAMPLING = {"strategy": {"sampling": {"enabled": False}}}


@pytest.fixture(autouse=True)
def bots(pool: Pool) -> None:
    """Bots in the order of their registration, of which `second` and `third` are preferred."""
    for name, priority, capacity in (("first", 5, 9), ("second", 0, 1), ("third", 0, 2), ("fourth", 5, 9)):
        pool.bot(name, priority=priority, capacity=capacity)


def leases(pool: Pool) -> list[tuple[str, str]]:
    """(bot, strategy) of each lease, in the order of the jobs."""
    rows = pool.rows("SELECT b.name, l.strategy FROM leases l JOIN bots b ON b.id = l.bot_id ORDER BY l.job_id")
    return [(row.name, row.strategy) for row in rows]


def test_each_job_goes_to_the_first_bot_that_has_room(pool: Pool) -> None:
    pool.submit(5)
    pool.assigner(**NO_SAMPLING).run_once()
    assert leases(pool) == [(name, "first") for name in ("second", "third", "third", "first", "first")]


def test_a_bot_that_another_transaction_has_locked_is_passed_over(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    with race.first() as other:
        other.connection.execute(Statement("SELECT FROM bots WHERE name = 'second' FOR UPDATE"))
        race.unhindered(pool.assigner(**NO_SAMPLING).run_once, by=other)
    assert leases(pool) == [("third", "first")]
    assert pool.job(job).state == "leased"


def test_the_first_of_all_bots_is_taken_and_a_bot_that_is_not_healthy_is_none(pool: Pool) -> None:
    pool.change("UPDATE bots SET draining = true WHERE name IN ('second', 'third')")
    pool.change(
        "INSERT INTO bots (name, status, session, sync_seq, expires_at, opened_at, kind, capacity, priority, epoch)"
        " SELECT 'late-' || n, status, session, sync_seq, expires_at, opened_at, kind, capacity, 9, epoch"
        " FROM bots, generate_series(1, 300) n WHERE name = 'first'"
    )
    pool.submit(2)
    pool.assigner(**NO_SAMPLING).run_once()
    assert leases(pool) == [("first", "first")] * 2


def test_a_job_too_large_for_every_bot_rests_without_sampling_as_with_it(pool: Pool) -> None:
    (job,) = pool.submit(units=10)
    pool.assigner(**NO_SAMPLING).run_once()
    assert leases(pool) == []
    assert "enough free units" in pool.queue_of(job).reason
