"""Several assigners at what is nearly used up: nobody exceeds it, nobody ends in an error, and the pool goes on."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from assigner.cycle import PriorityAgeAssigner
from assigner.tuning import AssignerSettings
from assigner.turns import CAREFUL, Turns
from schema import counters
from tests.patience import MINUTE
from tests.pool import Pool, active, completed
from tests.racing import Race
from tests.tenancy import share

TURN = text("SELECT pg_advisory_xact_lock(hashtext('leasehold.gates'))")


def used(pool: Pool, name: str) -> float:
    return pool.database.run(lambda c: counters.read(c, [name]))[name].used


@pytest.mark.conflicts
def test_who_planned_for_the_last_slot_that_another_takes_begins_anew_and_leaves_it(pool: Pool, race: Race) -> None:
    share(pool, "acme", max_concurrent=1)
    pool.submit(20, instance="acme")
    bots = [pool.bot(f"bot-{nth}") for nth in range(4)]
    pool.upkeep().run_once()
    with race.first() as one:
        one.assigner().run_once()
        other = race.second(pool.assigner().run_once, behind=one)
        one.commit()
        other.result(MINUTE)
    assert race.errors == ["40001"]
    assert used(pool, "instance:acme:jobs") == 1
    assert sum(len(bot.take()) for bot in bots) == 1


def test_who_planned_for_a_slot_that_is_given_back_gets_it(pool: Pool, race: Race) -> None:
    share(pool, "acme", max_concurrent=1)
    pool.submit(20, instance="acme")
    for nth in range(4):
        pool.bot(f"bot-{nth}")
    pool.upkeep().run_once()
    with race.first() as one:
        one.assigner().run_once()
        other = race.second(pool.assigner().run_once, behind=one)
        one.roll_back()
        other.result(MINUTE)
    assert race.errors == []
    assert used(pool, "instance:acme:jobs") == 1


@pytest.mark.conflicts
def test_who_was_undone_leaves_jobs_at_gates_to_the_one_whose_turn_it_is_and_waits_for_nobody(
    pool: Pool, race: Race
) -> None:
    moment = 0.0
    careful = PriorityAgeAssigner(
        pool.database,
        AssignerSettings(),
        timing=pool.timing,
        chance=pool.chance,
        name="assigner:test",
        now=lambda: moment,
    )
    share(pool, "acme", max_concurrent=2)
    pool.submit(4, instance="acme")
    bot = pool.bot(capacity=10)
    with race.first() as one:
        one.change("UPDATE counters SET most = 0 WHERE name = 'instance:acme:jobs'")
        undone = race.second(careful.run_once, behind=one)
        one.commit()
        undone.result(MINUTE)
    assert race.errors == ["40001"]
    pool.change("UPDATE counters SET most = 2 WHERE name = 'instance:acme:jobs'")
    pool.submit(2)
    with race.first() as holder:
        holder.connection.execute(TURN)
        race.unhindered(careful.run_once, by=holder)
        given = bot.take()
        assert len(given) == 2, "those that ask for nothing but a place are placed"
        moment = CAREFUL
        race.unhindered(careful.run_once, by=holder)
    bot.sync(*(active(lease) for lease in given))
    assert used(pool, "instance:acme:jobs") == 2


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.conflicts
def test_four_assigners_that_fight_for_a_small_limit_end_in_no_error_and_get_everything_done(
    pool: Pool, race: Race, most: int
) -> None:
    share(pool, "acme", max_concurrent=most)
    pool.submit(24, instance="acme")
    bot = pool.bot(capacity=20)
    assigners = [pool.assigner(batch=20) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        done = 0
        for _ in range(200):
            for cycle in [threads.submit(each.run_once) for each in assigners]:
                cycle.result()
            assert used(pool, "instance:acme:jobs") <= most
            given = bot.take()
            bot.sync(*(completed(lease) for lease in given))
            done += len(given)
            if done == 24:
                break
    assert done == 24
    assert set(race.errors) <= {"40001", "40P01", "55P03"}


def test_a_transaction_that_is_undone_at_every_try_is_no_error_and_any_other_error_is_one(pool: Pool) -> None:
    raised = "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{}'; END $$"
    turns = Turns(lambda: 0.0)
    assert turns.run(pool.database, lambda c: c.execute(text(raised.format("serialization_failure")))) is None
    with pytest.raises(DBAPIError):
        turns.run(pool.database, lambda c: c.execute(text(raised.format("check_violation"))))
