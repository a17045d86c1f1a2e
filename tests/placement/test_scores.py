"""The strategies that go by a score: golden numbers, ties, batches, and the choice of a plain search."""

import random
from collections import Counter
from typing import Any

import pytest

from assigner.cli.mistakes import mistakes
from assigner.placement.registry import load
from assigner.placement.strategy import (
    CapacityTerm,
    Policy,
    Weights,
    dominance,
    group_jobs,
    outweighing_units,
    success_score,
)
from assigner.settings import PoolSettings
from schema.fleet.candidates import FreeBot
from tests.support.pool import Pool, Rates, bot, job, placed, snapshot

HIT = frozenset({(1, "repo")})
#: Vapora's example: bots with a load of 0.4, 0 and 1.
EXAMPLE = [bot(1, 3, capacity=5), bot(2, 5), bot(3, 0, capacity=5)]
EXAMPLE_RATES: Rates = {(1, ""): 0.95, (2, ""): 0.85, (3, ""): 0.90}


@pytest.mark.parametrize(
    ("priority", "capacity", "hit", "expected"), [(0, 3, False, 3), (1, 3, True, -2), (1, 20, True, 15)]
)
def test_the_score_with_default_weights(priority: int, capacity: int, hit: bool, expected: float) -> None:
    assert Policy().score(bot(1, priority=priority), free_units=capacity, hit=hit).total == expected


@pytest.mark.parametrize("hit", [False, True])
def test_the_score_is_one_sum_of_its_terms_and_nothing_else(hit: bool) -> None:
    weights = Weights(priority=-3.0, locality=7.0, capacity=0.5)
    found = Policy(weights=weights).score(bot(1, 9, priority=2), free_units=4, hit=hit)
    assert found.as_decision() == {
        "total": (3.0 if hit else -4.0), "priority": -6.0, "capacity": 2.0, "locality": (7.0 if hit else 0.0),
    }  # fmt: skip


@pytest.mark.parametrize("weight", [2.0, -2.0])
def test_success_is_one_more_term_with_a_weight_of_its_own(weight: float) -> None:
    one = bot(1, 3, capacity=5, priority=1)
    found = Policy(weights=Weights(success=weight)).score(one, free_units=3, hit=True, rate=0.7)
    assert found.as_decision() == {
        "total": -10.0 + 3.0 + 5.0 + weight * 0.5, "priority": -10.0, "capacity": 3.0, "locality": 5.0,
        "success": weight * 0.5,
    }  # fmt: skip


def test_a_normalised_capacity_is_the_free_share_of_a_bots_units() -> None:
    found = [
        Policy(capacity_term="normalised").score(each, free_units=each.free_units, hit=False).total
        for each in (bot(1, 50, capacity=100), bot(2, 3, capacity=4))
    ]
    assert found == [0.5, 0.75]


def test_the_success_score_is_the_rate_over_one_plus_load() -> None:
    """Load is the share of its units that a bot has in use."""
    found = [success_score(one, free_units=one.free_units, rate=EXAMPLE_RATES[one.id, ""]) for one in EXAMPLE]
    assert [(each.load, round(each.total, 2)) for each in found] == [(0.4, 0.68), (0.0, 0.85), (1.0, 0.45)]


#: What a row is about: the strategy, the bots, what else is seen, the policy, and the bot that a job with a hint gets.
ONE_JOB: dict[str, tuple[str, list[FreeBot], dict[str, Any], dict[str, Any], int]] = {
    "a lower priority number": ("capacity", [bot(1, priority=1), bot(2, priority=-1), bot(3)], {}, {}, 2),
    "priority before locality": ("capacity", [bot(1, priority=1), bot(2)], {"hits": HIT}, {}, 2),
    "locality with more weight": (
        "capacity", [bot(1, priority=1), bot(2)], {"hits": HIT}, {"weights": {"locality": 11.0}}, 1,
    ),
    "locality between equals": ("capacity", [bot(2), bot(1)], {"hits": HIT}, {}, 1),
    "a hit of the job's own hint": ("capacity", [bot(1), bot(2)], {"hits": {(2, "other")}}, {}, 1),
    "ten more units": ("capacity", [bot(1), bot(2, 11, priority=1)], {}, {}, 1),
    "eleven more units": ("capacity", [bot(1), bot(2, 12, priority=1)], {}, {}, 2),
    "eleven more, normalised": ("capacity", [bot(1), bot(2, 12, priority=1)], {}, {"capacity_term": "normalised"}, 1),
    "any number more, normalised": (
        "capacity", [bot(1), bot(2, 10_001, priority=1)], {}, {"capacity_term": "normalised"}, 1,
    ),
    "the candidate that came first": ("capacity", [bot(9), bot(3)], {}, {}, 9),
    "success without a weight": ("capacity", [bot(1), bot(2)], {"rates": {(1, ""): 0.1}}, {}, 1),
    "success with a weight": (
        "capacity", [bot(1), bot(2)], {"rates": {(1, ""): 0.1}}, {"weights": {"success": 1.0}}, 2,
    ),
    "an idle bot before better ones": ("success", EXAMPLE, {"rates": EXAMPLE_RATES}, {}, 2),
    "the less loaded of two alike": ("success", [bot(1, 50, capacity=100), bot(2, 3, capacity=4)], {}, {}, 2),
    "the lower id of equals": ("success", [bot(9), bot(3), bot(7)], {}, {}, 3),
    "who is not known always succeeds": ("success", [bot(1), bot(2)], {"rates": {(1, ""): 0.99}}, {}, 2),
    "no bot without units": ("success", [FreeBot(1, "bot-1", 0, 0, 0), bot(2, 1, capacity=5)], {}, {}, 2),
    "no full bot": ("success", [bot(1, 0, capacity=5), bot(2, 5)], {"rates": {(2, ""): 0.1}}, {}, 2),
    "load": ("success", EXAMPLE[:2], {"rates": {(1, ""): 0.95, (2, ""): 0.6}}, {}, 1),
    "load squared": ("success", EXAMPLE[:2], {"rates": {(1, ""): 0.95, (2, ""): 0.6}}, {"load_power": 2.0}, 2),
    "no load": ("success", EXAMPLE[:2], {"rates": {(1, ""): 0.95, (2, ""): 0.6}}, {"load_power": 0.0}, 1),
    "the rate alone": ("rate-only", EXAMPLE, {"rates": {**EXAMPLE_RATES, (3, ""): 0.99}}, {}, 1),
    "equal rates, by priority": ("rate-only", [bot(4), bot(3), bot(9, priority=-1), bot(2, priority=1)], {}, {}, 9),
    "equal rates, by age": ("rate-only", [bot(4), bot(3), bot(2, priority=1)], {}, {}, 3),
    "the rate before the priority": ("rate-only", [bot(3), bot(9, priority=-1)], {"rates": {(9, ""): 0.9}}, {}, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_JOB)
def test_a_job_goes_to_the_bot_that_the_strategy_values_most(case: str) -> None:
    kind, bots, fields, policy, chosen = ONE_JOB[case]
    seen = snapshot([job(1, hint="repo")], bots, **fields)
    assert placed(load(kind), seen, Policy(**policy)) == {1: chosen}


def test_a_job_without_a_hint_has_no_hit_and_one_without_a_bot_no_place() -> None:
    assert placed(load("capacity"), snapshot([job(1)], [bot(3), bot(1)], hits=HIT)) == {1: 3}
    for full in (bot(1, 0, capacity=5), FreeBot(1, "bot-1", 0, 0, 0)):
        assert placed(load("success"), snapshot([job(1)], [full])) == {}


LABELS = {1: "a", 2: "a", 3: "b", 4: "b"}
OWN_LABEL: Rates = {(1, "a"): 0.9, (2, "a"): 0.5, (1, "b"): 0.5, (2, "b"): 0.9}
#: The strategy, its weights, the free units of bots 1, 2, … of five each, what else is seen, the units of the jobs, and
#: their bots.
BATCHES: dict[str, tuple[str, dict[str, float], list[int], dict[str, Any], list[int], list[int]]] = {
    "more room, which spreads": ("capacity", {}, [2, 3], {}, [1, 1, 1], [2, 1, 2]),
    "less room, which packs": ("capacity", {"capacity": -1.0}, [3, 2], {}, [1, 1, 1], [2, 2, 1]),
    "a placement is load": ("success", {}, [5, 5], {"rates": {(1, ""): 0.95, (2, ""): 0.9}}, [1, 1, 1], [1, 2, 1]),
    "load of other labels": (
        "success", {}, [5, 5],
        {"labels": LABELS, "rates": {(1, "a"): 0.95, (1, "b"): 0.95, (2, "a"): 0.9, (2, "b"): 0.9}}, [1, 1, 1],
        [1, 2, 1],
    ),
    "the rate with jobs of its label": (
        "success", {}, [5, 5], {"labels": {1: "a", 2: "b", 3: "a"}, "rates": OWN_LABEL}, [1, 1, 1], [1, 2, 1],
    ),
    "a bot that joins": ("success", {}, [2, 2, 5], {}, [1, 1, 1], [3, 3, 3]),
    "a bot that is full now": ("success", {}, [1, 5], {"rates": {(2, ""): 0.1}}, [1, 1], [1, 2]),
    "the best is filled first": (
        "rate-only", {}, [3, 3, 3], {"rates": {(1, ""): 0.7, (2, ""): 0.9, (3, ""): 0.8}}, [1] * 10,
        [2, 2, 2, 3, 3, 3, 1, 1, 1],
    ),
    "sizes and labels": ("rate-only", {}, [3, 3], {"labels": LABELS, "rates": OWN_LABEL}, [2, 2, 1, 1], [1, 2, 2, 1]),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_jobs_of_a_batch_see_what_those_before_them_took(case: str) -> None:
    kind, weights, rooms, fields, units, chosen = BATCHES[case]
    bots = [bot(number, room, capacity=5) for number, room in enumerate(rooms, 1)]
    jobs = [job(number, units=each) for number, each in enumerate(units, 1)]
    policy = Policy(weights=Weights(**weights))
    assert placed(load(kind), snapshot(jobs, bots, **fields), policy) == dict(enumerate(chosen, 1))


def test_groups_that_share_bots_are_placed_in_the_order_of_their_jobs() -> None:
    assert placed(load("capacity"), snapshot([job(1, kind=2), job(2, kind=1)], [bot(1)])) == {1: 1}
    jobs, rates = [job(1), job(2, kind=2), job(3)], {(1, ""): 0.95, (2, ""): 0.9}
    assert placed(load("success"), snapshot(jobs, [bot(1, 5), bot(2, 5)], rates=rates)) == {1: 1, 2: 2, 3: 1}


@pytest.mark.parametrize("kind", ["capacity", "capacity with success", "success", "rate-only", "pack"])
def test_the_choice_is_that_of_comparing_every_candidate_for_every_job(kind: str) -> None:
    chance = random.Random(5)
    for _ in range(200):
        weights = Weights(
            locality=chance.choice([-5.0, 0.0, 1.0, 5.0, 25.0]),
            capacity=chance.choice([1.0, 0.0, -1.0]),
            success=chance.choice([-20.0, 5.0, 20.0]) if kind == "capacity with success" else 0.0,
        )
        policy = Policy(weights=weights)
        bots = [bot(n, chance.randint(1, 4), capacity=6, priority=chance.randint(-1, 1)) for n in range(6)]
        jobs = [
            job(n, units=chance.randint(1, 2), kind=chance.randint(1, 2), hint=chance.choice([None, "a", "b"]))
            for n in range(12)
        ]
        labels = {one.id: chance.choice("ab") for one in jobs}
        rates = {(one.id, label): chance.choice([0.5, 0.75, 1.0]) for one in bots for label in "ab"}
        hits = {(chance.randrange(6), chance.choice("ab")) for _ in range(4)}
        rooms, expected = {one.id: one.free_units for one in bots}, dict[int, int]()

        def value(one: FreeBot, rate: float, hit: bool) -> tuple[float, ...]:
            if kind == "rate-only":
                return rate, -one.priority
            if kind == "pack":
                return -rooms[one.id], -one.priority  # noqa: B023
            if kind == "success":
                return (success_score(one, free_units=rooms[one.id], rate=rate).total,)  # noqa: B023
            return (policy.score(one, free_units=rooms[one.id], hit=hit, rate=rate).total,)  # noqa: B023

        for each in jobs:
            fitting = {
                one.id: value(one, rates[one.id, labels[each.id]], (one.id, each.locality_hint) in hits)
                for one in bots
                if rooms[one.id] >= each.units
            }
            if fitting:
                expected[each.id] = max(fitting, key=fitting.__getitem__)
                rooms[expected[each.id]] -= each.units
        candidates = [[one for one in bots if one.free_units >= group.units] for group in group_jobs(jobs)]
        seen = snapshot(jobs, *candidates, hits=hits, labels=labels, rates=rates)
        assert placed(load(kind.split()[0]), seen, policy) == expected


@pytest.mark.parametrize(
    ("kind", "fields", "decision"),
    [
        ("capacity", {}, {"bot": "bot-2", "score": {"total": 5.0, "priority": 0.0, "capacity": 5.0, "locality": 0.0}}),
        ("success", {}, {"bot": "bot-2", "score": {"total": 0.85, "success_rate": 0.85, "load": 0.0}}),
        ("rate-only", {}, {"bot": "bot-1", "score": {"total": 0.95, "success_rate": 0.95, "load": 0.4}}),
    ],
)
def test_the_decision_keeps_what_its_score_is_made_of(
    kind: str, fields: dict[str, Any], decision: dict[str, Any]
) -> None:
    seen = snapshot([job(1)], EXAMPLE, rates=EXAMPLE_RATES)
    (placement,) = load(kind).choose(seen, Policy(), how={"strategy": kind, "round": 1})
    assert placement.decision == {"candidates": 3, "strategy": kind, "round": 1, **decision}


def test_the_sample_leaves_the_last_job_of_a_batch_as_many_candidates_as_the_first() -> None:
    (group,) = group_jobs([job(1), job(2), job(3)])
    assert group.wanted(10).count == 12


@pytest.mark.parametrize(
    ("weights", "term", "units", "said"),
    [
        ({}, "raw", 11, "one step of bot priority (10) outweighs a locality hit (5); "
         "free capacity outweighs it from 11 more free units on"),
        ({"locality": 10.0, "capacity": 3.0}, "raw", 4, "one step of bot priority (10) weighs as much as a locality hit"
         " (10); free capacity outweighs it from 4 more free units on"),
        ({"locality": -11.0, "capacity": -11.0}, "raw", 1, "one step of bot priority (10) is outweighed by a locality"
         " hit (11); free capacity outweighs it from 1 more free unit on"),
        ({"capacity": 1e-300}, "raw", None, "free capacity never outweighs it"),
        ({"priority": 0.0}, "raw", 1, "free capacity outweighs it from 1 more free unit on"),
        ({}, "normalised", None, "free capacity never outweighs it"),
        ({"capacity": 10.5}, "normalised", 1, "a bot that is wholly free (10.5) outweighs it"),
        ({"success": 4.0}, "raw", 11, "; success adds at most 4"),
    ],
)  # fmt: skip
def test_it_is_said_in_one_line_which_term_can_dominate(
    weights: dict[str, float], term: CapacityTerm, units: int | None, said: str
) -> None:
    assert outweighing_units(Weights(**weights), term) == units
    assert dominance(Weights(**weights), term).endswith(said)


def test_jobs_that_come_one_by_one_are_spread_fairly_and_the_better_bots_get_more() -> None:
    def spread(rates: Rates) -> list[int]:
        taken = Counter[int]()
        for number in range(15):
            now = [bot(n, 10 - taken[n], capacity=10) for n in (1, 2, 3) if taken[n] < 10]
            taken += Counter(placed(load("success"), snapshot([job(number)], now, rates=rates)).values())
        return [taken[n] for n in (1, 2, 3)]

    assert spread({}) == [5, 5, 5]
    assert spread({(1, ""): 1.0, (2, ""): 0.9, (3, ""): 0.8}) == [7, 5, 3]


def test_other_strategies_concentrate_or_ignore_what_bots_can_do() -> None:
    """By success alone the best bot gets everything; in turns the worst gets as much as the best."""
    rates: Rates = {(1, ""): 0.95, (2, ""): 0.94, (3, ""): 0.2}
    seen = snapshot([job(number) for number in range(30)], [bot(n, 30) for n in (1, 2, 3)], rates=rates)
    spread = {kind: Counter(placed(load(kind), seen).values()) for kind in ("rate-only", "round-robin", "success")}
    assert spread == {"rate-only": {1: 30}, "round-robin": {1: 10, 2: 10, 3: 10}, "success": {1: 15, 2: 15}}


@pytest.mark.parametrize(
    ("strategy", "success", "warned"),
    [
        ({"kind": "success"}, {}, 1),
        ({"kind": "rate-only"}, {}, 1),
        ({"kind": "locality", "fallback": "success"}, {}, 1),
        ({"weights": {"success": 1.0}}, {"statistics": False}, 1),
        ({"kind": "success"}, {"statistics": True}, 0),
        ({}, {}, 0),
    ],
)
def test_a_strategy_that_goes_by_success_nobody_counts_is_warned_of(
    strategy: dict[str, object], success: dict[str, object], warned: int
) -> None:
    settings = PoolSettings.model_validate({"assigners": [{"strategy": strategy}], "success": success})
    assert len(mistakes(settings)) == warned


def test_an_assigner_goes_by_what_the_pool_has_counted(pool: Pool) -> None:
    for name in ("poor", "good", "fair"):
        pool.bot(name, capacity=2)
    pool.change(
        "INSERT INTO bot_success (bot_id, label, successes, failures)"
        " SELECT id, '', 10, CASE name WHEN 'poor' THEN 20 WHEN 'good' THEN 1 ELSE 5 END FROM bots"
    )
    pool.submit(5)
    pool.assigner(strategy={"kind": "rate-only"}).run_once()
    rows = pool.rows("SELECT b.name, l.strategy FROM live l JOIN bots b ON b.id = l.bot_id")
    names = {("good", "rate-only"): 2, ("fair", "rate-only"): 2, ("poor", "rate-only"): 1}
    assert Counter((row.name, row.strategy) for row in rows) == names
