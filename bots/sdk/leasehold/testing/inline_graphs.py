"""Graphs of `inline`: their nodes run in this process, each once those that it waits for have ended."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.errors import Conflict, NotFound
from leasehold.states import FINAL, JobState
from leasehold.testing.inline_job import InlineJob
from leasehold.transport import Record

_BAD = FINAL - {JobState.SUCCEEDED}


@dataclass
class InlineGraph:
    """A graph, its jobs by the numbers of their nodes, and for each node those it waits for, with what if they fail."""

    id: str
    request: Record
    jobs: dict[int, InlineJob]
    after: Mapping[int, Mapping[int, str]]
    #: Its nodes are being run: what ends meanwhile is seen by the loop that runs them.
    is_moving: bool = False

    @property
    def waiting(self) -> Sequence[int]:
        """The nodes that have not ended."""
        return [node for node, job in self.jobs.items() if not job.is_final]

    def shown(self, nodes: Sequence[int]) -> Record:
        """Return what a gateway tells of the graph and of these nodes."""
        counts = Counter(job.state for job in self.jobs.values())
        stuck = self._stuck()
        left = len(self.waiting)
        state = "finished" if not left else "stalled" if len(stuck) == left else "active"
        told = {str(each): counts[each] for each in (*FINAL, JobState.BLOCKED, JobState.QUEUED, JobState.PARKED)}
        return {
            "id": self.id,
            "name": self.request["name"],
            "state": state,
            "nodes": len(self.jobs),
            "blocked_forever": len(stuck),
            "active": sum(job.thread is not None for job in self.jobs.values()),
            **told,
            "first_failed": self._first_failed(),
            "page": [{"node": node, "job": self.jobs[node].id, "state": str(self.jobs[node].state)} for node in nodes],
        }

    def _first_failed(self) -> Record | None:
        """Return the node that failed or died first, else the one that was cancelled first."""
        bad = [(node, job) for node, job in self.jobs.items() if job.state in _BAD]
        if not bad:
            return None
        node, job = min(bad, key=lambda each: (each[1].state is JobState.CANCELLED, each[1].finished_at))
        return {"node": node, "job": job.id, "state": str(job.state), "reason": job.reason}

    def _stuck(self) -> set[int]:
        """Return the nodes that can never run: those that wait for a failed one, and whatever waits for these."""
        stuck: set[int] = set()
        blocked = [node for node in self.waiting if self.jobs[node].state is JobState.BLOCKED]
        while more := {node for node in blocked if self._barring(node) or self.after[node].keys() & stuck} - stuck:
            stuck |= more
        return stuck

    def _barring(self, node: int) -> set[int]:
        return {
            parent for parent, what in self.after[node].items() if what == "block" and self.jobs[parent].state in _BAD
        }

    def next_state(self, node: int) -> JobState | None:
        """Return what a blocked node is to become: queued or cancelled; None if it stays blocked."""
        steps = {self._of(self.jobs[parent].state, what) for parent, what in self.after[node].items()}
        if JobState.CANCELLED in steps:
            return JobState.CANCELLED
        return None if None in steps else JobState.QUEUED

    @staticmethod
    def _of(parent: JobState, what: str) -> JobState | None:
        if parent is JobState.SUCCEEDED or (parent in _BAD and what == "run"):
            return JobState.QUEUED
        return JobState.CANCELLED if parent in _BAD and what == "cancel" else None


class InlineGraphs:
    """The graphs that were submitted, by id in their order.

    make: returns the job of a request. start: runs a job to its end, unless it is to start later.
    """

    def __init__(self, make: Callable[[Record], InlineJob], start: Callable[[InlineJob], None]) -> None:
        self._make, self._start = make, start
        self._graphs: dict[str, InlineGraph] = {}
        self._keys: dict[str, InlineGraph] = {}
        #: The graph and the number of each node, by the id of its job.
        self._of: dict[str, tuple[InlineGraph, int]] = {}

    def submit(self, request: Record) -> Record:
        """Run a graph as far as it goes."""
        if (first := self._keys.get(request["key"])) is not None:
            if first.request != request:
                raise Conflict("key_reused", f"key: '{request['key']}' was used before for a different request")
            return self._told(first, created=False)
        jobs: dict[int, InlineJob] = {}
        after: dict[int, dict[int, str]] = {}
        default = request.get("on_failure", "block")
        for node in request["nodes"]:
            edges: list[Record] = [{"node": each} if isinstance(each, int) else each for each in node.get("after", ())]
            after[node["node"]] = {edge["node"]: edge.get("on_failure") or default for edge in edges}
            own = {name: node[name] for name in node.keys() - {"node", "after"}}
            jobs[node["node"]] = self._make(own | ({"instance": request["instance"]} if "instance" in request else {}))
        graph = InlineGraph(next(iter(jobs.values())).id, request, jobs, after)
        self._graphs[graph.id] = self._keys[request["key"]] = graph
        for node, job in jobs.items():
            job.state = JobState.BLOCKED
            self._of[job.id] = graph, node
        self._go_on(graph)
        return self._told(graph, created=True)

    def show(self, graph: str, query: Mapping[str, Any]) -> Record:
        """Return a graph, by its id or name, and a page of its nodes."""
        found = self._found(graph)
        after, limit, states = int(query.get("after", -1)), int(query.get("limit", 0)), query.get("state")
        nodes = [node for node in sorted(found.jobs) if node > after]
        return found.shown([node for node in nodes if not states or str(found.jobs[node].state) in states][:limit])

    def ended(self, job: InlineJob) -> None:
        """Let the graph of a job that has ended go on, if it has one."""
        if job.id in self._of:
            self._go_on(self._of[job.id][0])

    def inputs_of(self, job: InlineJob) -> Mapping[str, Any]:
        """Return the results of the nodes that a job waits for."""
        if job.id not in self._of:
            return {}
        graph, node = self._of[job.id]
        parents = {parent: graph.jobs[parent] for parent in graph.after[node]}
        return {str(parent): {"state": str(each.state), "result": each.result} for parent, each in parents.items()}

    def _go_on(self, graph: InlineGraph) -> None:
        """Run what may run, until nothing more can."""
        if graph.is_moving:
            return
        graph.is_moving = True
        try:
            while self._moved(graph):
                pass
        finally:
            graph.is_moving = False

    def _moved(self, graph: InlineGraph) -> bool:
        """Run or cancel each node that may; return whether there was one."""
        has_moved = False
        for node in graph.waiting:
            job = graph.jobs[node]
            if job.state is not JobState.BLOCKED or (state := graph.next_state(node)) is None:
                continue
            has_moved = True
            if state is JobState.QUEUED:
                self._start(job)
            else:
                job.end(state, "a node that it waits for did not succeed")
        return has_moved

    def _found(self, graph: str) -> InlineGraph:
        named = [each for each in self._graphs.values() if graph in (each.id, each.request["name"])]
        if not named:
            raise NotFound(f"graph '{graph}' does not exist")
        return named[-1]

    @staticmethod
    def _told(graph: InlineGraph, *, created: bool) -> Record:
        nodes = [{"node": node, "id": job.id} for node, job in sorted(graph.jobs.items())]
        return {"id": graph.id, "name": graph.request["name"], "created": created, "nodes": nodes, "warnings": []}
