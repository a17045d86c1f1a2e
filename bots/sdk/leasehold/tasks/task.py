"""A task: a function that a pool may run, the calls that submit it as jobs, and the registry of an app.

A call of a task is an ordinary job. Its command is `leasehold-task MODULE:POOL TASK`, its standard input is JSON with
`args` and `kwargs`, and it requires the property `app` of its bot.

One module because a task, the job of its call and the registry that holds it name each other.
"""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

from leasehold.client import Client, Job
from leasehold.errors import BadInput, TaskFailed, TimedOut
from leasehold.jobs import AnyJob, ListedJob, job_id
from leasehold.tasks.arguments import (
    Arguments,
    check_parameters,
    concurrency_lock,
    decode_result,
    dedup_key,
    encode_call,
)
from leasehold.tasks.large_results import LargeResults
from leasehold.tasks.options import OF_UNIQUE, TaskOptions, request_fields
from leasehold.transport import Record
from leasehold.wire import COMMAND, MAX_DELAY, PROPERTY, Hinting, JsonSerialiser, Serialiser

if TYPE_CHECKING:
    from leasehold.async_calls import AsyncCalls

#: What Celery's users write for calls one after another.
IN_TURN = {"|": "calls one after another are leasehold.chain(first.s(1), second.s())"}

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
#: Types of the first parameters of a task whose calls are submitted together.
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
T1 = TypeVar("T1", contravariant=True)
T2 = TypeVar("T2", contravariant=True)
T3 = TypeVar("T3", contravariant=True)
T4 = TypeVar("T4", contravariant=True)
#: The named arguments of one call. Their types are not checked before the call is encoded.
Named: TypeAlias = Mapping[str, Any]
#: Calls of a task that takes one, two, three or four arguments by their places.
One: TypeAlias = Iterable[tuple[A] | Named]
Two: TypeAlias = Iterable[tuple[A, B] | tuple[A] | Named]
Three: TypeAlias = Iterable[tuple[A, B, C] | tuple[A, B] | tuple[A] | Named]
Four: TypeAlias = Iterable[tuple[A, B, C, D] | tuple[A, B, C] | tuple[A, B] | tuple[A] | Named]


class TaskRegistry:
    """The tasks of one app. `AppRegistry` has its schedules too, and `Pool` and `AsyncPool` derive from that.

    app: the value of the property `app` that bots of these tasks offer; default the top-level package of the module.
    serialiser: makes JSON of all arguments and results, in the place of the codecs of their annotations.
    large_results: keeps values of more than 64 KiB; None = they are refused.
    """

    #: The pool has coroutines for calls: its tasks have `defer_async` and `batch_async`, and not `defer` and `batch`.
    only_async: ClassVar[bool] = False

    if TYPE_CHECKING:

        @property
        def client(self) -> Client: ...

        def of_loop(self) -> AsyncCalls:
            """The calls of this pool as coroutines of the event loop that runs."""

    def __init__(
        self,
        *,
        app: str | None = None,
        serialiser: Serialiser | None = None,
        large_results: LargeResults | None = None,
    ) -> None:
        self.app = app
        self.serialiser: Serialiser = serialiser or JsonSerialiser()
        self.large_results = large_results
        #: Tasks by name.
        self.tasks: dict[str, Task[Any, Any]] = {}

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> "AsyncTask[P, R]": ...

    @overload
    def task(self, function: Callable[P, R], /) -> "Task[P, R]": ...

    @overload
    def task(self, *, name: str | None = None, **options: Unpack[TaskOptions]) -> "TaskDecorator": ...

    def task(self, *functions: Callable[..., Any], **options: Any) -> Any:
        """Make a function of a module a task, as a decorator with or without arguments.

        name: default the function's module and name; jobs that wait hold it, so a function that is renamed keeps the
        old one here. label: of its jobs, 64 bytes. retries: how often a call that failed is tried again; 0 = never. A
        call whose bot was lost is tried again in any case. timeout: seconds of run time. properties: what the bot must
        offer in addition to the app. priority: lower = more urgent. unique: while a call is unfinished, an equal one
        joins it; a function of the arguments returns the text by which they are compared. concurrency: a key and how
        many calls with one key run at once, such as ("customer-{customer}", 2); the key is a lock of the instance, and
        an operator who has set its slots decides instead of the number. Any other field of a job
        request may be given as well, such as `locks` or `metadata`. Raises BadInput, also for an option that there is
        not.
        """
        name = options.pop("name", None)
        if not isinstance(name, str | None):
            raise BadInput("name", f"is a text, not a '{type(name).__name__}'")
        if functions:
            return self._register(functions[0], name, options)
        request_fields(**options)
        return lambda function: self._register(function, name, options)

    def _register(self, function: Callable[..., Any], name: str | None, options: Mapping[str, Any]) -> "Task[Any, Any]":
        if not inspect.isroutine(function):
            kind = type(function).__name__
            raise BadInput("task", f"decorates a function, not a '{kind}'; its options have names, such as name=…")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise BadInput("task", f"'{function.__qualname__}' yields values, and a task returns one")
        if "<" in function.__qualname__:
            raise BadInput("task", f"'{function.__qualname__}' is not a function of a module, so no bot can import it")
        called = name or f"{module_name(function.__module__)}.{function.__qualname__}"
        known = self.tasks.get(called)
        # A module that is imported again has the same function again.
        if known is not None and _place(known.function) != _place(function):
            raise BadInput("name", f"'{called}' is the name of another task, '{'.'.join(_place(known.function))}'")
        cls: type[Task[Any, Any]] = AsyncTask if inspect.iscoroutinefunction(function) else Task
        task = self.tasks[called] = cls(self, function, called, options)
        return task

    def fetch_result(self, reference: Any) -> bytes:
        """Return a large value that a task of this pool has kept. Raises BadInput if the pool does not know where."""
        if self.large_results is None:
            raise BadInput("large_results", "is not given to this pool, and a task has kept a large value there")
        return self.large_results.fetch(reference)

    def place(self, module: str) -> str:
        """Return `MODULE:ATTRIBUTE` by which a bot imports this pool with the tasks of a module. Raises BadInput."""
        shown = module_name(module)
        for attribute, value in vars(sys.modules[module]).items():
            if value is self:
                return f"{shown}:{attribute}"
        raise BadInput(
            "pool", f"is no variable of the module '{shown}', so no bot can find it there; import it by name"
        )

    def app_of(self, module: str) -> str:
        """Return the name of the app, for tasks of this module."""
        return self.app or module_name(module).partition(".")[0]


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def module_name(module: str) -> str:
    """Return the name by which another process imports a module: that of its file, if it is the main program."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        found: str = spec.name
        return found
    if file is None:
        raise BadInput("task", "is defined in no file, so no bot can import it")
    return Path(file).stem


class TaskDecorator(Protocol):
    """What makes a function a task with the options that were given."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> "AsyncTask[P, R]": ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> "Task[P, R]": ...


class Takes0(Protocol[R]):
    """For type checkers alone: a task that can be called with no argument."""

    def defer(self) -> "TaskJob[R]": ...


class Takes1(Protocol[T1, R]):
    """For type checkers alone: a task that can be called with one argument by its place."""

    def defer(self, a: T1, /) -> "TaskJob[R]": ...


class Takes2(Protocol[T1, T2, R]):
    """For type checkers alone: a task that can be called with two arguments by their places."""

    def defer(self, a: T1, b: T2, /) -> "TaskJob[R]": ...


class Takes3(Protocol[T1, T2, T3, R]):
    """For type checkers alone: a task that can be called with three arguments by their places."""

    def defer(self, a: T1, b: T2, c: T3, /) -> "TaskJob[R]": ...


class Takes4(Protocol[T1, T2, T3, T4, R]):
    """For type checkers alone: a task that can be called with four arguments by their places."""

    def defer(self, a: T1, b: T2, c: T3, d: T4, /) -> "TaskJob[R]": ...


class TakesMore(Protocol[P, R]):
    """For type checkers alone: a task that can be called with these arguments."""

    def defer(self, *args: P.args, **kwargs: P.kwargs) -> "TaskJob[R]": ...


class Task(Hinting, Generic[P, R]):
    """A function that a pool can run as a job. Calling the task calls the function, here and now.

    P: its parameters. R: its value, also if it is an `async def`.
    """

    def __init__(
        self, registry: TaskRegistry, function: Callable[P, Any], name: str, options: Mapping[str, Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.name, self.registry, self._options = function, name, registry, dict(options)
        #: The function is an `async def`.
        self.is_async = inspect.iscoroutinefunction(function)
        request_fields(**self._options)
        check_parameters(function, self._options.get("concurrency"))

    def __reduce__(self) -> Any:
        """Let a task go to another process, such as a worker of `concurrent.futures`, which imports its module."""
        named: Any = sys.modules.get(self.function.__module__)
        for name in self.function.__qualname__.split("."):
            named = getattr(named, name, None)
        if isinstance(named, Task) and named is not self and named.name == self.name:
            return _with_options, (named, self._options)
        return self.function.__qualname__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        returned: R = self.function(*args, **kwargs)
        return returned

    _hints = (
        "a task",
        dict.fromkeys(
            ("delay", "apply_async", "enqueue", "send"), "task.defer(…) submits a call, task.after(60).defer(…) later"
        )
        | {"AsyncResult": "task.job(ID) is the job of an earlier call"},
    )

    def using(self, **options: Unpack[TaskOptions]) -> Self:
        """Return the same task with other options for its calls: those of the decorator, and `key`. Raises BadInput."""
        own = self._options
        if not options.get("unique", True):
            own = {name: value for name, value in own.items() if name not in OF_UNIQUE}
        return type(self)(self.registry, self.function, self.name, {**own, **options})

    def at(self, time: datetime) -> Self:
        """Return the same task, whose calls start at this time at the earliest.

        Raises BadInput for what is no time, or a time without a zone.

        A time that is past lets them start at once; one of over a year ahead is refused where the call is submitted.
        """
        if not isinstance(time, datetime):
            raise BadInput("time", f"must be a datetime with a zone, not {time!r:.60}")
        if time.tzinfo is None:
            raise BadInput("time", f"{time.isoformat()} has no zone: use datetime(…, tzinfo=ZoneInfo('Europe/Berlin'))")
        return self._starting(schedule_after=time.isoformat())

    def after(self, seconds: float | timedelta) -> Self:
        """Return the same task with a delay: each call starts at the earliest these seconds after its submit.

        Raises BadInput for what is no number of at least 0, and for more than a year.
        """
        wait = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0:
            raise BadInput("after", f"takes a number of seconds of at least 0, or a timedelta, not {seconds!r:.40}")
        if wait > MAX_DELAY:
            raise BadInput("after", f"takes at most a year, not {seconds!r:.40}")
        return self._starting(delay=wait)

    def _starting(self, **start: str | float) -> Self:
        others = {name: value for name, value in self._options.items() if name not in ("schedule_after", "delay")}
        return type(self)(self.registry, self.function, self.name, others | start)

    def defer(self, *args: P.args, **kwargs: P.kwargs) -> "TaskJob[R]":
        """Submit a call as a job.

        Raises TypeError if the function cannot be called so, BadInput with the name of an argument that is no JSON;
        then nothing has been sent. Raises what `Client.submit` raises; RuntimeError for a task of an `AsyncPool`.
        """
        self._refuse_to_block("defer")
        submitted = self.registry.client.submit_one(self.request(*args, **kwargs))
        return TaskJob(submitted.id, submitted.created, task=self)

    @overload
    def batch(self: Takes0[V], calls: Iterable[tuple[()] | Named]) -> "list[TaskJob[V]]": ...

    @overload
    def batch(self: Takes1[A, V], calls: One[A]) -> "list[TaskJob[V]]": ...

    @overload
    def batch(self: Takes2[A, B, V], calls: Two[A, B]) -> "list[TaskJob[V]]": ...

    @overload
    def batch(self: Takes3[A, B, C, V], calls: Three[A, B, C]) -> "list[TaskJob[V]]": ...

    @overload
    def batch(self: Takes4[A, B, C, D, V], calls: Four[A, B, C, D]) -> "list[TaskJob[V]]": ...

    @overload
    def batch(
        self: TakesMore[Concatenate[A, B, C, D, E, ...], V], calls: Iterable[Arguments]
    ) -> "list[TaskJob[V]]": ...

    @overload
    def batch(self, calls: Iterable[Named]) -> "list[TaskJob[R]]": ...

    def batch(self, calls: Iterable[Arguments]) -> "list[TaskJob[Any]]":
        """Submit many calls in one request; a tuple holds the arguments of one, a mapping its named arguments.

        With `key` among the options call N, from 0, has the key `KEY-N`, so that a repeat makes no second jobs.
        Raises as `defer` does, with the number of the call before the name of the argument.
        """
        self._refuse_to_block("batch")
        submitted = self.registry.client.submit(self._requests(calls))
        return [TaskJob(job.id, job.created, task=self) for job in submitted]

    async def defer_async(self, *args: P.args, **kwargs: P.kwargs) -> "AsyncTaskJob[R]":
        """Submit a call as a job, from a coroutine, whichever kind of pool the task has. Raises as `defer` does."""
        pool = self.registry.of_loop()
        submitted = await pool.call(pool.client.submit_one, self.request(*args, **kwargs))
        return AsyncTaskJob(submitted.id, submitted.created, task=self)

    @overload
    async def batch_async(self: Takes0[V], calls: Iterable[tuple[()] | Named]) -> "list[AsyncTaskJob[V]]": ...

    @overload
    async def batch_async(self: Takes1[A, V], calls: One[A]) -> "list[AsyncTaskJob[V]]": ...

    @overload
    async def batch_async(self: Takes2[A, B, V], calls: Two[A, B]) -> "list[AsyncTaskJob[V]]": ...

    @overload
    async def batch_async(self: Takes3[A, B, C, V], calls: Three[A, B, C]) -> "list[AsyncTaskJob[V]]": ...

    @overload
    async def batch_async(self: Takes4[A, B, C, D, V], calls: Four[A, B, C, D]) -> "list[AsyncTaskJob[V]]": ...

    @overload
    async def batch_async(
        self: TakesMore[Concatenate[A, B, C, D, E, ...], V], calls: Iterable[Arguments]
    ) -> "list[AsyncTaskJob[V]]": ...

    @overload
    async def batch_async(self, calls: Iterable[Named]) -> "list[AsyncTaskJob[R]]": ...

    async def batch_async(self, calls: Iterable[Arguments]) -> "list[AsyncTaskJob[Any]]":
        """Submit many calls in one request, from a coroutine; see `batch`. `calls` is read on a thread."""
        pool = self.registry.of_loop()
        client = pool.client
        submitted = await pool.call(lambda: client.submit(self._requests(calls)))
        return [AsyncTaskJob(job.id, job.created, task=self) for job in submitted]

    def _refuse_to_block(self, call: str) -> None:
        if self.registry.only_async:
            name = self.function.__name__
            wait = "" if call == "job" else "await "
            raise RuntimeError(f"a task of an AsyncPool has no `{call}`: use `{wait}{name}.{call}_async(…)`")

    def defer_in(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Submit a call in the transaction of a connection to the pool's database; see `transaction.submit_in`.

        Returns a TaskJob, for a task of an `AsyncPool` an AsyncTaskJob, or, for an asynchronous connection, an
        awaitable of one. The job exists once the caller has committed.
        """
        return self._submit_in(connection, [self.request(*args, **kwargs)], lambda jobs: jobs[0])

    def batch_in(self, connection: Any, calls: Iterable[Arguments]) -> Any:
        """Submit many calls in the transaction of a connection: what `defer_in` is to `defer`.

        Returns a list of jobs, or, for an asynchronous connection, an awaitable of one.
        """
        return self._submit_in(connection, self._requests(calls), list)

    def _submit_in(self, connection: Any, requests: list[Record], then: Callable[[list[Any]], Any]) -> Any:
        from leasehold.transaction import submit_in

        job = AsyncTaskJob if self.registry.only_async else TaskJob

        def jobs(created: list[tuple[str, bool]]) -> Any:
            return then([job(name, is_new, task=self) for name, is_new in created])

        return submit_in(connection, requests, jobs)

    def job(self, job: AnyJob) -> "TaskJob[R]":
        """Return the job of an earlier call of this task, by its id or what else names it, such as for its value.

        Nothing is asked before that is used. Raises BadInput for a text that is no id; RuntimeError for a task of an
        `AsyncPool`.
        """
        self._refuse_to_block("job")
        return TaskJob(job_id(job), False, task=self)

    def job_async(self, job: AnyJob) -> "AsyncTaskJob[R]":
        """Return the job of an earlier call, as `job` does, with coroutines."""
        return AsyncTaskJob(job_id(job), False, task=self)

    def s(self, *args: Any, **kwargs: Any) -> "Signature":
        """Return this call, to be made in a chain or a group, which may put the results of others before `args`."""
        return Signature(self, args, kwargs)

    def request(self, *args: P.args, **kwargs: P.kwargs) -> Record:
        """Return the request of a job that makes this call. Raises as `defer` does."""
        return self._request(args, kwargs)

    def _requests(self, calls: Iterable[Arguments]) -> list[Record]:
        if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
            raise BadInput("calls", f"are many, such as [(5,), (6,)], and not one '{type(calls).__name__}'")
        requests: list[Record] = []
        for number, call in enumerate(calls):
            try:
                if isinstance(call, tuple):
                    requests.append(self._request(call, {}))
                elif isinstance(call, Mapping):
                    requests.append(self._request((), call))
                else:
                    kind = type(call).__name__
                    raise BadInput("arguments", f"are a tuple or a mapping, not a '{kind}'; batch([(5,)]) is one call")
            except BadInput as refused:
                raise BadInput(f"{number}.{refused.field}", refused.reason) from None
            except TypeError as error:
                raise TypeError(f"call {number}: {error}") from None
            if "key" in requests[-1]:
                requests[-1]["key"] = f"{requests[-1]['key']}-{number}"
        return requests

    def node_request(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Record:
        """Return the request of a node that makes this call; arguments may hold results of nodes. Raises as `defer`."""
        return self._request(args, kwargs, in_graph=True)

    def _request(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, in_graph: bool = False) -> Record:
        unique = self._options.get("unique", False)
        if in_graph and unique:
            instead = f"use {self.function.__name__}.using(unique=False)"
            raise BadInput("unique", f"does not hold for nodes of a graph, chain or group: {instead}")
        called = f"task '{self.name}'"
        stdin = encode_call(self.function, self.registry.serialiser, args, kwargs, called=called, in_graph=in_graph)
        module = self.function.__module__
        fields = request_fields(**self._options)
        request = {
            **fields,
            "command": [COMMAND, self.registry.place(module), self.name],
            "stdin": stdin,
            "properties": {**fields.get("properties", {}), PROPERTY: self.registry.app_of(module)},
        }
        if unique:
            serialiser = self.registry.serialiser
            request["dedup_key"] = dedup_key(self.name, unique, self.function, serialiser, args, kwargs)
        if concurrency := self._options.get("concurrency"):
            request["locks"] = [*fields.get("locks", ()), concurrency_lock(self.function, concurrency, args, kwargs)]
        return request


def _with_options(task: Task[P, R], options: Mapping[str, Any]) -> Task[P, R]:
    return type(task)(task.registry, task.function, task.name, options)


class AsyncTask(Task[P, R]):
    """A task that is an `async def`. Calling it makes a coroutine; its job has the value that the coroutine returns."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...  # type: ignore[override]


@dataclass(frozen=True)
class Signature(Hinting):
    """A call of a task that is not made yet: `task.s(…)` makes one."""

    task: Task[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    _hints = (
        "a call that is not made yet",
        dict.fromkeys(("delay", "apply_async", "defer"), "leasehold.chain(call).defer() makes it") | IN_TURN,
    )


@dataclass(frozen=True, repr=False)
class SubmittedCall(Job, Generic[R]):
    """The job that makes one call of a task.

    created: False if the call joined an unfinished one, or was submitted before with its key.
    """

    task: Task[..., R] = field(kw_only=True, compare=False)
    _hints = (
        "the job of a call",
        {name: f"use pool.{name}(job)" for name in ("output", "logs", "explain")}
        | dict.fromkeys(("ready", "successful", "failed", "status"), "use job.state()")
        | {"get": "use job.result(timeout=60)", "revoke": "use job.cancel()"},
    )

    def __repr__(self) -> str:
        return f"<job {self.id} of task {self.task.name}>"

    def value(self, ended: Record) -> R:
        """Return what the function returned, of the answer of `Client.results`. Raises TaskFailed."""
        state, document, registry = ended["state"], ended["result"], self.task.registry
        if state == "succeeded" and is_kept(document):
            document = json.loads(registry.fetch_result(document["kept"]))
        match document:
            case {"ok": _} if state == "succeeded":
                value: R = decode_result(self.task.function, registry.serialiser, document)
                return value
            case {"error": {"type": str(kind), "message": str(message), "traceback": str(trace)}} if state == "failed":
                raise TaskFailed(self.id, task=self.task.name, state=state, kind=kind, message=message, traceback=trace)
        reason = ended["reason"] or ("without a result" if state == "succeeded" else "nobody gave a reason")
        raise TaskFailed(self.id, task=self.task.name, state=state, message=reason)


class TaskJob(SubmittedCall[R]):
    """The job of a call that `defer` or `batch` has submitted."""

    def state(self) -> str:
        """Return the state of the job. Raises NotFound."""
        return str(self._client.read_states([self.id])[0]["state"])

    def cancel(self) -> None:
        """Cancel the job: at once if it waits, by stopping the task if it runs. Raises Conflict if it has ended."""
        self._client.cancel([self.id])

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the job has ended and return its state. Raises TimedOut after `timeout` seconds."""
        for ended in self._client.wait([self.id], timeout=timeout):
            return str(ended["state"])
        raise TimedOut([self.id], timeout or 0.0)

    def result(self, timeout: float | None = None) -> R:
        """Wait until the job has ended and return what the function returned. `Pool.gather` does so for many jobs.

        Raises TaskFailed if the function raised an error or the job ended without a result, with the remote traceback;
        TimedOut after `timeout` seconds.
        """
        self.wait(timeout)
        (ended,) = self._client.results([self.id])
        return self.value(ended)

    @property
    def _client(self) -> Client:
        return self.task.registry.client


class AsyncTaskJob(SubmittedCall[R]):
    """The job of a call that a coroutine has submitted: what `TaskJob` is, with coroutines."""

    async def state(self) -> str:
        """See `TaskJob.state`."""
        (found,) = await self._pool.call(self._pool.client.read_states, [self.id])
        return str(found["state"])

    async def cancel(self) -> None:
        """See `TaskJob.cancel`."""
        await self._pool.call(self._pool.client.cancel, [self.id])

    async def wait(self, timeout: float | None = None) -> str:
        """See `TaskJob.wait`. However many coroutines wait, one request asks for the jobs of all of them."""
        return str((await self._pool.ended([self.id], timeout))[self.id]["state"])

    async def result(self, timeout: float | None = None) -> R:
        """See `TaskJob.result`. `AsyncPool.gather` reads the results of many jobs together."""
        await self.wait(timeout)
        (ended,) = await self._pool.call(self._pool.client.results, [self.id])
        # A large value is read from where it is kept, which may take time.
        return await self._pool.call(self.value, ended) if is_kept(ended["result"]) else self.value(ended)

    @property
    def _pool(self) -> "AsyncCalls":
        return self.task.registry.of_loop()


def is_kept(document: Any) -> bool:
    """Tell whether the result of a task is a reference to a large value that is kept elsewhere."""
    return isinstance(document, dict) and "kept" in document


def calls_of(jobs: "Iterable[SubmittedCall[Any]]") -> "list[SubmittedCall[Any]]":
    """Return the jobs that `gather` is given. Raises BadInput if they are not jobs of tasks."""
    if isinstance(jobs, SubmittedCall):
        raise BadInput("jobs", "are many, and this is one: gather([job]), or the job's own result()")
    if isinstance(jobs, str | Mapping) or not isinstance(jobs, Iterable):
        raise BadInput("jobs", f"are a list of jobs of tasks, not a '{type(jobs).__name__}'")
    given = list(jobs)
    for number, each in enumerate(given):
        if not isinstance(each, SubmittedCall):
            instead = "; await it first" if inspect.isawaitable(each) else ""
            if isinstance(each, str | Job | ListedJob):
                instead = "; task.job(ID) is the job of an earlier call of a task"
            raise BadInput(f"jobs.{number}", f"is a '{type(each).__name__}', not the job of a task{instead}")
    return given


def values_of(jobs: "Sequence[SubmittedCall[Any]]", ended: Iterable[Record], *, return_errors: bool) -> list[Any]:
    """Return the value of each job, of the answer of `Client.results`. Raises the first error.

    return_errors: return a TaskFailed for each job without a value instead, also if only its value cannot be read.
    """
    records = {record["id"]: record for record in ended}
    values: list[Any] = []
    for job in jobs:
        try:
            values.append(job.value(records[job.id]))
        except Exception as error:
            if not return_errors:
                raise
            values.append(error if isinstance(error, TaskFailed) else _unread(job, error))
    return values


def _unread(job: "SubmittedCall[Any]", error: Exception) -> TaskFailed:
    """Return the error of a job whose value cannot be read, such as a large one that is not kept any more."""
    failed = TaskFailed(job.id, task=job.task.name, state="succeeded", kind=type(error).__name__, message=str(error))
    failed.__cause__ = error
    return failed
