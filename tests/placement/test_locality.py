"""The strategy that takes warm bots: as a pure choice, on a pool whose sample misses them, and what makes bots warm."""

import random
from typing import Any

import pytest

from assigner.placement.strategies.capacity import Capacity
from assigner.placement.strategies.locality import Locality
from assigner.placement.strategy import Policy, SamplingSettings
from schema.fleet import localities
from schema.fleet.candidates import CandidateRequest
from schema.fleet.localities import WARM_LIMIT
from tests.support.pool import Pool, bot, completed, job, placed, snapshot

STRATEGY = Locality(Capacity(), "capacity")
WARM: dict[str, Any] = {"strategy": {"kind": "locality", "sampling": {"sample_size": 1}}}


@pytest.mark.parametrize(
    ("hints", "bots", "warm", "chosen"),
    [
        pytest.param("r", [bot(1, 50, priority=-100), bot(2, priority=100)], [2], {1: 2}, id="however bad its score"),
        pytest.param("r", [bot(1, 90), bot(2, 2), bot(3, 3), bot(4, 9, priority=1)], [2, 3, 4], {1: 3}, id="the best"),
        pytest.param("-", [bot(1), bot(2, 2)], [1], {1: 2}, id="the fallback for a job without a hint"),
        pytest.param("x", [bot(1), bot(2, 2)], [1], {1: 2}, id="the fallback for a job without a hit"),
        pytest.param("rrr", [bot(1), bot(2, 2), bot(3)], [1], {1: 1, 2: 2, 3: 2}, id="no full one"),
        pytest.param("-r", [bot(1)], [1], {1: 1}, id="an earlier job before a later one with a hit"),
    ],
)
def test_a_job_gets_a_warm_bot(hints: str, bots: list[Any], warm: list[int], chosen: dict[int, int]) -> None:
    jobs = [job(number, hint=None if hint == "-" else hint) for number, hint in enumerate(hints, 1)]
    assert placed(STRATEGY, snapshot(jobs, bots, hits={(number, "r") for number in warm})) == chosen


def test_jobs_of_both_kinds_never_take_more_than_there_is() -> None:
    chance = random.Random(11)
    for _ in range(200):
        bots = [bot(number, chance.randint(1, 4)) for number in range(6)]
        jobs = [job(number, units=chance.randint(1, 2), hint=chance.choice([None, "a", "b"])) for number in range(15)]
        hits = {(chance.randrange(6), hint) for hint in ("a", "b") for _ in range(2)}
        policy = Policy(sampling=SamplingSettings(sample_size=chance.randint(1, 4)))
        found = placed(STRATEGY, snapshot(jobs, bots, hits=hits), policy)
        spare = {one.id: one.free_units - sum(j.units for j in jobs if found.get(j.id) == one.id) for one in bots}
        assert min(spare.values()) >= 0
        for each in jobs:
            assert each.id in found or max(spare.values()) < each.units, "room was left for it"


def test_a_decision_says_whether_the_fallback_made_it() -> None:
    seen = snapshot([job(1, hint="repo"), job(2)], [bot(1), bot(2)], hits={(1, "repo")})
    first, second = STRATEGY.choose(seen, Policy(), how={"strategy": "locality"})
    assert first.decision == {
        "bot": "bot-1", "candidates": 1, "strategy": "locality",
        "score": {"total": 6.0, "priority": 0.0, "capacity": 1.0, "locality": 5.0},
    }  # fmt: skip
    assert (second.decision["fallback"], second.decision["bot"]) == ("capacity", "bot-2")


def warmed(pool: Pool, **hints: str) -> None:
    """These bots have lately worked on these hints, the last one last."""
    for name, hint in hints.items():
        pool.change(
            "INSERT INTO bot_localities (bot_id, hint) SELECT id, :hint FROM bots WHERE name = :name",
            name=name,
            hint=hint,
        )


def grants(pool: Pool) -> list[dict[str, Any]]:
    return [row.details for row in pool.rows("SELECT details FROM job_events WHERE move = 'grant' ORDER BY job_id")]


def test_warm_bots_are_found_though_the_sample_misses_them(pool: Pool) -> None:
    for number in range(24):
        pool.bot(f"bot{number}")
    warmed(pool, bot0="first", bot11="middle", bot23="last")
    for hint in ("first", "middle", "last"):
        pool.submit(locality_hint=hint)
    pool.assigner(**WARM).run_once()
    assert [(each["bot"], each["score"]["locality"]) for each in grants(pool)] == [
        ("bot0", 5.0), ("bot11", 5.0), ("bot23", 5.0),
    ]  # fmt: skip
    assert {each["strategy"] for each in grants(pool)} == {"locality"}


@pytest.mark.breaks_invariants
def test_a_warm_bot_that_could_not_have_the_job_is_not_added(pool: Pool) -> None:
    pool.submit(instance="other", properties={"os": "plan9"})
    names = ("drained", "full", "foreign", "unable")
    for name in names:
        pool.bot(name, properties={} if name == "unable" else {"cpu": "x"})
    pool.bot("able", capacity=9, properties={"cpu": "x"}, priority=9)
    warmed(pool, **{name: name for name in names})
    pool.change("UPDATE bots SET draining = true WHERE name = 'drained'")
    pool.change("UPDATE bots SET in_use = capacity WHERE name = 'full'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'other') WHERE name = 'foreign'")
    for name in names:
        pool.submit(locality_hint=name, properties={"cpu": "x"})
    pool.assigner(**WARM).run_once()
    assert [each["bot"] for each in grants(pool)] == ["able"] * 4


def test_the_latest_of_many_warm_bots_are_added_and_no_more_than_a_few(pool: Pool) -> None:
    names = [f"bot{number}" for number in range(WARM_LIMIT + 5)]
    for name in names:
        pool.bot(name)
    warmed(pool, **dict.fromkeys(names, "repo"))
    pool.submit()
    row = pool.row("SELECT instance, platform FROM jobs")
    wanted = CandidateRequest(0, row.instance, row.platform, 1, WARM_LIMIT)
    found, none = pool.database.run(lambda c: localities.warm(c, [(wanted, "repo"), (wanted, "other")]))
    assert [each.name for each in found] == names[: -WARM_LIMIT - 1 : -1]
    assert none == []


def test_a_bot_without_the_hint_is_good_enough_if_no_warm_one_is_free(pool: Pool) -> None:
    pool.bot("cold")
    pool.bot("warm")
    warmed(pool, warm="repo")
    pool.submit(2, locality_hint="repo")
    pool.assigner(strategy={"kind": "locality"}).run_once()
    assert {each["bot"]: each.get("fallback") for each in grants(pool)} == {"warm": None, "cold": "capacity"}


@pytest.mark.parametrize(
    ("limit", "hints", "verdict", "kept"),
    [
        pytest.param(10, [*range(11), 1], "succeeded", [*range(2, 11), 1], id="the ten latest"),
        pytest.param(2, [1, 2, 3], "succeeded", [2, 3], id="as many as the setting says"),
        pytest.param(0, [1, 2], "succeeded", [], id="none with a setting of nought"),
        pytest.param(10, [1], "failed", [], id="none of a job that failed"),
    ],
)
def test_a_bot_keeps_the_hints_of_its_latest_successes(
    pool: Pool, limit: int, hints: list[int], verdict: str, kept: list[int]
) -> None:
    bot = pool.bot(
        sync_service=pool.sync_service(enabled=False, **{"bot_locality_hint_limit": limit} if limit < 10 else {})
    )
    for hint in hints:
        pool.submit(locality_hint=str(hint))
        (work,) = pool.given(bot)
        bot.sync(completed(work, verdict))
    assert [int(row.hint) for row in pool.rows("SELECT hint FROM bot_localities ORDER BY seq")] == kept


def test_a_finished_job_draws_the_next_one_with_its_hint(pool: Pool) -> None:
    pool.submit(locality_hint="repo")
    first, second = pool.bot("first"), pool.bot("second")
    pool.assigner().run_once()
    holder, other = (first, second) if (offered := first.take()) else (second, first)
    (work,) = offered or holder.take()
    holder.sync(completed(work))
    for _ in range(2):
        pool.submit(locality_hint="repo")
        (work,) = pool.given(holder)
        assert other.sync()["leases"] == []
        holder.sync(completed(work))
