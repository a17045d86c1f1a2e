"""How many units a bot offers if nobody says, and how many leases of short tasks it holds in advance."""

from functools import partial
from pathlib import Path

import pytest

from bots.agent.agent import AgentSettings
from bots.agent.capacity import Lookahead, Machine, Sizing, this_machine, units
from tests.support.agents import NEEDS_PROC, Pool, serving


@pytest.mark.parametrize(
    ("cores", "slots", "load", "offered"),
    [
        (4, 3, 0.0, 3),
        (4, 3, 0.70, 3),
        (4, 3, 0.71, 1),
        (16, 100, 0.0, 8),
        (16, 100, 0.9, 4),
        (16, 5, 0.0, 5),
        (1, 100, 0.0, 1),
        (1, 100, 2.0, 1),
        (4, 0, 0.0, 1),
    ],
)
def test_units_are_those_of_the_scarcest_and_half_under_load(cores: int, slots: int, load: float, offered: int) -> None:
    memory = slots * 512 + 511
    assert units(cores, memory, load=load, task_memory_mib=512, most=8) == offered


def test_a_task_is_reckoned_at_512_mib_and_there_are_eight_at_most() -> None:
    assert (AgentSettings().task_memory_mib, AgentSettings().max_parallel) == (512, 8)
    assert AgentSettings().auto_capacity is False


def test_the_load_counts_as_it_is_and_memory_as_it_was_before_anything_ran() -> None:
    seen = [Machine(4, 2048, 0.0), Machine(4, 2048, 0.0), Machine(4, 10, 0.1), Machine(4, 10, 0.8)]
    sizing = Sizing(task_memory_mib=512, most=8, read_machine=lambda: seen.pop(0))
    assert [sizing.units() for _ in range(3)] == [3, 3, 1]


def test_this_machine_can_be_measured() -> None:
    found = this_machine()
    assert found.cores >= 1
    assert found.memory_mib > 0
    assert found.load >= 0


@NEEDS_PROC
def test_an_agent_offers_what_its_machine_has_and_says_so_with_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Machine(4, 8192, 0.0)
    monkeypatch.setattr("bots.agent.agent.Sizing", partial(Sizing, read_machine=lambda: now))
    pool = Pool(sync_in=0.05)
    with serving(pool, tmp_path, auto_capacity=True, capacity=77, resources={"memory_mib": 100}):
        pool.grant("sleep", "60")
        pool.until(lambda: pool.syncs and pool.syncs[-1].capacity == 3)
        now = Machine(4, 16, 0.9)
        pool.until(lambda: pool.syncs[-1].capacity == 1)
        now = Machine(4, 16, 0.2)
        pool.until(lambda: pool.syncs[-1].capacity == 3)
    (opened,) = pool.opened
    assert (opened.capacity, opened.resources) == (3, {"memory_mib": 100})


@NEEDS_PROC
def test_an_agent_with_a_capacity_of_its_own_says_it_once(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.05)
    with serving(pool, tmp_path, capacity=2):
        pool.until(lambda: pool.syncs)
    assert pool.opened[0].capacity == 2
    assert {sync.capacity for sync in pool.syncs} == {None}


@pytest.mark.parametrize(("seconds", "ahead", "together"), [(0.0005, 512, 204), (0.0041, 195, 78), (0.06, 0, 0)])
def test_two_fifths_of_the_leases_in_advance_are_reported_at_once(seconds: float, ahead: int, together: int) -> None:
    lookahead = Lookahead()
    for _ in range(400):
        lookahead.note(seconds)
    assert (lookahead.units(8), lookahead.together(8)) == (ahead, together)


def test_fewer_calls_wait_in_each_of_many_processes() -> None:
    lookahead = Lookahead()
    for _ in range(400):
        lookahead.note(0.0001)
    assert [lookahead.queue(processes) for processes in (1, 8, 16, 200)] == [20, 20, 10, 8]
