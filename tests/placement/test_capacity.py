"""The choice by score: scores, the working copy, ties."""

import random

import pytest

from assigner.placement.capacity import Capacity
from assigner.placement.strategy import (
    CapacityTerm,
    Policy,
    Snapshot,
    Weights,
    dominance,
    group_jobs,
    outweighing_units,
    score,
)
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob


def bot(number: int, *, priority: int = 0, free_units: int = 1) -> FreeBot:
    return FreeBot(number, f"bot-{number}", priority, free_units, free_units)


def job(number: int, *, units: int = 1, platform: int = 1, hint: str | None = None) -> ReadyJob:
    return ReadyJob(number, str(number), platform, 0, 1, platform, 0, units, hint, False)


def place(
    jobs: list[ReadyJob], *candidates: list[FreeBot], hits: set[tuple[int, str]] | None = None, **weights: float
) -> dict[int, int]:
    snapshot = Snapshot(jobs, group_jobs(jobs), candidates, frozenset(hits or ()))
    policy = Policy(weights=Weights(**weights))
    return {found.job_id: found.bot_id for found in Capacity().choose(snapshot, policy, how={})}


@pytest.mark.parametrize(
    ("priority", "capacity", "hit", "expected"), [(0, 3, False, 3), (1, 3, True, -2), (1, 20, True, 15)]
)
def test_the_score_with_default_weights(priority: int, capacity: int, hit: bool, expected: float) -> None:
    assert score(bot(1, priority=priority), free_units=capacity, hit=hit, weights=Weights()).total == expected


@pytest.mark.parametrize("hit", [False, True])
def test_the_score_is_one_sum_of_its_terms_and_nothing_else(hit: bool) -> None:
    weights = Weights(priority=-3.0, locality=7.0, capacity=0.5)
    found = score(bot(1, priority=2, free_units=9), free_units=4, hit=hit, weights=weights)
    assert found.as_decision() == {
        "total": (3.0 if hit else -4.0), "priority": -6.0, "capacity": 2.0, "locality": (7.0 if hit else 0.0),
    }  # fmt: skip


def test_a_lower_bot_priority_number_is_preferred() -> None:
    assert Weights().priority == -10.0
    assert place([job(1)], [bot(1, priority=1), bot(2, priority=-1), bot(3)]) == {1: 2}


def test_a_bot_priority_that_is_better_by_one_outweighs_a_locality_hit() -> None:
    candidates = [bot(1, priority=1), bot(2, priority=0)]
    assert place([job(1, hint="repo")], candidates, hits={(1, "repo")}) == {1: 2}


def test_an_operator_may_weigh_locality_above_priority() -> None:
    candidates = [bot(1, priority=1), bot(2, priority=0)]
    assert place([job(1, hint="repo")], candidates, hits={(1, "repo")}, locality=11.0) == {1: 1}


def test_a_locality_hit_decides_between_equals() -> None:
    assert Weights().locality == 5.0
    assert place([job(1, hint="repo")], [bot(1), bot(2)], hits={(2, "repo")}) == {1: 2}


def test_a_hit_is_one_of_the_jobs_own_hint_only() -> None:
    candidates = [bot(1), bot(2), bot(3)]
    hits = {(2, "other"), (3, "repo")}
    assert place([job(1, hint="repo")], candidates, hits=hits) == {1: 3}
    assert place([job(1)], candidates, hits=hits) == {1: 1}


@pytest.mark.parametrize(
    ("term", "spare", "chosen"), [("raw", 10, 1), ("raw", 11, 2), ("normalised", 11, 1), ("normalised", 10_000, 1)]
)
def test_raw_capacity_is_unbounded_and_outweighs_a_priority_from_eleven_more_units(
    term: CapacityTerm, spare: int, chosen: int
) -> None:
    jobs, candidates = [job(1)], [bot(1, priority=0, free_units=1), bot(2, priority=1, free_units=1 + spare)]
    snapshot = Snapshot(jobs, group_jobs(jobs), [candidates], frozenset())
    (placement,) = Capacity().choose(snapshot, Policy(capacity_term=term), how={})
    assert placement.bot_id == chosen


def test_a_normalised_capacity_is_the_free_share_of_a_bots_units() -> None:
    large = FreeBot(1, "large", 0, 50, 100)
    small = FreeBot(2, "small", 0, 3, 4)
    found = [
        score(each, free_units=each.free_units, hit=False, weights=Weights(), term="normalised")
        for each in (large, small)
    ]
    assert [each.total for each in found] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("weights", "term", "units", "said"),
    [
        ({}, "raw", 11, "one step of bot priority (10) outweighs a locality hit (5); "
         "free capacity outweighs it from 11 more free units on"),
        ({"locality": 10.0, "capacity": 3.0}, "raw", 4, "one step of bot priority (10) weighs as much as a locality hit"
         " (10); free capacity outweighs it from 4 more free units on"),
        ({"locality": -11.0, "capacity": -11.0}, "raw", 1, "one step of bot priority (10) is outweighed by a locality"
         " hit (11); free capacity outweighs it from 1 more free unit on"),
        ({"capacity": 0.0}, "raw", None, "free capacity never outweighs it"),
        ({"capacity": 1e-300}, "raw", None, "free capacity never outweighs it"),
        ({"priority": 0.0}, "raw", 1, "free capacity outweighs it from 1 more free unit on"),
        ({}, "normalised", None, "free capacity never outweighs it"),
        ({"capacity": 10.5}, "normalised", 1, "a bot that is wholly free (10.5) outweighs it"),
    ],
)  # fmt: skip
def test_it_is_said_in_one_line_which_term_can_dominate(
    weights: dict[str, float], term: CapacityTerm, units: int | None, said: str
) -> None:
    assert outweighing_units(Weights(**weights), term) == units
    assert dominance(Weights(**weights), term).endswith(said)


def test_more_room_is_preferred_which_spreads_a_batch() -> None:
    assert Weights().capacity == 1.0
    placed = place([job(1), job(2), job(3)], [bot(1, free_units=2), bot(2, free_units=3)])
    assert placed == {1: 2, 2: 1, 3: 2}


def test_a_negative_capacity_weight_packs_bots_full() -> None:
    placed = place([job(1), job(2), job(3)], [bot(1, free_units=3), bot(2, free_units=2)], capacity=-1.0)
    assert placed == {1: 2, 2: 2, 3: 1}


def test_a_batch_never_puts_more_on_a_bot_than_it_has_room_for() -> None:
    chance = random.Random(7)
    for _ in range(200):
        bots = [bot(number, free_units=chance.randint(1, 4), priority=chance.randint(-1, 1)) for number in range(5)]
        jobs = [job(number, units=chance.randint(1, 3), platform=chance.randint(1, 2)) for number in range(20)]
        groups = group_jobs(jobs)
        candidates = [[one for one in bots if one.free_units >= group.units] for group in groups]
        placed = place(jobs, *candidates)
        for one in bots:
            assert sum(job.units for job in jobs if placed.get(job.id) == one.id) <= one.free_units


def test_jobs_are_placed_in_their_order_across_groups_that_share_a_bot() -> None:
    shared = [bot(1, free_units=1)]
    assert place([job(1, platform=2), job(2, platform=1)], shared, shared) == {1: 1}


def test_equal_scores_go_to_the_candidate_that_came_first() -> None:
    assert place([job(1)], [bot(9), bot(3)]) == {1: 9}


def test_the_sample_leaves_the_last_job_of_a_batch_as_many_candidates_as_the_first() -> None:
    (group,) = group_jobs([job(1), job(2), job(3)])
    assert group.wanted(10).count == 12


def test_the_decision_keeps_the_parts_of_its_score() -> None:
    snapshot = Snapshot([job(1)], group_jobs([job(1)]), [[bot(1, priority=1, free_units=3)]], frozenset())
    (placement,) = Capacity().choose(snapshot, Policy(), how={"strategy": "capacity", "round": 1})
    assert placement.decision == {
        "bot": "bot-1",
        "candidates": 1,
        "strategy": "capacity",
        "round": 1,
        "score": {"total": -7.0, "priority": -10.0, "capacity": 3.0, "locality": 0.0},
    }


def test_the_choice_is_that_of_comparing_every_candidate_for_every_job() -> None:
    chance = random.Random(5)
    for _ in range(300):
        bots = [bot(number, free_units=chance.randint(1, 4), priority=chance.randint(-1, 1)) for number in range(6)]
        jobs = [job(number, hint=chance.choice([None, "a", "b"])) for number in range(10)]
        hits = {(chance.randrange(6), chance.choice(["a", "b"])) for _ in range(4)}
        weights = {"locality": chance.choice([-5.0, 0.0, 1.0, 5.0, 25.0]), "capacity": chance.choice([1.0, 0.0, -1.0])}
        rooms, expected = {each.id: each.free_units for each in bots}, dict[int, int]()
        for each in jobs:
            fitting = [one for one in bots if rooms[one.id] > 0]
            if fitting:
                best = max(
                    fitting,
                    key=lambda one: (
                        score(
                            one,
                            free_units=rooms[one.id],
                            hit=(one.id, each.locality_hint) in hits,
                            weights=Weights(**weights),
                        ).total
                    ),
                )
                rooms[best.id] -= 1
                expected[each.id] = best.id
        assert place(jobs, bots, hits=hits, **weights) == expected
