"""Calls that come at the same moment are settled together, and none pays for another one's trouble."""

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from leasehold.errors import Conflict, NotReady

from bots.gateway.workers import BATCH, HELP_AFTER, LARGEST, Batcher, Busy, SessionOpener, WorkerPool
from bots.protocol import OpenSession, Session
from bots.sync import sessions
from schema.postgres.engine import Database
from schema.timing import Timing
from tests.support.patience import MINUTE


@dataclass
class Desk:
    """Notes which calls come together; `open` lets it work, `trouble` makes it fail."""

    trouble: Callable[[list[str]], Exception | None] = lambda _: None
    open: threading.Event = field(default_factory=threading.Event)
    batches: list[list[str]] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)

    def answer(self, bots: Sequence[str]) -> list[Any]:
        assert len(set(bots)) == len(bots)
        assert not self.under_way & set(bots), "two calls of one bot at the same time"
        self.under_way |= set(bots)
        self.batches.append(list(bots))
        try:
            assert self.open.wait(MINUTE)
            if error := self.trouble(list(bots)):
                raise error
            return [Conflict("stale_seq", "late") if bot == "late" else bot.encode() for bot in bots]
        finally:
            self.under_way -= set(bots)


@dataclass
class Counter:
    """Where the test hands its calls in, and what they came to."""

    batches: Batcher[str, bytes]
    sync_service: Desk
    crew: WorkerPool
    answers: list[tuple[str, Any]] = field(default_factory=list)

    async def call(self, bot: str) -> None:
        try:
            answer: Any = await self.batches.answer(bot, bot=bot)
        except Exception as error:
            answer = error
        self.answers.append((bot, answer))

    def run(self, *bots: str, then: Callable[[TaskGroup], Awaitable[None]] | None = None) -> None:
        """These calls come one after the other while the desk is closed; then it opens, after what else happens."""

        async def scenario() -> None:
            async with anyio.create_task_group() as tasks:
                for bot in bots:
                    await self.begin(tasks, bot)
                if then is not None:
                    await then(tasks)
                self.sync_service.open.set()

        anyio.run(scenario)

    async def begin(self, tasks: TaskGroup, bot: str) -> None:
        """Let a call come, and the first one reach its thread."""
        tasks.start_soon(self.call, bot)
        await anyio.wait_all_tasks_blocked()
        await self.under_way(1)

    async def under_way(self, batches: int) -> None:
        """Wait until a call has been answered, or the threads have taken at least `batches` batches."""
        with anyio.fail_after(MINUTE):
            while not (len(self.sync_service.batches) >= batches or self.answers):
                await anyio.sleep(0.001)


@pytest.fixture
def make(database: Database) -> Callable[..., Counter]:
    def counter(sync_service: Desk | None = None, *, threads: int = 1, queue: int = 100, **batch: Any) -> Counter:
        sync_service, crew = sync_service or Desk(), WorkerPool(database, threads=threads, queue=queue)
        batcher = Batcher[str, bytes](sync_service.answer, crew, **{"most": 3, "help_after": MINUTE, **batch})
        return Counter(batcher, sync_service, crew)

    return counter


def test_a_call_goes_at_once_and_those_that_come_meanwhile_go_together(make: Callable[..., Counter]) -> None:
    counter = make()
    counter.run("a", "b", "c", "d", "e")
    assert counter.sync_service.batches == [["a"], ["b", "c", "d"], ["e"]]
    assert sorted(counter.answers) == [(bot, bot.encode()) for bot in "abcde"]


def test_a_second_thread_settles_calls_once_half_a_batch_waits(make: Callable[..., Counter]) -> None:
    counter = make(threads=2, most=4)

    async def fourth(tasks: TaskGroup) -> None:
        await counter.under_way(2)
        await counter.begin(tasks, "d")

    counter.run("a", "b", "c", then=fourth)
    assert counter.sync_service.batches == [["a"], ["b", "c"], ["d"]]


def test_other_work_gets_a_thread_between_two_batches(make: Callable[..., Counter]) -> None:
    counter = make()

    async def other(tasks: TaskGroup) -> None:
        tasks.start_soon(counter.crew.run_unbounded, lambda: counter.sync_service.batches.append(["other"]))
        await anyio.wait_all_tasks_blocked()

    counter.run("a", "b", "c", then=other)
    assert counter.sync_service.batches == [["a"], ["other"], ["b", "c"]]


def test_of_many_calls_that_wait_half_go_together_but_no_more_than_a_batch(make: Callable[..., Counter]) -> None:
    counter = make(queue=LARGEST * 3, most=2)
    counter.run("first", *map(str, range(2 * LARGEST + 20)))
    assert [len(batch) for batch in counter.sync_service.batches[:4]] == [1, LARGEST, 42, 21]


def test_a_call_that_waits_behind_a_slow_batch_is_taken_by_another_thread(make: Callable[..., Counter]) -> None:
    counter = make(threads=2, most=5, help_after=HELP_AFTER)

    async def another(_: TaskGroup) -> None:
        await counter.under_way(2)

    counter.run("a", "b", then=another)
    assert counter.sync_service.batches == [["a"], ["b"]]


def test_calls_do_not_wait_for_a_slow_batch(database: Database) -> None:
    gates = {"a": threading.Event(), "b": threading.Event()}
    begun = set[str]()

    def settle(bots: Sequence[str]) -> list[bytes]:
        begun.update(bots)
        for bot in bots:
            assert bot not in gates or gates[bot].wait(MINUTE)
        return [bot.encode() for bot in bots]

    crew = WorkerPool(database, threads=2, queue=100)
    counter = Counter(Batcher[str, bytes](settle, crew, most=4), Desk(), crew)

    async def until(found: Callable[[], bool]) -> None:
        with anyio.fail_after(MINUTE):
            while not found():
                await anyio.sleep(0.01)

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for bot in ("a", "b"):
                tasks.start_soon(counter.call, bot)
                await until(lambda bot=bot: bot in begun)
            for bot in ("c", "d"):
                tasks.start_soon(counter.call, bot)
                await anyio.wait_all_tasks_blocked()
            await anyio.sleep(3 * HELP_AFTER)  # in vain another thread was asked for
            gates["b"].set()
            await until(lambda: {("c", b"c"), ("d", b"d")} <= set(counter.answers))
            await counter.call("e")
            assert counter.answers[-1] == ("e", b"e"), "and not after the slow batch has ended"
            gates["a"].set()

    anyio.run(scenario)
    assert begun == set("abcde")


def test_calls_fail_while_there_is_no_thread(make: Callable[..., Counter], monkeypatch: pytest.MonkeyPatch) -> None:
    counter = make()
    counter.sync_service.open.set()
    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "run_unbounded", _without_thread)
        counter.run("a")
    counter.run("b")
    (_, failure), answered = counter.answers
    assert isinstance(failure, RuntimeError)
    assert answered == ("b", b"b")


async def _without_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_second_call_of_a_bot_waits_until_the_first_is_answered(make: Callable[..., Counter]) -> None:
    counter = make(threads=2)
    counter.run("a", "a", "b", "b", "a")
    assert sorted(bot for batch in counter.sync_service.batches for bot in batch) == ["a", "a", "a", "b", "b"]
    assert len(counter.answers) == 5


def test_an_error_of_one_call_is_told_to_its_caller_alone_also_if_it_breaks_the_transaction(
    make: Callable[..., Counter],
) -> None:
    counter = make(Desk(trouble=lambda bots: ValueError("broken") if "bad" in bots else None))
    counter.run("a", "late", "b", "c", "bad", "d", "e")
    assert counter.sync_service.batches == [["a"], ["late", "b", "c"], ["bad", "d", "e"], ["bad"], ["d"], ["e"]]
    found = dict(counter.answers)
    assert isinstance(found.pop("late"), Conflict)
    assert isinstance(found.pop("bad"), ValueError)
    assert found == {bot: bot.encode() for bot in "abcde"}


def test_while_the_database_is_away_a_batch_is_not_tried_call_by_call(make: Callable[..., Counter]) -> None:
    counter = make(Desk(trouble=lambda _: NotReady("away")))
    counter.run("a", "b", "c")
    assert counter.sync_service.batches == [["a"], ["b", "c"]]
    assert all(isinstance(answer, NotReady) for _, answer in counter.answers)


def test_callers_that_hang_up_leave_nothing_behind(make: Callable[..., Counter]) -> None:
    counter = make()

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as impatient:
                impatient.start_soon(counter.call, "first")
                await anyio.wait_all_tasks_blocked()
                impatient.start_soon(counter.call, "second")
                tasks.start_soon(counter.call, "a")
                await anyio.wait_all_tasks_blocked()
                impatient.cancel_scope.cancel()
            tasks.start_soon(counter.call, "b")
            await anyio.wait_all_tasks_blocked()
            counter.sync_service.open.set()

    anyio.run(scenario)
    assert counter.sync_service.batches == [["first"], ["a", "b"]]
    assert sorted(counter.answers) == [("a", b"a"), ("b", b"b")]


def test_calls_beyond_the_queue_are_refused_at_once(make: Callable[..., Counter]) -> None:
    counter = make(queue=2)
    counter.run("a", "b", "c", "d")
    assert [bot for bot, answer in counter.answers if isinstance(answer, Busy)] == ["d"]
    assert len(counter.answers) == 4


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Takes the place of the openings in the database."""
    desk = Desk()

    def open_sessions(_: Database, requests: Sequence[OpenSession], *, timing: Timing, tracer: object) -> list[Session]:
        desk.answer([request.bot for request in requests])
        told = {"epoch": 1, "secret": "s", "expires_in": timing.ttl, "sync_in": 1.0}
        return [Session(bot=request.bot, **told) for request in requests]

    monkeypatch.setattr(sessions, "open_sessions", open_sessions)
    return desk


def test_sessions_that_wait_open_together_and_leave_a_thread_to_syncs(database: Database, openings: Desk) -> None:
    crew = WorkerPool(database, threads=2, queue=100)
    opener, done = SessionOpener(database, crew, queue=100, timing=Timing()), list[str]()

    async def open_session(bot: str) -> None:
        done.append((await opener.open(OpenSession(bot=bot))).bot)

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for bot in ("first", "a", "b", "c"):
                tasks.start_soon(open_session, bot)
                await anyio.wait_all_tasks_blocked()
            try:
                with anyio.fail_after(MINUTE / 2):
                    done.append(await crew.run_unbounded(lambda: "synced"))
            finally:
                openings.open.set()

    anyio.run(scenario)
    assert done == ["synced", "first", "a", "b", "c"]
    assert openings.batches == [["first"], ["a", "b", "c"]]


def test_sessions_that_wait_are_refused_beyond_a_queue_of_their_own(database: Database, openings: Desk) -> None:
    crew = WorkerPool(database, threads=2, queue=1)
    opener = SessionOpener(database, crew, queue=1, timing=Timing())

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(BATCH + 1):
                tasks.start_soon(opener.open, OpenSession(bot=f"bot-{number}"))
            await anyio.wait_all_tasks_blocked()
            try:
                with pytest.raises(Busy):
                    await opener.open(OpenSession(bot="late"))
                assert await crew.call(lambda: "synced") == "synced"
            finally:
                openings.open.set()

    anyio.run(scenario)
    assert (opener.slots.taken, crew.slots.taken) == (0, 0)


def test_a_repeated_opening_waits_with_the_one_before_it(database: Database, openings: Desk) -> None:
    crew = WorkerPool(database, threads=2, queue=100)
    opener, done = SessionOpener(database, crew, queue=100, timing=Timing()), list[str]()

    async def open_session(bot: str, secret: str) -> None:
        done.append((await opener.open(OpenSession(bot=bot, secret=secret * 40))).bot)

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_session, "first", "s")
            await anyio.wait_all_tasks_blocked()
            for bot, secret in (("second", "s"), ("second", "s"), ("first", "s"), ("second", "t")):
                tasks.start_soon(open_session, bot, secret)
            await anyio.wait_all_tasks_blocked()
            openings.open.set()

    anyio.run(scenario)
    assert sorted(done) == ["first"] * 2 + ["second"] * 3
    assert openings.batches == [["first"], ["second"], ["second"]], "another secret is another session"
    assert (opener.slots.taken, crew.slots.taken) == (0, 0)
