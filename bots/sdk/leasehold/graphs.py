"""Graphs of jobs that depend on each other: put together here, submitted whole or not at all."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Unpack

from leasehold import jobs, wire
from leasehold.calls.graphs import is_unfinished
from leasehold.client import Client, Job
from leasehold.errors import BadInput, TimedOut
from leasehold.jobs import NodeFields, Record, Result
from leasehold.tasks.node_results import NodeResult
from leasehold.tasks.task import Signature, Task

if TYPE_CHECKING:
    from leasehold.async_calls import AsyncCalls

#: What a node does if one that it depends on does not succeed: stay blocked, run, or be cancelled.
OnFailure: TypeAlias = Literal["block", "run", "cancel"]
#: When the callback of a graph runs: whatever became of the nodes, if all succeeded, or if at least one did not.
CallbackOn: TypeAlias = Literal["done", "succeeded", "failed"]


@dataclass(frozen=True)
class Node:
    """A node of a graph, by its number."""

    number: int

    @classmethod
    def checked(cls, given: Any) -> Self:
        """Return the node. Raises BadInput for anything else, such as its number or a job."""
        if not isinstance(given, cls):
            raise BadInput("node", f"is what graph.add(…) returned, or Node(3), and not a '{type(given).__name__}'")
        return given

    @property
    def result(self) -> Any:
        """What the call of a task in this node returns, as an argument of a later node; None if it does not succeed."""
        return NodeResult(self.number)


@dataclass(frozen=True, kw_only=True)
class FailedNode:
    """A node that failed, died or was cancelled, by its number. job: None if it was deleted. reason: why, if known."""

    node: int
    job: str | None
    state: str
    reason: str | None

    @classmethod
    def of(cls, record: Record) -> "FailedNode":
        """Return the node as the gateway tells it; a newer gateway may tell more."""
        return cls(**{each.name: record[each.name] for each in fields(cls)})

    def __str__(self) -> str:
        job = "" if self.job is None else f", job {self.job},"
        return f"node {self.node}{job} is {self.state}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, kw_only=True)
class GraphState:
    """How many nodes of a graph are in each state.

    state: `active`; `stalled`, if no node can run any more; `finished`, `cancelled` or `replaced`.
    blocked_forever: blocked nodes that can never run. active: nodes that are leased to bots or running. needless: among
    the cancelled ones, callbacks for failures of a graph in which there was none: 0 or 1. first_failed: the node that
    failed or died first, else the one that was cancelled first; None if none was.
    """

    id: str
    name: str
    state: str
    nodes: int
    blocked: int
    blocked_forever: int
    queued: int
    parked: int
    active: int
    succeeded: int
    failed: int
    cancelled: int
    dead: int
    needless: int = 0
    first_failed: FailedNode | None = None

    @property
    def all_succeeded(self) -> bool:
        """True if every node has succeeded, but for a needless callback."""
        return self.succeeded + self.needless == self.nodes

    @classmethod
    def of(cls, record: Record) -> "GraphState":
        """Return the state of a graph as the gateway shows it."""
        needless = record.get("callback") == "failed" and record["callback_outcome"] == "cancelled"
        counts = {each.name: record[each.name] for each in fields(cls) if each.name not in ("needless", "first_failed")}
        first = record.get("first_failed")  # a gateway of an older version does not tell it
        return cls(**counts, needless=int(needless), first_failed=first and FailedNode.of(first))


class GraphRequest:
    """The nodes of a graph that is not submitted yet. `Pool.graph` and `AsyncPool.graph` make one."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        given = {option: value for option, value in options.items() if value is not None}
        self._request: dict[str, Any] = {"name": name, **given}
        self._nodes: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self._request['name']!r}, nodes={len(self._nodes)})"

    def add(
        self,
        command: "Sequence[str] | Task[..., Any]",
        *args: Any,
        after: Iterable[Node] | Mapping[Node, OnFailure | None] = (),
        on_failure: OnFailure | None = None,
        named: Mapping[str, Any] | None = None,
        **fields: Unpack[NodeFields],
    ) -> Node:
        """Add a node, which starts once all nodes of `after` have succeeded.

        on_failure: what it does if one of them does not succeed; None = as the graph says. A mapping `after` says so
        for each of them. Raises BadInput if one of them is not of this graph.

        In the place of a command, a task and its arguments `args` make a call. An argument may be or hold the `result`
        of an earlier node, on which this one depends then. named: its named arguments. Options of its job
        are those of `task.using(…)`.
        """
        node = Node(len(self._nodes))
        parents = dict(after) if isinstance(after, Mapping) else dict.fromkeys(after)
        if isinstance(command, Task):
            if fields:
                raise BadInput(min(fields), "is an option of the task: use task.using(…)")
            request = command.node_request(args, named or {})
            for number in json.loads(request["stdin"]).get("inputs", ()):
                parents.setdefault(Node(number), None)
        elif args or named:
            raise BadInput("args", "are those of a task, and this is a command")
        else:
            request = jobs.request(command, fields)
        for parent in map(Node.checked, parents):
            if not 0 <= parent.number < node.number:
                raise BadInput("after", f"names node {parent.number}, which the graph does not have yet")
        edges = [_edge(parent, own or on_failure) for parent, own in parents.items()]
        self._nodes.append({**request, "node": node.number} | ({"after": edges} if edges else {}))
        return node

    def then(
        self, command: "Sequence[str] | Signature", *, on: CallbackOn = "done", **fields: Unpack[NodeFields]
    ) -> Self:
        """Let a command, or a call such as `task.s(1)`, run once all nodes have ended; return the graph.

        on: `done` = whatever became of them, `succeeded` = if all succeeded, `failed` = if at least one failed, died or
        was cancelled. Otherwise the callback is cancelled. A graph with a callback cancels a node if one before it does
        not succeed, unless it says otherwise: a node that stays blocked would hold up the callback for ever.

        Raises BadInput for a second callback, and for a call that takes the result of a node, which it may not have.
        """
        if "callback" in self._request:
            raise BadInput("callback", "is there already: a graph has one, which may submit more")
        if isinstance(command, Task):
            raise BadInput("callback", f"is a call such as {command.name.rpartition('.')[2]}.s(1), not the task")
        if isinstance(command, Signature):
            if fields:
                raise BadInput(min(fields), "is an option of the task: use task.using(…)")
            request = command.task.node_request(command.args, command.kwargs)
            if json.loads(request["stdin"]).get("inputs"):
                raise BadInput("callback", "takes no result of a node: some may have none")
        else:
            request = jobs.request(command, fields)
        self._request = {"on_failure": "cancel", **self._request, "callback": {**request, "on": on}}
        return self

    def request(self) -> dict[str, Any]:
        """Return the graph in the form in which it is submitted."""
        return {**self._request, "nodes": list(self._nodes)}


class Graph(GraphRequest):
    """A graph to put together and to submit."""

    def __init__(self, client: Client, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._client = client

    def submit(self) -> "SubmittedGraph":
        """Submit the graph, all or nothing; it replaces an unfinished graph of its name.

        Without a key the client draws a random one for each call. Raises BadInput with the path in the request;
        Conflict `key_reused`; QueueFull if too many jobs with a label wait.
        """
        return SubmittedGraph(self._client, self._client.graphs.submit(self.request()))


class SubmittedGraph:
    """A graph that was submitted.

    created: False if an earlier, equal request with the same key had created it.
    jobs: the job of each node. warnings: what the gateway noticed about the request.
    """

    def __init__(self, client: Client, answer: Record) -> None:
        self._client = client
        self.id: str = answer["id"]
        self.name: str = answer["name"]
        self.created: bool = answer["created"]
        self.jobs: Mapping[Node, Job] = {
            Node(each["node"]): Job(each["id"], created=self.created) for each in answer["nodes"]
        }
        self.warnings: Sequence[str] = tuple(answer["warnings"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, id={self.id!r}, nodes={len(self.jobs)})"

    def look(self) -> Record:
        """Return the graph as the gateway shows it, without its nodes."""
        return self._client.graphs.show(self.id)

    def state(self) -> GraphState:
        """Return how many nodes are in each state."""
        return GraphState.of(self.look())

    def wait(
        self, timeout: float | None = None, *, on_progress: Callable[[GraphState], object] | None = None
    ) -> GraphState:
        """Wait until no node can run any more. Raises TimedOut after `timeout` seconds; the graph goes on.

        on_progress: called with the state of the graph each time that it has changed, at most once a second.
        """
        watch = None if on_progress is None else Changes(on_progress)
        return GraphState.of(self._client.graphs.wait(self.id, timeout=timeout, told=watch))

    def results(self) -> Mapping[Node, Result]:
        """Return the state of every node, and how it ended if it has. Raises NotFound if a job was deleted.

        A node that was tried again has the state of its newest job.
        """
        jobs = {Node(each["node"]): each["job"] for each in self._client.graphs.nodes(self.id)}
        wanted = {node: jobs.get(node) or job.id for node, job in self.jobs.items()}
        found = self._client.states(list(wanted.values()))
        read = self._client.read_output
        return {node: Result.of(record, read=read) for node, record in zip(wanted, found, strict=True)}

    def retry(self, *nodes: Node) -> Mapping[Node, Job]:
        """Let these nodes run again, or all that failed, died or were cancelled, and what waits for them go on.

        Returns the new jobs. Nodes that were cancelled because of one of them run again too; succeeded ones stay.
        Raises Conflict `node_barred` if a node depends on one that failed and does not run again, `graph_replaced` if
        another graph has taken the place of this one.
        """
        answer = self._client.graphs.retry(self.id, nodes=[Node.checked(node).number for node in nodes] or None)
        return {Node(each["node"]): Job(each["id"], created=True) for each in answer["nodes"]}

    def cancel(self) -> int:
        """Cancel waiting nodes and stop running ones; return how many."""
        return int(self._client.graphs.cancel(self.id)["jobs"])


class AsyncSubmittedGraph:
    """A graph that was submitted from a coroutine; see `SubmittedGraph`."""

    def __init__(self, calls: "AsyncCalls", graph: SubmittedGraph) -> None:
        self._calls, self._graph = calls, graph
        self.id, self.name, self.created = graph.id, graph.name, graph.created
        self.jobs, self.warnings = graph.jobs, graph.warnings

    def __repr__(self) -> str:
        return f"Async{self._graph!r}"

    async def state(self) -> GraphState:
        """See `SubmittedGraph.state`."""
        return await self._calls.call(self._graph.state)

    async def wait(
        self, timeout: float | None = None, *, on_progress: Callable[[GraphState], object] | None = None
    ) -> GraphState:
        """See `SubmittedGraph.wait`. The function is called in the event loop."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wire.waited(timeout)
        rest = 0.05
        tell = None if on_progress is None else Changes(on_progress)
        while True:  # no thread is kept between two looks
            found = await self._calls.call(self._graph.look)
            if tell is not None:
                tell(found)
            if not is_unfinished(found):
                return GraphState.of(found)
            left = deadline - loop.time()
            if left <= 0:
                raise TimedOut([self.id], timeout or 0.0, look="graph show")
            await asyncio.sleep(min(left, rest))
            rest = min(1.0, 2 * rest)

    async def results(self) -> Mapping[Node, Result]:
        """See `SubmittedGraph.results`."""
        return await self._calls.call(self._graph.results)

    async def retry(self, *nodes: Node) -> Mapping[Node, Job]:
        """See `SubmittedGraph.retry`."""
        return await self._calls.call(self._graph.retry, *nodes)

    async def cancel(self) -> int:
        """See `SubmittedGraph.cancel`."""
        return await self._calls.call(self._graph.cancel)


class Changes:
    """Hands the states of a graph on to a function, each once."""

    def __init__(self, on_progress: Callable[[GraphState], object]) -> None:
        self._tell = on_progress
        self._last: GraphState | None = None

    def __call__(self, found: Record) -> None:
        state = GraphState.of(found)
        if state != self._last:
            self._last = state
            self._tell(state)


def _edge(parent: Node, on_failure: OnFailure | None) -> int | dict[str, Any]:
    return parent.number if on_failure is None else {"node": parent.number, "on_failure": on_failure}
