"""Threads that do a gateway's work, on the database and on bodies, and the bound on what may wait for them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

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

#: Threads of a crew that read bodies. They compute, so each one more delays the event loop without being faster.
READERS = 2


class Busy(NotReady):
    """More work waits than the gateway wants to keep in memory; nothing was done."""

    code = "busy"


class WorkerPool:
    """As many threads as a pool has connections, so that nobody waits for a connection inside a thread.

    threads: connections of the pool. queue: how many pieces of work may wait for a thread. What comes beyond is
    refused at once: under overload it is better to answer few callers in time than all of them too late.
    urgent: whether `run` uses the reserved connections.
    """

    def __init__(self, database: Database, *, threads: int, queue: int, urgent: bool = False) -> None:
        self._database, self._urgent = database, urgent
        self.threads = threads
        self._limit = threads + queue
        self._limiter: anyio.CapacityLimiter | None = None
        self._readers: anyio.CapacityLimiter | None = None
        self.busy = 0

    @property
    def full(self) -> bool:
        """Whether a new piece of work would be refused."""
        return self.busy >= self._limit

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Do `work` in one transaction on a thread. Raises Busy when too much waits already."""
        return await self.call(lambda: self._database.run(work, urgent=self._urgent))

    async def call(self, function: Callable[[], T]) -> T:
        """Call `function`, which may block, on a thread. Raises Busy when too much waits already."""
        with self.reserve_slot():
            return await self.run_unbounded(function)

    async def run_unbounded(self, function: Callable[[], T]) -> T:
        """Call `function`, which may block, on a thread, however much waits already: for work that stands for places
        taken before, and for what must not be refused."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self.threads)
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)

    async def read(self, function: Callable[[], T]) -> T:
        """Call `function`, which only computes, on a thread that needs no connection: a bad body is refused also while
        the database hangs. Raises Busy when too much waits already."""
        if self._readers is None:
            self._readers = anyio.CapacityLimiter(READERS)
        with self.reserve_slot():
            return await anyio.to_thread.run_sync(function, limiter=self._readers)

    @contextmanager
    def reserve_slot(self) -> Iterator[None]:
        """Be counted as a piece of work. Raises Busy when too much waits already."""
        if self.full:
            raise Busy("the gateway has too much to do")
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


@dataclass(frozen=True)
class WorkerPools:
    """Bots have a crew of their own, on the reserved connections: no crowd of callers can make a bot lose its
    session."""

    callers: WorkerPool
    bots: WorkerPool


def worker_pools(database: Database, *, queue: int) -> WorkerPools:
    """The crews of one gateway, each with a queue of that length."""
    return WorkerPools(
        callers=WorkerPool(database, threads=_connections(database.engine), queue=queue),
        bots=WorkerPool(database, threads=_connections(database.reserve), queue=queue, urgent=True),
    )


def _connections(engine: Engine) -> int:
    pool = engine.pool
    return pool.size() if isinstance(pool, QueuePool) else 1


# Calls of bots that wait at the same moment are settled together, in one transaction.
#
# Nobody waits for company: a call goes at once while a thread is free, and with all the others that have come when one
# becomes free.


#: Calls settled together at most. Doubling it makes a crowd cheaper to serve, and the wait of each in it longer.
BATCH = 32

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call, and where its caller waits for the answer."""

    call: Call
    answer: asyncio.Future[bytes | HeldCall]

    @property
    def bot(self) -> str:
        return self.call.sync.bot if isinstance(self.call, NewCall) else self.call.bot


class SyncBatcher:
    """Takes the calls to the desk. As many transactions are under way as the crew has connections."""

    def __init__(
        self, sync_service: SyncService, workers: WorkerPool, *, metrics: GatewayMetrics, most: int = BATCH
    ) -> None:
        self._sync_service, self._worker_pool, self._metrics, self._most = sync_service, workers, metrics, most
        self._places: deque[PendingCall] = deque()
        self._at_work: set[str] = set()
        self._workers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, call: Call) -> bytes | HeldCall:
        """The desk's answer to this call, and the errors that it has for it. Raises Busy when too much waits."""
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
        """Those that have waited longest, at most one of each bot, and none of a bot that is being served."""
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
        """On a thread. What one call does to the database must not be the end of the others."""
        try:
            return self._sync_service.answer(calls)
        except Exception as error:
            if isinstance(error, NotReady) or len(calls) == 1:
                return [error] * len(calls)
            _log.warning("calls are settled one by one", calls=len(calls), kind=type(error).__name__)
            return [self._settle([call])[0] for call in calls]
