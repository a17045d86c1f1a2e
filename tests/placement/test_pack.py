"""The strategies `pack` and `fragmentation`, and what bots have left of several resources."""

import random

import pytest

from assigner.placement.registry import StrategySettings, load
from assigner.placement.resources import ResourceSnapshot
from assigner.placement.room import Declared, Demand, Room, WaitingKinds, after, choose_gpus, demand_of, fits, times
from assigner.placement.strategy import Policy, Snapshot, Strategy, group_jobs
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob

PACK, FRAGMENTATION = load("pack"), load("fragmentation")
CPU = (64_000.0, None, None, None)


def bot(number: int, *, free_units: int = 8, capacity: int = 8, priority: int = 0) -> FreeBot:
    return FreeBot(number, f"bot-{number}", priority, free_units, capacity)


def job(number: int, *, units: int = 1, kind: int = 1) -> ReadyJob:
    """Jobs of one `kind` take the same."""
    return ReadyJob(number, str(number), kind, 0, 1, kind, 0, units, None, False)


def gpus(*left: int, cpu: float = 64_000.0) -> Declared:
    return Declared((cpu, None, None, None), CPU, left)


def snapshot(
    jobs: list[ReadyJob],
    bots: list[FreeBot],
    *,
    needs: dict[int, dict[str, int]] | None = None,
    declared: dict[int, Declared] | None = None,
    waiting: dict[Demand, int] | None = None,
) -> Snapshot:
    groups = group_jobs(jobs)
    return ResourceSnapshot(
        jobs,
        groups,
        [bots] * len(groups),
        frozenset(),
        needs={each.id: {} for each in jobs} | (needs or {}),  # type: ignore[dict-item]
        declared=declared or {},
        waiting={0: WaitingKinds(waiting)} if waiting else {},
    )


def placed(strategy: Strategy, seen: Snapshot) -> dict[int, int]:
    return {each.job_id: each.bot_id for each in seen.chosen_by(strategy, Policy(), how={})}


def test_pack_takes_the_bot_that_has_least_left_and_fills_it() -> None:
    bots = [bot(1, free_units=8), bot(2, free_units=3), bot(3, free_units=5)]
    jobs = [job(number) for number in range(1, 6)]
    assert placed(PACK, snapshot(jobs, bots)) == {1: 2, 2: 2, 3: 2, 4: 3, 5: 3}


def test_pack_weighs_all_resources_by_the_largest_bot() -> None:
    tight = Declared((2_000.0, None, None, None), CPU)
    roomy = Declared((60_000.0, None, None, None), CPU)
    seen = snapshot([job(1)], [bot(1, free_units=7), bot(2)], needs={1: {"cpu_milli": 2_000}},
                    declared={1: roomy, 2: tight})  # fmt: skip
    assert placed(PACK, seen) == {1: 2}, "one more unit is an eighth, the cores are more"


def test_pack_leaves_gpus_to_jobs_that_take_some() -> None:
    seen = snapshot([job(1)], [bot(1), bot(2)], needs={1: {"cpu_milli": 1000}}, declared={1: gpus(1000), 2: gpus()})
    assert placed(PACK, seen) == {1: 2}


def test_pack_shares_a_gpu_that_is_shared_already() -> None:
    seen = snapshot([job(1)], [bot(1), bot(2)], needs={1: {"gpu_milli": 400}},
                    declared={1: gpus(1000, 0), 2: gpus(600, 600)})  # fmt: skip
    assert placed(PACK, seen) == {1: 2}


def test_equally_tight_bots_go_by_their_priority_and_then_by_chance() -> None:
    assert placed(PACK, snapshot([job(1)], [bot(1, priority=1), bot(2), bot(3)])) == {1: 2}


def test_groups_see_what_each_other_takes() -> None:
    jobs = [job(1, units=3, kind=1), job(2, units=2, kind=2), job(3, units=3, kind=1)]
    assert placed(PACK, snapshot(jobs, [bot(1, free_units=5), bot(2, free_units=4)])) == {1: 2, 2: 1, 3: 1}


def test_a_job_that_its_quota_refuses_takes_no_room() -> None:
    jobs = [job(1, units=4)._replace(headroom=3), job(2, units=4, kind=2)._replace(instance=2)]
    seen = snapshot(jobs, [bot(1, free_units=4)])
    seen = ResourceSnapshot(seen.jobs, seen.groups, seen.candidates, seen.hits, headrooms={(0, 1): 3}, needs=seen.needs)
    assert placed(PACK, seen) == {2: 1}


def test_fragmentation_spares_what_waiting_jobs_can_use() -> None:
    """The tightest fit would make one of two whole GPUs unusable for the jobs that wait for two."""
    declared = {1: gpus(1000, 1000), 2: gpus(1000, 700, 700, 700)}
    seen = snapshot([job(1)], [bot(1), bot(2)], needs={1: {"gpus": 1}}, declared=declared,
                    waiting={demand_of(1, {"gpus": 2}): 5, demand_of(1, {"gpus": 1}): 5})  # fmt: skip
    assert placed(PACK, seen) == {1: 1}
    assert placed(FRAGMENTATION, seen) == {1: 2}


def test_fragmentation_counts_units_where_no_gpus_are_declared() -> None:
    jobs = [job(1)]
    seen = snapshot(jobs, [bot(1, free_units=4), bot(2, free_units=7)], waiting={demand_of(4, {}): 1})
    assert placed(PACK, seen) == {1: 1}
    assert placed(FRAGMENTATION, seen) == {1: 2}


def test_fragmentation_goes_by_the_batch_if_nothing_else_is_known_to_wait() -> None:
    jobs = [job(1, kind=1), job(2, units=4, kind=2)]
    assert placed(FRAGMENTATION, snapshot(jobs, [bot(1, free_units=4), bot(2, free_units=5)])) == {1: 2, 2: 1}


def test_what_a_kind_cannot_use_is_as_in_the_paper() -> None:
    room = Room(8, (4_000.0, None, None, None), (1000, 600, 300))
    of = {
        demand_of(1, {"gpus": 1}): 900.0,  # the two that are not whole
        demand_of(1, {"gpu_milli": 500}): 300.0,  # the one that has less
        demand_of(1, {"gpus": 2}): 1900.0,  # does not fit
        demand_of(1, {"gpu_milli": 500, "cpu_milli": 5_000}): 1900.0,  # nor does this
        demand_of(1, {"cpu_milli": 1_000}): 1900.0,  # takes no GPU
    }
    assert {each: WaitingKinds({each: 1}).unusable(room)[0] for each in of} == of
    mixed = WaitingKinds({demand_of(1, {"gpus": 1}): 3, demand_of(1, {"gpu_milli": 500}): 1})
    assert mixed.unusable(room)[0] == pytest.approx(750.0)


def test_a_part_of_a_gpu_is_of_one_device_and_whole_ones_are_untouched() -> None:
    assert choose_gpus((1000, 500, 460), demand_of(1, {"gpu_milli": 460})) == (2,)
    assert choose_gpus((1000, 500, 500), demand_of(1, {"gpu_milli": 500})) == (1,)
    assert choose_gpus((400, 400, 400), demand_of(1, {"gpu_milli": 401})) is None
    assert choose_gpus((999, 1000, 1000), demand_of(1, {"gpus": 2})) == (1, 2)
    assert choose_gpus((999, 999, 1000), demand_of(1, {"gpus": 2})) is None
    assert choose_gpus((1000, 1000), demand_of(1, {"gpus": 1, "gpu_milli": 300})) == (1, 0)
    assert choose_gpus((1000,), demand_of(1, {"gpus": 1, "gpu_milli": 300})) is None
    assert choose_gpus(None, demand_of(1, {"gpus": 1})) is None
    assert choose_gpus(None, demand_of(1, {"gpu_milli": 300})) == ()


def test_as_many_jobs_fit_as_can_be_taken_one_after_another() -> None:
    chance = random.Random(7)
    for _ in range(300):
        room = Room(chance.randint(1, 9), (float(chance.randint(0, 9)), None, None, None),
                    tuple(chance.choice((0, 300, 700, 1000)) for _ in range(chance.randint(0, 4))))  # fmt: skip
        need = {"cpu_milli": chance.randint(1, 4), "gpus": chance.randint(0, 2), "gpu_milli": chance.choice((0, 300))}
        demand = demand_of(chance.randint(1, 3), need)  # type: ignore[arg-type]
        most, left, found = times(room, demand), room, 0
        while fits(left, demand):
            left, found = after(left, demand), found + 1
            assert min(left.gpus or (0,)) >= 0
            assert left.units >= 0
        assert found == most


def test_the_heap_finds_the_same_bots_as_looking_at_all_of_them() -> None:
    chance = random.Random(11)
    for _ in range(50):
        bots = [bot(number, free_units=chance.randint(1, 8)) for number in range(1, 7)]
        jobs = [job(number, units=(kind := chance.randint(1, 3)), kind=kind) for number in range(1, 12)]
        free, expected = {each.id: each.free_units for each in bots}, {}
        for each in jobs:
            fitting = [other.id for other in bots if free[other.id] >= each.units]
            if fitting:
                best = min(fitting, key=lambda number: free[number])
                expected[each.id] = best
                free[best] -= each.units
        assert placed(PACK, snapshot(jobs, bots)) == expected


def test_the_strategies_read_what_they_go_by_and_others_do_not() -> None:
    kinds = ("capacity", "success", "pack", "fragmentation")
    assert {kind: StrategySettings(kind=kind).inputs for kind in kinds} == {
        "capacity": set(), "success": {"success"}, "pack": {"resources"}, "fragmentation": {"resources", "waiting"},
    }  # fmt: skip
    fallen_back = StrategySettings(kind="locality", fallback="fragmentation")
    assert fallen_back.inputs == {"warm", "resources", "waiting"}
