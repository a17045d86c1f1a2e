"""The choice by success rate alone: golden numbers, ties, what it does to a fleet, and a pool that follows it."""

from collections import Counter

import pytest

from assigner.cli.mistakes import mistakes
from assigner.placement.rate_only import RateOnly
from assigner.placement.round_robin import RoundRobin
from assigner.placement.strategy import Policy, Snapshot, Strategy, group_jobs
from assigner.placement.success import Success
from assigner.settings import PoolSettings
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob
from tests.support.pool import Pool

Rates = dict[tuple[int, str], float]


def bot(number: int, *, taken: int = 0, capacity: int = 5, priority: int = 0) -> FreeBot:
    return FreeBot(number, f"bot-{number}", priority, capacity - taken, capacity)


def job(number: int, *, units: int = 1) -> ReadyJob:
    return ReadyJob(number, str(number), 1, 0, 1, 1, 0, units, None, False)


def place(
    jobs: list[ReadyJob],
    bots: list[FreeBot],
    rates: Rates,
    *,
    labels: dict[int, str] | None = None,
    strategy: Strategy | None = None,
) -> list[int]:
    groups = group_jobs(jobs)
    snapshot = Snapshot(
        jobs, groups, [bots for _ in groups], frozenset(), labels=labels or dict.fromkeys(range(100), ""), rates=rates
    )
    return [each.bot_id for each in (strategy or RateOnly()).choose(snapshot, Policy(), how={})]


def test_the_highest_rate_wins_whatever_the_load() -> None:
    """Of Vapora's example the first bot, which `success` passes over for the idle one; a full bot is no candidate."""
    bots = [bot(1, taken=2), bot(2), bot(3, taken=5)]
    rates: Rates = {(1, ""): 0.95, (2, ""): 0.85, (3, ""): 0.99}
    assert place([job(1)], bots, rates) == [1]
    assert place([job(1)], bots, rates, strategy=Success()) == [2]


def test_equal_rates_go_to_the_lower_priority_number_and_then_to_the_older_bot() -> None:
    bots = [bot(4), bot(3), bot(9, priority=-1), bot(2, priority=1)]
    assert place([job(1)], bots, {}) == [9]
    assert place([job(1)], [bot(4), bot(3), bot(2, priority=1)], {}) == [3]
    assert place([job(1)], bots, {(9, ""): 0.9}) == [3]


def test_the_best_bot_is_filled_before_the_next_one_gets_anything() -> None:
    bots = [bot(1, capacity=3), bot(2, capacity=3), bot(3, capacity=3)]
    rates: Rates = {(1, ""): 0.7, (2, ""): 0.9, (3, ""): 0.8}
    assert place([job(n) for n in range(10)], bots, rates) == [2, 2, 2, 3, 3, 3, 1, 1, 1]


def test_jobs_of_several_sizes_and_labels_see_what_others_took() -> None:
    bots = [bot(1, capacity=3), bot(2, capacity=3)]
    rates: Rates = {(1, "a"): 0.9, (2, "a"): 0.5, (1, "b"): 0.5, (2, "b"): 0.9}
    jobs = [job(1, units=2), job(2, units=2), job(3), job(4)]
    assert place(jobs, bots, rates, labels={1: "a", 2: "a", 3: "b", 4: "b"}) == [1, 2, 2, 1]


def test_a_decision_shows_the_rate_and_the_load_that_did_not_count() -> None:
    snapshot = Snapshot([job(1)], group_jobs([job(1)]), [[bot(1, taken=2)]], frozenset(), rates={(1, ""): 0.5})
    (placement,) = RateOnly().choose(snapshot, Policy(), how={"round": 1})
    score = {"total": 0.5, "success_rate": 0.5, "load": 0.4}
    assert placement.decision == {"bot": "bot-1", "candidates": 1, "score": score, "round": 1}


def test_the_rejected_alternatives_concentrate_or_ignore_what_bots_can_do() -> None:
    """By success alone the best bot gets everything; in turns the worst gets as much as the best."""
    bots = [bot(number, capacity=30) for number in (1, 2, 3)]
    rates: Rates = {(1, ""): 0.95, (2, ""): 0.94, (3, ""): 0.2}
    jobs = [job(number) for number in range(30)]

    def spread(strategy: Strategy) -> list[int]:
        placed = Counter(place(jobs, bots, rates, strategy=strategy))
        return [placed[one.id] for one in bots]

    assert spread(RateOnly()) == [30, 0, 0]
    assert spread(RoundRobin()) == [10, 10, 10]
    assert spread(Success()) == [15, 15, 0]


def test_an_assigner_goes_by_what_the_pool_has_counted(pool: Pool) -> None:
    for name in ("poor", "good", "fair"):
        pool.bot(name, capacity=2)
    pool.change(
        "INSERT INTO bot_success (bot_id, label, successes, failures)"
        " SELECT id, '', 10, CASE name WHEN 'poor' THEN 20 WHEN 'good' THEN 1 ELSE 5 END FROM bots"
    )
    pool.submit(5)
    assigner = pool.assigner(strategy={"kind": "rate-only"})
    for _ in range(5):
        assigner.run_once()
    rows = pool.rows(
        "SELECT b.name, l.strategy, count(*) AS n FROM live l JOIN bots b ON b.id = l.bot_id GROUP BY 1, 2"
    )
    assert {(row.name, row.strategy): row.n for row in rows} == {
        ("good", "rate-only"): 2,
        ("fair", "rate-only"): 2,
        ("poor", "rate-only"): 1,
    }


@pytest.mark.parametrize(("success", "warned"), [({}, 1), ({"statistics": True}, 0)])
def test_it_is_warned_of_where_nobody_counts_successes(success: dict[str, object], warned: int) -> None:
    settings = PoolSettings.model_validate({"assigners": [{"strategy": {"kind": "rate-only"}}], "success": success})
    assert len(mistakes(settings)) == warned
