"""Seen from outside: equal bots get equally many jobs, because samples are drawn evenly."""

from collections import Counter
from collections.abc import Collection

from assigner.cycle.assigner import PriorityAgeAssigner
from tests.support.pool import Bot, Pool

BOTS, JOBS = 8, 160
#: Bounds of chi-square for p = 0.000001, by degrees of freedom.
BOUNDS = {5: 35.9, 7: 40.5}


def placed(pool: Pool, assigner: PriorityAgeAssigner) -> Counter[str]:
    """Place some jobs one by one; returns how many each bot got."""
    last = pool.row("SELECT coalesce(max(id), 0) AS id FROM job_events").id
    pool.submit(JOBS)
    for _ in range(JOBS):
        assigner.run_once()
    rows = pool.rows("SELECT details ->> 'bot' AS name FROM job_events WHERE move = 'grant' AND id > :last", last=last)
    assert len(rows) == JOBS
    return Counter(row.name for row in rows)


def assert_even(found: Counter[str], names: Collection[str]) -> None:
    assert set(found) <= set(names)
    expected = JOBS / len(names)
    assert sum((found[name] - expected) ** 2 / expected for name in names) < BOUNDS[len(names) - 1], found


def test_bg_30_equal_bots_share_the_jobs_evenly_after_restarts_and_while_bots_come_and_go(pool: Pool) -> None:
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
