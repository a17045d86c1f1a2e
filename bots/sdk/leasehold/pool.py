"""`Pool`: a program's way to a pool of workers. It is a layer of types over `Client`, which does every call."""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary

from leasehold.client import Client, Job
from leasehold.credentials import Credentials
from leasehold.errors import TaskFailed, TimedOut
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
    query,
    request,
    requests,
)
from leasehold.states import JobState
from leasehold.tasks import periodic
from leasehold.tasks.large_results import LargeResults
from leasehold.tasks.periodic import AppliedSchedule, AppRegistry
from leasehold.tasks.task import SubmittedCall, calls_of, values_of
from leasehold.wire import Serialiser

if TYPE_CHECKING:
    from leasehold.async_calls import AsyncCalls
    from leasehold.graphs import Graph, OnFailure

R = TypeVar("R")

#: Jobs that are read ahead by an iterator over a list.
PAGE = 200


class Pool(AppRegistry):
    """Calls one pool, through its gateway, and holds the tasks of one app; several threads may share one.

    url: `http://…`, `https://…` or `http+unix://` followed by the socket's absolute path.
    timeout: seconds for one request, in addition to the time for which a request may be held.
    patience: seconds for which lost connections and the statuses 429, 502, 503 and 504 are retried, with full jitter.
    insecure: a token may be sent unencrypted to another machine.
    app, serialiser, large_results: see TaskRegistry.

    Every call raises a LeaseholdError: Unauthorised and Forbidden for a token that may not make it, NotFound for a job
    that does not exist or belongs to another instance, NoAnswer if the patience ends.
    """

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
        checked = Credentials(url=url, insecure=insecure).address()
        chance = chance or random.SystemRandom()
        self._connect: Callable[[], Client] = partial(
            Client, checked, token, chance=chance, timeout=timeout, patience=patience
        )
        # A wrong token is refused here, and not at the first call.
        _ = self._client

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
        """Return the pool that the environment names, in the way of the command line.

        The address: LEASEHOLD_URL, else `<data>/gateway.url`. The token: the file `token_file`, LEASEHOLD_TOKEN, else
        `<data>/operator.token`. The data directory: `data`, LEASEHOLD_DATA, else that of `leasehold up`.

        They are looked up when the pool is first called, because the processes that run tasks import the module of
        their pool without them. That call raises BadInput if one of them is unknown, if others could read the token's
        file, or if the token would be sent unencrypted to another machine and LEASEHOLD_INSECURE does not allow it.
        """
        found = Credentials(token_file=_path(token_file), data=_path(data))

        def connect() -> Client:
            chance = random.SystemRandom()
            return Client(found.address(), found.token(), chance=chance, timeout=timeout, patience=patience)

        made = cls.__new__(cls)
        AppRegistry.__init__(made, app=app, serialiser=serialiser, large_results=large_results)
        made._connect = connect
        return made

    @property
    def client(self) -> Client:
        """All calls that a gateway takes. Their answers are its JSON objects. Raises as `from_env` says."""
        return Client.substitute or self._client

    @cached_property
    def _client(self) -> Client:
        return self._connect()

    @cached_property
    def _of_loops(self) -> "WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncCalls]":
        return WeakKeyDictionary()

    def of_loop(self) -> "AsyncCalls":
        """The calls of this pool as coroutines of the event loop that runs; their threads end with the loop."""
        from leasehold.async_calls import AsyncCalls  # most programs that make a Pool have no event loop

        loop = asyncio.get_running_loop()
        if loop not in self._of_loops:
            self._of_loops[loop] = AsyncCalls(lambda: self.client)
        return self._of_loops[loop]

    def close(self) -> None:
        """Close all connections. Calls of other threads and of coroutines that are under way fail."""
        if "_client" in vars(self):
            self._client.close()
        if "_of_loops" in vars(self):
            for calls in self._of_loops.values():
                calls.end_threads(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, command: Sequence[str], **fields: Unpack[JobFields]) -> Job:
        """Submit one job: a program with its arguments, started without a shell.

        Without a `key` the client draws a random one, so that its own retries make no second job. Raises BadInput with
        the name of the field; Conflict `key_reused` for a key that another request used; QueueFull.
        """
        return self.client.submit_one(request(command, fields))

    def plan(self, command: Sequence[str], **fields: Unpack[JobFields]) -> JobPlan:
        """Tell what `submit` would do, and submit nothing. Raises as it does."""
        return JobPlan.of(self.client.plan_one(request(command, fields)))

    def submit_many(self, jobs: Iterable[JobRequest], *, key: str | None = None) -> list[Job]:
        """Submit job requests; the answers have their order.

        More than 10,000 jobs or 8 MB are sent in parts, each of which is accepted whole or not at all. key: the job
        with number N, from 0, gets the key `KEY-N` unless it has one, so that a repeat of the same call makes no second
        job.
        Raises as `submit`; `submitted` of the error holds the ids of the jobs of earlier parts.
        """
        if key is None:
            return self.client.submit(requests(jobs))
        return self.client.submit({"key": f"{key}-{n}", **job} for n, job in zip(count(), requests(jobs)))

    def wait(self, jobs: AnyJob | Iterable[AnyJob], timeout: float | None = None) -> list[Result]:
        """Wait until all jobs are final; return their results in the given order.

        Raises TimedOut after `timeout` seconds; the jobs go on.
        """
        ids = job_ids(jobs)
        ended = {record["id"]: record for record in self.client.wait(ids, timeout=timeout, together=True)}
        _refuse_unfinished(ids, ended, timeout)
        return [self._result(ended[id]) for id in ids]

    def results(self, jobs: AnyJob | Iterable[AnyJob]) -> list[Result]:
        """Return the state of each job, and how it ended if it has, in the given order, without waiting."""
        return [self._result(record) for record in self.client.states(job_ids(jobs))]

    def result(self, job: AnyJob, timeout: float | None = None) -> Result:
        """Wait until one job is final; return its result. Raises TimedOut."""
        (found,) = self.wait(job, timeout)
        return found

    @overload
    def gather(
        self, jobs: Iterable[SubmittedCall[R]], *, timeout: float | None = None, return_errors: Literal[False] = False
    ) -> list[R]: ...

    @overload
    def gather(
        self, jobs: Iterable[SubmittedCall[R]], *, timeout: float | None = None, return_errors: Literal[True]
    ) -> list[R | TaskFailed]: ...

    def gather(
        self, jobs: Iterable[SubmittedCall[Any]], *, timeout: float | None = None, return_errors: bool = False
    ) -> list[Any]:
        """Wait until the jobs of tasks have ended and return what their functions returned, in the given order.

        The results are read up to 1,000 at a time. return_errors: put a TaskFailed into the list for each job that has
        no value; otherwise the first one is raised, once all have ended. Raises TimedOut after `timeout` seconds; the
        jobs go on.
        """
        given = calls_of(jobs)
        ids = list(dict.fromkeys(job.id for job in given))
        ended = {record["id"]: record for record in self.client.wait(ids, timeout=timeout, together=True)}
        _refuse_unfinished(ids, ended, timeout)
        return values_of(given, self.client.results(ids), return_errors=return_errors)

    def as_completed(
        self,
        jobs: AnyJob | Iterable[AnyJob],
        *,
        timeout: float | None = None,
        progress: Callable[[int, int], object] | None = None,
        on_progress: Callable[[str, Progress], object] | None = None,
    ) -> Iterator[Result]:
        """Yield the result of each job once it is final, in the order in which they end.

        The order is exact for up to 1,000 jobs. Of more, jobs that end within seconds of each other may change places.
        progress: called before each yield with the number of jobs that have ended and of all. on_progress: called with
        the id of a running job and what it tells of its progress, when that has changed, about once a second, if at
        most 1,000 jobs are left. Raises TimedOut after `timeout` seconds; the jobs go on.
        """
        ids = job_ids(jobs)
        ended: dict[str, Record] = {}
        told = None if on_progress is None else progress_news(on_progress)
        for record in self.client.wait(ids, timeout=timeout, told=told):
            ended[record["id"]] = record
            if progress is not None:
                progress(len(ended), len(ids))
            yield self._result(record)
        _refuse_unfinished(ids, ended, timeout)

    def cancel(self, jobs: AnyJob | Iterable[AnyJob], *, all_submissions: bool = False) -> list[CancelledJob]:
        """Cancel waiting jobs, and ask bots to stop running ones.

        Raises NotFound if none of the jobs exists, Conflict `already_final` if all of them had ended before by
        themselves. A job that other submissions share goes on, unless an operator cancels with `all_submissions`.
        """
        answers = self.client.cancel(job_ids(jobs), all_submissions=all_submissions)
        return [
            CancelledJob(each["id"], None if each["state"] is None else JobState(each["state"]), each["changed"])
            for each in answers
        ]

    def explain(self, job: AnyJob) -> Explanation:
        """Return why a job runs where it runs, or why it does not run and what would start it."""
        found = self.client.explain(job_id(job))
        return Explanation(
            id=found["id"],
            state=JobState(found["state"]),
            sentence=found["sentence"],
            change=tuple(found["change"]),
            record=found,
        )

    def output(self, job: AnyJob) -> bytes:
        """Return the output that the newest attempt has so far: standard output and error in the order of writing."""
        return self.client.read_output(job_id(job))

    def logs(self, job: AnyJob, *, follow: bool = False) -> Iterator[bytes]:
        """Yield the output of the newest attempt, in pieces. follow: go on as it is written, until the job is final.

        When a new attempt begins, the pieces start again at its first byte; `Pool.client.follow` says for each piece
        to which attempt it belongs.
        """
        pieces = self.client.follow(job_id(job)) if follow else self.client.written(job_id(job))
        return (piece.data for piece in pieces if piece.data)

    def job(self, job: AnyJob) -> ShownJob:
        """Return everything about one job."""
        return ShownJob.of(self.client.show(job_id(job)))

    def jobs(
        self,
        *,
        sort: Sort | None = None,
        order: Literal["asc", "desc"] | None = None,
        limit: int | None = None,
        **wanted: Unpack[JobFilter],
    ) -> Iterator[ListedJob]:
        """Yield the jobs that pass a filter, by default the newest first. limit: the most jobs; None = all.

        Pages are read as the iterator advances, so jobs that change meanwhile may be missing.
        """
        cursor, left = None, limit
        asked = query(wanted) | {"sort": sort, "order": order}
        while left is None or left > 0:
            page = self.client.list(limit=PAGE if left is None else min(left, PAGE), cursor=cursor, **asked)
            yield from map(ListedJob.of, page.jobs)
            cursor, left = page.next, None if left is None else left - len(page.jobs)
            if cursor is None:
                return

    def graph(
        self,
        name: str,
        *,
        instance: str | None = None,
        key: str | None = None,
        priority: int | None = None,
        on_failure: "OnFailure | None" = None,
        fair_share: bool | None = None,
    ) -> "Graph":
        """Begin a graph of jobs that depend on each other; add its nodes, then submit it.

        on_failure: what a node does if one that it depends on does not succeed; None = it stays blocked.
        priority: of nodes that have none of their own. fair_share: divide the pool between this graph and others.
        """
        from leasehold.graphs import Graph  # most programs have none

        options: Mapping[str, Any] = {
            "instance": instance,
            "key": key,
            "priority": priority,
            "on_failure": on_failure,
            "fair_share": fair_share,
        }
        return Graph(self.client, name, options)

    def apply_schedules(self, *, prune: bool = False, take_over: bool = False) -> list[AppliedSchedule]:
        """Make the pool's schedules of this app those that `periodic` declares, all or none; tell what became of each.

        Import the modules that declare them first. prune: remove what the app declared before and declares no longer.
        take_over: change schedules that a command has set or another app declares, too. Raises Conflict
        `schedule_owned`, which names such schedules, without it.
        """
        return periodic.apply(self, self.client, prune=prune, take_over=take_over)

    def _result(self, record: Record) -> Result:
        return Result.of(record, read=self.client.read_output)


def _refuse_unfinished(ids: Sequence[str], ended: Mapping[str, Record], timeout: float | None) -> None:
    if pending := [id for id in ids if id not in ended]:
        raise TimedOut(pending, timeout or 0.0)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
