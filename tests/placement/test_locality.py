"""The strategy that takes warm bots, as a pure choice and on a pool whose sample misses them."""

import random
from collections.abc import Sequence

import pytest

from assigner.placement.capacity import Capacity
from assigner.placement.locality import Locality
from assigner.placement.strategy import Policy, SamplingSettings, Snapshot, group_jobs
from schema.fleet import candidates
from schema.fleet.candidates import WARM_LIMIT, CandidateRequest, FreeBot
from schema.picking.pick import ReadyJob
from tests.support.pool import Pool


def bot(number: int, *, priority: int = 0, free_units: int = 1) -> FreeBot:
    return FreeBot(number, f"bot-{number}", priority, free_units, free_units)


def job(number: int, *, hint: str | None = None, units: int = 1) -> ReadyJob:
    return ReadyJob(number, str(number), 1, 0, 1, 1, 0, units, hint, False)


def place(
    jobs: Sequence[ReadyJob], bots: Sequence[FreeBot], hits: set[tuple[int, str]], *, sample_size: int = 10
) -> dict[int, int]:
    snapshot = Snapshot(jobs, group_jobs(jobs), [bots for _ in group_jobs(jobs)], frozenset(hits))
    policy = Policy(sampling=SamplingSettings(sample_size=sample_size))
    return {found.job_id: found.bot_id for found in Locality(Capacity(), "capacity").choose(snapshot, policy, how={})}


def test_a_warm_bot_is_taken_however_bad_its_score() -> None:
    bots = [bot(1, priority=-100, free_units=50), bot(2, priority=100)]
    assert place([job(1, hint="repo")], bots, {(2, "repo")}) == {1: 2}


def test_the_best_of_several_warm_bots_is_taken() -> None:
    bots = [bot(1, free_units=90), bot(2, free_units=2), bot(3, free_units=3), bot(4, priority=1, free_units=9)]
    assert place([job(1, hint="repo")], bots, {(2, "repo"), (3, "repo"), (4, "repo")}) == {1: 3}


@pytest.mark.parametrize("hint", [None, "repo"])
def test_without_a_hit_the_fallback_decides(hint: str | None) -> None:
    assert place([job(1, hint=hint)], [bot(1), bot(2, free_units=2)], {(1, "other")}) == {1: 2}


def test_a_warm_bot_that_is_full_is_no_candidate() -> None:
    jobs = [job(number, hint="repo") for number in (1, 2, 3)]
    assert place(jobs, [bot(1), bot(2, free_units=2), bot(3)], {(1, "repo")}) == {1: 1, 2: 2, 3: 2}


def test_an_earlier_job_without_a_hint_is_served_before_a_later_one_with_a_hit() -> None:
    assert place([job(1), job(2, hint="repo")], [bot(1)], {(1, "repo")}) == {1: 1}


def test_jobs_of_both_kinds_never_take_more_than_there_is() -> None:
    chance = random.Random(11)
    for _ in range(200):
        bots = [bot(number, free_units=chance.randint(1, 4)) for number in range(6)]
        jobs = [job(number, units=chance.randint(1, 2), hint=chance.choice([None, "a", "b"])) for number in range(15)]
        hits = {(chance.randrange(6), hint) for hint in ("a", "b") for _ in range(2)}
        placed = place(jobs, bots, hits, sample_size=chance.randint(1, 4))
        for one in bots:
            assert sum(each.units for each in jobs if placed.get(each.id) == one.id) <= one.free_units
        spare = {one.id: one.free_units - sum(j.units for j in jobs if placed.get(j.id) == one.id) for one in bots}
        for each in jobs:
            assert each.id in placed or max(spare.values()) < each.units, "room was left for it"


def test_a_decision_says_whether_the_fallback_made_it() -> None:
    jobs = [job(1, hint="repo"), job(2)]
    snapshot = Snapshot(jobs, group_jobs(jobs), [[bot(1), bot(2)]], frozenset({(1, "repo")}))
    first, second = Locality(Capacity(), "capacity").choose(snapshot, Policy(), how={"strategy": "locality"})
    assert first.decision == {
        "bot": "bot-1", "candidates": 1, "strategy": "locality",
        "score": {"total": 6.0, "priority": 0.0, "capacity": 1.0, "locality": 5.0},
    }  # fmt: skip
    assert (second.decision["fallback"], second.decision["bot"]) == ("capacity", "bot-2")


def fleet(pool: Pool, size: int, *warm: str) -> None:
    """So many bots; those named have lately worked on `repo`, the last one last."""
    for number in range(size):
        pool.bot(f"bot-{number}")
    for name in warm:
        pool.change(
            "INSERT INTO bot_localities (bot_id, hint) SELECT id, 'repo' FROM bots WHERE name = :name", name=name
        )


def holder(pool: Pool) -> str:
    name: str = pool.row("SELECT b.name FROM live l JOIN bots b ON b.id = l.bot_id").name
    return name


@pytest.mark.parametrize("warm", ["bot-0", "bot-11", "bot-23"])
def test_a_warm_bot_is_found_though_the_sample_misses_it(pool: Pool, warm: str) -> None:
    fleet(pool, 24, warm)
    pool.submit(locality_hint="repo")
    pool.assigner(strategy={"kind": "locality", "sampling": {"sample_size": 1}}).run_once()
    assert holder(pool) == warm
    decision = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert (decision["strategy"], decision["score"]["locality"]) == ("locality", 5.0)


@pytest.mark.parametrize(
    "unfit", ["draining = true", "in_use = capacity", "instance = (SELECT id FROM instances WHERE name = 'other')"]
)
@pytest.mark.breaks_invariants
def test_a_warm_bot_that_could_not_have_the_job_is_not_added(pool: Pool, unfit: str) -> None:
    pool.submit(instance="other", properties={"os": "plan9"})
    pool.submit(locality_hint="repo")
    fleet(pool, 2, "bot-1")
    pool.change(f"UPDATE bots SET {unfit} WHERE name = 'bot-1'")
    pool.assigner(strategy={"kind": "locality"}).run_once()
    assert holder(pool) == "bot-0"


def test_a_warm_bot_without_what_the_job_requires_is_not_added(pool: Pool) -> None:
    fleet(pool, 1, "bot-0")
    pool.bot("able", properties={"os": "plan9"})
    pool.submit(locality_hint="repo", properties={"os": "plan9"})
    pool.assigner(strategy={"kind": "locality"}).run_once()
    assert holder(pool) == "able"


def test_the_latest_of_many_warm_bots_are_added_and_no_more_than_a_few(pool: Pool) -> None:
    names = [f"bot-{number}" for number in range(WARM_LIMIT + 5)]
    fleet(pool, len(names), *names)
    pool.submit()
    job = pool.row("SELECT instance, platform FROM jobs")
    wanted = CandidateRequest(0, job.instance, job.platform, 1, WARM_LIMIT)
    found, none = pool.database.run(lambda c: candidates.warm(c, [(wanted, "repo"), (wanted, "other")]))
    assert [each.name for each in found] == names[: -WARM_LIMIT - 1 : -1]
    assert none == []


def test_a_bot_without_the_hint_is_good_enough_if_no_warm_one_is_free(pool: Pool) -> None:
    fleet(pool, 2, "bot-1")
    pool.submit(2, locality_hint="repo")
    pool.assigner(strategy={"kind": "locality"}).run_once()
    rows = pool.rows("SELECT details FROM job_events WHERE move = 'grant'")
    assert {row.details["bot"]: row.details.get("fallback") for row in rows} == {"bot-1": None, "bot-0": "capacity"}
