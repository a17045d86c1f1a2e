"""Instances share the pool by their weights, on the real database: convergence, what a pause is worth, and changes."""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from assigner.admission import controller
from schema import clock
from schema.accounting import counters, fair_share
from schema.accounting.fair_share import FairShareSettings, jain_index
from tests.support.assigners import assigning
from tests.support.patience import MINUTE, eventually
from tests.support.plans import watching
from tests.support.pool import Bot, Pool, completed
from tests.support.race import Race, cancel
from tests.support.tenancy import share, used

WEIGHTS = {"a": 5, "b": 3, "c": 2}
SIZES = {"a": 1.0, "b": 3.0, "c": 2.0}
SETTINGS = FairShareSettings()


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


@pytest.mark.parametrize("assigners", [1, pytest.param(4, marks=pytest.mark.long)])
def test_three_instances_that_want_everything_get_their_shares_whatever_their_jobs_cost(
    pool: Pool, assigners: int
) -> None:
    for name, weight in WEIGHTS.items():
        share(pool, name, weight=weight)
        pool.submit(300, instance=name, estimated_cost=2)
    bot = pool.bot(capacity=12)

    def used_by(work: dict[str, Any]) -> dict[str, float]:
        return {"cost": SIZES[work["instance"]] * pool.chance.uniform(0.5, 1.5)}

    working = [pool.assigner(batch=6) for _ in range(assigners)]
    with ThreadPoolExecutor(assigners) as threads:
        for _ in range(30):
            for cycle in [threads.submit(each.run_once) for each in working]:
                cycle.result()
            bot.sync(*(completed(work, usage=used_by(work)) for work in bot.take()))
    found = {name: used(pool, f"instance:{name}:cost") for name in WEIGHTS}
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


def returned(pool: Pool, bot: Bot) -> Counter[str]:
    """How many jobs of each instance the bot gets once `a` asks for something again."""
    pool.submit(40, instance="a")
    return Counter(work["instance"] for work in pool.given(bot))


def assert_even(count: Counter[str]) -> None:
    assert abs(count["a"] - count["b"]) <= 1, "and not all of them for the first one"


@pytest.mark.parametrize("others", ["nobody", "who has waited long without a start"])
def test_who_comes_back_gets_a_job_at_once_and_is_not_paid_for_the_time_away(pool: Pool, others: str) -> None:
    share(pool, "a")
    if others != "nobody":
        shared(pool, "shut", jobs=5, max_concurrent=0)
    bot = served(pool, "b")
    away(pool, "a", 3600)
    if others != "nobody":
        pool.upkeep().run_once()
    assert_even(returned(pool, bot))
    assert lift_of(pool, "a") == pytest.approx(1000, rel=0.01)


def test_who_has_been_at_work_and_waited_all_the_while_is_owed_what_it_lacks(pool: Pool) -> None:
    share(pool, "a")
    bot = served(pool, "b")
    away(pool, "a", SETTINGS.idle_after - 10)
    assert set(returned(pool, bot)) == {"a"}


def test_the_lift_counts_by_weight_and_goes_with_the_window(pool: Pool) -> None:
    share(pool, "a", weight=0.5)
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
    assert_even(returned(pool, bot))
    assert lift_of(pool, "a") == pytest.approx(1000, rel=0.01)
    assert pool.row(
        "SELECT demand_at < now() - interval '1 minute' AS away FROM accounts"
        " WHERE instance = (SELECT id FROM instances WHERE name = 'stuck')"
    ).away, "it counts as away, so that it is not paid for the time in which nobody could run its jobs"


@pytest.mark.parametrize(("before", "after"), [(0.001, 1.0), (1.0, 0.25), (0.0, 1.0)])
def test_whose_weight_changes_shares_by_the_new_weight_at_once(pool: Pool, before: float, after: float) -> None:
    share(pool, "a", weight=before)
    share(pool, "b")
    pool.submit(400, instance="a")
    pool.submit(400, instance="b")
    bot = pool.bot(capacity=40)
    assigner = pool.assigner()

    def started(rounds: int) -> Counter[str]:
        found = Counter[str]()
        for _ in range(rounds):
            assigner.run_once()
            given = bot.take()
            found.update(work["instance"] for work in given)
            bot.sync(*(completed(work, usage={"cost": 1}) for work in given))
        return found

    started(4)
    share(pool, "a", weight=after)
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
    assert {work["instance"] for work in bot.take()} == {"b"}


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
    pool.bot(capacity=3)
    pool.assigner().run_once()
    names = [f"instance:{name}:{what}" for name in "ab" for what in ("cost", "jobs")]
    ids = [row.instance for row in pool.rows("SELECT instance FROM accounts")]
    stored = pool.database.run(lambda c: counters.read(c, names))
    found = pool.database.run(lambda c: fair_share.read_shares(c, ids, SETTINGS)).counters
    assert stored["instance:a:slots"].most == 5
    assert stored["instance:a:cost"].used + stored.get("instance:b:cost", counters.Counter()).used == 3
    assert found == dict.fromkeys(names, counters.Counter()) | stored


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


# Several assigners in threads, while instances come, go and are reweighed. Starts are counted in the database, where
# all starts have one order.


SECONDS_VARIABLE = "LEASEHOLD_TEST_SOAK"
ASSIGNERS, UNITS = 4, 12
#: The fewest starts in a span over which shares are compared with weights.
STARTS = 160
#: Two hundredths, and two jobs: the minimum guarantee and one that is running.
TOLERANCE, EDGE = 0.02, 2

WAITING = """
SELECT j.public_id FROM jobs j JOIN instances i ON i.id = j.instance WHERE i.name = :name AND j.state = 'queued'"""
STARTED = """
SELECT i.name, count(*) AS jobs FROM job_events e JOIN jobs j ON j.id = e.job_id JOIN instances i ON i.id = j.instance
WHERE e.move = 'grant' AND e.id > :after GROUP BY 1"""


class Tenants:
    """Instances with weights. Some of them want everything; one bot ends at once whatever it is given."""

    def __init__(self, pool: Pool, weights: dict[str, float]) -> None:
        self.pool, self.weights = pool, dict[str, float]()
        self.wanting: set[str] = set()
        self.bot: Bot = pool.bot(capacity=UNITS, sync_service=pool.sync_service(enabled=False))
        for name, weight in weights.items():
            self.reweigh(name, weight)

    def reweigh(self, name: str, weight: float) -> None:
        self.weights[name] = weight
        share(self.pool, name, weight=weight)

    def go(self, name: str) -> None:
        """It has no jobs any more. Then an hour passes."""
        self.wanting.discard(name)
        ids = [str(row.public_id) for row in self.pool.rows(WAITING, name=name)]
        cancel(self.pool, *ids)
        away(self.pool, name, 3600)

    def fill(self) -> None:
        """Submit jobs of those that want everything, so that more of them wait than can start at once."""
        for name in sorted(self.wanting):
            if len(self.pool.rows(WAITING, name=name)) < 2 * UNITS:
                self.pool.submit(4 * UNITS, instance=name, estimated_cost=1)

    def end(self) -> None:
        """End what runs."""
        given = self.bot.sync()["leases"]
        self.bot.sync(*(completed(lease, usage={"cost": 1}) for lease in given))

    def pause(self) -> int:
        """Let nothing start, and end what runs; returns the number of the last event."""
        self.pool.change("UPDATE bots SET draining = true")

        def idle() -> bool:
            self.end()
            return not self.pool.rows("SELECT FROM live")

        eventually(idle)
        self.pool.upkeep().run_once()
        return int(self.pool.row("SELECT coalesce(max(id), 0) AS id FROM job_events").id)

    def shares(self, after: int, seconds: float) -> str:
        """Let work go on for so long, and at least until enough jobs have started; returns what is not as it should."""
        self.fill()
        self.pool.change("UPDATE bots SET draining = false")
        found, until = Counter[str](), clock.monotonic() + seconds

        def enough() -> bool:
            self.fill()
            self.end()
            found.clear()
            found.update({row.name: row.jobs for row in self.pool.rows(STARTED, after=after)})
            return found.total() >= STARTS and clock.monotonic() >= until

        eventually(enough, seconds + 4 * MINUTE)
        total, weight = found.total(), sum(self.weights[name] for name in self.wanting)
        wrong = {
            name: f"{found[name] / total:.3f} instead of {self.weights[name] / weight:.3f}"
            for name in self.wanting
            if abs(found[name] / total - self.weights[name] / weight) > TOLERANCE + EDGE / total
        }
        print(f"{total} starts: " + ", ".join(f"{n} {found[n] / total:.3f}" for n in sorted(self.wanting)))
        assert not found.keys() - self.wanting
        return f"of {total} starts {wrong}" if wrong else ""


@pytest.mark.timeout(900)
@pytest.mark.long
def test_shares_follow_the_weights_through_four_assigners_while_one_returns_and_one_is_reweighed(
    pool: Pool, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LEASEHOLD_TEST_SOAK=60` goes on for a minute."""
    seconds = float(os.environ.get(SECONDS_VARIABLE) or 0.0) / 4
    monkeypatch.setattr(controller, "DEMAND_RECHECK", 0.5)
    tenants = Tenants(pool, {"a": 1.0, "b": 2.0, "c": 4.0})
    tenants.wanting |= {"a", "b", "c"}
    wrong = dict[str, str]()
    with assigning(pool.database, pool.timing, chance, [None] * ASSIGNERS, wakeups=True, interval=0.1, jitter=0.1):
        wrong["all want everything"] = tenants.shares(tenants.pause(), seconds)
        after = tenants.pause()
        tenants.go("c")
        # So long that no assigner takes the demand of the one that has gone for recorded lately.
        wrong["one has gone"] = tenants.shares(after, max(seconds, controller.DEMAND_RECHECK))
        after = tenants.pause()
        tenants.wanting.add("c")
        wrong["it returns from an idle hour"] = tenants.shares(after, seconds)
        after = tenants.pause()
        tenants.reweigh("b", 5.0)
        wrong["another one is reweighed"] = tenants.shares(after, seconds)
    assert not {when: told for when, told in wrong.items() if told}
