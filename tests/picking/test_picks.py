"""Picks find jobs that fit behind any number of others, cheaply, and what is remembered of the front hides none."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from leasehold.errors import BadInput

from schema import clock
from schema.clock import SLOW_FACTOR, monotonic
from schema.moves.submit import submit
from schema.picking import for_bot, head_cursor, ready
from schema.picking.for_bot import FetchingBot
from schema.picking.head_cursor import HeadCursor, HeadCursors
from schema.picking.pick import LEAST_HEADS, Order, ReadyJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.explain import explained
from tests.support.plans import watching
from tests.support.pool import Pool
from tests.support.race import cancel
from tests.support.requests import PLAIN
from tests.support.tenancy import EAGER, Tenancy, put_cohort

BATCH = 10
#: Seconds that a walk from the very beginning takes by the clock below.
SLOW = 10.0


class Clock:
    """Time that passes only while a walk from the very beginning is under way, and when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slow = True

    def __call__(self) -> float:
        self.now += SLOW if self.slow else 0.0
        return self.now


class ScannedPool:
    """A front that has been walked once, slowly, and is walked from where it was seen to begin from then on."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._clock = pool, Clock()
        self.cursor = HeadCursor(self._clock)

    def pick(self) -> list[str]:
        found = self._pool.database.run(partial(pick, batch=BATCH, line=self.cursor))
        self._clock.slow = False
        return names(found)

    def later(self) -> None:
        """So much later that a walk from the very beginning may be paid for again."""
        self._clock.now += SLOW_FACTOR * SLOW


def fetch(connection: Connection, bot: FetchingBot, limit: int, line: HeadCursor | None) -> list[ReadyJob]:
    return for_bot.pick_for_bot(connection, bot, limit=limit, any_wait=False, literal=False, cursor=line)


def fetcher(pool: Pool, units: int = 100, *, capacity: int = 0) -> FetchingBot:
    """The first bot, with so much room."""
    bot = pool.row("SELECT min(id) AS id FROM bots").id
    return FetchingBot(bot, "bot-1", 1, 0, None, None, capacity or units, units)


def pick(connection: Connection, batch: int, line: HeadCursor | None, order: Order = Order.PRIORITY) -> list[ReadyJob]:
    return ready.pick(connection, Scope(), order=order, batch=batch, cursor=line)


@contextmanager
def snapshot(pool: Pool) -> Iterator[None]:
    """Somebody who keeps an old snapshot, so that nothing can be cleaned up."""
    with pool.database.listen() as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM jobs")
        yield


def names(jobs: list[ReadyJob]) -> list[str]:
    return [job.public_id for job in jobs]


def aged(pool: Pool, jobs: list[str], by: timedelta) -> None:
    """The jobs were queued so much earlier than they say, as a requeued one was."""
    pool.change(
        "UPDATE jobs SET queued_at = queued_at - :by WHERE public_id = ANY (CAST(:jobs AS uuid[]))", by=by, jobs=jobs
    )


@pytest.fixture
def line(pool: Pool) -> ScannedPool:
    pool.bot(capacity=100)
    return ScannedPool(pool)


def test_a_job_of_any_urgency_is_found_from_where_the_front_began(pool: Pool, line: ScannedPool) -> None:
    (gone,) = pool.submit()
    assert line.pick() == [gone]
    cancel(pool, gone)
    assert line.pick() == [], "a line that was empty is walked from then on, too"
    first = pool.submit(2, priority=5)
    assert line.pick() == first
    urgent, between, unurgent = (pool.submit(priority=priority)[0] for priority in (-7, 3, 9))
    assert line.pick() == [urgent, between, *first, unurgent]


def test_a_job_that_comes_to_lie_before_what_is_remembered_is_found_by_the_next_whole_walk(
    pool: Pool, line: ScannedPool
) -> None:
    jobs = pool.submit(2)
    assert line.pick() == jobs
    (old,) = pool.submit()
    aged(pool, [old], timedelta(minutes=5))
    assert line.pick() == jobs
    line.later()
    assert line.pick() == [old, *jobs]


def test_a_job_whose_submit_took_long_to_commit_is_not_missed(pool: Pool, line: ScannedPool) -> None:
    with pool.database.begin() as slow:
        slow.execute(Statement("SELECT now()"))
        jobs = pool.submit(2)
        assert line.pick() == jobs
        request = {"instance": "default", "payload": {"command": ["true"]}, "properties": {}}
        (late,) = submit(slow, [request], actor="test")
    assert line.pick() == [late.public_id, *jobs]


def test_a_whole_walk_that_was_cut_forgets_what_it_did_not_reach(pool: Pool, line: ScannedPool) -> None:
    low = pool.submit(2, priority=5)
    assert line.pick() == low
    (old,) = pool.submit(priority=5)
    aged(pool, [old], timedelta(minutes=5))
    urgent = pool.submit(4 * BATCH)
    line.later()
    assert line.pick() == urgent[:BATCH]
    moved = "UPDATE jobs SET schedule_after = now() + interval '1 h' WHERE priority = 0"
    pool.change(moved)
    assert line.pick() == [old, *low]


def test_a_walk_that_began_late_does_not_undo_what_a_whole_one_found() -> None:
    clock = Clock()
    front = HeadCursor(clock)
    front.learn(front.begin(), (1, 1000.0, [[0, 5, 1000.0, 7]]), limit=2)
    clock.slow = False
    partial = front.begin()
    clock.now += SLOW_FACTOR * SLOW
    whole = front.begin()
    assert (partial.whole, whole.whole) == (False, True)
    assert not front.begin().whole, "one is under way"
    clock.slow = True
    front.learn(whole, (1, 1001.0, [[0, 5, 10.0, 7]]), limit=2)
    front.learn(partial, (1, 1001.0, [[0, 5, 1000.0, 7]]), limit=2)
    assert max(front.begin().since.values()) == (10.0, 7)


@pytest.mark.parametrize(("walked", "whole"), [(head_cursor.MANY - 1, True), (head_cursor.MANY, False)])
def test_a_long_pick_that_took_a_little_longer_is_followed_by_those_from_where_the_front_began(
    walked: int, whole: bool
) -> None:
    clock = Clock()
    clock.slow = False
    line = HeadCursor(clock)
    walk = line.begin()
    clock.now += 2 * head_cursor.QUICK
    line.learn(walk, (walked, 1000.0, [[0, 5, 1000.0, 7]]), limit=walked + 1)
    assert line.begin().whole is whole


def test_what_a_walk_saw_in_a_transaction_that_did_not_happen_is_forgotten(pool: Pool) -> None:
    pool.bot(capacity=100)
    head_cursors = HeadCursors(Clock())
    old = pool.submit(2)
    aged(pool, old, timedelta(minutes=5))

    def picked(connection: Connection) -> list[ReadyJob]:
        return pick(connection, BATCH, head_cursors.of(0))

    def undone(connection: Connection) -> None:
        picked(connection)
        connection.execute(Statement("UPDATE jobs SET schedule_after = now() + interval '5 s'"))
        assert not picked(connection)
        raise BadInput("test", "comes to nothing")

    with pytest.raises(BadInput):
        pool.database.run(undone, undone=head_cursors.forget)
    assert names(pool.database.run(picked)) == old


@pytest.mark.parametrize("who", ["an assigner", "a bot"])
def test_a_pick_does_not_wade_through_what_an_old_snapshot_keeps_even_of_the_same_submit(
    pool: Pool, line: ScannedPool, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_cursor, "LATE", 0.0)
    bot = fetcher(pool)

    def read(connection: Connection) -> list[ReadyJob]:
        return (
            pick(connection, BATCH, line.cursor) if who == "an assigner" else fetch(connection, bot, BATCH, line.cursor)
        )

    with snapshot(pool):
        submitted = pool.submit(5000 + BATCH)
        gone, jobs = submitted[:-BATCH], submitted[-BATCH:]
        cancel(pool, *gone)
        buffers = []
        for _walk in ("from the very beginning", "from where the front was seen to begin"):
            with pool.database.begin() as connection, watching(connection) as watch:
                assert names(read(connection)) == jobs
            buffers.append(watch.buffers)
        pages = pool.row("SELECT count(DISTINCT (ctid::text::point)[0]) AS pages FROM jobs").pages
    assert buffers[0] - buffers[1] > pages / 2


# Picks from the front give what picks queue by queue give.


INSTANCES = ("one", "two", "three")


@pytest.mark.parametrize("seed", range(4))
def test_any_pool_is_picked_from_alike(pool: Pool, tenancy: Tenancy, seed: int) -> None:
    chance = random.Random(seed)
    units = chance.choice([3, 40])
    pool.bot(capacity=units, properties={"kind": ["a"]})
    pool.bot("bot-2", capacity=5, properties={"kind": ["b"]})
    line, bot = HeadCursor(monotonic), fetcher(pool, units)
    for turn in range(6):
        for _ in range(chance.randint(1, 6)):
            pool.submit(
                chance.randint(1, 8),
                priority=chance.randint(-12, 12),
                properties={"kind": chance.choice("aaabz")},
                instance=chance.choice(INSTANCES),
            )
        if turn == 1:
            tenancy.quota("one", maximum=7)
        batch = chance.choice([1, 3, 10])
        for read, cursor in (
            (partial(pick, batch=batch), line),
            (partial(fetch, bot=bot, limit=2), HeadCursor(monotonic)),
        ):
            found, expected = (pool.database.run(partial(read, line=each)) for each in (cursor, None))
            assert names(found) == names(expected)


def test_a_bot_is_not_given_a_job_at_rest_before_a_more_urgent_one_behind_the_front(pool: Pool) -> None:
    pool.bot(capacity=100, properties={"kind": ["a"]})
    pool.submit(5, priority=0, properties={"kind": "b"})
    urgent = pool.submit(priority=3, properties={"kind": "a"})
    pool.submit(priority=5, instance="resting", properties={"kind": "a"})
    pool.rest_queues(60, "priority = 5")
    bot = fetcher(pool)
    assert names(pool.database.run(lambda c: fetch(c, bot, 1, HeadCursor(monotonic)))) == urgent


def test_by_age_an_old_job_that_fits_is_found_behind_large_ones_of_its_urgency(pool: Pool, tenancy: Tenancy) -> None:
    pool.bot(capacity=1000)
    tenancy.quota("default", maximum=3)
    pool.submit(600, priority=0, units=5)
    (old,) = pool.submit(priority=0)
    pool.submit(30, priority=9)
    assert pool.database.run(lambda c: pick(c, 2, None, Order.AGE))[0].public_id == old


# Jobs that fit are found behind any number of jobs that do not, at a cost that those do not decide.


KINDS = ("free",)
LARGE = 3_000
#: Heads that are looked through, what of each of them is read once more, and a few rows of everything else.
BOUND = 2000


@pytest.fixture
def filled(pool: Pool) -> Pool:
    """Three thousand jobs of four units, and behind them one of two units and one of one; two bots of four units."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=KINDS)
        filling.fill_jobs(connection, LARGE, instances=1, kinds=KINDS, units=4, priority=0)
        for units in (2, 1):
            filling.fill_jobs(connection, 1, instances=1, kinds=KINDS, units=units, priority=5)
        filling.fill_bots(connection, {"free": 2}, capacity=4)

    pool.database.run(fill)
    return pool


def small(pool: Pool, units: int) -> str:
    return str(pool.row("SELECT public_id FROM jobs WHERE units = :units", units=units).public_id)


@pytest.mark.parametrize("urgent_first", [100, 0])
def test_a_job_that_fits_into_what_a_quota_leaves_is_placed_behind_many_that_do_not(
    filled: Pool, urgent_first: int
) -> None:
    tenancy = Tenancy(filled)
    tenancy.quota("i-0", maximum=2)
    assert explained(filled, small(filled, 2)).sentence.startswith("nothing stands in its way")
    tenancy.assigner(EAGER, priority_percentage=urgent_first).run_once()
    assert filled.job(small(filled, 2)).state == "leased"
    assert filled.job(small(filled, 1)).state == "queued", "the other one has used the quota up"


def test_a_bot_fetches_what_fits_behind_many_jobs_that_do_not(filled: Pool) -> None:
    for free_units, maximum, found in ((1, None, [1]), (3, None, [2, 1]), (4, 1, [1])):
        Tenancy(filled).quota("i-0", maximum=maximum)
        bot = fetcher(filled, free_units, capacity=1)
        with filled.database.connect() as connection:
            assert [job.units for job in fetch(connection, bot, 5, None)] == found


@pytest.mark.parametrize("analysed", [False, True])
def test_jobs_that_do_not_fit_cost_nothing(filled: Pool, analysed: bool) -> None:
    Tenancy(filled).quota("i-0", maximum=1)
    if analysed:
        filled.change("ANALYZE")
    with filled.database.connect() as connection:
        for order in Order:
            with watching(connection) as picked:
                jobs = ready.pick(connection, Scope(), order=order, batch=5)
            assert [job.units for job in jobs] == [1]
            assert picked.touched <= BOUND, str(picked)
        bot = fetcher(filled, 1)
        with watching(connection) as looked:
            fetch(connection, bot, 5, None)
        assert looked.touched <= BOUND, str(looked)
        connection.rollback()


# Picks among many queues: none is read whole, and the order over all of them is kept.


QUEUES, EACH = 40, 30
PICKED = 25


def fill(pool: Pool, chance: random.Random, *, urgent: int) -> None:
    """Jobs of random urgency in every queue, and so many in one queue that come before all others."""
    requests = [
        PLAIN | {"properties": {"kind": [f"kind-{number}"]}, "priority": priority}
        for number in range(QUEUES)
        for priority in sorted({chance.randint(-5, 5) for _ in range(6)})
        for _ in range(EACH // 6)
    ]
    requests += [PLAIN | {"properties": {"kind": ["kind-7"]}, "priority": -20}] * urgent
    pool.database.run(lambda c: submit(c, requests, actor="test"))
    pool.change("UPDATE jobs SET queued_at = queued_at - id * 37 % 101 * interval '1 s'")


@pytest.mark.parametrize(
    "urgent", [0, PICKED, 3 * LEAST_HEADS * PICKED], ids=["mixed", "a few urgent", "one queue first"]
)
def test_what_is_picked_comes_first_over_all_queues(pool: Pool, urgent: int) -> None:
    """Queue by queue, and from the front."""
    fill(pool, random.Random(urgent), urgent=urgent)
    pool.bot(capacity=1000, properties={"kind": [f"kind-{number}" for number in range(QUEUES)]})
    for order in Order:
        first = [row.id for row in pool.rows(f"SELECT id FROM jobs ORDER BY {order.value} LIMIT {PICKED}")]
        for cursor in (None, HeadCursor(clock.monotonic)):
            with pool.database.begin() as connection:
                found = [job.id for job in ready.pick(connection, Scope(), order=order, batch=PICKED, cursor=cursor)]
            assert found == first[: len(found)], (order, cursor)
            assert len(found) >= PICKED // 2


def test_jobs_behind_those_that_others_hold_are_found_among_many_queues(pool: Pool) -> None:
    fill(pool, random.Random(3), urgent=4 * PICKED)
    pool.bot(capacity=1000, properties={"kind": [f"kind-{number}" for number in range(QUEUES)]})
    with pool.database.begin() as other:
        held = {job.id for job in ready.pick(other, Scope(), order=Order.PRIORITY, batch=PICKED)}
        found = pool.database.run(
            lambda connection: ready.pick(connection, Scope(), order=Order.PRIORITY, batch=PICKED)
        )
    assert held
    assert found
    assert not held & {job.id for job in found}
    assert {job.priority for job in found} == {-20}


@pytest.mark.parametrize("constrained", [False, True], ids=["plain", "constrained"])
def test_idle_bots_of_one_cohort_however_many_keep_no_other_cohort_waiting(pool: Pool, constrained: bool) -> None:
    for name in ("crowd", "lone"):
        put_cohort(pool, name, f"pool={name}")
    pool.database.run(lambda c: filling.fill_bots(c, {"free": PICKED + 1}))
    pool.change("UPDATE bots SET cohort = (SELECT id FROM cohorts WHERE name = 'crowd')")
    bot = pool.bot("zz", properties={"pool": "lone"})
    (job,) = pool.submit(properties={"pool": "lone"}, **({"terms": {"owner": "ann"}} if constrained else {}))
    lone = pool.row("SELECT id FROM cohorts WHERE name = 'lone'").id
    pool.change("UPDATE bots SET cohort = :lone WHERE name = 'zz'", lone=lone)
    pool.change("UPDATE jobs SET cohort = :lone", lone=lone)
    pool.change("UPDATE queues SET cohort = :lone", lone=lone)
    pool.assigner(batch=PICKED).run_once()
    assert [lease["job"] for lease in bot.take()] == [job]
