"""Threads that do a gateway's work, on the database and on bodies, and the bound on what may wait for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.to_thread
from sqlalchemy import Connection, Engine
from sqlalchemy.pool import QueuePool

from schema.engine import Database
from schema.errors import NotReady

T = TypeVar("T")

#: Threads of a crew that read bodies. They compute, so each one more delays the event loop without being faster.
READERS = 2


class Busy(NotReady):
    """More work waits than the gateway wants to keep in memory; nothing was done."""

    code = "busy"


class Crew:
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
        with self.place():
            return await self.insist(function)

    async def insist(self, function: Callable[[], T]) -> T:
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
        with self.place():
            return await anyio.to_thread.run_sync(function, limiter=self._readers)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Be counted as a piece of work. Raises Busy when too much waits already."""
        if self.full:
            raise Busy("the gateway has too much to do")
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


@dataclass(frozen=True)
class Crews:
    """Bots have a crew of their own, on the reserved connections: no crowd of callers can make a bot lose its
    session."""

    callers: Crew
    bots: Crew


def crews(database: Database, *, queue: int) -> Crews:
    """The crews of one gateway, each with a queue of that length."""
    return Crews(
        callers=Crew(database, threads=_connections(database.engine), queue=queue),
        bots=Crew(database, threads=_connections(database.reserve), queue=queue, urgent=True),
    )


def _connections(engine: Engine) -> int:
    pool = engine.pool
    return pool.size() if isinstance(pool, QueuePool) else 1
