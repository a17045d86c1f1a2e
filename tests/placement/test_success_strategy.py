"""The choice by success and load, on plain values: golden numbers, ties, and how a batch is spread."""

import random
from collections import Counter

import pytest

from assigner.cli.mistakes import mistakes
from assigner.placement.capacity import Capacity
from assigner.placement.locality import Locality
from assigner.placement.strategy import (
    Input,
    Policy,
    Snapshot,
    Strategy,
    Weights,
    dominance,
    group_jobs,
    success_score,
)
from assigner.placement.success import Success
from assigner.settings import PoolSettings
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob

Rates = dict[tuple[int, str], float]


def bot(number: int, *, taken: int = 0, capacity: int = 5, priority: int = 0) -> FreeBot:
    return FreeBot(number, f"bot-{number}", priority, capacity - taken, capacity)


def job(number: int, *, units: int = 1, platform: int = 1) -> ReadyJob:
    return ReadyJob(number, str(number), platform, 0, 1, platform, 0, units, None, False)


def place(
    jobs: list[ReadyJob],
    *candidates: list[FreeBot],
    rates: Rates,
    strategy: Strategy | None = None,
    policy: Policy | None = None,
    labels: dict[int, str] | None = None,
) -> dict[int, int]:
    snapshot = Snapshot(
        jobs, group_jobs(jobs), candidates, frozenset(), labels=labels or {one.id: "" for one in jobs}, rates=rates
    )
    found = (strategy or Success()).choose(snapshot, policy or Policy(), how={})
    return {placement.job_id: placement.bot_id for placement in found}


EXAMPLE = [bot(1, taken=2), bot(2), bot(3, taken=5)]
EXAMPLE_RATES: Rates = {(1, ""): 0.95, (2, ""): 0.85, (3, ""): 0.90}


def test_the_score_is_the_success_rate_over_one_plus_load() -> None:
    found = [success_score(one, free_units=one.free_units, rate=EXAMPLE_RATES[one.id, ""]).total for one in EXAMPLE]
    assert [round(each, 2) for each in found] == [0.68, 0.85, 0.45]


def test_the_best_of_the_example_is_the_idle_one() -> None:
    """Though two others succeed more often."""
    assert place([job(1)], EXAMPLE, rates=EXAMPLE_RATES) == {1: 2}


@pytest.mark.parametrize(("taken", "load"), [(0, 0.0), (2, 0.4), (5, 1.0)])
def test_load_is_the_share_of_its_units_that_a_bot_has_in_use(taken: int, load: float) -> None:
    one = bot(1, taken=taken)
    assert success_score(one, free_units=one.free_units, rate=1.0).load == load


def test_load_alone_decides_between_bots_that_succeed_alike() -> None:
    """A large bot with the more free units may still be the more loaded one."""
    assert place([job(1)], [bot(1, taken=50, capacity=100), bot(2, taken=1, capacity=4)], rates={}) == {1: 2}


def test_equal_scores_go_to_the_lower_bot_id() -> None:
    assert place([job(1)], [bot(9), bot(3), bot(7)], rates={}) == {1: 3}


def test_a_placement_counts_as_load_for_the_next_one_at_once() -> None:
    assert place([job(1), job(2), job(3)], [bot(1), bot(2)], rates={(1, ""): 0.95, (2, ""): 0.9}) == {1: 1, 2: 2, 3: 1}


def test_the_load_is_seen_by_other_groups_and_labels_too() -> None:
    jobs, shared = [job(1), job(2, platform=2), job(3)], [bot(1), bot(2)]
    rates: Rates = {(1, "a"): 0.95, (1, "b"): 0.95, (2, "a"): 0.9, (2, "b"): 0.9}
    placed = place(jobs, shared, shared, rates=rates, labels={1: "a", 2: "a", 3: "b"})
    assert placed == {1: 1, 2: 2, 3: 1}


def test_a_bot_is_judged_by_jobs_of_the_same_label() -> None:
    rates: Rates = {(1, "build"): 0.9, (1, "test"): 0.5, (2, "build"): 0.5, (2, "test"): 0.9}
    labels = {1: "build", 2: "test", 3: "build"}
    assert place([job(1), job(2), job(3)], [bot(1), bot(2)], rates=rates, labels=labels) == {1: 1, 2: 2, 3: 1}


def test_a_bot_that_nobody_knows_counts_as_one_that_always_succeeds() -> None:
    assert place([job(1)], [bot(1), bot(2)], rates={(1, ""): 0.99}) == {1: 2}


def test_a_bot_without_units_is_no_candidate() -> None:
    assert place([job(1)], [FreeBot(1, "bot-1", 0, 0, 0), bot(2, taken=4)], rates={}) == {1: 2}
    assert place([job(1)], [FreeBot(1, "bot-1", 0, 0, 0)], rates={}) == {}


def test_a_full_bot_is_no_candidate_however_good() -> None:
    assert place([job(1), job(2)], [bot(1, taken=4), bot(2)], rates={(2, ""): 0.1}) == {1: 1, 2: 2}
    assert place([job(1)], [bot(1, taken=5)], rates={}) == {}


def test_the_power_of_load_is_a_setting() -> None:
    candidates, rates = [bot(1, taken=2), bot(2)], {(1, ""): 0.95, (2, ""): 0.6}
    assert place([job(1)], candidates, rates=rates) == {1: 1}
    assert place([job(1)], candidates, rates=rates, policy=Policy(load_power=2.0)) == {1: 2}
    assert place([job(1)], candidates, rates=rates, policy=Policy(load_power=0.0)) == {1: 1}
    assert Policy().load_power == 1.0


def test_the_decision_keeps_what_its_score_is_made_of() -> None:
    snapshot = Snapshot([job(1)], group_jobs([job(1)]), [EXAMPLE], frozenset(), labels={1: ""}, rates=EXAMPLE_RATES)
    (placement,) = Success().choose(snapshot, Policy(), how={"strategy": "success", "round": 1})
    score = {"total": 0.85, "success_rate": 0.85, "load": 0.0}
    assert placement.decision == {"bot": "bot-2", "candidates": 3, "strategy": "success", "round": 1, "score": score}


def test_the_choice_is_that_of_comparing_every_candidate_for_every_job() -> None:
    chance = random.Random(5)
    for _ in range(200):
        bots = [bot(n, taken=chance.randint(0, 4), capacity=chance.randint(4, 6)) for n in range(6)]
        jobs = [job(n, units=chance.randint(1, 2), platform=chance.randint(1, 2)) for n in range(12)]
        labels = {one.id: chance.choice("ab") for one in jobs}
        rates: Rates = {(one.id, label): chance.choice([0.5, 0.75, 1.0]) for one in bots for label in "ab"}
        rooms, expected = {one.id: one.free_units for one in bots}, dict[int, int]()
        for each in jobs:
            fitting = [one for one in bots if rooms[one.id] >= each.units]
            if fitting:
                best = min(
                    fitting,
                    key=lambda one: (
                        -success_score(one, free_units=rooms[one.id], rate=rates[one.id, labels[each.id]]).total,
                        one.id,
                    ),
                )
                rooms[best.id] -= each.units
                expected[each.id] = best.id
        assert place(jobs, *[bots for _ in group_jobs(jobs)], rates=rates, labels=labels) == expected


def spread(strategy: Strategy, jobs: int, bots: list[FreeBot], rates: Rates) -> list[int]:
    """Jobs on each bot when they come one by one and all run on."""
    taken = Counter[int]()
    for number in range(jobs):
        now = [FreeBot(one.id, one.name, 0, one.free_units - taken[one.id], one.capacity) for one in bots]
        free = [one for one in now if one.free_units > 0]
        taken += Counter(place([job(number)], free, rates=rates, strategy=strategy).values())
    return [taken[one.id] for one in bots]


def test_a_sequence_is_spread_fairly_and_the_better_ones_get_more() -> None:
    bots = [bot(number, capacity=10) for number in (1, 2, 3)]
    alike = spread(Success(), 15, bots, {})
    better = spread(Success(), 15, bots, {(1, ""): 1.0, (2, ""): 0.9, (3, ""): 0.8})
    assert alike == [5, 5, 5]
    assert better == [7, 5, 3]


def test_under_stress_every_bot_is_filled_and_none_beyond_its_units() -> None:
    bots = [bot(number, capacity=number + 1) for number in range(1, 20)]
    rates: Rates = {(one.id, ""): 0.5 + one.id / 40 for one in bots}
    jobs = [job(number) for number in range(1000)]
    placed = Counter(place(jobs, bots, rates=rates).values())
    assert placed == {one.id: one.capacity for one in bots}
    half = Counter(place(jobs[:104], bots, rates=rates).values())
    assert max(half[one.id] / one.capacity for one in bots) < 1.0


def test_a_bot_that_joins_takes_the_load_of_the_others() -> None:
    busy = [bot(1, taken=3), bot(2, taken=3)]
    assert place([job(1), job(2), job(3)], [*busy, bot(3)], rates={}) == {1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize("weight", [2.0, -2.0])
def test_the_sum_has_the_same_term_with_a_weight_of_its_own(weight: float) -> None:
    one = bot(1, taken=2, priority=1)
    found = Policy(weights=Weights(success=weight)).score(one, free_units=3, hit=True, rate=0.7)
    assert found.as_decision() == {
        "total": -10.0 + 3.0 + 5.0 + weight * 0.5, "priority": -10.0, "capacity": 3.0, "locality": 5.0,
        "success": weight * 0.5,
    }  # fmt: skip


def test_without_a_weight_success_changes_nothing_of_the_sum() -> None:
    assert Weights().success == 0.0
    candidates, rates = [bot(1), bot(2)], {(1, ""): 0.1, (2, ""): 1.0}
    assert place([job(1)], candidates, rates=rates, strategy=Capacity()) == {1: 1}
    by_success = Policy(weights=Weights(success=1.0))
    assert place([job(1)], candidates, rates=rates, strategy=Capacity(), policy=by_success) == {1: 2}


def test_the_sum_with_success_is_that_of_comparing_every_candidate_for_every_job() -> None:
    chance = random.Random(6)
    for _ in range(200):
        bots = [bot(n, capacity=chance.randint(1, 4), priority=chance.randint(-1, 1)) for n in range(6)]
        jobs = [job(n, platform=chance.randint(1, 2)) for n in range(12)]
        labels = {one.id: chance.choice("ab") for one in jobs}
        rates: Rates = {(one.id, label): chance.choice([0.5, 0.75, 1.0]) for one in bots for label in "ab"}
        weights = Weights(success=chance.choice([-20.0, 5.0, 20.0]), capacity=chance.choice([-1.0, 0.0, 1.0]))
        policy = Policy(weights=weights)
        rooms, expected = {one.id: one.free_units for one in bots}, dict[int, int]()
        for each in jobs:
            fitting = [one for one in bots if rooms[one.id] > 0]
            if fitting:
                best = max(
                    fitting,
                    key=lambda one: (
                        policy.score(
                            one, free_units=rooms[one.id], hit=False, rate=rates[one.id, labels[each.id]]
                        ).total
                    ),
                )
                rooms[best.id] -= 1
                expected[each.id] = best.id
        candidates = [bots for _ in group_jobs(jobs)]
        assert place(jobs, *candidates, rates=rates, strategy=Capacity(), policy=policy, labels=labels) == expected


def test_it_is_said_how_much_success_can_add() -> None:
    assert dominance(Weights(success=4.0), "raw").endswith("; success adds at most 4")


@pytest.mark.parametrize(
    ("strategy", "success", "warned"),
    [
        ({"kind": "success"}, {}, 1),
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


def test_success_may_be_the_fallback_of_locality() -> None:
    """A job without a warm bot goes to the best one."""
    locality = Locality(Success(), "success")
    assert Input.SUCCESS in locality.inputs
    assert place([job(1)], EXAMPLE, rates=EXAMPLE_RATES, strategy=locality) == {1: 2}
