"""Samples are drawn evenly: each free bot is as likely in one as any other, and equal bots get equally many jobs."""

import os
import random
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations
from math import comb
from statistics import mean, stdev
from typing import Any

import pytest

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.placement import sampling
from assigner.placement.fleet import Fleet, shuffled
from schema.picking import ready
from schema.picking.pick import Order
from schema.picking.ready import Scope
from tests.support import filling
from tests.support.assigners import assigning
from tests.support.patience import eventually
from tests.support.pool import Bot, Pool, completed

BOTS, JOBS = 8, 80
GRANTED = "SELECT details ->> 'bot' AS name FROM job_events WHERE move = 'grant' AND id > :last"
#: Bounds of chi-square for p = 0.000001, by degrees of freedom.
BOUNDS = {5: 35.9, 7: 40.5}


def placed(pool: Pool, assigner: PriorityAgeAssigner) -> Counter[str]:
    """Place some jobs one by one; returns how many each bot got."""
    last = pool.row("SELECT coalesce(max(id), 0) AS id FROM job_events").id
    pool.submit(JOBS)
    for _ in range(JOBS):
        assigner.run_once()
    rows = pool.rows(GRANTED, last=last)
    assert len(rows) == JOBS
    return Counter(row.name for row in rows)


def assert_even(found: Counter[str], names: Collection[str]) -> None:
    assert set(found) <= set(names)
    assert chi_square(found, len(names)) < BOUNDS[len(names) - 1], found


@pytest.mark.long
def test_equal_bots_share_the_jobs_evenly_after_restarts_and_while_bots_come_and_go(pool: Pool) -> None:
    alone = {"batch": 1, "strategy": {"sampling": {"sample_size": 1}}}
    bots: dict[str, Bot] = {name: pool.bot(name, capacity=2000) for name in (f"bot-{number}" for number in range(BOTS))}
    assigner = pool.assigner(**alone)
    assert_even(placed(pool, assigner), bots)

    bots |= {name: pool.restarted(bots[name]) for name in ("bot-0", "bot-5")}
    pool.change("UPDATE bots SET capacity = 2000")
    assert_even(placed(pool, pool.assigner(**alone)), bots)

    for name in ("bot-2", "bot-7"):
        pool.change("UPDATE bots SET draining = true WHERE name = :name", name=name)
    assert_even(placed(pool, assigner), bots.keys() - {"bot-2", "bot-7"})

    pool.change("UPDATE bots SET draining = false")
    assert_even(placed(pool, assigner), bots)


#: Bound of chi-square of the eight bots for p = 0.0001.
BURSTS, BURST, LIKELY = 8, 50, 29.9
RUNS_VARIABLE = "LEASEHOLD_TEST_RUNS"


@pytest.mark.long
def test_bursts_are_spread_evenly_over_a_small_fleet(pool: Pool, chance: random.Random) -> None:
    """`LEASEHOLD_TEST_RUNS=10` makes more runs."""
    bots = [pool.bot(f"bot-{number}", capacity=300) for number in range(BOTS)]
    for _ in range(int(os.environ.get(RUNS_VARIABLE) or 1)):
        last = pool.row("SELECT coalesce(max(id), 0) AS id FROM job_events").id
        with assigning(
            pool.database, pool.timing, chance, [None, None], wakeups=True, strategy={"sampling": {"sample_size": 1}}
        ):
            for _ in range(BURSTS):
                pool.submit(BURST)
            eventually(lambda: not pool.rows("SELECT FROM jobs WHERE state = 'queued'"))
        found = Counter(row.name for row in pool.rows(GRANTED, last=last))
        squares = chi_square(found, BOTS)
        print(f"chi-square {squares:.1f}: {sorted(found.values())}")
        assert squares < LIKELY, found
        for bot in bots:
            bot.sync(*map(completed, bot.take()))


def inclusions(samples: Sequence[Sequence[int]]) -> Counter[object]:
    return Counter(each for sample in samples for each in sample)


def pairs(samples: Sequence[Sequence[int]]) -> Counter[object]:
    return Counter(pair for sample in samples for pair in combinations(sorted(sample), 2))


def chi_square(counts: Counter[Any], cells: int) -> float:
    """The statistic of counts, which are equal in expectation."""
    expected = counts.total() / cells
    return (sum((count - expected) ** 2 for count in counts.values()) + (cells - len(counts)) * expected**2) / expected


def is_uniform(samples: Sequence[Sequence[int]], able: Sequence[int]) -> bool:
    """Whether samples are as even as those that `random.sample` draws: of both statistics, the difference from the mean
    of fifty reference runs is less than four of their standard deviations (p > 0.0001 for one that is normal)."""
    size, chance = len(samples[0]), random.Random(1)
    assert {len(sample) for sample in samples} == {size}
    references = [[chance.sample(able, size) for _ in samples] for _ in range(50)]
    for statistic, cells in ((inclusions, len(able)), (pairs, comb(len(able), 2))):
        expected = [chi_square(statistic(each), cells) for each in references]
        if chi_square(statistic(samples), cells) > mean(expected) + 4 * stdev(expected):
            return False
    return True


def drawn(pool: Pool, fleet: Fleet, number: int, *, size: int) -> list[list[int]]:
    """So many samples of bots for the first job, drawn while those for the others are."""
    with pool.database.connect() as connection:
        jobs = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=100)
        found = [
            sampling.sample_snapshot(connection, jobs, sample_size=size, fleet=fleet, chance=random.Random(seed))
            for seed in range(number)
        ]
        connection.rollback()
    return [[bot.id for bot in seen.candidates[0]] for seen in found]


def test_the_test_of_uniform_samples_finds_contiguous_ones() -> None:
    able, chance = list(range(40)), random.Random(1)
    fair = [chance.sample(able, 5) for _ in range(300)]
    starts = [chance.randrange(40) for _ in range(300)]
    assert is_uniform(fair, able)
    assert not is_uniform([[able[(start + n) % 40] for n in range(5)] for start in starts], able)


@pytest.mark.parametrize("many_kinds", [1000, 0], ids=["by kind", "one after another"])
@pytest.mark.parametrize("groups", [1, 8])
def test_samples_of_forty_bots_with_mixed_room_are_uniform(pool: Pool, many_kinds: int, groups: int) -> None:
    pool.submit(properties={"kind": "a"}, units=2)
    for number in range(1, groups):
        pool.submit(instance=f"other-{number}", properties={"kind": "ab"[number % 2]})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"a": 40, "b": 40}, capacity=8))
    pool.change("UPDATE bots SET in_use = id % 8")
    able = [row.id for row in pool.rows("SELECT id FROM bots WHERE name LIKE 'a-%' AND capacity - in_use >= 2")]
    assert len(able) == 35
    assert is_uniform(drawn(pool, Fleet(many_kinds=many_kinds), 300, size=4), able)
    pool.change("UPDATE bots SET in_use = 0")


@pytest.mark.parametrize("free", [pytest.param(500, marks=pytest.mark.long), 10_000])
def test_samples_of_ten_thousand_bots_are_uniform_however_many_are_free(pool: Pool, free: int) -> None:
    pool.submit(properties={"kind": "a"})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"a": 10_000}, capacity=4))
    pool.change("UPDATE bots SET in_use = CASE WHEN 7919 * id % 10000 < :free THEN id % 4 ELSE 4 END", free=free)
    able = [row.id for row in pool.rows("SELECT id FROM bots WHERE free ORDER BY id")]
    blocks = {bot_id: nth * 40 // free for nth, bot_id in enumerate(able)}
    found = drawn(pool, Fleet(), 300, size=10)
    assert {len(set(sample)) for sample in found} == {10}
    reference = random.Random(1)
    even = [reference.sample(able, 10) for _ in found]
    for statistic, cells, bound in ((inclusions, 40, 2), (pairs, comb(41, 2), 1.5)):
        of_found, of_even = (
            chi_square(statistic([[blocks[each] for each in sample] for sample in samples]), cells)
            for samples in (found, even)
        )
        assert of_found < bound * of_even
    pool.change("UPDATE bots SET in_use = 0")


def test_a_shuffle_gives_each_element_once_and_every_order_as_often() -> None:
    chance = random.Random(1)
    orders = Counter(tuple(shuffled("abcd", chance)) for _ in range(2400))  # type: ignore[arg-type]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(orders) == 24
    assert chi_square(Counter(orders), 24) < 49.7, "the bound of 23 degrees of freedom for p = 0.001"
