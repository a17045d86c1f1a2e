"""The strategies `pack` and `fragmentation`, and what bots have left of several resources."""

import random
from typing import Any

import pytest

from assigner.placement.registry import StrategySettings, load
from assigner.placement.resources import ResourceSnapshot
from assigner.placement.room import Declared, Room, WaitingDemand, after, choose_gpus, demand_of, fits, times
from assigner.placement.strategy import Policy, Strategy, group_jobs
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob
from tests.support.pool import bot, job

PACK, FRAGMENTATION = load("pack"), load("fragmentation")
CPU = (64_000.0, None, None, None)


def gpus(*left: int, cpu: float = 64_000.0) -> Declared:
    return Declared((cpu, None, None, None), CPU, left)


def placed(strategy: Strategy, jobs: list[ReadyJob], bots: list[FreeBot], **fields: Any) -> dict[int, int]:
    """Job → bot. `waiting`: how many jobs wait that take something."""
    waiting = {0: WaitingDemand(fields.pop("waiting"))} if "waiting" in fields else {}
    given: dict[str, Any] = {"needs": {each.id: {} for each in jobs} | fields.pop("needs", {}), "waiting": waiting}
    groups = group_jobs(jobs)
    seen = ResourceSnapshot(jobs, groups, [bots] * len(groups), frozenset(), **given, **fields)
    return {each.job_id: each.bot_id for each in seen.chosen_by(strategy, Policy(), how={})}


ROOMS = [bot(1, 8, capacity=8), bot(2, 3, capacity=8), bot(3, 5, capacity=8)]
EQUAL = [bot(1, 8), bot(2, 8)]
KINDS = [job(1, units=3, kind=1), job(2, units=2, kind=2), job(3, units=3, kind=1)]


@pytest.mark.parametrize(
    ("jobs", "bots", "fields", "chosen"),
    [
        pytest.param([job(n) for n in range(1, 6)], ROOMS, {}, {1: 2, 2: 2, 3: 2, 4: 3, 5: 3},
                     id="who has least left, until it is full"),
        pytest.param([job(1)], [bot(1, 7, capacity=8), bot(2, 8)],
                     {"needs": {1: {"cpu_milli": 2_000}},
                      "declared": {1: Declared((60_000.0, None, None, None), CPU),
                                   2: Declared((2_000.0, None, None, None), CPU)}},
                     {1: 2}, id="by the largest bot: a unit more is an eighth, the cores are more"),
        pytest.param([job(1)], EQUAL, {"needs": {1: {"cpu_milli": 1000}}, "declared": {1: gpus(1000), 2: gpus()}},
                     {1: 2}, id="GPUs are left to jobs that take some"),
        pytest.param([job(1)], EQUAL,
                     {"needs": {1: {"gpu_milli": 400}}, "declared": {1: gpus(1000, 0), 2: gpus(600, 600)}},
                     {1: 2}, id="a GPU that is shared already"),
        pytest.param([job(1)], [bot(1, 8, priority=1), bot(2, 8), bot(3, 8)], {}, {1: 2},
                     id="of equally tight bots by priority, and then by chance"),
        pytest.param(KINDS, [bot(1, 5), bot(2, 4)], {}, {1: 2, 2: 1, 3: 1}, id="groups see what each other takes"),
    ],
)  # fmt: skip
def test_pack_takes_the_bot_that_has_least_left(
    jobs: list[ReadyJob], bots: list[FreeBot], fields: dict[str, Any], chosen: dict[int, int]
) -> None:
    assert placed(PACK, jobs, bots, **fields) == chosen


WHOLE, PAIR = demand_of(1, {"gpus": 1}), demand_of(1, {"gpus": 2})


@pytest.mark.parametrize(
    ("bots", "fields", "packed", "spared"),
    [
        pytest.param(
            EQUAL,
            {"needs": {1: {"gpus": 1}}, "declared": {1: gpus(1000, 1000), 2: gpus(1000, 700, 700, 700)},
             "waiting": {PAIR: 5, WHOLE: 5}},
            {1: 1}, {1: 2}, id="one of two whole GPUs for jobs that wait for two",
        ),
        pytest.param([bot(1, 4, capacity=8), bot(2, 7, capacity=8)], {"waiting": {demand_of(4, {}): 1}},
                     {1: 1}, {1: 2}, id="units, where no GPUs are declared"),
    ],
)  # fmt: skip
def test_fragmentation_spares_what_waiting_jobs_can_use(
    bots: list[FreeBot], fields: dict[str, Any], packed: dict[int, int], spared: dict[int, int]
) -> None:
    """The tightest fit would make it unusable for them."""
    assert placed(PACK, [job(1)], bots, **dict(fields)) == packed
    assert placed(FRAGMENTATION, [job(1)], bots, **dict(fields)) == spared


def test_fragmentation_goes_by_the_batch_if_nothing_else_is_known_to_wait() -> None:
    jobs, bots = [job(1, kind=1), job(2, units=4, kind=2)], [bot(1, 4, capacity=8), bot(2, 5, capacity=8)]
    assert placed(FRAGMENTATION, jobs, bots) == {1: 2, 2: 1}


def test_what_a_kind_cannot_use_is_as_in_the_paper() -> None:
    room = Room(8, (4_000.0, None, None, None), (1000, 600, 300))
    of = {
        demand_of(1, {"gpus": 1}): 900.0,  # the two that are not whole
        demand_of(1, {"gpu_milli": 500}): 300.0,  # the one that has less
        demand_of(1, {"gpus": 2}): 1900.0,  # does not fit
        demand_of(1, {"gpu_milli": 500, "cpu_milli": 5_000}): 1900.0,  # nor does this
        demand_of(1, {"cpu_milli": 1_000}): 1900.0,  # takes no GPU
    }
    assert {each: WaitingDemand({each: 1}).unusable(room)[0] for each in of} == of
    mixed = WaitingDemand({demand_of(1, {"gpus": 1}): 3, demand_of(1, {"gpu_milli": 500}): 1})
    assert mixed.unusable(room)[0] == pytest.approx(750.0)


@pytest.mark.parametrize(
    ("left", "need", "taken"),
    [
        ((1000, 500, 460), {"gpu_milli": 460}, (2,)),
        ((1000, 500, 500), {"gpu_milli": 500}, (1,)),
        ((400, 400, 400), {"gpu_milli": 401}, None),
        ((999, 1000, 1000), {"gpus": 2}, (1, 2)),
        ((999, 999, 1000), {"gpus": 2}, None),
        ((1000, 1000), {"gpus": 1, "gpu_milli": 300}, (1, 0)),
        ((1000,), {"gpus": 1, "gpu_milli": 300}, None),
        (None, {"gpus": 1}, None),
        (None, {"gpu_milli": 300}, ()),
    ],
)
def test_a_part_of_a_gpu_is_of_one_device_and_whole_ones_are_untouched(left: Any, need: Any, taken: Any) -> None:
    assert choose_gpus(left, demand_of(1, need)) == taken


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


def test_the_strategies_read_what_they_go_by_and_others_do_not() -> None:
    kinds = ("capacity", "success", "pack", "fragmentation")
    assert {kind: StrategySettings(kind=kind).inputs for kind in kinds} == {
        "capacity": set(), "success": {"success"}, "pack": {"resources"}, "fragmentation": {"resources", "waiting"},
    }  # fmt: skip
    for kind in kinds:
        of_fallback = StrategySettings(kind=kind).inputs
        assert StrategySettings(kind="locality", fallback=kind).inputs == {"warm", *of_fallback}
