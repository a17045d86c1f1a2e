"""Reads of dependency graphs: active graphs, their counters, what a blocked job waits for, and why one was cancelled.

A graph is active while it has jobs that are ready or running. Its running jobs are counted in the counter `graph:ID`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import ready_queues

COUNTER_PREFIX = "graph:"

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
#: The most nodes between those that were cancelled and those that failed first.
MAX_BETWEEN = 10_000

# Of what a node depends on, the first that did not succeed is why it was cancelled. All that was cancelled at one
# moment was so because of one node, so it does not matter which of these comes first.
_CAUSE = """
    SELECT e.parent, n.node_no AS node, j.public_id AS job, n.outcome, coalesce(j.reason = :upstream, false) AS goes_on
    FROM graph_edges e JOIN graph_nodes n ON n.job_id = e.parent LEFT JOIN jobs j ON j.id = e.parent
    WHERE e.child = {child} AND e.on_failure = 'cancel' AND n.outcome <> 'succeeded'
    ORDER BY j.finished_at NULLS FIRST, n.node_no LIMIT 1"""
CAUSES = Statement(f"""
WITH RECURSIVE above AS (
    SELECT t.child, c.* FROM unnest(CAST(:ids AS bigint[])) AS t (child)
    CROSS JOIN LATERAL ({_CAUSE.format(child="t.child")}) c
    UNION
    SELECT a.parent, c.* FROM above a CROSS JOIN LATERAL ({_CAUSE.format(child="a.parent")}) c WHERE a.goes_on
)
SELECT * FROM above LIMIT :limit
""")


def with_roots(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of jobs, of which nodes that were cancelled because of others have the first of these as `reason`.

    Each has `row_id` and `reason`. Nothing is read unless there is such a node.
    """
    cancelled = [row["row_id"] for row in rows if row["reason"] == UPSTREAM]
    if not cancelled:
        return [dict(row) for row in rows]
    where = {"ids": cancelled, "upstream": UPSTREAM, "limit": MAX_BETWEEN}
    causes = {cause.child: cause for cause in connection.execute(CAUSES, where)}

    def reason(row_id: int) -> str:
        cause = causes.get(row_id)
        while cause is not None and cause.goes_on:
            cause = causes.get(cause.parent)
        if cause is None:
            return UPSTREAM
        job = "" if cause.job is None else f", job {cause.job},"
        return f"cancelled: node {cause.node} of its graph{job} {ENDED_BADLY[cause.outcome]}"

    return [{**row, "reason": reason(row["row_id"])} if row["reason"] == UPSTREAM else dict(row) for row in rows]
