"""A graph goes on: nodes that failed, died or were cancelled get new jobs in their places.

The job that is over stays what it is. Its node, with number, edges and callback, gets the new job, which is blocked if
the node waits for others. Blocked nodes wait for it again; succeeded ones stay, with their results. A child that has
started already, because its edge says `run`, is not held up again: that edge is passed. A callback that has run, or
that was left out, waits again.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psycopg
from leasehold.errors import Conflict, NotFound

from schema.graphs import ENDED_BADLY, first_failed
from schema.moves.graphs import LOCK, allow_longer
from schema.moves.submit import Submitted
from schema.moves.submit_again import LOCK_AGAINST_RETENTION, submit_again
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement

#: New jobs of one statement: their payloads are handed on in one value.
SLICE = 500

# As `submit_normal_graph` does, before any row: no graph of the same name begins meanwhile.
LOCK_NAMES = Statement("""
SELECT pg_advisory_xact_lock(hashtext('leasehold.graphs'), hashtext(name)) FROM (
    SELECT i.name || '/' || g.name AS name FROM graphs g JOIN instances i ON i.id = g.instance
    WHERE g.public_id = ANY (CAST(:ids AS uuid[])) ORDER BY 1 OFFSET 0) names
""")
# All nodes at once, in the order of locks, so that what is read next is all there: whoever ends a node holds its row.
LOCK_NODES = Statement("SELECT FROM graph_nodes WHERE graph = :graph ORDER BY job_id FOR NO KEY UPDATE")
NODES = Statement("""
SELECT n.node_no, n.job_id, n.outcome, n.callback, j.public_id, j.state, coalesce(j.attempts, 0) AS attempts
FROM graph_nodes n LEFT JOIN jobs j ON j.id = n.job_id WHERE n.graph = :graph ORDER BY n.node_no
""")
# A repeated request is answered as the first one was, by the keys of the submits that made jobs of its nodes, whether
# these have been tried again since or not.
MADE_BY = Statement("""
WITH RECURSIVE made AS (
    SELECT n.node_no, j.public_id, j.instance, w.origin->>'from' AS old
    FROM graph_nodes n JOIN jobs j ON j.id = n.job_id JOIN job_payloads w ON w.job_id = j.id
    WHERE n.graph = :graph AND w.origin->>'from' IS NOT NULL
    UNION ALL
    SELECT m.node_no, j.public_id, j.instance, w.origin->>'from'
    FROM made m JOIN jobs j ON j.public_id = CAST(m.old AS uuid) JOIN job_payloads w ON w.job_id = j.id
    WHERE w.origin->>'from' IS NOT NULL
)
SELECT m.node_no, m.public_id FROM made m
JOIN submit_keys k ON k.instance = m.instance AND k.key = 'requeue:' || CAST(:key AS text) || ':' || m.old
ORDER BY m.node_no
""")
EDGES = Statement("""
SELECT p.node_no AS parent, c.node_no AS child, e.on_failure
FROM graph_nodes p JOIN graph_edges e ON e.parent = p.job_id JOIN graph_nodes c ON c.job_id = e.child
WHERE p.graph = :graph
""")
# The counts of a node are those of the invariant S14. A node that waits is blocked; its time in the queue is to come.
REPLACE = Statement("""
WITH made AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:old AS bigint[]), CAST(:new AS bigint[])) AS m (old, new)
), nodes AS (
    UPDATE graph_nodes n SET job_id = m.new, outcome = NULL, due = false FROM made m WHERE n.job_id = m.old
)
UPDATE graph_edges e SET parent = coalesce(p.new, e.parent), child = coalesce(c.new, e.child),
    passed = c.new IS NULL AND e.child = ANY (CAST(:started AS bigint[]))
FROM (
    SELECT parent, child FROM graph_edges WHERE parent = ANY (CAST(:old AS bigint[]))
    UNION
    SELECT parent, child FROM graph_edges WHERE child = ANY (CAST(:old AS bigint[]))
) k LEFT JOIN made p ON p.old = k.parent LEFT JOIN made c ON c.old = k.child
WHERE e.parent = k.parent AND e.child = k.child
""")
COUNT = Statement("""
WITH touched AS MATERIALIZED (
    SELECT unnest(CAST(:new AS bigint[])) AS job_id
    UNION
    SELECT child FROM graph_edges WHERE parent = ANY (CAST(:new AS bigint[]))
), counted AS MATERIALIZED (
    SELECT t.job_id, count(e.parent) FILTER (WHERE NOT e.passed
            AND (p.outcome = 'succeeded' OR p.outcome IS NOT NULL AND e.on_failure = 'run') IS NOT TRUE) AS unmet,
        count(e.parent) FILTER (WHERE NOT e.passed AND p.outcome <> 'succeeded' AND e.on_failure <> 'run') AS dead
    FROM touched t LEFT JOIN graph_edges e ON e.child = t.job_id LEFT JOIN graph_nodes p ON p.job_id = e.parent
    GROUP BY t.job_id
), nodes AS (
    UPDATE graph_nodes n SET pending_deps = c.unmet + cardinality(n.missing),
        dead_ends = c.dead + cardinality(n.missing), due = n.due AND c.unmet = 0
    FROM counted c WHERE n.job_id = c.job_id RETURNING n.job_id, n.pending_deps
), blocked AS (
    UPDATE jobs j SET state = 'blocked', queue_deadline = NULL
    FROM nodes n WHERE j.id = n.job_id AND n.pending_deps > 0 AND j.id = ANY (CAST(:new AS bigint[]))
    RETURNING j.id, j.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)
    SELECT id, 'block', 'queued', 'blocked', fence, :actor FROM blocked
)
UPDATE graphs SET state = 'active', finished_at = NULL WHERE id = :graph
""")


class GraphNode(NamedTuple):
    """A node as it is decided about. outcome: how it ended; None = it has not. state: of its job; None = deleted."""

    number: int
    outcome: str | None
    state: str | None
    attempts: int = 0
    is_callback: bool = False


class GraphEdge(NamedTuple):
    """That one node depends on another, by their numbers."""

    parent: int
    child: int
    on_failure: str


@dataclass(frozen=True)
class RetryPlan:
    """What is tried again, and what cannot be.

    nodes: the numbers that get new jobs.
    barred: nodes that get none, because a node that they depend on did not succeed and is not tried again: number →
    that one's, or once `_read` has looked, that of the node above which failed first.
    started: numbers of children that have started and are not held up again.
    busy: a node that has to be waited for: it is being stopped, or is a callback that may run.
    """

    nodes: frozenset[int]
    barred: Mapping[int, int]
    started: frozenset[int]
    busy: int | None = None


def plan_retry(
    nodes: Collection[GraphNode], edges: Collection[GraphEdge], wanted: Collection[int] | None = None
) -> RetryPlan:
    """Choose the nodes that are tried again: those of `wanted` that ended badly, and all that were cancelled with them;
    None = every node that ended badly."""
    by_number = {node.number: node for node in nodes}
    children, parents = defaultdict[int, list[GraphEdge]](list), defaultdict[int, list[GraphEdge]](list)
    for edge in edges:
        children[edge.parent].append(edge)
        parents[edge.child].append(edge)
    bad = {node.number for node in nodes if node.outcome in ENDED_BADLY}
    chosen = {number for number in bad if not by_number[number].is_callback} if wanted is None else bad & {*wanted}
    follow = list(chosen)
    while follow:
        for edge in children[follow.pop()]:
            child = by_number[edge.child]
            if edge.on_failure == "cancel" and child.outcome == "cancelled" and edge.child not in chosen:
                chosen.add(edge.child)
                follow.append(edge.child)
    barred = dict(_barred(chosen, parents, by_number))
    while barred.keys() & chosen:
        chosen -= barred.keys()
        barred |= dict(_barred(chosen, parents, by_number))
    if chosen:
        chosen |= {node.number for node in nodes if node.is_callback and node.outcome is not None}
    reached = {edge.child for number in chosen for edge in children[number]} - chosen
    busy = next((node.number for node in nodes if chosen and _is_busy(node)), None)
    started = frozenset(number for number in reached if _has_started(by_number[number]))
    return RetryPlan(frozenset(chosen), barred, started, busy)


def _barred(
    chosen: Collection[int], parents: Mapping[int, Sequence[GraphEdge]], nodes: Mapping[int, GraphNode]
) -> Iterator[tuple[int, int]]:
    for number in chosen:
        for edge in parents.get(number, ()):
            ended = nodes[edge.parent].outcome
            if edge.on_failure != "run" and ended in ENDED_BADLY and edge.parent not in chosen:
                yield number, edge.parent


def _has_started(node: GraphNode) -> bool:
    waits = node.state == "blocked" or (node.outcome == "cancelled" and node.attempts == 0)
    return not waits


def _is_busy(node: GraphNode) -> bool:
    return node.state == "cancelling" or (node.is_callback and node.outcome is None and node.state != "blocked")


@dataclass(frozen=True)
class RetriedGraph:
    """A graph that goes on: public ids of the new jobs by the numbers of their nodes; none if nothing had failed."""

    public_id: str
    name: str
    jobs: Mapping[int, str]


def retry_graph(
    connection: Connection,
    public_id: str,
    *,
    nodes: Collection[int] | None = None,
    instances: Sequence[str] | None,
    ceiling: int | None,
    key: str | None = None,
    actor: str,
) -> RetriedGraph:
    """Let a graph go on from the nodes with these numbers, or from all that failed, died or were cancelled.

    A node that has not ended, or has succeeded, is passed over. With a `key` (at most 150 bytes) that has made new jobs
    of the graph before, these are the answer, and nothing else is done. Raises NotFound without such a graph or node,
    Conflict `graph_replaced` if another graph has taken the place of this one, `node_barred` if a node depends on one
    that failed and is not tried again, `graph_busy` if a node is still being stopped or the callback runs,
    `job_deleted` if its job is kept no longer; Forbidden for a job that is more urgent than `ceiling`; QueueFull.
    Nothing is changed then.
    """
    allow_longer(connection)
    where = {"id": public_id, "instances": None if instances is None else list(instances)}
    connection.execute(LOCK_NAMES, {"ids": [public_id]})
    graph = connection.execute(LOCK, where).one_or_none()
    if graph is None:
        raise NotFound(f"id: there is no graph '{public_id}'")
    if key is not None:
        made = {row.node_no: str(row.public_id) for row in connection.execute(MADE_BY, {"key": key, "graph": graph.id})}
        if made:
            return RetriedGraph(public_id, graph.name, made)
    if graph.state == "replaced":
        raise Conflict("graph_replaced", f"graph: a newer graph has replaced this one of the name '{graph.name}'")
    rows, plan = _read(connection, graph.id, nodes)
    absent = sorted(set(nodes or ()) - rows.keys())
    if absent:
        raise NotFound(f"nodes: the graph has no node {absent[0]}")
    if plan.busy is not None:
        raise Conflict("graph_busy", f"nodes: node {plan.busy} {_busy(rows[plan.busy])}: try again when it has ended")
    for number, parent in sorted(plan.barred.items()):
        ended = ENDED_BADLY[rows[parent].outcome]
        raise Conflict("node_barred", f"nodes: node {number} depends on node {parent}, which {ended}")
    made = _replace(connection, graph, rows, plan, ceiling=ceiling, key=key, actor=actor)
    return RetriedGraph(public_id, graph.name, {number: made[number] for number in sorted(made)})


#: A graph of which no other one of its name has taken the place.
_STANDS = """g.state <> 'replaced' AND NOT EXISTS (
    SELECT FROM graphs o WHERE o.instance = g.instance AND o.name = g.name AND o.state = 'active' AND o.id <> g.id)"""
GRAPHS_OF_JOBS = Statement("""
SELECT DISTINCT g.public_id FROM graph_nodes n JOIN graphs g ON g.id = n.graph
WHERE n.job_id = ANY (CAST(:ids AS bigint[]))
""")
OF_JOBS = Statement(f"""
SELECT DISTINCT g.public_id, n.node_no, n.job_id FROM graph_nodes n JOIN graphs g ON g.id = n.graph
WHERE n.job_id = ANY (CAST(:ids AS bigint[])) AND {_STANDS} ORDER BY 1, 2
""")


class RetriedNode(NamedTuple):
    """What became of a node's job. job: public id of its new job, None = it cannot run now; why: the reason of that."""

    job: str | None
    made: bool
    why: str | None


def retry_nodes(
    connection: Connection, jobs: Mapping[str, int], *, ceiling: int | None, key: str | None, actor: str
) -> dict[str, RetriedNode]:
    """Let the graphs go on of which some of these jobs, given by public id and id, are nodes.

    A node cannot run now if one that it depends on failed, or if its graph is busy. Jobs of no graph, and of graphs of
    which another one has taken the place, are left out. Raises as `retry_graph` does for other reasons.
    """
    ids = list(jobs.values())
    graphs = [str(row.public_id) for row in connection.execute(GRAPHS_OF_JOBS, {"ids": ids})]
    if not graphs:
        return {}
    connection.execute(LOCK_NAMES, {"ids": graphs})
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for row in connection.execute(OF_JOBS, {"ids": ids}):
        found[str(row.public_id)][row.node_no] = row.job_id
    names = {job_id: name for name, job_id in jobs.items()}
    answers: dict[str, RetriedNode] = {}
    for public_id, wanted in found.items():
        graph = connection.execute(LOCK, {"id": public_id, "instances": None}).one()
        rows, plan = _read(connection, graph.id, wanted)
        made = {}
        if plan.busy is None:
            made = _replace(connection, graph, rows, plan, ceiling=ceiling, key=key, actor=actor)
        for number, job_id in wanted.items():
            why = None if number in made else _why_not(public_id, number, rows, plan)
            answers[names[job_id]] = RetriedNode(made.get(number), number in made, why)
    return answers


def _why_not(graph: str, number: int, rows: Mapping[int, Row], plan: RetryPlan) -> str | None:
    """Return why this node cannot run now, and what would do it."""
    if plan.busy is not None:
        return f"node {plan.busy} of its graph {_busy(rows[plan.busy])}: try again when it has ended"
    parent = plan.barred.get(number)
    if parent is None:
        return None
    goes_on = f"`leasehold graph retry {graph}` lets the graph go on"
    return f"it depends on node {parent} of its graph, which {ENDED_BADLY[rows[parent].outcome]}; {goes_on}"


def _read(connection: Connection, graph: int, wanted: Collection[int] | None) -> tuple[dict[int, Row], RetryPlan]:
    """The nodes of the graph, which are locked now, by their numbers, and what of them is tried again."""
    connection.execute(LOCK_NODES, {"graph": graph})
    rows = {row.node_no: row for row in connection.execute(NODES, {"graph": graph})}
    edges = [GraphEdge(*row) for row in connection.execute(EDGES, {"graph": graph})]
    nodes = [
        GraphNode(row.node_no, row.outcome, row.state, row.attempts, row.callback is not None) for row in rows.values()
    ]
    plan = plan_retry(nodes, edges, wanted)
    barred = {rows[number].job_id: number for number in plan.barred}
    if not barred:
        return rows, plan
    firsts = first_failed(connection, barred, passed_over=[rows[number].job_id for number in plan.nodes])
    known = {barred[job_id]: first.node for job_id, first in firsts.items() if first is not None and job_id in barred}
    return rows, replace(plan, barred={**plan.barred, **known})


def _replace(
    connection: Connection,
    graph: Row,
    rows: Mapping[int, Row],
    plan: RetryPlan,
    *,
    ceiling: int | None,
    key: str | None,
    actor: str,
) -> dict[int, str]:
    """Give the nodes of the plan new jobs; returns their public ids by number."""
    if not plan.nodes:
        return {}
    chosen = [rows[number] for number in sorted(plan.nodes)]
    for row in chosen:
        if row.state is None:
            raise Conflict("job_deleted", f"nodes: the job of node {row.node_no} is kept no longer")
    connection.execute(LOCK_AGAINST_RETENTION, {"ids": sorted(row.job_id for row in chosen)})
    made: dict[str, Submitted] = {}
    for part in _slices(chosen, SLICE):
        jobs = {str(row.public_id): row.job_id for row in part}
        made |= submit_again(connection, jobs, ceiling=ceiling, key=key, actor=actor)
    old = [row.job_id for row in chosen]
    new = [made[str(row.public_id)].job_id for row in chosen]
    started = [rows[number].job_id for number in plan.started]
    connection.execute(REPLACE, {"old": old, "new": new, "started": started})
    try:
        connection.execute(COUNT, {"new": new, "graph": graph.id, "actor": actor})
    except psycopg.errors.UniqueViolation:
        reason = f"graph: another graph of the name '{graph.name}' has taken the place of this one"
        raise Conflict("graph_replaced", reason) from None
    return {row.node_no: made[str(row.public_id)].public_id for row in chosen}


def _slices(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _busy(row: Row) -> str:
    return "is still being stopped" if row.state == "cancelling" else "is the callback, and may run already"
