"""Instances share the pool by their weights, on the real database: convergence, and what a pause is worth."""

from collections import Counter as Count
from concurrent.futures import ThreadPoolExecutor

import pytest

from schema.accounting import counters, fair_share
from schema.accounting.fair_share import FairShareSettings, jain_index
from tests.support.plans import watching
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import Race, Undecided
from tests.support.tenancy import share

WEIGHTS = {"a": 5, "b": 3, "c": 2}
SIZES = {"a": 1.0, "b": 3.0, "c": 2.0}
SETTINGS = FairShareSettings()


def used(pool: Pool) -> dict[str, float]:
    found = pool.database.run(lambda c: counters.read(c, [f"instance:{name}:cost" for name in WEIGHTS]))
    return {name.split(":")[1]: counter.used for name, counter in found.items()}


def shared(pool: Pool, *names: str, jobs: int = 40, **given: float) -> None:
    for name in names:
        share(pool, name, **given)
        pool.submit(jobs, instance=name)


def lift_of(pool: Pool, name: str) -> float:
    """As the next cycle of any assigner reads it."""
    instance = pool.row("SELECT id FROM instances WHERE name = :name", name=name).id
    return pool.database.run(lambda c: fair_share.read_shares(c, [instance], SETTINGS)).of[instance].lift


def away(pool: Pool, name: str, seconds: float) -> None:
    """The instance has asked for nothing for so long."""
    pool.change(
        "UPDATE accounts SET demand_at = now() - make_interval(secs => :seconds)"
        " WHERE instance = (SELECT id FROM instances WHERE name = :name)",
        name=name,
        seconds=seconds,
    )


@pytest.mark.parametrize("assigners", [1, 4])
def test_three_instances_that_want_everything_get_their_shares_whatever_their_jobs_cost(
    pool: Pool, assigners: int
) -> None:
    for name, weight in WEIGHTS.items():
        share(pool, name, credit_weight=weight)
        pool.submit(450, instance=name, estimated_cost=2)
    bot = pool.bot(capacity=12)
    working = [pool.assigner(batch=6) for _ in range(assigners)]
    with ThreadPoolExecutor(assigners) as threads:
        for _ in range(40):
            for cycle in [threads.submit(each.run_once) for each in working]:
                cycle.result()
            given = bot.take()
            bot.sync(
                *(
                    completed(work, usage={"cost": SIZES[work["instance"]] * pool.chance.uniform(0.5, 1.5)})
                    for work in given
                )
            )
    found = used(pool)
    total = sum(found.values())
    assert total > 200
    assert all(abs(found[name] / total - weight / 10) < 0.02 for name, weight in WEIGHTS.items()), found
    index = jain_index(found[name] / weight for name, weight in WEIGHTS.items())
    assert index is not None
    assert index >= 0.99


def served(pool: Pool, *names: str) -> Bot:
    """A bot that has done twenty jobs of these instances, each of which has cost 50."""
    shared(pool, *names)
    bot = pool.bot(capacity=20)
    pool.assigner().run_once()
    bot.sync(*(completed(work, usage={"cost": 50}) for work in bot.take()))
    return bot


def test_who_comes_back_gets_a_job_at_once_and_is_not_paid_for_the_time_away(pool: Pool) -> None:
    share(pool, "a")
    bot = served(pool, "b")
    away(pool, "a", 3600)
    pool.submit(40, instance="a")
    given = pool.given(bot)
    count = Count(work["instance"] for work in given)
    assert abs(count["a"] - count["b"]) <= 1, "and not all of them for the first one"
    assert lift_of(pool, "a") == pytest.approx(1000, rel=0.01)
    bot.sync(*(active(work) for work in given))


def test_who_has_been_at_work_and_waited_all_the_while_is_owed_what_it_lacks(pool: Pool) -> None:
    share(pool, "a")
    bot = served(pool, "b")
    away(pool, "a", SETTINGS.idle_after - 10)
    pool.submit(40, instance="a")
    given = pool.given(bot)
    assert {work["instance"] for work in given} == {"a"}
    bot.sync(*(active(work) for work in given))


def test_the_lift_counts_by_weight_and_goes_with_the_window(pool: Pool) -> None:
    share(pool, "a", credit_weight=0.5)
    served(pool, "b", "c")
    away(pool, "a", 3600)
    pool.submit(instance="a")
    pool.upkeep().run_once()
    assert lift_of(pool, "a") == pytest.approx(250, rel=0.01)
    pool.change("UPDATE accounts SET lifted_at = now() - interval '18 hours' WHERE lift > 0")
    assert lift_of(pool, "a") == pytest.approx(62.5, rel=0.01)
    pool.change("UPDATE accounts SET lifted_at = now() - interval '25 hours' WHERE lift > 0")
    assert lift_of(pool, "a") == 0


def test_who_has_only_jobs_that_no_bot_can_run_holds_nobody_back(pool: Pool) -> None:
    share(pool, "stuck")
    pool.submit(5, instance="stuck", properties={"gpu": "none-here"})
    pool.assigner().run_once()
    share(pool, "a")
    bot = served(pool, "b")
    away(pool, "a", 3600)
    away(pool, "stuck", SETTINGS.idle_after + 1)
    pool.upkeep().run_once()
    pool.submit(40, instance="a")
    given = pool.given(bot)
    count = Count(work["instance"] for work in given)
    assert abs(count["a"] - count["b"]) <= 1
    assert lift_of(pool, "a") == pytest.approx(1000, rel=0.01)
    assert pool.row(
        "SELECT demand_at < now() - interval '1 minute' AS away FROM accounts"
        " WHERE instance = (SELECT id FROM instances WHERE name = 'stuck')"
    ).away, "it counts as away, so that it is not paid for the time in which nobody could run its jobs"
    bot.sync(*(active(work) for work in given))


def test_who_has_waited_long_without_a_start_is_not_what_those_who_return_are_compared_with(pool: Pool) -> None:
    share(pool, "a")
    share(pool, "shut", max_concurrent=0)
    pool.submit(5, instance="shut")
    bot = served(pool, "b")
    away(pool, "a", 3600)
    pool.upkeep().run_once()
    pool.submit(40, instance="a")
    given = pool.given(bot)
    count = Count(work["instance"] for work in given)
    assert abs(count["a"] - count["b"]) <= 1
    bot.sync(*(active(work) for work in given))


@pytest.mark.parametrize(("before", "after"), [(0.001, 1.0), (1.0, 0.25), (0.0, 1.0), (4.0, 1.0)])
def test_whose_weight_changes_shares_by_the_new_weight_at_once(pool: Pool, before: float, after: float) -> None:
    share(pool, "a", credit_weight=before)
    share(pool, "b")
    pool.submit(400, instance="a")
    pool.submit(400, instance="b")
    bot = pool.bot(capacity=40)
    assigner = pool.assigner()

    def started(rounds: int) -> Count[str]:
        found = Count[str]()
        for _ in range(rounds):
            assigner.run_once()
            given = bot.take()
            found.update(work["instance"] for work in given)
            bot.sync(*(completed(work, usage={"cost": 1}) for work in given))
        return found

    started(4)
    share(pool, "a", credit_weight=after)
    found = started(5)
    assert found.total() == 200
    assert found["a"] / 200 == pytest.approx(after / (1 + after), abs=0.03)


def test_where_nobody_has_asked_for_anything_lately_nobody_is_lifted(pool: Pool) -> None:
    served(pool, "b")
    for name in ("a", "b"):
        share(pool, name)
        away(pool, name, 3600)
    pool.submit(instance="a")
    pool.upkeep().run_once()
    assert lift_of(pool, "a") == lift_of(pool, "b") == 0


def test_waiting_for_a_pool_that_is_full_is_no_pause(pool: Pool) -> None:
    bot = served(pool, "b")
    share(pool, "a")
    pool.submit(instance="a")
    pool.change("UPDATE bots SET status = 'unhealthy'")
    for seconds in (SETTINGS.idle_after - 1, SETTINGS.idle_after - 1):
        away(pool, "a", seconds)
        pool.upkeep().run_once()
    assert lift_of(pool, "a") == 0
    assert pool.row("SELECT min(demand_at) > now() - interval '10 s' AS fresh FROM accounts").fresh
    bot.sync(status="gone")


def test_who_finds_that_another_notes_a_return_leaves_its_jobs_and_serves_the_others(pool: Pool, race: Race) -> None:
    share(pool, "a")
    bot = served(pool, "b")
    away(pool, "a", 3600)
    pool.submit(40, instance="a")
    with race.first() as one:
        one.change("SELECT FROM accounts FOR NO KEY UPDATE")
        race.unhindered(pool.assigner().run_once, by=one)
    given = bot.take()
    assert {work["instance"] for work in given} == {"b"}
    bot.sync(*(active(work) for work in given))


def test_where_nobody_has_a_share_no_cycle_asks_for_any(pool: Pool) -> None:
    pool.submit(3, terms={"locks": ["tree"]})
    pool.submit(3)
    bot = pool.bot(capacity=10)
    with pool.database.connect() as connection, watching(connection) as watch:
        Undecided(pool, connection).assigner().run_once()
        assert not {node.relation for plan in watch.plans for node in plan.nodes} & {"accounts", "usage"}
        connection.commit()
    assert len(bot.take()) == 4


def test_a_cycle_with_a_thousand_instances_reads_each_of_them_once(pool: Pool) -> None:
    pool.change(
        "WITH made AS (INSERT INTO instances (name, managed) SELECT 'i-' || n, true FROM generate_series(1, 1000) n"
        " RETURNING id, name), counted AS ("
        "INSERT INTO counters (name) SELECT 'instance:' || name || '\\:cost' FROM made)"
        " INSERT INTO accounts (instance) SELECT id FROM made"
    )
    pool.change("ANALYZE")
    ids = [row.instance for row in pool.rows("SELECT instance FROM accounts")]
    with pool.database.connect() as connection:
        with watching(connection) as watch:
            found = fair_share.read_shares(connection, ids, SETTINGS)
        connection.rollback()
    assert len(found.of) == 1000
    assert watch.touched <= 6 * 1000, str(watch)


def test_shares_come_with_the_counters_of_their_instances(pool: Pool) -> None:
    shared(pool, "a", jobs=3, budget=7.5, max_concurrent=9, slots=5)
    shared(pool, "b", jobs=1)
    bot = pool.bot(capacity=3)
    pool.assigner().run_once()
    names = [f"instance:{name}:{what}" for name in "ab" for what in ("cost", "jobs")]
    ids = [row.instance for row in pool.rows("SELECT instance FROM accounts")]
    stored = pool.database.run(lambda c: counters.read(c, names))
    found = pool.database.run(lambda c: fair_share.read_shares(c, ids, SETTINGS)).counters
    assert stored["instance:a:slots"].most == 5
    assert stored["instance:a:cost"].used + stored.get("instance:b:cost", counters.Counter()).used == 3
    assert found == dict.fromkeys(names, counters.Counter()) | stored
    bot.sync(*(active(work) for work in bot.take()))


def test_what_an_instance_has_completed_counts_unless_enough_of_its_jobs_run(pool: Pool) -> None:
    shared(pool, "a", jobs=3)
    bot = pool.bot(capacity=1)

    def completed_jobs(**settings: object) -> int:
        wanted = FairShareSettings.model_validate(settings)
        ids = [row.instance for row in pool.rows("SELECT instance FROM accounts")]
        (found,) = pool.database.run(lambda c: fair_share.read_shares(c, ids, wanted)).of.values()
        return found.completed

    pool.assigner().run_once()
    bot.sync(*(completed(work) for work in bot.take()))
    assert completed_jobs() == 1
    pool.assigner().run_once()
    assert completed_jobs() == 0, "one job runs, which is the guarantee"
    assert completed_jobs(min_task_guarantee=2) == 1
    assert completed_jobs(mode="literal") == 1
    bot.sync(*(active(work) for work in bot.take()))


def test_the_window_is_a_day_and_the_guarantee_one_job_unless_configured() -> None:
    settings = FairShareSettings()
    assert (settings.rolling_window_hours, settings.min_task_guarantee) == (24, 1)
