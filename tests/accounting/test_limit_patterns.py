"""Limits by the beginning of a name. A key has its limit from its first use, also while patterns change or go."""

from collections.abc import Callable
from typing import Any

import pytest
from leasehold.errors import BadInput, NotFound
from psycopg.errors import SerializationFailure

from schema.accounting import counters, limit_patterns, rates
from schema.postgres.statements import Statement
from tests.support.explain import explained
from tests.support.pool import Pool, completed
from tests.support.race import Race, outcome

OF_PATTERN, LOCK = "lock:default:customer-", "lock:default:customer-7"


def slots(pool: Pool, lock: str, most: float | None) -> None:
    def change(connection: Any) -> None:
        names = ("default", lock)
        if most is None:
            counters.remove_limits(connection, counters.SLOTS_OF_LOCK, [names], actor="t")
        else:
            counters.set_limits(connection, counters.SLOTS_OF_LOCK, {names: most}, actor="t")

    pool.database.run(change)


def rate(pool: Pool, used: str, per_second: float, burst: int) -> None:
    pool.database.run(lambda c: rates.set_rates(c, {used: rates.RateTerms(per_second, burst)}, actor="t"))


def started(pool: Pool, count: int, lock: str = "customer-7", **terms: Any) -> int:
    """Submit jobs that take the lock; return how many of all run after a cycle."""
    pool.submit(count, terms={"locks": [lock], **terms})
    pool.assigner().run_once()
    return len(pool.rows("SELECT FROM jobs WHERE state = 'leased'"))


def counter(pool: Pool, name: str = LOCK) -> tuple[Any, ...]:
    rows = pool.rows("SELECT trunc(used), trunc(most), limited_by FROM counters WHERE name = :name", name=name)
    return tuple(rows[0]) if rows else ()


def forget(pool: Pool) -> int:
    return pool.database.run(lambda c: limit_patterns.delete_idle(c, age=limit_patterns.KEPT, limit=500))


def days_pass(pool: Pool) -> None:
    pool.change("UPDATE counters SET charged_at = charged_at - interval '2 days'")
    pool.change("UPDATE rate_buckets SET refilled_at = refilled_at - interval '2 days'")


def test_a_key_has_the_slots_of_the_longest_pattern_unless_they_are_set_by_its_name(pool: Pool) -> None:
    pool.bot(capacity=50)
    slots(pool, "c*", 4)
    slots(pool, "customer-*", 2)
    assert (started(pool, 5), counter(pool)) == (2, (2, 2, OF_PATTERN))
    (late,) = pool.submit(terms={"locks": ["customer-7"]})
    assert explained(pool, late).sentence.endswith(
        "2 of 2 slots of lock 'customer-7' are held, the limit of 'customer-*'"
    )
    slots(pool, "customer-*", 3)
    assert (started(pool, 0), counter(pool)) == (3, (3, 3, OF_PATTERN))
    slots(pool, "customer-7", 1)
    slots(pool, "customer-*", 9)
    assert (started(pool, 0), counter(pool)) == (3, (3, 1, "")), "its own limit wins, and stops no running job"
    slots(pool, "customer-7", None)
    assert counter(pool) == (3, 9, OF_PATTERN)
    slots(pool, "customer-*", None)
    assert counter(pool) == (3, 4, "lock:default:c")
    slots(pool, "c*", None)
    assert counter(pool) == (3, 1, None)
    for lock in ("customer-7", "c*"):
        with pytest.raises(NotFound):
            slots(pool, lock, None)


def test_jobs_give_slots_to_a_lock_that_no_operator_has_set_and_the_smallest_number_counts(pool: Pool) -> None:
    bot = pool.bot(capacity=50)
    assert (started(pool, 3, "customer-7:2"), counter(pool)) == (2, (2, 2, None))
    assert started(pool, 1, "customer-7:9") == 2, "those that hold it were promised that only 2 do"
    bot.sync(*map(completed, bot.take()))
    assert started(pool, 0) == 2, "of those that wait, the smallest number counts too"
    bot.sync(*map(completed, bot.take()))
    assert started(pool, 2) == 1, "a lock without a number has one slot"
    assert started(pool, 1, "customer-7:5") == 1
    slots(pool, "customer-*", 3)
    assert started(pool, 9, "customer-7:9") == 3, "a number never raises what an operator has set"


def test_a_pattern_of_rates_gives_each_class_a_bucket_of_its_own(pool: Pool) -> None:
    pool.bot(capacity=50)
    rate(pool, "api-*", 0.001, 2)
    rate(pool, "api-big", 0.001, 3)
    rate(pool, "api-big/*", 0.001, 1)
    for used in ({"resource_class": "api-a"}, {"resource_class": "api-b", "model": "m"}, {"resource_class": "api-big"}):
        pool.submit(5, terms=used)
    pool.submit(2, terms={"resource_class": "api-big", "model": "m"}, priority=-1)
    pool.assigner().run_once()
    buckets = "SELECT name, floor(tokens), limited_by FROM rate_buckets ORDER BY name"
    known = [("rate:api-a", 0, "rate:api-"), ("rate:api-b", 0, "rate:api-"), ("rate:api-big", 0, None)]
    assert [tuple(row) for row in pool.rows(buckets)] == [*known, ("rate:api-big/m", 0, "rate:api-big/")]
    assert len(pool.rows("SELECT FROM jobs WHERE state = 'leased'")) == 2 + 2 + 3
    (late,) = pool.submit(terms={"resource_class": "api-a"})
    assert "may start 0.001 jobs per second, the limit of 'api-*'" in explained(pool, late).sentence
    rate(pool, "api-*", 1000, 2)
    pool.database.run(lambda c: rates.remove_rates(c, ["api-big/*"], actor="t"))
    found = pool.rows("SELECT name, rate FROM rate_buckets ORDER BY name")
    assert [tuple(row) for row in found] == [("rate:api-a", 1000), ("rate:api-b", 1000), ("rate:api-big", 0.001)]


@pytest.mark.parametrize("wrong", ["*", "a*b", "a*b*", "**", "A*", "-a*", f"{'a' * 63}*"])
def test_a_pattern_that_is_not_the_begin_of_a_name_is_refused(pool: Pool, wrong: str) -> None:
    for change in (lambda: slots(pool, wrong, 2), lambda: rate(pool, wrong, 1, 1)):
        with pytest.raises(BadInput, match=r"\*"):
            change()


@pytest.mark.conflicts
def test_a_lock_that_is_made_while_a_pattern_changes_has_the_new_limit(pool: Pool, race: Race) -> None:
    """Whoever comes first: the pattern waits for a lock that is being made, and a job begins anew behind a pattern."""
    take: Callable[[Pool, str], None] = lambda of, name: of.database.run(  # noqa: E731
        lambda c: counters.take(c, [{name: 1.0}], numbers={name: 1.0})
    )
    with race.first() as job:
        take(job, LOCK)
        late = race.second(lambda: slots(pool, "customer-*", 5), behind=job)
        job.commit()
        outcome(late)
    assert counter(pool) == (1, 5, OF_PATTERN)
    with race.first() as operator:
        slots(operator, "customer-*", 7)
        with pytest.raises(SerializationFailure, match="being changed"):
            race.unhindered(lambda: take(pool, f"{LOCK}0"), by=operator)
        operator.commit()
    take(pool, f"{LOCK}0")
    assert (counter(pool), counter(pool, f"{LOCK}0")) == ((1, 7, OF_PATTERN), (1, 7, OF_PATTERN))
    pool.change("UPDATE counters SET used = 0")
    race.forget_errors()


def test_what_nothing_has_used_for_a_day_goes_and_what_a_job_begins_to_use_stays(pool: Pool, race: Race) -> None:
    rate(pool, "api-*", 1000, 2)
    slots(pool, "customer-*", 2)
    slots(pool, "customer-9", 2)
    bot = pool.bot(capacity=50)
    pool.submit(terms={"locks": ["customer-7", "customer-8", "customer-9", "tree"], "resource_class": "api-a"})
    given = pool.given(bot)
    days_pass(pool)
    assert (forget(pool), counter(pool)) == (1, (1, 2, OF_PATTERN)), "only the bucket, because a job runs"
    bot.sync(*map(completed, given))
    assert forget(pool) == 3
    names = "SELECT name FROM counters WHERE name LIKE 'lock:%'"
    assert [row.name for row in pool.rows(names)] == ["lock:default:customer-9"]
    take: Callable[[Pool], None] = lambda of: of.database.run(lambda c: counters.take(c, [{LOCK: 1.0}]))  # noqa: E731
    take(pool)
    pool.change("UPDATE counters SET used = 0, charged_at = now() - interval '2 days' WHERE name = :name", name=LOCK)
    with race.first() as job:
        take(job)
        assert race.unhindered(lambda: forget(pool), by=job) == 0, "a job has begun to use it"
    with race.first() as upkeep:
        assert forget(upkeep) == 1
        late = race.second(lambda: take(pool), behind=upkeep)
        upkeep.commit()
        outcome(late)
    assert counter(pool) == (1, 2, OF_PATTERN)
    pool.change("UPDATE counters SET used = 0 WHERE name = :name", name=LOCK)


def test_a_limit_that_is_set_while_upkeep_deletes_its_idle_counter_holds(pool: Pool, race: Race) -> None:
    names = [LOCK, "lock:default:customer-8"]
    pool.database.run(lambda c: counters.take(c, [dict.fromkeys(names, 1.0)]))
    pool.change("UPDATE counters SET used = 0")
    days_pass(pool)
    wanted: dict[tuple[str, ...], float | None] = {("default", "customer-7"): 3.0, ("default", "customer-8"): 4.0}
    with race.first() as other:
        other.connection.execute(Statement("SELECT FROM counters WHERE name = :name FOR UPDATE"), {"name": LOCK})
        late = race.second(
            lambda: pool.database.run(lambda c: counters.set_limits(c, counters.SLOTS_OF_LOCK, wanted, actor="t")),
            behind=other,
        )
        assert forget(pool) == 1, "the other one is held"
        other.commit()
        outcome(late)
    assert [counter(pool, name) for name in names] == [(0, 3, ""), (0, 4, "")]
