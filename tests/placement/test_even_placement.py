"""Seen from outside: equal bots get equally many jobs, because samples are drawn evenly."""

import os
import random
from collections import Counter
from collections.abc import Collection

from assigner.cycle.assigner import PriorityAgeAssigner
from tests.support.assigners import assigning
from tests.support.patience import eventually
from tests.support.pool import Bot, Pool, completed

BOTS, JOBS = 8, 160
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
    expected = JOBS / len(names)
    assert sum((found[name] - expected) ** 2 / expected for name in names) < BOUNDS[len(names) - 1], found


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
BURSTS, BURST, LIKELY = 16, 50, 29.9
RUNS_VARIABLE = "LEASEHOLD_TEST_RUNS"


def test_bursts_are_spread_evenly_over_a_small_fleet(pool: Pool, chance: random.Random) -> None:
    """`LEASEHOLD_TEST_RUNS=10` makes more runs."""
    bots = [pool.bot(f"bot-{number}", capacity=400) for number in range(BOTS)]
    for _ in range(int(os.environ.get(RUNS_VARIABLE) or 1)):
        last = pool.row("SELECT coalesce(max(id), 0) AS id FROM job_events").id
        with assigning(
            pool.database, pool.timing, chance, [None, None], wakeups=True, strategy={"sampling": {"sample_size": 1}}
        ):
            for _ in range(BURSTS):
                pool.submit(BURST)
            eventually(lambda: not pool.rows("SELECT FROM jobs WHERE state = 'queued'"))
        found = Counter(row.name for row in pool.rows(GRANTED, last=last))
        expected = BURSTS * BURST / BOTS
        squares = sum((found[f"bot-{number}"] - expected) ** 2 / expected for number in range(BOTS))
        print(f"chi-square {squares:.1f}: {sorted(found.values())}")
        assert squares < LIKELY, found
        for bot in bots:
            bot.sync(*map(completed, bot.take()))
