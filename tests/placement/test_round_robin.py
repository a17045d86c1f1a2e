"""Round robin: plain values, then a pool in which every bot gets its turn, whoever places and whatever is undone."""

import threading
from collections import Counter

import psycopg
import pytest
from prometheus_client import REGISTRY

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.placement.locality import Locality
from assigner.placement.round_robin import MAX_REMEMBERED, Rotation, RoundRobin
from assigner.placement.strategy import Input, Policy, Snapshot, Strategy, group_jobs
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob
from schema.postgres.statements import Statement
from tests.support.pool import Pool, completed

IN_TURN = {"kind": "round-robin"}


def bot(number: int, *, free_units: int = 100, priority: int = 0) -> FreeBot:
    return FreeBot(number, f"bot-{number}", priority, free_units, 100)


def job(number: int, *, units: int = 1, platform: int = 1, hint: str | None = None) -> ReadyJob:
    return ReadyJob(number, str(number), platform, 0, 1, platform, 0, units, hint, False)


def place(
    jobs: list[ReadyJob],
    *candidates: list[FreeBot],
    turns: dict[int, int] | None = None,
    hits: frozenset[tuple[int, str]] = frozenset(),
    strategy: Strategy | None = None,
) -> list[int]:
    snapshot = Snapshot(jobs, group_jobs(jobs), candidates, hits, turns=turns or {})
    return [each.bot_id for each in (strategy or RoundRobin()).choose(snapshot, Policy(), how={})]


def test_bots_get_jobs_in_turn_whatever_their_load_and_priority() -> None:
    bots = [bot(3, free_units=2), bot(1, priority=9), bot(2)]
    assert place([job(n) for n in range(7)], bots) == [1, 2, 3, 1, 2, 3, 1]


def test_who_has_waited_longest_is_next_and_who_never_had_a_job_is_first() -> None:
    turns = {1: 7, 2: 5, 4: 6}
    assert place([job(n) for n in range(5)], [bot(n) for n in (1, 2, 3, 4)], turns=turns) == [3, 2, 4, 1, 3]


def test_a_bot_without_room_is_passed_over_and_the_others_keep_their_order() -> None:
    bots = [bot(1, free_units=1), bot(2, free_units=3), bot(3, free_units=9)]
    assert place([job(n, units=2) for n in range(4)], bots) == [2, 3, 3, 3]


def test_groups_that_share_bots_share_the_turns() -> None:
    shared = [bot(1), bot(2), bot(3)]
    assert place([job(1), job(2, platform=2), job(3), job(4, platform=2)], shared, shared) == [1, 2, 3, 1]


def test_a_decision_says_when_the_bots_last_turn_was() -> None:
    snapshot = Snapshot([job(1)], group_jobs([job(1)]), [[bot(1), bot(2)]], frozenset(), turns={1: 8, 2: 9})
    (placement,) = RoundRobin().choose(snapshot, Policy(), how={"round": 1})
    assert placement.decision == {"bot": "bot-1", "candidates": 2, "last_turn": 8, "round": 1}


def test_jobs_that_locality_leaves_to_it_go_in_turn_and_warm_jobs_use_up_a_turn() -> None:
    jobs = [job(1), job(2, hint="x"), job(3), job(4)]
    strategy = Locality(RoundRobin(), "round-robin")
    assert Input.TURNS in strategy.inputs
    bots = [bot(n) for n in range(1, 40)]
    placed = place(jobs, bots, hits=frozenset({(2, "x")}), strategy=strategy)
    assert placed == [1, 2, 3, 4]


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


def test_a_bot_that_others_hold_is_first_in_the_next_cycle(pool: Pool) -> None:
    for number in range(3):
        pool.bot(f"bot-{number}", capacity=1000)
    assigner = pool.assigner(strategy=IN_TURN)
    pool.submit(3)
    with pool.database.begin() as holder:
        holder.execute(Statement("SELECT FROM bots WHERE name = 'bot-1' FOR NO KEY UPDATE"))
        assigner.run_once()
    assert given(pool) == {"bot-0": 1, "bot-2": 1}, "no other bot gets the job whose turn is that of bot-1"
    assigner.run_once()
    assert given(pool) == {"bot-0": 1, "bot-1": 1, "bot-2": 1}


def test_a_bot_that_joins_gets_its_turn_and_no_more(pool: Pool) -> None:
    for number in range(3):
        pool.bot(f"bot-{number}", capacity=1000)
    assigner = pool.assigner(strategy=IN_TURN)
    placed_by(pool, assigner, jobs=30)
    pool.bot("late", capacity=1000)
    placed_by(pool, assigner, jobs=4)
    assert given(pool) == {"bot-0": 11, "bot-1": 11, "bot-2": 11, "late": 1}


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


def test_a_cycle_that_was_undone_uses_up_no_turn(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        pool.bot(f"bot-{number}", capacity=1000)
    assigner = pool.assigner(strategy=IN_TURN)
    pool.submit(2)
    wake = "assigner.cycle.assigner.wake_queues"

    class Deadlock(Exception):
        sqlstate = "40P01"

    failures = [psycopg.OperationalError("", {}, Deadlock())]

    def fail_once(*_: object) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(wake, fail_once)
    assigner.run_once()
    assert failures == []
    assert given(pool) == {"bot-0": 1, "bot-1": 1}


def test_jobs_that_take_resources_go_in_turn_too(pool: Pool) -> None:
    for number in range(4):
        pool.bot(f"bot-{number}", capacity=100, resources={"cpu_milli": 8000})
    assigner = pool.assigner(strategy=IN_TURN)
    pool.submit(8, terms={"resources": {"cpu_milli": 1000}})
    for _ in range(8):
        assigner.run_once()
    assert set(given(pool).values()) == {2}
