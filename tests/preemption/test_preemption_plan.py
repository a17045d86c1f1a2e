"""Preemption as a decision: what a plan may evict and whom it may not, for any bots and any work on them."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assigner.preemption.plan import Eviction, QuotaSettings, plan, protection
from schema.picking.preemption import Occupant, OccupiedBot, StarvedJob

NOW = datetime(2030, 1, 1, tzinfo=UTC)
OURS, INSTANCES = 1, (1, 2, 3)
EAGER = QuotaSettings(preemption_delay=0)


def job(*, priority: int = 0, units: int = 1, rule: str = "lower_priority_only") -> StarvedJob:
    return StarvedJob(1, "ours", 0, 0, OURS, "team-a", 1, priority, units, 30.0, 0, 4, 4, rule)


def occupant(job_id: int, *, instance: int = 2, priority: int = 5, units: int = 1, **fields: object) -> Occupant:
    queued, started = NOW - timedelta(seconds=100), NOW - timedelta(seconds=50)
    usual = Occupant(
        job_id, f"job-{job_id}", 1, 0, instance, f"team-{instance}", priority, units, queued, started, 0, running=True,
        spare=float("inf"),
    )  # fmt: skip
    return replace(usual, **fields)  # type: ignore[arg-type]


def bot(
    *occupants: Occupant, number: int = 1, capacity: int | None = None, free_units: int | None = None
) -> OccupiedBot:
    """A bot that is full unless it is said to be larger."""
    used = sum(each.units for each in occupants)
    capacity = used if capacity is None else capacity
    return OccupiedBot(
        number, f"bot-{number}", capacity, capacity - used if free_units is None else free_units, occupants
    )


def victims(eviction: Eviction | None) -> list[int]:
    return [] if eviction is None else [victim.job_id for victim in eviction.victims]


@st.composite
def situations(draw: st.DrawFn) -> tuple[StarvedJob, list[OccupiedBot], QuotaSettings]:
    spare = {n: draw(st.sampled_from([-1, 0, 1, 2, 3, float("inf")])) for n in INSTANCES}
    bots, job_id = [], 10
    for number in range(draw(st.integers(1, 3))):
        held = []
        for _ in range(draw(st.integers(0, 4))):
            job_id += 1
            instance = draw(st.sampled_from(INSTANCES))
            held.append(
                occupant(
                    job_id,
                    instance=instance,
                    priority=draw(st.integers(-2, 2)),
                    units=draw(st.integers(1, 3)),
                    queued_at=NOW - timedelta(seconds=draw(st.integers(0, 5))),
                    started_at=NOW - timedelta(seconds=draw(st.integers(0, 5))),
                    evictions=draw(st.integers(0, 2)),
                    running=draw(st.booleans()),
                    spare=spare[instance],
                )
            )
        free, reserved = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        used = sum(each.units for each in held)
        bots.append(bot(*held, number=number, capacity=used + free, free_units=max(0, free - reserved)))
    wanting = job(
        priority=draw(st.integers(-2, 2)),
        units=draw(st.integers(1, 4)),
        rule=draw(st.sampled_from(["lower_priority_only", "any"])),
    )
    settings = QuotaSettings(
        preemption_delay=0, max_evictions=draw(st.integers(0, 3)), min_run_time=draw(st.integers(0, 5))
    )
    return wanting, bots, settings


@given(situations())
def test_what_is_evicted_may_be_is_needed_and_suffices(
    situation: tuple[StarvedJob, list[OccupiedBot], QuotaSettings],
) -> None:
    """Nothing is while a bot has room, and no instance is brought below its minimum."""
    wanting, bots, settings = situation
    eviction = plan(wanting, bots, settings, now=NOW)
    if eviction is None:
        return
    assert all(each.free_units < wanting.units for each in bots)
    assert eviction.bot in bots
    assert set(eviction.victims) <= set(eviction.bot.occupants)
    freed = sum(victim.units for victim in eviction.victims)
    assert eviction.bot.capacity >= wanting.units
    assert eviction.bot.free_units + freed >= wanting.units, "it fits once they have stopped"
    lost: Counter[int] = Counter()
    for victim in eviction.victims:
        assert eviction.bot.free_units + freed - victim.units < wanting.units, "without this one it would not fit"
        left = victim.spare - lost[victim.instance]
        assert protection(wanting, victim, settings, now=NOW, spare=left) is None
        lost[victim.instance] += victim.units
        assert lost[victim.instance] <= victim.spare


@given(situations())
def test_a_job_of_one_unit_gets_a_bot_whenever_any_rule_allows_it(
    situation: tuple[StarvedJob, list[OccupiedBot], QuotaSettings],
) -> None:
    wanting, bots, settings = situation
    wanting = replace(wanting, units=1)
    if any(each.free_units >= 1 for each in bots):
        return
    one_is_enough = any(
        protection(wanting, each, settings, now=NOW, spare=each.spare) is None and holder.free_units + each.units >= 1
        for holder in bots
        for each in holder.occupants
    )
    eviction = plan(wanting, bots, settings, now=NOW)
    if one_is_enough:
        assert eviction is not None
        assert len(eviction.victims) == 1


def test_the_least_urgent_goes_first_and_of_those_the_most_recently_queued() -> None:
    early, late = NOW - timedelta(seconds=90), NOW - timedelta(seconds=10)
    urgent = occupant(1, priority=1, queued_at=late)
    idle_early, idle_late = occupant(2, priority=9, queued_at=early), occupant(3, priority=9, queued_at=late)
    assert victims(plan(job(), [bot(urgent, idle_early, idle_late)], EAGER, now=NOW)) == [3]
    several = [bot(urgent, number=1), bot(idle_early, number=2), bot(idle_late, number=3)]
    assert victims(plan(job(), several, EAGER, now=NOW)) == [3]
    assert victims(plan(job(), several[:2], EAGER, now=NOW)) == [2]


@pytest.mark.parametrize(
    "spared",
    [{"instance": OURS}, {"running": False}, {"spare": 0}, {"priority": 0}, {"priority": -1}, {"evictions": 5}],
)
def test_some_are_never_victims(spared: dict[str, object]) -> None:
    """Its own instance's, what does not run (yet, or any more), an instance at its minimum, as urgent or more urgent
    ones, and whoever has been evicted often enough."""
    assert plan(job(), [bot(replace(occupant(1), **spared))], EAGER, now=NOW) is None


def test_more_urgent_jobs_go_only_where_the_cohort_reclaims_from_any() -> None:
    urgent = bot(occupant(1, priority=-7))
    assert plan(job(), [urgent], EAGER, now=NOW) is None
    eviction = plan(job(rule="any"), [urgent], EAGER, now=NOW)
    assert victims(eviction) == [1]
    assert eviction is not None
    assert (eviction.rule, eviction.receipt["rule"]) == ("any", "any")
    assert plan(job(rule="any"), [bot(occupant(1, instance=OURS, priority=9))], EAGER, now=NOW) is None


def test_a_job_is_exempt_after_max_evictions_and_before_min_run_time() -> None:
    settings = QuotaSettings(preemption_delay=0, max_evictions=2, min_run_time=10)
    for evictions, ran, goes in ((1, 10, True), (2, 10, False), (1, 9, False), (0, 60, True)):
        held = occupant(1, evictions=evictions, started_at=NOW - timedelta(seconds=ran))
        assert bool(victims(plan(job(), [bot(held)], settings, now=NOW))) is goes, (evictions, ran)


def test_several_go_from_one_bot_and_none_that_is_not_needed() -> None:
    small = [occupant(n, priority=9) for n in (1, 2)]
    large = occupant(3, priority=8, units=3)
    assert victims(plan(job(units=3), [bot(*small, large)], EAGER, now=NOW)) == [3], "the small ones would not help"
    assert sorted(victims(plan(job(units=2), [bot(*small, large)], EAGER, now=NOW))) == [1, 2]
    spread = [bot(small[0], number=1), bot(small[1], number=2)]
    assert plan(job(units=2), spread, EAGER, now=NOW) is None, "two halves are no place for it"


def test_room_kept_for_others_is_not_counted_twice() -> None:
    """On a bot of one unit somebody has been asked to stop, and what that frees is reserved."""
    stopping = bot(occupant(1, running=False), free_units=0)
    assert plan(job(), [stopping], EAGER, now=NOW) is None


def test_the_receipt_has_the_numbers_on_which_it_rests() -> None:
    eviction = plan(job(), [bot(occupant(1, spare=2.0, evictions=1))], EAGER, now=NOW)
    assert eviction is not None
    preemptor = {
        "job": "ours", "instance": "team-a", "priority": 0, "units": 1, "waited_seconds": 30.0, "preemption_delay": 0.0,
        "usage": 0, "min_quota": 4,
    }  # fmt: skip
    victim = {
        "job": "job-1", "instance": "team-2", "priority": 5, "units": 1, "evictions_before": 1, "above_minimum_by": 2,
    }  # fmt: skip
    assert eviction.receipt == {
        "rule": "lower_priority_only", "bot": "bot-1", "preemptor": preemptor, "victims": [victim],
    }  # fmt: skip
