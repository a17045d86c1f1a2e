"""`AsyncPool`: the calls of `Pool` as coroutines, each made on a thread by the code of `Pool`."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from leasehold.async_calls import AsyncCalls, on_thread
from leasehold.client import LONG_POLL, MAX_IDS, PROGRESS_POLL, Client, Job, Output
from leasehold.errors import LeaseholdError, TaskFailed
from leasehold.graphs import AsyncSubmittedGraph, GraphRequest, OnFailure, SubmittedGraph
from leasehold.jobs import (
    AnyJob,
    CancelledJob,
    Explanation,
    JobFields,
    JobFilter,
    JobPlan,
    JobRequest,
    ListedJob,
    Progress,
    Record,
    Result,
    ShownJob,
    Sort,
    job_id,
    job_ids,
    progress_news,
)
from leasehold.pool import PAGE, Pool
from leasehold.tasks import periodic
from leasehold.tasks.large_results import LargeResults
from leasehold.tasks.periodic import AppliedSchedule, AppRegistry
from leasehold.tasks.task import SubmittedCall, calls_of, values_of
from leasehold.transport import Interruption
from leasehold.wire import Serialiser

P = ParamSpec("P")
R = TypeVar("R")

#: Threads for requests that follow the output of a job.
FOLLOWERS = 32
#: Seconds for which a request for output is held while more jobs are followed than there are threads for.
SHORT_POLL = 1.0


class AsyncPool(AppRegistry):
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
        large_results: LargeResults | None = None,
    ) -> None:
        super().__init__(app=app, serialiser=serialiser, large_results=large_results)
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
        large_results: LargeResults | None = None,
    ) -> Self:
        """See `Pool.from_env`. `async with` looks the gateway and the token up at once."""
        made = cls.__new__(cls)
        AppRegistry.__init__(made, app=app, serialiser=serialiser, large_results=large_results)
        made._begin(Pool.from_env(data=data, token_file=token_file, timeout=timeout, patience=patience))
        return made

    def _begin(self, pool: Pool) -> None:
        self._pool, self._calls = pool, AsyncCalls(lambda: pool.client)
        self._follows = ThreadPoolExecutor(FOLLOWERS, "leasehold-follow")
        self._followers = 0

    @property
    def client(self) -> Client:
        """All calls that a gateway takes. They block the thread that makes them; `call` makes them on another one."""
        return self._pool.client

    def of_loop(self) -> AsyncCalls:
        return self._calls

    async def close(self) -> None:
        """Close all connections. Calls that are under way fail."""
        await self._calls.stop_waiting()
        self._pool.close()
        await asyncio.to_thread(self._calls.end_threads, wait=True)
        await asyncio.to_thread(self._follows.shutdown, wait=True, cancel_futures=True)

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
        return await self._calls.call(work, *args, **kwargs)

    async def submit(self, command: Sequence[str], **fields: Unpack[JobFields]) -> Job:
        """See `Pool.submit`."""
        return await self.call(self._pool.submit, command, **fields)

    async def plan(self, command: Sequence[str], **fields: Unpack[JobFields]) -> JobPlan:
        """See `Pool.plan`."""
        return await self.call(self._pool.plan, command, **fields)

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
        on_progress: Callable[[str, Progress], object] | None = None,
    ) -> AsyncGenerator[Result, None]:
        """See `Pool.as_completed`. `progress` and `on_progress` are called in the event loop."""
        ids, done = job_ids(jobs), 0
        left = dict.fromkeys(ids)
        news = None if on_progress is None else asyncio.create_task(self._tell_progress(left, on_progress))
        try:
            async with aclosing(self._calls.as_ended(ids, timeout)) as ended:
                async for record in ended:
                    done += 1
                    left.pop(record["id"], None)
                    if progress is not None:
                        progress(done, len(ids))
                    yield self._result(record)
        finally:
            if news is not None:
                news.cancel()
                # An error of `on_progress` is the caller's; one of a request has reached the wait, too.
                with suppress(asyncio.CancelledError, LeaseholdError):
                    await news

    async def _tell_progress(self, left: Mapping[str, None], tell: Callable[[str, Progress], object]) -> None:
        told = progress_news(tell)
        while True:
            if 0 < len(left) <= MAX_IDS:
                for record in await self.call(self.client.read_states, list(left), progress=True):
                    if record.get("progress") is not None:
                        told(record)
            await asyncio.sleep(PROGRESS_POLL)

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
        await self._calls.ended(ids, timeout)
        # On a thread, because large values are read from where they are kept.
        found = await self.call(self.client.results, ids)
        return await self.call(values_of, given, found, return_errors=return_errors)

    async def apply_schedules(self, *, prune: bool = False, take_over: bool = False) -> list[AppliedSchedule]:
        """See `Pool.apply_schedules`."""
        return await self.call(periodic.apply, self, self.client, prune=prune, take_over=take_over)

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
        return await on_thread(self._follows, Interruption(), partial(next, pieces, None))


class AsyncGraph(GraphRequest):
    """A graph to put together and to submit from a coroutine; see `Graph`."""

    def __init__(self, pool: AsyncPool, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._pool = pool

    async def submit(self) -> "AsyncSubmittedGraph":
        """See `Graph.submit`."""
        client = self._pool.client
        answer = await self._pool.call(client.graphs.submit, self.request())
        return AsyncSubmittedGraph(self._pool.of_loop(), SubmittedGraph(client, answer))
