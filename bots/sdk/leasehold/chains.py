"""Calls of tasks one after another and side by side: `chain`, `group` and `chord`, which are graphs.

Each call is a node and a job of its own, with the retries and the options of its task. A call whose node has failed can
be tried again by `leasehold graph retry`, and the others go on from there.
"""

import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack

from leasehold.client import Client
from leasehold.errors import BadInput, NotFound
from leasehold.graphs import AsyncSubmittedGraph, CallbackOn, GraphRequest, Node, SubmittedGraph
from leasehold.jobs import NodeFields
from leasehold.tasks.task import IN_TURN, Signature, TaskJob, values_of
from leasehold.transport import Record
from leasehold.wire import Hinting

if TYPE_CHECKING:
    from leasehold.async_calls import AsyncCalls

#: What Celery's users write to submit what was put together, or to put more together.
_INSTEAD = dict.fromkeys(("delay", "apply_async"), "use .defer()") | IN_TURN


class Group(Hinting, tuple[Signature, ...]):
    """Calls that are made side by side."""

    __slots__ = ()
    _hints = ("a group", _INSTEAD)

    def defer(self) -> "DeferredCalls":
        """Submit these calls alone; their result is the list of their values. As `chain(group).defer()`."""
        return CallGraph((self,), None).defer()

    async def defer_async(self) -> "AsyncDeferredCalls":
        """Submit these calls alone, from a coroutine."""
        return await CallGraph((self,), None).defer_async()


#: A step of a chain: one call, or several side by side.
Step: TypeAlias = Signature | Group
#: How a node may have ended for which its graph has no result.
_ENDED_BADLY = ("failed", "dead", "cancelled")


def group(*calls: Signature) -> Group:
    """Return calls that are made side by side. The step after it in a chain is given the list of their results."""
    return Group(calls)


def chain(*steps: Step, name: str | None = None) -> "CallGraph":
    """Put calls together that are made one after another.

    Each is given the result of the one before as its first argument. A group in a chain gives each of its calls that
    result, and the next step the list of their results. name: that of the graph, unique among the unfinished ones of
    the instance; None = a new one. Raises BadInput without a call, for tasks of several pools, and as `Task.defer`.
    """
    return CallGraph(steps, name)


def chord(calls: Sequence[Signature], callback: Signature, *, name: str | None = None) -> "CallGraph":
    """Put calls together that are made side by side, and one that is given the list of their results."""
    return CallGraph((Group(calls), callback), name)


class CallGraph(Hinting, GraphRequest):
    """Calls of tasks that are put together, to be submitted as a graph."""

    _hints = ("a chain", _INSTEAD)

    def __init__(self, steps: Sequence[Step], name: str | None) -> None:
        super().__init__(name or f"calls-{uuid.uuid4().hex}", {})
        groups = [step if isinstance(step, Group) else Group([step]) for step in steps]
        if not groups or not all(groups):
            raise BadInput("calls", "are at least one: chain(task.s(1), other.s())")
        self._registry = _checked(groups[0][0]).task.registry
        self._calls: dict[Node, Signature] = {}
        before: tuple[Any, ...] = ()
        for step, calls in zip(steps, groups, strict=True):
            self._last = [self._call(call, before) for call in calls]
            results = [node.result for node in self._last]
            before = (results,) if isinstance(step, Group) else (results[0],)
        self._is_group = isinstance(steps[-1], Group)

    def then(
        self, command: Sequence[str] | Signature, *, on: CallbackOn = "done", **fields: Unpack[NodeFields]
    ) -> Self:
        """Do as `GraphRequest.then`. Raises BadInput also for the call of a task of another pool."""
        if isinstance(command, Signature):
            self._require_own(command)
        return super().then(command, on=on, **fields)

    def _require_own(self, call: Signature) -> None:
        if call.task.registry is not self._registry:
            raise BadInput("calls", f"are tasks of one pool, and '{call.task.name}' is one of another")

    def _call(self, call: Signature, before: tuple[Any, ...]) -> Node:
        self._require_own(_checked(call))
        node = self.add(call.task, *before, *call.args, named=call.kwargs)
        self._calls[node] = call
        return node

    def defer(self) -> "DeferredCalls":
        """Submit all calls, or none. Raises what `Client.submit` raises; RuntimeError for tasks of an `AsyncPool`."""
        if self._registry.only_async:
            raise RuntimeError("calls of tasks of an AsyncPool have no `defer`: use `await ….defer_async()`")
        client = self._registry.client
        return DeferredCalls(client, client.graphs.submit(self.request()), self)

    async def defer_async(self) -> "AsyncDeferredCalls":
        """Submit all calls, or none, from a coroutine, whichever kind of pool they have. Raises as `defer` does."""
        pool = self._registry.of_loop()
        answer = await pool.call(pool.client.graphs.submit, self.request())
        return AsyncDeferredCalls(pool, DeferredCalls(pool.client, answer, self))

    def value(self, client: Client, nodes: Sequence[Record]) -> Any:
        """Return the value of the last step, from the nodes of the graph.

        Raises TaskFailed if one has failed, NotFound if the job of one that counts is not kept any more.
        """
        jobs = {Node(each["node"]): each["job"] for each in nodes}
        # The callback is no call of these, and ends as cancelled if it has nothing to do.
        bad = [node for each in nodes if (node := Node(each["node"])) in self._calls and each["state"] in _ENDED_BADLY]
        told = bad[:1] or self._last
        if gone := [node for node in told if jobs[node] is None]:
            raise NotFound(f"node {gone[0].number} ended long ago, and its job with its result is not kept any more")
        calls = [TaskJob[Any](jobs[node], created=True, task=self._calls[node].task) for node in told]
        values = values_of(calls, client.results([each.id for each in calls]), return_errors=False)
        return values if self._is_group else values[0]


def _checked(call: Any) -> Signature:
    """Return the call. Raises BadInput for a task without arguments, and for anything else."""
    if not isinstance(call, Signature):
        many = "; group(*calls) takes many of them" if isinstance(call, Iterable) and not isinstance(call, str) else ""
        raise BadInput("calls", f"are such as task.s(1), and this is a '{type(call).__name__}'{many}")
    return call


#: What Celery's users write of calls that were submitted.
_OF_SUBMITTED = (
    "a graph of calls",
    dict.fromkeys(("ready", "successful", "failed", "status"), "use .state()")
    | {"get": "use .result(timeout=60)", "join": "use .result(timeout=60)", "revoke": "use .cancel()"},
)


class DeferredCalls(Hinting, SubmittedGraph):
    """Calls that were submitted as a graph."""

    _hints = _OF_SUBMITTED

    def __init__(self, client: Client, answer: Record, calls: CallGraph) -> None:
        super().__init__(client, answer)
        self._calls = calls

    def result(self, timeout: float | None = None) -> Any:
        """Wait until all calls have ended, a callback too, and return the last one's value; of a group, their values.

        Raises TaskFailed for the first call that failed, TimedOut after `timeout` seconds.
        """
        self.wait(timeout)
        return self._calls.value(self._client, list(self._client.graphs.nodes(self.id)))


class AsyncDeferredCalls(Hinting, AsyncSubmittedGraph):
    """Calls that a coroutine has submitted as a graph: what `DeferredCalls` is, with coroutines."""

    _hints = _OF_SUBMITTED

    def __init__(self, calls: "AsyncCalls", graph: DeferredCalls) -> None:
        super().__init__(calls, graph)
        self._value = graph.result

    async def result(self, timeout: float | None = None) -> Any:
        """See `DeferredCalls.result`."""
        await self.wait(timeout)
        return await self._calls.call(self._value)
