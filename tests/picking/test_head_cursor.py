"""The front of the line: what is remembered of it keeps picks cheap and hides no job."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from leasehold.errors import BadInput

from schema.clock import SLOW_FACTOR, monotonic
from schema.moves.submit import submit
from schema.picking import for_bot, head_cursor, ready
from schema.picking.for_bot import FetchingBot
from schema.picking.head_cursor import HeadCursor, HeadCursors
from schema.picking.pick import Order, ReadyJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support.plans import watching
from tests.support.pool import Pool
from tests.support.race import cancel
from tests.support.tenancy import Tenancy

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


def fetcher(pool: Pool, units: int = 100) -> FetchingBot:
    """The first bot, with so much room."""
    return FetchingBot(pool.row("SELECT min(id) AS id FROM bots").id, "bot-1", 1, 0, None, None, units, units)


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
