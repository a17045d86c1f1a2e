"""Calls that come at the same moment are settled together, and none pays for another one's trouble."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from bots.gateway.metrics import GatewayMetrics
from bots.gateway.workers import Busy, SyncBatcher, WorkerPool
from bots.protocol import Sync
from bots.sync.call import Call, NewCall
from schema.errors import Conflict, NotReady
from schema.postgres.engine import Database
from tests.support.patience import MINUTE


@dataclass
class Desk:
    """Notes which calls come together; `open` lets it work, `trouble` makes it fail."""

    trouble: Callable[[list[str]], Exception | None] = lambda _: None
    open: threading.Event = field(default_factory=threading.Event)
    batches: list[list[str]] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)

    def answer(self, calls: Sequence[Call]) -> list[Any]:
        bots = [call.sync.bot for call in calls if isinstance(call, NewCall)]
        assert len(set(bots)) == len(bots)
        assert not self.under_way & set(bots), "two calls of one bot at the same time"
        self.under_way |= set(bots)
        self.batches.append(bots)
        try:
            assert self.open.wait(MINUTE)
            if error := self.trouble(bots):
                raise error
            return [Conflict("stale_seq", "late") if bot == "late" else bot.encode() for bot in bots]
        finally:
            self.under_way -= set(bots)


@dataclass
class Counter:
    """Where the test hands its calls in, and what they came to."""

    batches: SyncBatcher
    sync_service: Desk
    answers: list[tuple[str, Any]] = field(default_factory=list)

    async def call(self, bot: str) -> None:
        sync = Sync(bot=bot, epoch=1, secret="s", seq=1)
        try:
            answer: Any = await self.batches.answer(NewCall(sync, 0.0))
        except Exception as error:
            answer = error
        self.answers.append((bot, answer))

    def run(self, *bots: str) -> None:
        """These calls come one after the other while the desk is closed; then it opens."""

        async def scenario() -> None:
            async with anyio.create_task_group() as tasks:
                for bot in bots:
                    tasks.start_soon(self.call, bot)
                    await anyio.wait_all_tasks_blocked()
                self.sync_service.open.set()

        anyio.run(scenario)


@pytest.fixture
def make(database: Database) -> Callable[..., Counter]:
    def counter(sync_service: Desk | None = None, *, threads: int = 1, queue: int = 100, most: int = 3) -> Counter:
        sync_service = sync_service or Desk()
        crew = WorkerPool(database, threads=threads, queue=queue)
        return Counter(SyncBatcher(sync_service, crew, metrics=GatewayMetrics(), most=most), sync_service)  # type: ignore[arg-type]

    return counter


def test_a_call_goes_at_once_and_those_that_come_meanwhile_go_together(make: Callable[..., Counter]) -> None:
    counter = make()
    counter.run("a", "b", "c", "d", "e")
    assert counter.sync_service.batches == [["a"], ["b", "c", "d"], ["e"]]
    assert sorted(counter.answers) == [(bot, bot.encode()) for bot in "abcde"]


def test_there_are_as_many_transactions_under_way_as_threads(make: Callable[..., Counter]) -> None:
    counter = make(threads=2, most=5)
    counter.run("a", "b", "c", "d")
    assert counter.sync_service.batches == [["a"], ["b"], ["c", "d"]]


def test_a_second_call_of_a_bot_waits_until_the_first_is_answered(make: Callable[..., Counter]) -> None:
    counter = make(threads=2)
    counter.run("a", "a", "b", "b", "a")
    assert sorted(bot for batch in counter.sync_service.batches for bot in batch) == ["a", "a", "a", "b", "b"]
    assert len(counter.answers) == 5


def test_an_error_of_one_call_is_told_to_its_caller_alone(make: Callable[..., Counter]) -> None:
    counter = make()
    counter.run("a", "b", "late", "c")
    found = dict(counter.answers)
    assert isinstance(found.pop("late"), Conflict)
    assert found == {"a": b"a", "b": b"b", "c": b"c"}


def test_a_call_that_breaks_its_transaction_does_not_break_the_others(make: Callable[..., Counter]) -> None:
    counter = make(Desk(trouble=lambda bots: ValueError("broken") if "bad" in bots else None))
    counter.run("a", "b", "bad", "c")
    assert counter.sync_service.batches == [["a"], ["b", "bad", "c"], ["b"], ["bad"], ["c"]]
    found = dict(counter.answers)
    assert isinstance(found.pop("bad"), ValueError)
    assert found == {"a": b"a", "b": b"b", "c": b"c"}


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


def test_sessions_that_open_leave_a_thread_to_syncs(database: Database) -> None:
    crew, opening, done = WorkerPool(database, threads=2, queue=100), threading.Event(), list[str]()

    async def open_session() -> None:
        await crew.call_in_turn(lambda: opening.wait(MINUTE))
        done.append("opened")

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(open_session)
            await anyio.wait_all_tasks_blocked()
            try:
                with anyio.fail_after(MINUTE / 2):
                    done.append(await crew.run_unbounded(lambda: "synced"))
            finally:
                opening.set()

    anyio.run(scenario)
    assert done == ["synced", *["opened"] * 5]


def test_sessions_that_wait_for_their_turn_are_refused_beyond_a_queue_of_their_own(database: Database) -> None:
    crew, opening = WorkerPool(database, threads=2, queue=1), threading.Event()

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(crew.call_in_turn, lambda: opening.wait(MINUTE))
            await anyio.wait_all_tasks_blocked()
            try:
                with pytest.raises(Busy):
                    await crew.call_in_turn(lambda: None)
                assert await crew.call(lambda: "synced") == "synced"
                assert (crew.in_turn, crew.busy) == (2, 0)
            finally:
                opening.set()

    anyio.run(scenario)


def test_a_repeated_open_waits_with_the_one_before_it_until_that_has_its_turn(database: Database) -> None:
    crew, opening, done = WorkerPool(database, threads=2, queue=100), threading.Event(), list[int]()
    calls = iter(range(10))

    def work() -> int:
        number = next(calls)
        assert opening.wait(MINUTE)
        return number

    async def open_session(repeats: str) -> None:
        done.append(await crew.call_in_turn(work, repeats=repeats))

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_session, "first")
            await anyio.wait_all_tasks_blocked()
            for repeats in ("second", "second", "first", "second"):
                tasks.start_soon(open_session, repeats)
            await anyio.wait_all_tasks_blocked()
            opening.set()

    anyio.run(scenario)
    assert sorted(done) == [0, 1, 1, 1, 2], "one that runs already may have begun before it was asked again"
    assert (crew.in_turn, crew.busy) == (0, 0)
