"""Sampled decisions: they hold what the strategy saw, and are made again by the strategy's own code."""

from typing import Any

import pytest

from assigner.placement.decision_sample import (
    MAX_CANDIDATES,
    SAMPLE_SECONDS,
    DecisionRecorder,
    DecisionSample,
    Seen,
    rescore,
    sample_decision,
)
from assigner.placement.registry import StrategySettings
from assigner.placement.strategy import Input, Snapshot, group_jobs
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob
from tests.support.pool import Pool


def job(number: int, *, units: int = 1, hint: str | None = None) -> ReadyJob:
    return ReadyJob(number, f"job-{number}", 1, 0, 1, 1, 0, units, hint, False)


def bots(*free: int, priorities: tuple[int, ...] = ()) -> list[FreeBot]:
    given = priorities or (0,) * len(free)
    return [
        FreeBot(n, f"bot-{n}", priority, units, 8) for n, (units, priority) in enumerate(zip(free, given, strict=True))
    ]


def snapshot(jobs: list[ReadyJob], candidates: list[FreeBot], **more: Any) -> Snapshot:
    return Snapshot(jobs, group_jobs(jobs), [candidates], **{"hits": frozenset(), **more})


def sampled(seen: Snapshot, policy: StrategySettings) -> DecisionSample | None:
    return sample_decision(seen, policy.chooser[0].choose(seen, policy, how={}), policy)


@pytest.mark.parametrize("kind", ["capacity", "locality", "success", "rate-only"])
@pytest.mark.parametrize("success", [0.0, 20.0])
def test_a_sampled_decision_made_again_has_the_same_bot_and_the_same_score(
    kind: str, success: float, chance: Any
) -> None:
    policy = StrategySettings(kind=kind, weights={"success": success})
    for _ in range(30):
        candidates = [FreeBot(n, f"bot-{n}", chance.randint(-2, 2), chance.randint(1, 8), 8) for n in range(6)]
        jobs = [job(n, units=chance.randint(1, 2), hint=chance.choice([None, "a"])) for n in range(4)]
        seen = Snapshot(
            jobs,
            group_jobs(jobs),
            [[each for each in candidates if each.free_units >= group.units] for group in group_jobs(jobs)],
            hits=frozenset((chance.randrange(6), "a") for _ in range(2)),
            rates={(n, ""): chance.random() for n in range(6)} if Input.SUCCESS in policy.inputs else {},
        )
        placements = policy.chooser[0].choose(seen, policy, how={})
        sample = sample_decision(seen, placements, policy)
        first = next((each for each in placements if each.job_id == 0), None)
        if first is None:
            assert sample is None
            continue
        assert sample is not None
        assert sample.bot == f"bot-{first.bot_id}"
        again = rescore(Seen.model_validate_json(sample.seen.model_dump_json()), policy)
        assert again.chosen == sample.bot
        if kind in ("capacity", "locality"):
            place = [each.bot for each in sample.seen.candidates].index(sample.bot)
            assert again.scores[place].as_decision() == first.decision["score"]


def test_other_weights_choose_another_bot_and_take_the_score_apart() -> None:
    seen = snapshot([job(1, hint="repo")], bots(1, 6), hits=frozenset({(0, "repo")}))
    sample = sampled(seen, StrategySettings())
    assert sample is not None
    assert sample.bot == "bot-0"  # a hit, worth 5 units, and 1 free unit beside 6: the first of two equals
    tried = rescore(sample.seen, StrategySettings(weights={"locality": 4.0}))
    assert tried.chosen == "bot-1"
    assert [score.as_decision() for score in tried.scores] == [
        {"total": 5.0, "priority": 0.0, "capacity": 1.0, "locality": 4.0},
        {"total": 6.0, "priority": 0.0, "capacity": 6.0, "locality": 0.0},
    ]


def test_only_the_first_job_is_sampled_because_later_ones_see_less_room() -> None:
    sample = sampled(snapshot([job(1), job(2)], bots(2, 2)), StrategySettings())
    assert sample is not None
    assert (sample.job, sample.bot) == ("job-1", "bot-0")
    assert sampled(snapshot([job(1, units=3)], bots(2, 2)), StrategySettings()) is None


def test_of_many_candidates_the_one_that_was_chosen_is_kept() -> None:
    sample = sampled(snapshot([job(1)], bots(*[1] * MAX_CANDIDATES * 2, 8)), StrategySettings())
    assert sample is not None
    assert (len(sample.seen.candidates), sample.seen.of) == (MAX_CANDIDATES, 2 * MAX_CANDIDATES + 1)
    assert sample.bot in {each.bot for each in sample.seen.candidates}
    assert rescore(sample.seen, StrategySettings()).chosen == sample.bot


def test_a_strategy_that_goes_by_turns_has_scores_but_no_second_choice() -> None:
    sample = sampled(snapshot([job(1)], bots(1, 2)), StrategySettings(kind="round-robin"))
    assert sample is not None
    again = rescore(sample.seen, StrategySettings(kind="round-robin"))
    assert (len(again.scores), again.chosen) == (2, None)


def test_a_process_samples_one_decision_in_ten_seconds(pool: Pool) -> None:
    now = [100.0]
    recorder = DecisionRecorder(lambda: now[0])
    assigner = pool.assigner()
    assigner._recorder = recorder
    for name in ("bot-1", "bot-2"):
        pool.bot(name, capacity=2)
    taken = []
    for _ in range(3):
        (public_id,) = pool.submit()
        assigner.run_once()
        sample = recorder.take()
        taken.append(None if sample is None else (sample.job == public_id, len(sample.seen.candidates)))
        now[0] += SAMPLE_SECONDS * 0.6
    assert taken == [(True, 2), None, (True, 2)]
    assert recorder.take() is None
