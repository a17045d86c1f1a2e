"""Calls of a `Client` as coroutines: each request is made on a thread, and one waits for the jobs of all coroutines.

So retries, deadlines and errors are written once. The threads are bounded, and a coroutine that waits for jobs keeps
none.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from leasehold import wire
from leasehold.client import LONG_POLL, Client, pause
from leasehold.errors import NotFound, TimedOut
from leasehold.transport import Interrupted, Interruption, Record

P = ParamSpec("P")
R = TypeVar("R")

#: Threads for requests that are answered at once.
THREADS = 8


class AsyncCalls:
    """The calls of one client as coroutines of one event loop.

    find: returns the client. It is asked at each call, because a pool looks for its gateway when it is first called.
    """

    def __init__(self, find: Callable[[], Client]) -> None:
        self._find = find
        self._threads = ThreadPoolExecutor(THREADS, "leasehold-call")
        #: The thread of the one request that waits for jobs.
        self.waits = ThreadPoolExecutor(1, "leasehold-wait")
        self._watch = _Watch(self)

    @property
    def client(self) -> Client:
        """All calls that a gateway takes. They block the thread that makes them; `call` makes them on another one."""
        return self._find()

    async def call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that makes requests, such as a method of `client`, on a thread."""
        return await on_thread(self._threads, Interruption(), partial(work, *args, **kwargs))

    def as_ended(self, ids: Sequence[str], timeout: float | None) -> AsyncGenerator[Record, None]:
        """Yield the gateway's records of jobs as they end, until all have. Raises TimedOut and NotFound."""
        return self._watch.ended(ids, timeout)

    async def ended(self, ids: Sequence[str], timeout: float | None = None) -> dict[str, Record]:
        """Wait until all jobs have ended; return the gateway's records by their ids. Raises TimedOut and NotFound."""
        async with aclosing(self.as_ended(ids, timeout)) as ended:
            return {record["id"]: record async for record in ended}

    async def stop_waiting(self) -> None:
        """End the request that waits for jobs; coroutines that wait for them get a RuntimeError."""
        await self._watch.end()

    def end_threads(self, *, wait: bool) -> None:
        """End the threads of requests. Calls that come later fail. wait: until the calls under way have ended."""
        for threads in (self._threads, self.waits):
            threads.shutdown(wait=wait, cancel_futures=True)


class _Watch:
    """Waits for the jobs of all coroutines, by one request at a time."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls
        self._asking: dict[str, set[asyncio.Queue[Record | Exception]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._request = Interruption()

    async def ended(self, ids: Sequence[str], timeout: float | None) -> AsyncGenerator[Record, None]:
        """Yield the records of jobs as they end, until all have.

        Raises TimedOut after `timeout` seconds; NotFound if one of the jobs does not exist.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wire.waited(timeout)
        # An id that is wrong concerns this caller alone, so it is not asked for with those of others.
        ended = await self._calls.call(partial(self._calls.client.look, wait=0.0), ids)
        pending = dict.fromkeys(ids)
        news: asyncio.Queue[Record | Exception] = asyncio.Queue()
        try:
            self._add(pending.keys() - {record["id"] for record in ended}, news)
            for record in ended:
                pending.pop(record["id"], None)
                yield record
            while pending:
                left = None if deadline == math.inf else deadline - loop.time()
                try:
                    # What has come already is told also if the time is over.
                    found = await asyncio.wait_for(news.get(), left) if news.empty() else news.get_nowait()
                except TimeoutError:
                    raise TimedOut(list(pending), timeout or 0.0) from None
                if isinstance(found, Exception):
                    raise found
                pending.pop(found["id"], None)
                yield found
        finally:
            self._drop(pending, news)

    async def end(self) -> None:
        """Stop waiting; the coroutines that wait get a RuntimeError."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._tell_all(RuntimeError("the pool is closed"))

    def _add(self, ids: Iterable[str], news: "asyncio.Queue[Record | Exception]") -> None:
        new = [id for id in ids if id not in self._asking]
        for id in ids:
            self._asking.setdefault(id, set()).add(news)
        if self._asking and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._keep_asking())
        elif new:
            self._request.interrupt()

    def _drop(self, ids: Iterable[str], news: "asyncio.Queue[Record | Exception]") -> None:
        for id in ids:
            asking = self._asking.get(id, set())
            asking.discard(news)
            if not asking:
                self._asking.pop(id, None)
        if not self._asking:
            self._request.interrupt()

    def _tell(self, id: str, news: Record | Exception) -> None:
        for asking in self._asking.pop(id, ()):
            asking.put_nowait(news)

    def _tell_all(self, news: Exception) -> None:
        for id in list(self._asking):
            self._tell(id, news)

    async def _keep_asking(self) -> None:
        wait = LONG_POLL
        try:
            while self._asking:
                try:
                    await self._ask(list(self._asking), wait=wait)
                    wait = LONG_POLL
                except Interrupted:
                    # Jobs came or went, perhaps so often that no request that waits would ever be answered.
                    wait = 0.0
                except Exception as error:
                    # Whatever it is, nobody may wait for ever.
                    self._tell_all(error)
                await asyncio.sleep(pause(len(self._asking)))
        finally:
            # A `Pool` forgets this object with its event loop, so it must not keep the loop by a task that is over.
            self._task = None

    async def _ask(self, ids: list[str], *, wait: float) -> None:
        """Tell of those of these jobs that have ended. Raises Interrupted if others come or go while it waits."""
        request = Interruption()
        if wait:
            self._request = request
        try:
            look = partial(self._calls.client.look, ids, wait=wait)
            ended = await on_thread(self._calls.waits, request, look)
        except NotFound as error:
            if len(ids) == 1:
                self._tell(ids[0], error)
                return
            # A job was deleted meanwhile: find it by halves.
            await self._ask(ids[: len(ids) // 2], wait=0.0)
            await self._ask(ids[len(ids) // 2 :], wait=0.0)
        else:
            for record in ended:
                self._tell(record["id"], record)


async def on_thread(threads: ThreadPoolExecutor, interruption: Interruption, work: Callable[[], R]) -> R:
    """Call `work` on a thread. If the coroutine is cancelled, the request that `work` makes is broken off."""

    def interruptible() -> R:
        with interruption:
            return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(threads, interruptible)
    except asyncio.CancelledError:
        interruption.interrupt()
        running = asyncio.current_task()
        if running is not None and not running.cancelling():
            # The threads have ended before they came to this call. In a task group nobody would see a cancellation.
            raise RuntimeError("the pool is closed") from None
        raise
