"""Turns: those who place many jobs wait for each other before they begin, and not for long."""

import os
import random

import pytest
from sqlalchemy import Connection, text

from assigner.batching import LEAST, LEAST_AT_ONCE, at_once
from assigner.cycle import PriorityAgeAssigner
from assigner.loops import Again
from assigner.quotas import QuotaSettings
from assigner.tuning import AssignerSettings
from assigner.turns import AGAIN, IN_LINE
from schema import ready, turns
from schema.ready import Order, Scope
from tests.pool import Pool
from tests.racing import Race, outcome

JOBS = 4 * LEAST
TIMEOUT = text("SELECT current_setting('lock_timeout')")


def taken(connection: Connection, number: int) -> bool:
    chance = random.Random(1)
    return turns.take_free(connection, number, chance=chance) or turns.wait(connection, number, chance=chance)


class Busy:
    """An assigner, one at a time, that has had much to place, and has more; its time goes on when it is told to."""

    def __init__(self, pool: Pool) -> None:
        pool.bot(capacity=JOBS)
        pool.submit(JOBS)
        self.time = 0.0
        self.assigner = PriorityAgeAssigner(
            pool.database,
            AssignerSettings(at_once=1),
            timing=pool.timing,
            chance=pool.chance,
            name="assigner:busy",
            now=lambda: self.time,
        )
        self.assigner.run_once()
        assert len(queued(pool)) == JOBS - LEAST


@pytest.fixture
def busy(pool: Pool) -> Busy:
    return Busy(pool)


def queued(pool: Pool) -> list[str]:
    """The jobs that wait and that nobody holds."""

    def work(connection: Connection) -> list[str]:
        found = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=JOBS, chance=random.Random(1))
        return [job.public_id for job in found]

    return pool.database.run(work)


def test_who_gets_no_turn_comes_again_and_places_nothing_meanwhile(pool: Pool, busy: Busy, race: Race) -> None:
    with race.first() as first:
        assert taken(first.connection, 1)
        for _ in range(3):
            pause = race.unhindered(busy.assigner.run_once, by=first)
            assert isinstance(pause, Again)
            assert AGAIN / 2 <= pause <= 2 * AGAIN
            busy.time += pause
        assert len(queued(pool)) == JOBS - LEAST
        first.commit()
    busy.assigner.run_once()
    assert len(queued(pool)) == JOBS - 3 * LEAST


def test_who_has_got_no_turn_for_long_stands_in_line_and_holds_nothing_meanwhile(
    pool: Pool, busy: Busy, race: Race
) -> None:
    with race.first() as first:
        assert taken(first.connection, 1)
        race.unhindered(busy.assigner.run_once, by=first)
        busy.time += IN_LINE
        waiting = race.second(busy.assigner.run_once, behind=first)
        assert len(queued(pool)) == JOBS - LEAST
        first.commit()
        outcome(waiting)
    assert len(queued(pool)) == JOBS - 3 * LEAST


def test_who_places_other_jobs_needs_no_turn_of_theirs(pool: Pool, busy: Busy, race: Race) -> None:
    busy.assigner.reconfigure(AssignerSettings(at_once=1, instances=("default",)), QuotaSettings())
    with race.first() as first:
        assert taken(first.connection, 1)
        race.unhindered(busy.assigner.run_once, by=first)
    assert len(queued(pool)) == JOBS - 3 * LEAST


def test_who_has_little_to_place_waits_for_nobody(pool: Pool, race: Race) -> None:
    pool.bot(capacity=1)
    pool.submit(1)
    with race.first() as first:
        assert taken(first.connection, 1)
        race.unhindered(pool.assigner(at_once=1).run_once, by=first)
    assert not queued(pool)


def test_who_gets_no_turn_in_time_goes_on_without(pool: Pool) -> None:
    with pool.database.engine.begin() as one, pool.database.engine.begin() as other:
        assert taken(one, 1)
        assert not turns.take_free(other, 1, chance=random.Random(1))
        assert not turns.wait(other, 1, chance=random.Random(1), patience=10)
        assert taken(other, 2), "its transaction goes on, and there was another turn"


def test_a_wait_for_a_turn_leaves_the_timeout_of_other_locks_as_it_was(pool: Pool, race: Race) -> None:
    with race.first() as first:
        assert taken(first.connection, 1)

        def work(connection: Connection) -> tuple[str, ...]:
            before = connection.execute(TIMEOUT).scalar_one()
            assert taken(connection, 1)
            return before, connection.execute(TIMEOUT).scalar_one()

        waiting = race.second(lambda: pool.database.run(work), behind=first)
        first.commit()
        before, after = outcome(waiting)
    assert before == after


@pytest.mark.parametrize(("cores", "number"), [(None, LEAST_AT_ONCE), (1, LEAST_AT_ONCE), (12, 12)])
def test_there_are_as_many_turns_as_cores_unless_configured(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, number: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert (at_once(None), at_once(3)) == (number, 3)
