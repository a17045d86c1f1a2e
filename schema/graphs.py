"""Reads of dependency graphs: active graphs, their counters, what a blocked job waits for, and why one was cancelled.

A graph is active while it has jobs that are ready or running. Its running jobs are in the counter `graph:ID:jobs`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import ready_queues

ACTIVE_GRAPHS = Statement(f"""
WITH RECURSIVE {ready_queues("ready", constrained=True)}, waiting AS (
    SELECT DISTINCT t.terms->>'graph' AS graph FROM queues q JOIN constraint_sets t ON t.id = q.constraint_set
    WHERE q.id = ANY (ARRAY(SELECT queue FROM ready)) AND t.terms ? 'graph'
)
SELECT count(*) FROM (
    SELECT graph FROM waiting
    UNION
    SELECT split_part(name, ':', 2) FROM counters WHERE name LIKE 'graph:%' AND used > 0) active
""")
ENFORCE_CAPS = Statement("SELECT keep_caps(CAST(:names AS text[]), CAST(:caps AS numeric[]))")
# The next job of a graph whose counter was deleted makes the counter again.
DELETE_IDLE_COUNTERS = Statement("""
DELETE FROM counters WHERE used = 0 AND most IS NULL AND name = ANY (ARRAY(
    SELECT name FROM counters WHERE name LIKE 'graph:%' AND used = 0 AND most IS NULL
    ORDER BY name COLLATE "C" LIMIT :limit FOR UPDATE SKIP LOCKED))
""")


def active_graphs(connection: Connection) -> int:
    """Number of graphs that have jobs ready or running. Takes one index step for each queue."""
    return int(connection.execute(ACTIVE_GRAPHS).scalar_one())


def enforce_caps(connection: Connection, caps: Mapping[str, int]) -> None:
    """Fail if one of the counters that this transaction has charged is above its cap.

    `caps`: counter name → largest allowed value. A counter can be above its cap if another transaction charged it after
    this one read it. Then this raises psycopg.Error with the SQLSTATE of a serialization failure, and `Database.run`
    repeats the transaction.
    """
    if caps:
        connection.execute(ENFORCE_CAPS, {"names": list(caps), "caps": list(caps.values())})


def delete_idle_counters(connection: Connection, *, limit: int) -> int:
    """Delete up to `limit` counters of graphs that have no running job; returns the number deleted."""
    return connection.execute(DELETE_IDLE_COUNTERS, {"limit": limit}).rowcount


# What a blocked job waits for


# Parents of the job that have not ended as its edges require; those that never will come first.
UNMET_DEPENDENCIES = Statement("""
SELECT p.node_no AS node, j.public_id AS job, coalesce(j.state, p.outcome) AS state, e.on_failure,
    p.outcome IS NOT NULL AS hopeless
FROM graph_edges e JOIN graph_nodes p ON p.job_id = e.parent LEFT JOIN jobs j ON j.id = e.parent
WHERE e.child = :id AND (p.outcome = 'succeeded' OR p.outcome IS NOT NULL AND e.on_failure = 'run') IS NOT TRUE
ORDER BY p.outcome IS NULL, p.node_no LIMIT :limit
""")
# The nearest ancestor that can never run, beginning with the job itself.
NEVER_MET = Statement("""
WITH RECURSIVE above AS (
    SELECT job_id, node_no, dead_ends FROM graph_nodes WHERE job_id = :id
    UNION
    SELECT p.job_id, p.node_no, p.dead_ends FROM above a
    CROSS JOIN LATERAL (SELECT parent FROM graph_edges WHERE child = a.job_id OFFSET 0) e
    CROSS JOIN LATERAL (SELECT * FROM graph_nodes WHERE job_id = e.parent AND outcome IS NULL OFFSET 0) p
)
SELECT node_no FROM above WHERE dead_ends > 0 LIMIT 1
""")


def unmet_dependencies(connection: Connection, job_id: int, *, limit: int) -> dict[str, Any]:
    """Return what a blocked job waits for.

    `unmet`: up to `limit` parents that have not ended as the job requires, with the ids and states of their jobs. Those
    that never will come first. `hopeless`: number of the node because of which the job can never run, None if it can.
    """
    rows = connection.execute(UNMET_DEPENDENCIES, {"id": job_id, "limit": limit}).mappings()
    hopeless = connection.execute(NEVER_MET, {"id": job_id}).scalar_one_or_none()
    return {"unmet": [dict(row) for row in rows], "hopeless": hopeless}


# Why a node was cancelled


#: The reason that is stored with nodes which are cancelled because another one did not succeed.
UPSTREAM = "cancelled: what it depends on did not succeed"
#: How a node ended that did not succeed, by its outcome.
ENDED_BADLY = {"failed": "failed", "dead": "is dead", "cancelled": "was cancelled"}
#: The most nodes for which one answer looks for what they were cancelled by, so that the cost of a list is bounded. One
#: graph has no more, so a read of one job always tells the first cause. Only a list of nodes of several deep graphs can
#: pass this bound, and then tells `UPSTREAM` of the deepest.
MAX_CAUSES = 10_001

# Of what a node depends on, the first that did not succeed is why it was cancelled, or cannot run. What cancels it
# comes before what blocks it. All that was cancelled at one moment was so because of one node, so it does not matter
# which of these comes first. Each round takes the nodes that the round before has found, and looks at each of their
# parents once, however many of them it has. It leaves out the nodes that were asked for, which the first round has
# done.
CAUSES = Statement("""
WITH RECURSIVE above AS (
    SELECT NULL::bigint AS child, t.id AS parent, NULL::integer AS node, NULL::uuid AS job, NULL::text AS outcome,
        true AS goes_on
    FROM unnest(CAST(:ids AS bigint[])) AS t (id)
    UNION
    (WITH now AS MATERIALIZED (
        SELECT DISTINCT parent AS child FROM above
        WHERE goes_on AND (child IS NULL OR parent <> ALL (CAST(:ids AS bigint[])))
    ), edges AS MATERIALIZED (
        SELECT n.child, e.parent, e.on_failure FROM now n CROSS JOIN LATERAL (
            SELECT parent, on_failure FROM graph_edges WHERE child = n.child AND on_failure <> 'run' OFFSET 0) e
    ), ended AS MATERIALIZED (
        SELECT p.parent, n.node_no AS node, j.public_id AS job, n.outcome, j.finished_at,
            coalesce(j.reason = :upstream, false) AS goes_on
        FROM (SELECT DISTINCT parent FROM edges
              WHERE parent NOT IN (SELECT unnest(CAST(:passed_over AS bigint[])))) p
        CROSS JOIN LATERAL (
            SELECT node_no, outcome FROM graph_nodes WHERE job_id = p.parent AND outcome <> 'succeeded' OFFSET 0) n
        LEFT JOIN LATERAL (SELECT public_id, reason, finished_at FROM jobs WHERE id = p.parent OFFSET 0) j ON true
    )
    SELECT DISTINCT ON (e.child) e.child, p.parent, p.node, p.job, p.outcome, p.goes_on
    FROM edges e JOIN ended p ON p.parent = e.parent
    ORDER BY e.child, e.on_failure <> 'cancel', p.finished_at NULLS FIRST, p.node)
)
SELECT child, parent, node, job, outcome, goes_on FROM above WHERE child IS NOT NULL LIMIT :limit
""")


class Cause(Protocol):
    """Why a node was cancelled, or cannot run: a node that it depends on, how that ended, and whether it was cancelled
    for another."""

    parent: int
    node: int
    job: str | None
    outcome: str
    goes_on: bool


def first_causes(causes: Mapping[int, Cause], ids: Iterable[int]) -> dict[int, Cause | None]:
    """Return of each of these nodes the cause of its cause, and so on to the last; None if that is not known.

    Each node is walked once, however many others lie above it.
    """
    found: dict[int, Cause | None] = {}
    for row_id in ids:
        at, passed = row_id, dict[int, None]()
        while at not in found:
            is_round = at in passed  # in a graph that was changed by hand
            passed[at] = None
            cause = causes.get(at)
            if cause is None or not cause.goes_on or is_round:
                found[at] = cause
            else:
                at = cause.parent
        found.update(dict.fromkeys(passed, found[at]))
    return found


def first_failed(
    connection: Connection, ids: Collection[int], *, passed_over: Collection[int] = ()
) -> dict[int, Cause | None]:
    """Return of each of these nodes the one above it that failed first; None if that is not known.

    ids: of the nodes' jobs. passed_over: ids of jobs that are not looked at.
    """
    where = {"ids": list(ids), "passed_over": list(passed_over), "upstream": UPSTREAM, "limit": MAX_CAUSES}
    return first_causes({cause.child: cause for cause in connection.execute(CAUSES, where)}, ids)


def with_roots(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return these rows of jobs. The `reason` of a node that was cancelled because of others names the first of them.

    Each row has `row_id` and `reason`. Nothing is read unless there is such a node.
    """
    cancelled = [row["row_id"] for row in rows if row["reason"] == UPSTREAM]
    if not cancelled:
        return [dict(row) for row in rows]
    firsts = first_failed(connection, cancelled)
    return [
        {**row, "reason": _because_of(firsts[row["row_id"]])} if row["reason"] == UPSTREAM else dict(row)
        for row in rows
    ]


def _because_of(cause: Cause | None) -> str:
    if cause is None:
        return UPSTREAM
    job = "" if cause.job is None else f", job {cause.job},"
    return f"cancelled: node {cause.node} of its graph{job} {ENDED_BADLY[cause.outcome]}"
