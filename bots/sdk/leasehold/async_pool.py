"""`AsyncPool`: the calls of `Pool` as coroutines.

Each request is made on a thread, by the code of `Pool`, so that retries, deadlines and errors are written once. The
threads are bounded. A coroutine that waits for jobs keeps none: one request at a time asks for the jobs of all of them.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from leasehold.client import LONG_POLL, Client, Job, Output, pause
from leasehold.errors import NotFound, TaskFailed, TimedOut
from leasehold.graphs import GraphRequest, GraphState, Node, OnFailure, SubmittedGraph
from leasehold.interruption import Interrupted, Interruption
from leasehold.jobs import (
    AnyJob,
    CancelledJob,
    Explanation,
    JobFields,
    JobFilter,
    JobRequest,
    ListedJob,
    Record,
    Result,
    ShownJob,
    Sort,
    job_id,
    job_ids,
)
from leasehold.pool import PAGE, Pool
from leasehold.tasks import SubmittedCall, TaskRegistry, calls_of, values_of
from leasehold.wire import Serialiser

if TYPE_CHECKING:
    from leasehold.periodic import AppliedSchedule

P = ParamSpec("P")
R = TypeVar("R")

#: Threads for requests that are answered at once, and for those that follow the output of a job.
CALLS, FOLLOWERS = 8, 32
#: Seconds for which a request for output is held while more jobs are followed than there are threads for.
SHORT_POLL = 1.0


class AsyncPool(TaskRegistry):
    """Calls one pool, through its gateway, from the coroutines of one event loop, and holds the tasks of one app.

    Arguments and errors: see `Pool`. Its tasks have `defer_async` and `batch_async`; `defer` and `batch` would block
    the event loop, and raise RuntimeError.

    A call that is cancelled breaks off its request. A request that had begun may have been executed: a submit that was
    cancelled may have made its jobs. Give `key`, and a repeat returns the same jobs.
    """

    only_async: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float = 10.0,
        patience: float = 30.0,
        insecure: bool = False,
        chance: random.Random | None = None,
        app: str | None = None,
        serialiser: Serialiser | None = None,
    ) -> None:
        super().__init__(app=app, serialiser=serialiser)
        self._begin(Pool(url, token, timeout=timeout, patience=patience, insecure=insecure, chance=chance))

    @classmethod
    def from_env(
        cls,
        *,
        data: str | Path | None = None,
        token_file: str | Path | None = None,
        timeout: float = 10.0,
        patience: float = 30.0,
        app: str | None = None,
        serialiser: Serialiser | None = None,
    ) -> Self:
        """See `Pool.from_env`. `async with` looks the gateway and the token up at once."""
        made = cls.__new__(cls)
        TaskRegistry.__init__(made, app=app, serialiser=serialiser)
        made._begin(Pool.from_env(data=data, token_file=token_file, timeout=timeout, patience=patience))
        return made

    def _begin(self, pool: Pool) -> None:
        self._pool = pool
        self._calls = ThreadPoolExecutor(CALLS, "leasehold-call")
        #: The thread of the one request that waits for jobs.
        self.waits = ThreadPoolExecutor(1, "leasehold-wait")
        self._follows = ThreadPoolExecutor(FOLLOWERS, "leasehold-follow")
        self._followers = 0
        self._watch = _Watch(self)

    @cached_property
    def client(self) -> Client:
        """All calls that a gateway takes. They block the thread that makes them; `call` makes them on another one."""
        return self._pool.client

    def of_loop(self) -> Self:
        return self

    async def close(self) -> None:
        """Close all connections. Calls that are under way fail."""
        await self._watch.end()
        self._pool.close()
        await asyncio.to_thread(self.end_threads, wait=True)

    def end_threads(self, *, wait: bool) -> None:
        """End the threads of requests. Calls that come later fail. wait: until the calls under way have ended."""
        for threads in (self._calls, self.waits, self._follows):
            threads.shutdown(wait=wait, cancel_futures=True)

    async def __aenter__(self) -> Self:
        # A program learns at its start, and not at its first call, that no gateway or token is known.
        _ = self.client
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that makes requests, such as a method of `client`, on a thread."""
        return await _on_thread(self._calls, Interruption(), partial(work, *args, **kwargs))

    async def submit(self, command: Sequence[str], **fields: Unpack[JobFields]) -> Job:
        """See `Pool.submit`."""
        return await self.call(self._pool.submit, command, **fields)

    async def submit_many(self, jobs: Iterable[JobRequest], *, key: str | None = None) -> list[Job]:
        """See `Pool.submit_many`. `jobs` is read on a thread."""
        return await self.call(self._pool.submit_many, jobs, key=key)

    async def wait(self, jobs: AnyJob | Iterable[AnyJob], timeout: float | None = None) -> list[Result]:
        """See `Pool.wait`."""
        ids = job_ids(jobs)
        async with aclosing(self.as_completed(ids, timeout=timeout)) as results:
            ended = {result.id: result async for result in results}
        return [ended[id] for id in ids]

    async def results(self, jobs: AnyJob | Iterable[AnyJob]) -> list[Result]:
        """See `Pool.results`."""
        return [self._result(record) for record in await self.call(self.client.states, job_ids(jobs))]

    async def result(self, job: AnyJob, timeout: float | None = None) -> Result:
        """See `Pool.result`."""
        (found,) = await self.wait(job, timeout)
        return found

    async def as_completed(
        self,
        jobs: AnyJob | Iterable[AnyJob],
        *,
        timeout: float | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> AsyncGenerator[Result, None]:
        """See `Pool.as_completed`. `progress` is called in the event loop."""
        ids, done = job_ids(jobs), 0
        async with aclosing(self._watch.ended(ids, timeout)) as ended:
            async for record in ended:
                done += 1
                if progress is not None:
                    progress(done, len(ids))
                yield self._result(record)

    @overload
    async def gather(
        self, jobs: Iterable[SubmittedCall[R]], *, timeout: float | None = None, return_errors: Literal[False] = False
    ) -> list[R]: ...

    @overload
    async def gather(
        self, jobs: Iterable[SubmittedCall[R]], *, timeout: float | None = None, return_errors: Literal[True]
    ) -> list[R | TaskFailed]: ...

    async def gather(
        self, jobs: Iterable[SubmittedCall[Any]], *, timeout: float | None = None, return_errors: bool = False
    ) -> list[Any]:
        """See `Pool.gather`."""
        given = calls_of(jobs)
        ids = list(dict.fromkeys(job.id for job in given))
        await self.ended(ids, timeout)
        return values_of(given, await self.call(self.client.results, ids), return_errors=return_errors)

    async def apply_schedules(self, *, prune: bool = False, take_over: bool = False) -> "list[AppliedSchedule]":
        """See `Pool.apply_schedules`."""
        from leasehold import periodic  # needs cronsim, which most programs do not

        return await self.call(periodic.apply, self, self.client, prune=prune, take_over=take_over)

    async def ended(self, ids: Sequence[str], timeout: float | None = None) -> dict[str, Record]:
        """Wait until all jobs have ended; return the gateway's records by their ids. Raises TimedOut and NotFound."""
        async with aclosing(self._watch.ended(ids, timeout)) as ended:
            return {record["id"]: record async for record in ended}

    async def cancel(self, jobs: AnyJob | Iterable[AnyJob], *, all_submissions: bool = False) -> list[CancelledJob]:
        """See `Pool.cancel`."""
        return await self.call(self._pool.cancel, jobs, all_submissions=all_submissions)

    async def explain(self, job: AnyJob) -> Explanation:
        """See `Pool.explain`."""
        return await self.call(self._pool.explain, job)

    async def output(self, job: AnyJob) -> bytes:
        """See `Pool.output`. `Result.output` would block the event loop, and raises RuntimeError there."""
        return await self.call(self._pool.output, job)

    async def logs(self, job: AnyJob, *, follow: bool = False) -> AsyncIterator[bytes]:
        """See `Pool.logs`. Up to 32 jobs are followed at once; the output of more of them comes with a delay."""
        if not follow:
            yield await self.output(job)
            return
        self._followers += 1
        try:
            poll = LONG_POLL if self._followers <= FOLLOWERS else SHORT_POLL
            pieces = self.client.follow(job_id(job), poll=poll, idle=True)
            while (piece := await self._next(pieces)) is not None:
                if piece.data:
                    yield piece.data
        finally:
            self._followers -= 1

    async def job(self, job: AnyJob) -> ShownJob:
        """See `Pool.job`."""
        return await self.call(self._pool.job, job)

    async def jobs(
        self,
        *,
        sort: Sort | None = None,
        order: Literal["asc", "desc"] | None = None,
        limit: int | None = None,
        **wanted: Unpack[JobFilter],
    ) -> AsyncIterator[ListedJob]:
        """See `Pool.jobs`."""
        found = self._pool.jobs(sort=sort, order=order, limit=limit, **wanted)
        while page := await self.call(lambda: list(islice(found, PAGE))):
            for job in page:
                yield job

    def graph(
        self,
        name: str,
        *,
        instance: str | None = None,
        key: str | None = None,
        priority: int | None = None,
        on_failure: OnFailure | None = None,
        fair_share: bool | None = None,
    ) -> "AsyncGraph":
        """See `Pool.graph`."""
        options: Mapping[str, Any] = {
            "instance": instance,
            "key": key,
            "priority": priority,
            "on_failure": on_failure,
            "fair_share": fair_share,
        }
        return AsyncGraph(self, name, options)

    def _result(self, record: Record) -> Result:
        return Result.of(record, read=self._read_outside)

    def _read_outside(self, job: str) -> bytes:
        """Read output for `Result.output` unless that would stop the event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self.client.read_output(job)
        raise RuntimeError("Result.output would block the event loop: use `await pool.output(job)`")

    async def _next(self, pieces: Iterator[Output]) -> Output | None:
        return await _on_thread(self._follows, Interruption(), partial(next, pieces, None))


def coroutines_of(pool: Pool) -> AsyncPool:
    """Return the calls of this pool as coroutines. They use its connections; who closes the pool ends both."""
    made = object.__new__(AsyncPool)
    TaskRegistry.__init__(made)
    made._begin(pool)
    return made


class AsyncGraph(GraphRequest):
    """A graph to put together and to submit from a coroutine; see `Graph`."""

    def __init__(self, pool: AsyncPool, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._pool = pool

    async def submit(self) -> "AsyncSubmittedGraph":
        """See `Graph.submit`."""
        client = self._pool.client
        answer = await self._pool.call(client.graphs.submit, self.request())
        return AsyncSubmittedGraph(self._pool, SubmittedGraph(client, answer))


class AsyncSubmittedGraph:
    """A graph that was submitted from a coroutine; see `SubmittedGraph`."""

    def __init__(self, pool: AsyncPool, graph: SubmittedGraph) -> None:
        self._pool, self._graph = pool, graph
        self.id, self.name, self.created = graph.id, graph.name, graph.created
        self.jobs, self.warnings = graph.jobs, graph.warnings

    async def state(self) -> GraphState:
        """See `SubmittedGraph.state`."""
        return await self._pool.call(self._graph.state)

    async def wait(self, timeout: float | None = None) -> GraphState:
        """See `SubmittedGraph.wait`."""
        loop = asyncio.get_running_loop()
        deadline = math.inf if timeout is None else loop.time() + timeout
        rest = 0.05
        while True:  # no thread is kept between two looks
            try:
                return await self._pool.call(self._graph.wait, 0.0)
            except TimedOut as going:
                left = deadline - loop.time()
                if left <= 0:
                    raise TimedOut(going.pending, timeout or 0.0) from None
                await asyncio.sleep(min(left, rest))
                rest = min(1.0, 2 * rest)

    async def results(self) -> Mapping[Node, Result]:
        """See `SubmittedGraph.results`."""
        found = await self._pool.results(self.jobs.values())
        return dict(zip(self.jobs, found, strict=True))

    async def cancel(self) -> int:
        """See `SubmittedGraph.cancel`."""
        return await self._pool.call(self._graph.cancel)


class _Watch:
    """Waits for the jobs of all coroutines, by one request at a time."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._asking: dict[str, set[asyncio.Queue[Record | Exception]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._request = Interruption()

    async def ended(self, ids: Sequence[str], timeout: float | None) -> AsyncGenerator[Record, None]:
        """Yield the records of jobs as they end, until all have.

        Raises TimedOut after `timeout` seconds; NotFound if one of the jobs does not exist.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        # An id that is wrong concerns this caller alone, so it is not asked for with those of others.
        ended = await self._pool.call(partial(self._pool.client.look, wait=0.0), ids)
        pending = dict.fromkeys(ids)
        news: asyncio.Queue[Record | Exception] = asyncio.Queue()
        try:
            self._add(pending.keys() - {record["id"] for record in ended}, news)
            for record in ended:
                pending.pop(record["id"], None)
                yield record
            while pending:
                left = None if deadline is None else deadline - loop.time()
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
        try:
            while self._asking:
                try:
                    await self._ask(list(self._asking), wait=LONG_POLL)
                except Interrupted:
                    pass  # jobs came or went
                except Exception as error:
                    # Whatever it is, nobody may wait for ever.
                    self._tell_all(error)
                await asyncio.sleep(pause(len(self._asking)))
        finally:
            # A `Pool` forgets this object with its event loop, so it must not keep the loop by a task that is over.
            self._task = None

    async def _ask(self, ids: list[str], *, wait: float) -> None:
        self._request = Interruption()
        try:
            look = partial(self._pool.client.look, ids, wait=wait)
            ended = await _on_thread(self._pool.waits, self._request, look)
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


async def _on_thread(threads: ThreadPoolExecutor, interruption: Interruption, work: Callable[[], R]) -> R:
    """Call `work` on a thread. If the coroutine is cancelled, the request that `work` makes is broken off."""

    def interruptible() -> R:
        with interruption:
            return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(threads, interruptible)
    except asyncio.CancelledError:
        interruption.interrupt()
        raise
