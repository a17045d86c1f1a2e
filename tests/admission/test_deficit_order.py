"""Who comes first when instances share the pool, on a working copy alone: the same code as in every cycle."""

import random
from collections import Counter as Count
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from assigner.admission import admit, fair_share
from assigner.admission.fair_share import DeficitOrder
from assigner.admission.ordering import RankOrder
from assigner.admission.state import AdmissionState
from schema.accounting.counters import Counter
from schema.accounting.fair_share import Mode, Share, Shares, jain_index
from schema.picking.constrained import ConstrainedQueue, QueueHead
from schema.picking.pick import ReadyJob

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Pool:
    """A snapshot, as a cycle reads it: weights, what was used, and which jobs wait."""

    weights: Mapping[str, float]
    used: Mapping[str, float] = field(default_factory=dict)
    completed: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)
    lifts: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)
    missing_units: Mapping[str, int] = field(default_factory=dict)
    guarantee: int = 1
    mode: Mode = "waiting"

    def id(self, name: str) -> int:
        return sorted(self.weights).index(name)

    def admission_state(self) -> AdmissionState:
        counters = {f"instance:{name}:cost": Counter(amount) for name, amount in self.used.items()}
        counters |= {f"instance:{name}:jobs": Counter(float(count)) for name, count in self.running.items()}
        for name, most in self.limits.items():
            counters[name] = Counter(counters.get(name, Counter()).used, most)
        waiting = {
            self.id(name): Share(name, weight, self.lifts.get(name, 0.0), self.completed.get(name, 0))
            for name, weight in self.weights.items()
        }
        others = (len(self.others), sum(self.others.values()), sum(self.used[name] for name in self.others))
        return AdmissionState(NOW, counters, shares=Shares(waiting, *others, guarantee=self.guarantee, mode=self.mode))

    def head(self, name: str, number: int, *, cost: float = 1.0, rank: float = 0.0, age: float = 0.0) -> QueueHead:
        queue = ConstrainedQueue(
            self.id(name), 0, self.id(name), 0, 0, name, {}, None, self.missing_units.get(name, 0), managed=True
        )
        job = ReadyJob(number, str(number), self.id(name), 0, self.id(name), 0, 0, 1, None, False)
        return QueueHead(job, queue, rank, NOW - timedelta(seconds=age), 0, cost, None, None, {})

    def admitted(self, heads: Sequence[QueueHead], *, free_units: int) -> list[str]:
        return [head.queue.instance_name for head in first(heads, self.admission_state(), free_units)]

    def order(self, *, free_units: int = 1000, jobs: int = 4) -> list[str]:
        """The instances in the order in which the first of so many equal jobs of each start."""
        names = sorted(self.weights)
        heads = [self.head(name, 100 * nth + job) for nth, name in enumerate(names) for job in range(jobs)]
        return self.admitted(heads, free_units=free_units)


def first(heads: Sequence[QueueHead], state: AdmissionState, free_units: int) -> Sequence[QueueHead]:
    return admit.admit(heads, state, free_units=free_units, ordering=DeficitOrder(RankOrder())).heads


def deficits(pool: Pool) -> dict[str, float]:
    admission_state = pool.admission_state()
    assert admission_state.shares is not None
    weighed = fair_share.weigh_usage(admission_state.shares, admission_state)
    all_used = max(1.0, weighed.all_used)
    ids = {name: pool.id(name) for name in pool.weights}
    return {name: weighed.used[nth] / all_used - weighed.target(nth) for name, nth in ids.items()}


GOLDEN = Pool({"a": 3, "b": 1}, used={"a": 1000, "b": 500}, completed={"a": 9, "b": 9})


def test_the_worked_example_gives_the_stated_deficits_and_a_first() -> None:
    assert deficits(GOLDEN) == pytest.approx({"a": -1 / 12, "b": 1 / 12})
    assert GOLDEN.order()[0] == "a"
    assert jain_index([1000 / 3, 500 / 1]) == pytest.approx(0.962, abs=5e-4)
    admission_state = GOLDEN.admission_state()
    assert admission_state.shares is not None
    assert fair_share.fairness_index(admission_state.shares, admission_state) == pytest.approx(0.962, abs=5e-4)


def test_the_same_snapshot_gives_the_same_actions_in_whatever_order_jobs_come() -> None:
    heads = [GOLDEN.head(name, nth, cost=1 + nth) for nth, name in enumerate("abab" * 3)]
    wanted = GOLDEN.admitted(heads, free_units=7)
    assert len(wanted) == 7
    for seed in range(20):
        shuffled = random.Random(seed).sample(heads, len(heads))
        assert GOLDEN.admitted(shuffled, free_units=7) == wanted


def test_who_has_had_nothing_in_the_window_comes_before_the_lowest_deficit() -> None:
    pool = Pool({"a": 1, "b": 1000}, used={"a": 5, "b": 0.001}, completed={"a": 0, "b": 1})
    assert pool.order(free_units=3) == ["a", "b", "b"]


def test_a_job_that_runs_counts_for_the_guarantee_which_may_be_more_or_none() -> None:
    last: dict[str, Any] = {"weights": {"a": 1, "b": 1}, "used": {"a": 500, "b": 1}, "completed": {"b": 1}}
    assert Pool(**last, running={"a": 1}).order(free_units=1) == ["b"]
    assert Pool(**last, guarantee=0).order(free_units=1) == ["b"]
    two = Pool(**last, running={"a": 1}, guarantee=2)
    assert two.order(free_units=3)[:2] in (["a", "b"], ["b", "a"])


def test_literally_only_completed_jobs_count_for_the_guarantee() -> None:
    """So an instance whose first job runs on comes first for all its jobs."""
    asks: dict[str, Any] = {"weights": {"a": 1, "b": 1}, "used": {"a": 9.0, "b": 1.0}, "completed": {"b": 1}}
    assert Pool(**asks, running={"a": 1}).order(jobs=2) == ["b", "b", "a", "a"]
    assert Pool(**asks, running={"a": 1}, mode="literal").order(jobs=2) == ["a", "a", "b", "b"]


def test_literally_one_winner_takes_every_bot_of_a_cycle_and_limits_hold_nevertheless() -> None:
    asks: dict[str, Any] = {"weights": {"a": 1, "b": 1}, "used": {"a": 5.0, "b": 4.0}, "completed": {"a": 1, "b": 1}}
    assert Pool(**asks).order(free_units=4) == ["b", "a", "b", "a"]
    literal = Pool(**asks, mode="literal")
    assert literal.order(free_units=4) == ["b", "b", "b", "b"]
    literal.limits = {"instance:b:cost": 6.0}
    assert literal.order(free_units=4) == ["b", "b", "a", "a"]


def test_literally_the_usage_is_that_of_the_beginning_of_the_cycle_when_jobs_are_read_in_parts() -> None:
    pool = Pool({"a": 1, "b": 1}, used={"a": 5.0, "b": 4.0}, completed={"a": 1, "b": 1}, mode="literal")
    heads, state, found = [pool.head(name, number) for number, name in enumerate("aabbbb")], pool.admission_state(), []
    for part in (heads[:4], heads[4:]):
        found += first(part, state, 2)
    assert [head.queue.instance_name for head in found] == ["b", "b", "b", "b"]
    assert state.counter("instance:b:cost").used == 8.0


def test_the_first_round_divides_by_nothing() -> None:
    assert deficits(Pool({"a": 3, "b": 1})) == {"a": -0.75, "b": -0.25}
    assert Pool({"a": 3, "b": 1}, guarantee=0).order(jobs=8, free_units=8).count("a") in (6, 7)


def test_an_instance_at_its_limit_is_passed_over_and_the_next_one_is_served() -> None:
    for limits in ({"instance:a:cost": 1000}, {"instance:a:jobs": 0}, {"instance:a:slots": 0}):
        pool = Pool({"a": 3, "b": 1}, used=GOLDEN.used, completed=GOLDEN.completed, limits=limits)
        assert pool.order() == ["b"] * 4
    everybody = Pool({"a": 3, "b": 1}, used=GOLDEN.used, limits={"pool:cost": 0})
    assert everybody.order() == []


def test_what_is_assigned_counts_at_once_so_that_one_winner_does_not_take_every_bot() -> None:
    heads = [GOLDEN.head(name, 10 * nth + job, cost=200) for nth, name in enumerate("ab") for job in range(8)]
    admitted = GOLDEN.admitted(heads, free_units=8)
    assert Count(admitted) == {"a": 6, "b": 2}
    assert admitted[0] == "a"


def test_within_an_instance_the_lower_rank_comes_first_and_then_the_older_one() -> None:
    pool = Pool({"a": 1})
    heads = [pool.head("a", 1, rank=5), pool.head("a", 2, age=1), pool.head("a", 3, age=9), pool.head("a", 4, age=9)]
    assert [head.job.id for head in first(heads, pool.admission_state(), 9)] == [3, 4, 2, 1]


def test_no_room_no_jobs_or_no_instances_give_nothing_and_no_job_comes_twice() -> None:
    pool = Pool({"a": 1, "b": 2})
    assert pool.order(free_units=0) == []
    assert pool.order(jobs=0) == []
    assert Pool({}).order() == []
    heads = [pool.head("ab"[nth % 2], nth) for nth in range(30)]
    found = first(heads, pool.admission_state(), 20)
    assert len({head.job.id for head in found}) == len(found) == 20


def test_an_instance_below_its_minimum_quota_comes_before_all_others() -> None:
    pool = Pool({"a": 0, "b": 5}, used={"a": 50}, completed={"a": 3}, missing_units={"a": 2})
    assert pool.order(free_units=4) == ["a", "a", "b", "b"]


def test_the_parts_are_those_of_whom_jobs_wait_or_who_have_used_anything_and_literally_of_the_former() -> None:
    for mode, all_weights in (("demand", 8), ("literal", 4)):
        pool = Pool({"a": 3, "b": 1}, {"a": 30, "b": 10, "idle": 60}, others={"idle": 4}, mode=mode)
        assert deficits(pool) == pytest.approx({"a": 0.3 - 3 / all_weights, "b": 0.1 - 1 / all_weights})


@pytest.mark.parametrize(("weight", "amount"), [(100, 1), (1, 1000)])
def test_those_that_wait_share_by_their_weights_whatever_idle_ones_weigh_or_have_used(weight: int, amount: int) -> None:
    used = {"a": 0.0, "b": 0.0, "idle": float(amount)}
    for _ in range(200):
        pool = Pool({"a": 3, "b": 1}, dict(used), {"a": 1, "b": 1}, others={"idle": weight})
        used[pool.order(free_units=1, jobs=1)[0]] += 1
    assert (used["a"], used["b"]) == (150, 50)


def test_weights_that_are_all_zero_are_equal_and_beside_others_zero_gets_what_they_leave() -> None:
    assert deficits(Pool({"a": 0, "b": 0}, used={"a": 3, "b": 1})) == {"a": 0.25, "b": -0.25}
    assert Pool({"a": 0, "b": 2}, used={"b": 99}).order() == ["b"] * 4 + ["a"] * 4
    assert Pool({"a": 0, "b": 2}, limits={"instance:b:jobs": 2}).order() == ["b", "b", "a", "a", "a", "a"]


def test_a_lift_counts_as_usage_in_the_weighing_and_not_against_the_budget() -> None:
    done = {"a": 1, "b": 1}
    pool = Pool({"a": 1, "b": 1}, {"a": 1, "b": 10}, done, lifts={"a": 20}, limits={"instance:a:cost": 5})
    assert pool.order(free_units=1) == ["b"]
    assert pool.order().count("a") == 4


@pytest.mark.parametrize("instances", [2, 7, 15, 90, 300])
@pytest.mark.parametrize("same", [True, False])
def test_the_lowest_deficit_starts_next_each_time(instances: int, same: bool) -> None:
    """Against the rule itself, computed anew for every start: with equal and unequal costs, and instances that run out
    of jobs or are lifted below 0. Of many instances some come a start earlier or later."""
    for seed in range(2):
        chance = random.Random(seed)
        names = [f"i{nth:03}" for nth in range(instances)]
        pool = Pool(
            {name: chance.choice((0.25, 1.0, chance.uniform(0.1, 50.0))) for name in names},
            used={name: chance.uniform(0.0, chance.choice((0.01, 1.0, 300.0))) for name in names},
            lifts={name: chance.uniform(-20.0, 20.0) for name in names if chance.random() < 0.2},
            completed=dict.fromkeys(names, 1),
        )
        costs = {name: 1.0 if same else chance.uniform(0.0, 9.0) for name in names}
        jobs = {name: chance.randrange(1, 9) for name in names}
        heads = [
            pool.head(name, 10 * nth + job, cost=costs[name])
            for nth, name in enumerate(names)
            for job in range(jobs[name])
        ]
        found = pool.admitted(heads, free_units=400)
        wanted = by_the_rule(pool, costs, jobs, starts=400)
        if instances < 2 * fair_share.RENEWED:
            assert found == wanted, seed
        began, due, most = Count[str](), Count[str](), max(costs.values())
        for name, by_rule in zip(found, wanted, strict=True):
            began[name] += 1
            due[by_rule] += 1
            assert all(abs(began[each] - due[each]) * costs[each] <= most for each in (name, by_rule)), seed


def test_an_instance_far_above_its_part_starts_again_once_the_others_have_caught_up() -> None:
    """While the others start jobs nothing of it changes but its part."""
    found = with_a_large_one(50, used={"large": 200.0, **{f"i{nth:03}": 2.0 for nth in range(50)}}, free_units=300)
    assert 99 <= found["large"] <= 101, "half of 600"
    assert all(found[name] in (3, 4, 5) for name in found if name != "large")


@pytest.mark.parametrize(("others", "free_units"), [(200, 1), (200, 100), (200, 400), (500, 20)])
def test_a_large_instance_has_its_part_of_few_starts_among_many_small_ones(others: int, free_units: int) -> None:
    used = {"large": 1000.0, **{f"i{nth:03}": 1000.0 / others for nth in range(others)}}
    found = with_a_large_one(others, used=used, free_units=free_units)
    assert abs(found["large"] - free_units / 2) <= 1


def with_a_large_one(others: int, *, used: Mapping[str, float], free_units: int) -> Count[str]:
    """How many jobs of each instance start. The instance `large` weighs as much as all others together."""
    weights = {"large": float(others), **{f"i{nth:03}": 1.0 for nth in range(others)}}
    pool = Pool(weights, used=used, completed=dict.fromkeys(weights, 1))
    heads = [pool.head("large", 10 + job) for job in range(free_units)]
    heads += [pool.head(f"i{nth:03}", 1000 * (nth + 1) + job) for nth in range(others) for job in range(6)]
    return Count(pool.admitted(heads, free_units=free_units))


def by_the_rule(pool: Pool, costs: Mapping[str, float], jobs: dict[str, int], *, starts: int) -> list[str]:
    """The instance of each of so many starts: of those with jobs left the one with the lowest deficit."""
    used = {name: pool.used[name] + pool.lifts.get(name, 0.0) for name in pool.weights}
    all_used, all_weights, found = sum(used.values()), sum(pool.weights.values()), []
    real, left = dict(pool.used), dict(jobs)
    while len(found) < min(starts, sum(jobs.values())):
        scale = 1.0 / max(1.0, all_used)
        # Among equals the id of the next job decides, and ids follow the names.
        lowest = min(
            (name for name in pool.weights if left[name]),
            key=lambda name: (used[name] * scale - pool.weights[name] / all_weights, name),
        )
        before = used[lowest]
        real[lowest] += costs[lowest]
        used[lowest] = real[lowest] + pool.lifts.get(lowest, 0.0)
        all_used += used[lowest] - before
        left[lowest] -= 1
        found.append(lowest)
    return found
