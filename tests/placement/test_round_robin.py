"""Round robin: plain values, then a pool in which every bot gets its turn, whoever places and whatever is undone."""

import threading
from collections import Counter

import psycopg
import pytest
from prometheus_client import REGISTRY

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.placement.strategies.locality import Locality
from assigner.placement.strategies.round_robin import MAX_REMEMBERED, Rotation, RoundRobin
from assigner.placement.strategy import Input, Policy
from schema.fleet.candidates import FreeBot
from schema.postgres.statements import Statement
from tests.support.pool import Pool, bot, completed, job, placed, snapshot

IN_TURN = {"kind": "round-robin"}


@pytest.mark.parametrize(
    ("bots", "turns", "units", "chosen"),
    [
        pytest.param([bot(3, 9), bot(1, 50, priority=9), bot(2, 20)], {}, [1] * 7, [1, 2, 3, 1, 2, 3, 1],
                     id="whatever their load and priority"),
        pytest.param([bot(n, 9) for n in (1, 2, 3, 4)], {1: 7, 2: 5, 4: 6}, [1] * 5, [3, 2, 4, 1, 3],
                     id="who never had a job first, then who has waited longest"),
        pytest.param([bot(1), bot(2, 3), bot(3, 9)], {}, [2] * 4, [2, 3, 3, 3], id="without those that have no room"),
    ],
)  # fmt: skip
def test_bots_get_jobs_in_turn(bots: list[FreeBot], turns: dict[int, int], units: list[int], chosen: list[int]) -> None:
    jobs = [job(number, units=each) for number, each in enumerate(units)]
    assert [*placed(RoundRobin(), snapshot(jobs, bots, turns=turns)).values()] == chosen


def test_groups_that_share_bots_share_the_turns() -> None:
    seen = snapshot([job(1), job(2, kind=2), job(3), job(4, kind=2)], [bot(1, 9), bot(2, 9), bot(3, 9)])
    assert placed(RoundRobin(), seen) == {1: 1, 2: 2, 3: 3, 4: 1}


def test_a_decision_says_when_the_bots_last_turn_was() -> None:
    seen = snapshot([job(1)], [bot(1), bot(2)], turns={1: 8, 2: 9})
    (placement,) = RoundRobin().choose(seen, Policy(), how={"round": 1})
    assert placement.decision == {"bot": "bot-1", "candidates": 2, "last_turn": 8, "round": 1}


def test_jobs_that_locality_leaves_to_it_go_in_turn_and_warm_jobs_use_up_a_turn() -> None:
    jobs, bots = [job(1), job(2, hint="x"), job(3), job(4)], [bot(n, 9) for n in range(1, 40)]
    strategy = Locality(RoundRobin(), "round-robin")
    assert Input.TURNS in strategy.inputs
    assert placed(strategy, snapshot(jobs, bots, hits={(2, "x")})) == {1: 1, 2: 2, 3: 3, 4: 4}


def test_turns_that_were_not_committed_are_forgotten() -> None:
    rotation = Rotation()
    rotation.give([1, 2])
    rotation.keep()
    rotation.give([1, 3, 1])
    assert dict(rotation.last) == {1: 5, 2: 2, 3: 4}
    rotation.undo()
    assert dict(rotation.last) == {1: 1, 2: 2}
    rotation.give([3])
    assert max(rotation.last, key=rotation.last.__getitem__) == 3


def test_the_memory_of_turns_is_bounded() -> None:
    rotation = Rotation()
    rotation.give(range(MAX_REMEMBERED + 1))
    rotation.keep()
    assert len(rotation.last) == MAX_REMEMBERED // 2
    assert min(rotation.last) == MAX_REMEMBERED // 2 + 1


# Seen from outside.


def given(pool: Pool) -> Counter[str]:
    rows = pool.rows("SELECT details ->> 'bot' AS name FROM job_events WHERE move = 'grant'")
    return Counter(row.name for row in rows)


def spread(pool: Pool) -> int:
    """How many more jobs the bot with the most jobs has received than the one with the fewest."""
    counts = given(pool)
    every = [counts[row.name] for row in pool.rows("SELECT name FROM bots")]
    return max(every) - min(every)


def races_lost() -> float:
    return REGISTRY.get_sample_value("leasehold_races_lost_total", {"kind": "grant"}) or 0.0


def placed_by(pool: Pool, *assigners: PriorityAgeAssigner, jobs: int) -> None:
    """Submit jobs, and let the assigners place all of them, each in a thread of its own if there are several."""
    pool.submit(jobs)

    def work(assigner: PriorityAgeAssigner) -> None:
        while pool.row("SELECT EXISTS (SELECT FROM jobs WHERE state = 'queued') AS more").more:
            assigner.run_once()

    threads = [threading.Thread(target=work, args=(assigner,)) for assigner in assigners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def three(pool: Pool) -> Pool:
    """Three bots, which have room for any number of jobs and of resources."""
    for number in range(3):
        pool.bot(f"bot-{number}", capacity=1000, resources={"cpu_milli": 99_000})
    return pool


@pytest.mark.parametrize("batch", [1, 4, 500])
def test_equal_bots_get_equally_many_jobs_of_one_assigner(pool: Pool, batch: int) -> None:
    """However many it places at once, and though a sample would have only ten of the bots."""
    for number in range(13):
        pool.bot(f"bot-{number}", capacity=1000, priority=number)
    assigner = pool.assigner(batch=batch, strategy=IN_TURN)
    for jobs in (5, 13, 40):
        placed_by(pool, assigner, jobs=jobs)
        assert spread(pool) <= 1
    assert sum(given(pool).values()) == 58
    assert {row.strategy for row in pool.rows("SELECT DISTINCT strategy FROM leases")} == {"round-robin"}


def test_the_numbers_differ_by_at_most_one_for_each_assigner_and_lost_race(pool: Pool) -> None:
    """At once, each in a thread of its own; a job that lost the race for its bot may cost that bot one turn."""
    for number in range(7):
        pool.bot(f"bot-{number}", capacity=1000)
    assigners = [pool.assigner(batch=3, strategy=IN_TURN) for _ in range(3)]
    before = races_lost()
    for jobs in (20, 50, 31):
        placed_by(pool, *assigners, jobs=jobs)
    assert sum(given(pool).values()) == 101
    assert spread(pool) <= len(assigners) + races_lost() - before


def test_a_bot_that_others_hold_is_first_in_the_next_cycle(three: Pool) -> None:
    assigner = three.assigner(strategy=IN_TURN)
    three.submit(3)
    with three.database.begin() as holder:
        holder.execute(Statement("SELECT FROM bots WHERE name = 'bot-1' FOR NO KEY UPDATE"))
        assigner.run_once()
    assert given(three) == {"bot-0": 1, "bot-2": 1}, "no other bot gets the job whose turn is that of bot-1"
    assigner.run_once()
    assert given(three) == {"bot-0": 1, "bot-1": 1, "bot-2": 1}


def test_a_bot_that_joins_gets_its_turn_and_no_more(three: Pool) -> None:
    assigner = three.assigner(strategy=IN_TURN)
    placed_by(three, assigner, jobs=30)
    three.bot("late", capacity=1000)
    placed_by(three, assigner, jobs=4)
    assert given(three) == {"bot-0": 11, "bot-1": 11, "bot-2": 11, "late": 1}


def test_a_bot_that_was_full_gets_its_turn_when_it_has_room_again(pool: Pool) -> None:
    small = pool.bot("a-small", capacity=1)
    pool.bot("b-large", capacity=1000)
    assigner = pool.assigner(strategy=IN_TURN)
    placed_by(pool, assigner, jobs=6)
    assert given(pool) == {"a-small": 1, "b-large": 5}
    (work,) = small.take()
    small.sync(completed(work))
    placed_by(pool, assigner, jobs=1)
    assert given(pool)["a-small"] == 2


def test_a_cycle_that_was_undone_uses_up_no_turn(three: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    three.submit(2)

    class Deadlock(Exception):
        sqlstate = "40P01"

    failures = [psycopg.OperationalError("", {}, Deadlock())]

    def fail_once(*_: object) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr("assigner.cycle.assigner.wake_queues", fail_once)
    three.assigner(strategy=IN_TURN).run_once()
    assert failures == []
    assert given(three) == {"bot-0": 1, "bot-1": 1}


def test_jobs_that_take_resources_go_in_turn_too(three: Pool) -> None:
    assigner = three.assigner(strategy=IN_TURN)
    three.submit(6, terms={"resources": {"cpu_milli": 1000}})
    for _ in range(6):
        assigner.run_once()
    assert set(given(three).values()) == {2}
