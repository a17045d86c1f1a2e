"""The routes of graphs: submit, show, list, retry and cancel. They are mounted with those of `assigner/api/jobs.py`."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import structlog
from fastapi import APIRouter, Path, Query, Request
from leasehold import wire
from leasehold.errors import Forbidden, NotFound
from leasehold.states import JobState
from pydantic import BaseModel, Field

from assigner.api import routing, submission
from assigner.api.routing import CALLERS, IDS, Caller, Read, problems
from assigner.estimation import Estimator, with_estimate
from assigner.queries import job_names
from assigner.queries import jobs as job_queries
from schema import audit, validation
from schema.moves import graphs as graph_moves
from schema.moves.graph_retry import retry_graph
from schema.moves.graphs import cancel_graph, submit_graph
from schema.moves.submit_again import MAX_REQUEUE_KEY_BYTES
from schema.postgres.connection import Connection
from schema.requests import DEFAULT_INSTANCE, MAX_GRAPH_NODES, GraphRequest, NodeNo
from schema.tenancy.tokens import Principal

#: Most graphs in one answer; the answer counts each graph's nodes, which takes time.
MAX_GRAPHS = 100
#: The most numbers of missing nodes that a warning names.
NAMED = 20

log = structlog.get_logger()

GraphId = Annotated[
    str, Path(max_length=200, description="id or name; a name stands for the newest graph of that name")
]


class SubmittedNode(BaseModel):
    node: int
    id: UUID = Field(description="id of its job")


class SubmittedGraph(BaseModel):
    id: UUID
    name: str
    created: bool = Field(description="false: the key had been used before by an equal request")
    nodes: list[SubmittedNode] = Field(description="by number, without nodes whose jobs were deleted")
    edges: int
    ready: int = Field(description="nodes without dependencies, which may start at once")
    missing: list[int] = Field(
        description="numbers that nodes depend on but no node has: the nodes that depend on them never run"
    )
    warnings: list[str]
    callback: UUID | None = Field(description="id of the callback's job; null = there is none")
    replaced: int | None = Field(description="cancelled jobs of an older graph of that name; null = there was none")


class GraphRow(BaseModel):
    """A graph with the number of its nodes in each state."""

    id: UUID
    instance: str
    name: str
    state: str = Field(description="active, stalled (no node of it can run any more), finished, cancelled or replaced")
    priority: int
    nodes: int
    edges: int
    missing: list[int]
    created_at: datetime
    finished_at: datetime | None
    blocked: int
    blocked_forever: int = Field(description="blocked nodes that can never run")
    queued: int
    parked: int
    active: int = Field(description="leased to bots or running")
    succeeded: int
    failed: int
    cancelled: int
    dead: int
    callback: str | None = Field(description="when its callback runs: done, succeeded or failed; null = it has none")
    callback_outcome: str | None = Field(description="final state of the callback; it counts as a node too")


class Node(BaseModel):
    node: int
    job: UUID | None = Field(description="null: it ended long ago and was deleted")
    state: str
    depth: int
    priority: int | None
    waits_for: int = Field(description="number of unmet dependencies")
    missing: list[int] = Field(description="numbers that it depends on but no node has")
    dead_end: bool = Field(description="true: one of its dependencies can never be met")
    reason: str | None
    callback: str | None = Field(description="of a callback, when it runs: done, succeeded or failed")
    label: str | None = Field(description="null: its job was deleted")
    after: list[int] = Field(description="numbers of the nodes that it depends on")
    command: list[str] = Field(
        description="the first and last words of what it runs, each cut in its middle; empty = no longer stored"
    )
    arguments: str | None = Field(default=None, description="of a task's call, cut; unset = it calls no task")


class FailedNode(BaseModel):
    node: int
    job: UUID | None = Field(description="null: it ended long ago and was deleted")
    state: str
    reason: str | None


class Graph(GraphRow):
    first_failed: FailedNode | None = Field(
        description="the node that failed or died first, else the one that was cancelled first, of the 100 such nodes "
        "of the least depth; null = none was"
    )
    page: list[Node] = Field(description="nodes by number; the next page is `after` the last")


class GraphList(BaseModel):
    """Newest first; the next page is `before` the id of the last."""

    graphs: list[GraphRow]


class CancelledGraph(BaseModel):
    id: UUID
    name: str
    state: str = Field(description="state after the call")
    jobs: int = Field(description="jobs that this call cancelled or asked bots to stop")


router = APIRouter(prefix="/v1", tags=["callers"])


@router.post("/graphs", responses=problems(400, 408, 409, 413, 415), openapi_extra=CALLERS)
async def submit(request: Request, body: Annotated[GraphRequest, Read], caller: Caller) -> SubmittedGraph:
    """Submit a whole graph, all or nothing. It replaces an unfinished graph of the same name.

    400 for a circle of dependencies, which the answer names, and for a number given twice. 409 as for jobs.
    """
    state = request.app.state

    def work() -> SubmittedGraph:
        wanted = body if state.default_level is None else body.with_service_level(state.default_level)
        graph = _normal(wanted, caller, state.estimate)
        of_nodes = [node | {"instance": graph["instance"]} for node in graph["nodes"]] if state.advise else []
        advice = state.advise(of_nodes) if state.advise else {}
        told = [f"node {of_nodes[index]['node']}: {text}" for index, text in advice.items()]
        done = _submit(state.database, graph, caller=caller, sync=state.timing.sync, advice=told)
        callback = next((node.id for node in done.nodes if node.node == body.callback_node), None)
        return done.model_copy(update={"callback": callback})

    found: SubmittedGraph = await state.callers.call(work)
    return found


@router.get("/graphs", responses=problems(400, 404), openapi_extra=CALLERS)
async def list_graphs(
    request: Request,
    caller: Caller,
    instance: str | None = None,
    open: bool = False,
    limit: Annotated[int, Query(ge=1, le=MAX_GRAPHS)] = 50,
    before: Annotated[str | None, Query(max_length=200)] = None,
) -> GraphList:
    """List graphs, newest first; with `open` only graphs with nodes that have not ended."""
    wanted = None if instance is None else validation.check_name("instance", instance)

    def work(connection: Connection) -> GraphList:
        last = None if before is None else _find_graph(connection, before, caller)[0]
        filters = {"instance": wanted, "open": open, "limit": limit, "before": last}
        rows = job_queries.graph_page(connection, instances=caller.instances, filters=filters)
        return GraphList(graphs=[GraphRow.model_validate(row) for row in rows])

    found: GraphList = await request.app.state.read(work)
    return found


@router.get("/graphs/{id}", responses=problems(400, 404), openapi_extra=CALLERS)
async def show(
    request: Request,
    id: GraphId,
    caller: Caller,
    instance: str | None = None,
    state: Annotated[list[JobState] | None, Query(description="only nodes in one of these states in the page")] = None,
    after: Annotated[int, Query(ge=-1)] = -1,
    limit: Annotated[int, Query(ge=0, le=wire.MAX_LIST)] = 100,
) -> Graph:
    """Show one graph, with a page of its nodes."""

    def work(connection: Connection) -> Graph:
        row_id, _ = _find_graph(connection, id, caller, instance=instance)
        row = job_queries.graph(connection, row_id)
        nodes = job_queries.nodes(connection, row_id, states=state or (), after=after, limit=limit)
        return Graph.model_validate(row | {"page": nodes})

    found: Graph = await request.app.state.run(work)
    return found


class RetryRequest(submission.RequestModel):
    graph: str = Field(min_length=1, description="id or name; a name stands for the newest graph of that name")
    instance: str | None = Field(default=None, description="needed if several instances have a graph of that name")
    nodes: list[NodeNo] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_GRAPH_NODES,
        description="numbers of nodes to try again. One that has not ended badly is left. Nodes that were cancelled "
        "because of one of these are tried again too. Unset: all that failed, died or were cancelled",
    )
    key: str | None = Field(
        default=None,
        min_length=1,
        description="with the same key, a repeat gets the answer of the first and tries nothing again; up to 150 bytes",
    )


class RetriedGraph(BaseModel):
    id: UUID
    name: str
    nodes: list[SubmittedNode] = Field(description="the nodes that have new jobs, by number; empty: nothing had failed")


@router.post("/graphs/retry", responses=problems(400, 404, 408, 409, 413, 415), openapi_extra=IDS)
async def retry(request: Request, body: Annotated[RetryRequest, Read], caller: Caller) -> RetriedGraph:
    """Let a graph go on: nodes that failed, died or were cancelled get new jobs, and what is blocked waits for these.

    Nodes that succeeded stay, with their results. 409 `node_barred` if a node depends on one that failed and is not
    tried again, `graph_replaced` if another graph has taken the place of this one.
    """

    key = None if body.key is None else validation.check_text("key", body.key, MAX_REQUEUE_KEY_BYTES)

    def work(connection: Connection) -> RetriedGraph:
        _, public_id = _find_graph(connection, body.graph, caller, instance=body.instance)
        done = retry_graph(
            connection,
            public_id,
            nodes=body.nodes,
            instances=caller.instances,
            ceiling=caller.priority_ceiling,
            key=key,
            actor=caller.actor,
        )
        details = {"graph": public_id, "nodes": len(done.jobs)}
        routing.audit_act(connection, caller, "graphs.retry", subject=done.name, details=details)
        nodes = [SubmittedNode(node=node, id=UUID(job)) for node, job in done.jobs.items()]
        return RetriedGraph(id=UUID(public_id), name=done.name, nodes=nodes)

    answer: RetriedGraph = await request.app.state.run(work)
    return answer


class CancelRequest(submission.RequestModel):
    graph: str = Field(min_length=1, description="id or name; a name stands for the newest graph of that name")
    instance: str | None = Field(default=None, description="needed if several instances have a graph of that name")


@router.post("/graphs/cancel", responses=problems(400, 404, 408, 413, 415), openapi_extra=IDS)
async def cancel(request: Request, body: Annotated[CancelRequest, Read], caller: Caller) -> CancelledGraph:
    """Cancel the waiting jobs of a graph and ask bots to stop the running ones. A repeat is harmless."""
    sync = request.app.state.timing.sync

    def work(connection: Connection) -> CancelledGraph:
        _, public_id = _find_graph(
            connection, body.graph, caller, instance=body.instance, event="leasehold.deregister_unknown_job"
        )
        done = cancel_graph(connection, public_id, instances=caller.instances, sync=sync, actor=caller.actor)
        if done is None:
            raise _not_found(body.graph)
        details = {"graph": public_id, "jobs": done.jobs}
        routing.audit_act(connection, caller, "graphs.cancel", subject=done.name, details=details)
        return CancelledGraph(id=UUID(public_id), name=done.name, state=done.state, jobs=done.jobs)

    answer: CancelledGraph = await request.app.state.run(work)
    log.info("leasehold.job_deregistered", graph=str(answer.id), jobs=answer.jobs)
    return answer


def _normal(body: GraphRequest, caller: Principal, estimate: Estimator | None) -> dict[str, Any]:
    instance = body.instance or caller.instance or DEFAULT_INSTANCE
    if not caller.may_use_instance(instance):
        raise Forbidden(f"instance: this token is for the instance '{caller.instance}' only")
    graph = body.normal(instance=instance)
    graph["nodes"] = [with_estimate(node, estimate, instance=instance) for node in graph["nodes"]]
    own = [(nth, node["priority"]) for nth, node in enumerate(graph["nodes"]) if "priority" in node]
    for place, priority in [("priority", body.priority), *((f"nodes.{nth}.priority", each) for nth, each in own)]:
        if not caller.may_use_priority(priority):
            raise Forbidden(f"{place}: this token may not be more urgent than {caller.priority_ceiling}")
    return graph


def _submit(
    database: Any, graph: dict[str, Any], *, caller: Principal, sync: float, advice: list[str]
) -> SubmittedGraph:
    def work(connection: Connection) -> graph_moves.SubmittedGraph:
        submission.check_points(connection, graph["nodes"], caller, place="nodes")
        taken = submit_graph(connection, graph, sync=sync, actor=caller.actor)
        if caller.is_operator:
            details = {"graph": taken.public_id, "nodes": len(graph["nodes"]), "created": taken.created}
            audit.write(connection, "graphs.submit", actor=caller.actor, subject=graph["instance"], details=details)
        return taken

    taken = submission.run_keyed(database, work, keyed="key" in graph)
    if taken.created:
        _log_submission(taken)
    warnings = [f"no node has the numbers {_numbers(taken.missing)}: what depends on them will never become ready"]
    return SubmittedGraph(
        id=UUID(taken.public_id),
        name=taken.name,
        created=taken.created,
        nodes=[SubmittedNode(node=node, id=UUID(job)) for node, job in taken.jobs.items()],
        edges=taken.edges,
        ready=taken.ready,
        missing=list(taken.missing),
        warnings=[*(warnings if taken.missing else []), *advice],
        callback=None,
        replaced=taken.replaced,
    )


def _log_submission(taken: graph_moves.SubmittedGraph) -> None:
    if taken.replaced is not None:
        log.warning("leasehold.duplicate_register", graph=taken.public_id, replaced_jobs=taken.replaced)
    if taken.missing:
        log.warning("leasehold.phantom_dependencies", graph=taken.public_id, missing=_numbers(taken.missing))
    log.info(
        "leasehold.job_registered", graph=taken.public_id, total_nodes=len(taken.jobs), immediately_ready=taken.ready
    )


def _numbers(missing: Any) -> str:
    shown = ", ".join(map(str, missing[:NAMED]))
    return shown if len(missing) <= NAMED else f"{shown} and {len(missing) - NAMED} more"


def _find_graph(
    connection: Connection, given: str, caller: Principal, *, instance: str | None = None, event: str | None = None
) -> tuple[int, str]:
    wanted = None if instance is None else validation.check_name("instance", instance)
    by_word = job_names.find_graph(connection, given, instances=caller.instances, actor=caller.actor)
    found = by_word or job_queries.find_graph(
        connection,
        public_id=routing.uuid_or_none(given),
        name=validation.check_text("id", given, 200),
        instance=wanted,
        instances=caller.instances,
    )
    if found is None:
        if event is not None:
            log.debug(event, graph=wire.escaped(given, 80))
        raise _not_found(given)
    return found


def _not_found(given: str) -> NotFound:
    return NotFound(f"id: there is no graph '{wire.escaped(given, 80)}'")
