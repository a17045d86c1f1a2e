"""The pure choice: scores, the working copy, ties."""

import random

import pytest

from assigner.sampling import grouped
from assigner.scoring import Weights, score
from assigner.strategies import Snapshot, choose
from schema.candidates import FreeBot
from schema.ready import ReadyJob


def bot(number: int, *, priority: int = 0, room: int = 1) -> FreeBot:
    return FreeBot(number, f"bot-{number}", priority, room, room)


def job(number: int, *, units: int = 1, platform: int = 1, hint: str | None = None) -> ReadyJob:
    return ReadyJob(number, str(number), 1, platform, 0, units, hint, 0)


def place(
    jobs: list[ReadyJob], *candidates: list[FreeBot], hits: set[tuple[int, str]] | None = None, **weights: float
) -> dict[int, int]:
    snapshot = Snapshot(jobs, grouped(jobs), candidates, frozenset(hits or ()))
    return {found.job_id: found.bot_id for found in choose(snapshot, Weights(**weights), how={})}


@pytest.mark.parametrize(
    ("priority", "capacity", "hit", "expected"), [(0, 3, False, 3), (1, 3, True, -2), (1, 20, True, 15)]
)
def test_the_score_with_default_weights(priority: int, capacity: int, hit: bool, expected: float) -> None:
    assert score(bot(1, priority=priority), room=capacity, hit=hit, weights=Weights()).total == expected


def test_a_bot_priority_that_is_better_by_one_outweighs_a_locality_hit() -> None:
    candidates = [bot(1, priority=1), bot(2, priority=0)]
    assert place([job(1, hint="repo")], candidates, hits={(1, "repo")}) == {1: 2}


def test_a_locality_hit_decides_between_equals() -> None:
    assert place([job(1, hint="repo")], [bot(1), bot(2)], hits={(2, "repo")}) == {1: 2}


def test_more_room_is_preferred_which_spreads_a_batch() -> None:
    placed = place([job(1), job(2), job(3)], [bot(1, room=2), bot(2, room=3)])
    assert placed == {1: 2, 2: 1, 3: 2}


def test_a_negative_capacity_weight_packs_bots_full() -> None:
    placed = place([job(1), job(2), job(3)], [bot(1, room=3), bot(2, room=2)], capacity=-1.0)
    assert placed == {1: 2, 2: 2, 3: 1}


def test_a_batch_never_puts_more_on_a_bot_than_it_has_room_for() -> None:
    chance = random.Random(7)
    for _ in range(200):
        bots = [bot(number, room=chance.randint(1, 4), priority=chance.randint(-1, 1)) for number in range(5)]
        jobs = [job(number, units=chance.randint(1, 3), platform=chance.randint(1, 2)) for number in range(20)]
        groups = grouped(jobs)
        candidates = [[one for one in bots if one.room >= group.units] for group in groups]
        placed = place(jobs, *candidates)
        for one in bots:
            assert sum(job.units for job in jobs if placed.get(job.id) == one.id) <= one.room


def test_jobs_are_placed_in_their_order_across_groups_that_share_a_bot() -> None:
    shared = [bot(1, room=1)]
    assert place([job(1, platform=2), job(2, platform=1)], shared, shared) == {1: 1}


def test_equal_scores_go_to_the_candidate_that_came_first() -> None:
    assert place([job(1)], [bot(9), bot(3)]) == {1: 9}


def test_the_sample_leaves_the_last_job_of_a_batch_as_many_candidates_as_the_first() -> None:
    (group,) = grouped([job(1), job(2), job(3)])
    assert group.wanted(10).count == 12


def test_the_decision_keeps_the_parts_of_its_score() -> None:
    snapshot = Snapshot([job(1)], grouped([job(1)]), [[bot(1, priority=1, room=3)]], frozenset())
    (placement,) = choose(snapshot, Weights(), how={"strategy": "capacity", "round": 1})
    assert placement.decision == {
        "bot": "bot-1",
        "candidates": 1,
        "strategy": "capacity",
        "round": 1,
        "score": {"total": -7.0, "priority": -10.0, "capacity": 3.0, "locality": 0.0},
    }
