"""Thread pools of the gateway with a bound on waiting work, and the batches of sync calls.

Calls of bots that wait at the same moment are settled together in one transaction. No call waits for others: it is
settled at once while a thread is free. When a thread becomes free, it takes all calls that have arrived.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread
import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.pool import QueuePool

from bots.gateway.metrics import GatewayMetrics
from bots.sync.call import Call, HeldCall, NewCall
from bots.sync.settle import SyncService
from schema.errors import NotReady
from schema.postgres.engine import Database

T = TypeVar("T")

#: Threads of a pool that parse bodies. They compute, so more of them would only delay the event loop.
READERS = 2


class Busy(NotReady):
    """Too much work waits in the gateway; it did nothing for this request."""

    code = "busy"


class WorkerPool:
    """A thread pool with as many threads as its connection pool has connections, so that no thread waits for one.

    threads: connections of the connection pool. queue: how many pieces of work may wait for a thread. More work is
    refused at once: under overload it is better to answer few callers in time than all of them too late. urgent: True
    if `run` uses the reserved connections.
    """

    def __init__(self, database: Database, *, threads: int, queue: int, urgent: bool = False) -> None:
        self._database, self._urgent = database, urgent
        self.threads = threads
        self._limit = threads + queue
        self._limiter: anyio.CapacityLimiter | None = None
        self._readers: anyio.CapacityLimiter | None = None
        self._turns: anyio.CapacityLimiter | None = None
        self._queue = queue
        self._repeatable: dict[Hashable, asyncio.Future[Any]] = {}
        self.busy = 0
        #: Calls of `call_in_turn` that wait or run.
        self.in_turn = 0

    @property
    def full(self) -> bool:
        """True if a new piece of work would be refused."""
        return self.busy >= self._limit

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction on a thread. Raises Busy if too much work waits."""
        return await self.call(lambda: self._database.run(work, urgent=self._urgent))

    async def call(self, function: Callable[[], T]) -> T:
        """Call `function`, which may block, on a thread. Raises Busy if too much work waits."""
        with self.reserve_slot():
            return await self.run_unbounded(function)

    async def call_in_turn(self, function: Callable[[], T], *, repeats: Hashable = None) -> T:
        """Call `function` as `call` does; such calls take at most half of the threads, however many of them wait.

        For the opening of sessions: when hundreds of bots return at once, the syncs of the others go on between them.
        These calls have a queue of their own, of the same length, and take no place of other work. repeats: a call with
        the same value gets the answer of one that still waits for its turn, as a bot repeats what takes too long.
        """
        waiting = self._repeatable.get(repeats)
        if waiting is not None:
            return cast(T, await asyncio.shield(waiting))
        if self._turns is None:
            self._turns = anyio.CapacityLimiter(max(1, self.threads // 2))
        if self.in_turn >= self._queue + self._turns.total_tokens:
            raise Busy("too many sessions are being opened")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if repeats is not None:
            self._repeatable[repeats] = answer
        self.in_turn += 1
        try:
            async with self._turns:
                self._repeatable.pop(repeats, None)
                answer.set_result(await self.run_unbounded(function))
        except Exception as error:
            answer.set_exception(error)
        finally:
            self.in_turn -= 1
            if not answer.done():  # cancelled
                answer.cancel()
                if self._repeatable.get(repeats) is answer:
                    del self._repeatable[repeats]
        return await answer

    async def run_unbounded(self, function: Callable[[], T]) -> T:
        """Call `function`, which may block, on a thread, even if too much work waits.

        For work whose slots are already reserved, and for work that must not be refused.
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self.threads)
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)

    async def read(self, function: Callable[[], T]) -> T:
        """Call `function`, which only computes, on a thread without a connection. Raises Busy if too much work waits.

        Separate threads let the gateway refuse a bad body even while the database hangs.
        """
        if self._readers is None:
            self._readers = anyio.CapacityLimiter(READERS)
        with self.reserve_slot():
            return await anyio.to_thread.run_sync(function, limiter=self._readers)

    @contextmanager
    def reserve_slot(self) -> Iterator[None]:
        """Count one piece of work until the `with` block ends. Raises Busy if too much work waits."""
        if self.full:
            raise Busy("the gateway has too much to do")
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


@dataclass(frozen=True)
class WorkerPools:
    """The thread pools of one gateway.

    Bots have a pool of their own, on the reserved connections, so that no bot loses its session because many callers
    are waiting.
    """

    callers: WorkerPool
    bots: WorkerPool


def worker_pools(database: Database, *, queue: int) -> WorkerPools:
    """Make the thread pools of one gateway. `queue`: how many pieces of work may wait for each of them."""
    return WorkerPools(
        callers=WorkerPool(database, threads=_connections(database.engine), queue=queue),
        bots=WorkerPool(database, threads=_connections(database.reserve), queue=queue, urgent=True),
    )


def _connections(engine: Engine) -> int:
    pool = engine.pool
    return pool.size() if isinstance(pool, QueuePool) else 1


# Batches of sync calls


#: The most calls settled in one transaction. Doubling it makes many calls cheaper, and each of them slower.
BATCH = 32

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class PendingCall:
    """A sync call and the future of its answer."""

    call: Call
    answer: asyncio.Future[bytes | HeldCall]

    @property
    def bot(self) -> str:
        return self.call.sync.bot if isinstance(self.call, NewCall) else self.call.bot


class SyncBatcher:
    """Passes sync calls to the SyncService in batches, with at most one transaction per connection of the pool.

    most: the most calls in one batch.
    """

    def __init__(
        self, sync_service: SyncService, workers: WorkerPool, *, metrics: GatewayMetrics, most: int = BATCH
    ) -> None:
        self._sync_service, self._worker_pool, self._metrics, self._most = sync_service, workers, metrics, most
        self._places: deque[PendingCall] = deque()
        self._at_work: set[str] = set()
        self._workers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, call: Call) -> bytes | HeldCall:
        """Return the SyncService's answer to this call, or raise its error. Raises Busy if too much work waits."""
        with self._worker_pool.reserve_slot():
            place = PendingCall(call, asyncio.get_running_loop().create_future())
            self._places.append(place)
            if self._workers < self._worker_pool.threads:
                self._workers += 1
                worker = asyncio.create_task(self._work())
                self._tasks.add(worker)
                worker.add_done_callback(self._tasks.discard)
            return await place.answer

    async def _work(self) -> None:
        try:
            while batch := self._take():
                await self._serve(batch)
        finally:
            self._workers -= 1

    async def _serve(self, batch: Sequence[PendingCall]) -> None:
        self._metrics.batches.observe(len(batch))
        calls = [place.call for place in batch]
        answers: Sequence[bytes | HeldCall | Exception]
        try:
            answers = await self._worker_pool.run_unbounded(lambda: self._settle(calls))
        except Exception as error:
            answers = [error] * len(batch)
        finally:
            self._at_work.difference_update(place.bot for place in batch)
        for place, answer in zip(batch, answers, strict=True):
            if place.answer.done():
                continue  # its caller has gone
            if isinstance(answer, Exception):
                place.answer.set_exception(answer)
            else:
                place.answer.set_result(answer)

    def _take(self) -> list[PendingCall]:
        """Take the calls that waited longest: at most one of each bot, none of a bot in another batch."""
        batch, later = list[PendingCall](), list[PendingCall]()
        while self._places and len(batch) < self._most:
            place = self._places.popleft()
            if place.answer.done():
                continue
            if place.bot in self._at_work:
                later.append(place)
            else:
                self._at_work.add(place.bot)
                batch.append(place)
        self._places.extendleft(reversed(later))
        return batch

    def _settle(self, calls: Sequence[Call]) -> Sequence[bytes | HeldCall | Exception]:
        """Settle the calls, on a thread; after a failure settle each call alone, so that one cannot fail the others."""
        try:
            return self._sync_service.answer(calls)
        except Exception as error:
            if isinstance(error, NotReady) or len(calls) == 1:
                return [error] * len(calls)
            _log.warning("calls are settled one by one", calls=len(calls), kind=type(error).__name__)
            return [self._settle([call])[0] for call in calls]
