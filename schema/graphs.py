"""Which graphs have jobs that wait or run, and how many each of them may run."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, text

from schema.predicates import CONSTRAINED

COUNTER_PREFIX = "graph:"

# One step along the index for each queue of jobs that ask for more than a place, however many jobs it holds.
_STEP = f"""
    SELECT cohort, instance, platform, constraint_set FROM jobs
    WHERE {CONSTRAINED} AND (cohort, instance, platform, constraint_set) > ({{after}})
    ORDER BY cohort, instance, platform, constraint_set LIMIT 1"""
ACTIVE_GRAPHS = text(f"""
WITH RECURSIVE gated AS (
    SELECT first.* FROM ({_STEP.format(after="-1, -1, -1, -1")}) first
    UNION ALL
    SELECT following.* FROM gated g
    CROSS JOIN LATERAL ({_STEP.format(after="g.cohort, g.instance, g.platform, g.constraint_set")}) following
), waiting AS (
    SELECT t.terms->>'graph' AS graph FROM (SELECT DISTINCT constraint_set FROM gated) g
    CROSS JOIN LATERAL (SELECT terms FROM constraint_sets WHERE id = g.constraint_set OFFSET 0) t
    WHERE t.terms->>'graph' IS NOT NULL
)
SELECT count(*) FROM (
    SELECT graph FROM waiting
    UNION
    SELECT split_part(name, ':', 2) FROM counters WHERE name LIKE 'graph:%' AND used > 0) active
""")
ENFORCE_CAPS = text("SELECT keep_caps(CAST(:names AS text[]), CAST(:caps AS numeric[]))")
# What a graph counts begins anew with its next job.
DELETE_IDLE_COUNTERS = text("""
DELETE FROM counters WHERE used = 0 AND most IS NULL AND name = ANY (ARRAY(
    SELECT name FROM counters WHERE name LIKE 'graph:%' AND used = 0 AND most IS NULL
    ORDER BY name COLLATE "C" LIMIT :limit FOR UPDATE SKIP LOCKED))
""")


def active_graphs(connection: Connection) -> int:
    """Graphs that have jobs ready to start or running. One step along an index for each queue of gated jobs."""
    return int(connection.execute(ACTIVE_GRAPHS).scalar_one())


def enforce_caps(connection: Connection, caps: Mapping[str, int]) -> None:
    """The counters that this transaction has taken of must not be above these numbers.

    If others took of them since they were looked at, the transaction has to begin anew: raises DBAPIError with the
    SQLSTATE of a serialization failure, which `Database.run` repeats.
    """
    if caps:
        connection.execute(ENFORCE_CAPS, {"names": list(caps), "caps": list(caps.values())})


def delete_idle_counters(connection: Connection, *, limit: int) -> int:
    """Delete up to `limit` counters of graphs that run nothing; returns how many."""
    return connection.execute(DELETE_IDLE_COUNTERS, {"limit": limit}).rowcount


# What a blocked job waits for.


# Its parents that have not ended as it asks, those that never will first.
UNMET_DEPENDENCIES = text("""
SELECT p.node_no AS node, j.public_id AS job, coalesce(j.state, p.outcome) AS state, e.on_failure,
    p.outcome IS NOT NULL AS hopeless
FROM graph_edges e JOIN graph_nodes p ON p.job_id = e.parent LEFT JOIN jobs j ON j.id = e.parent
WHERE e.child = :id AND (p.outcome = 'succeeded' OR p.outcome IS NOT NULL AND e.on_failure = 'run') IS NOT TRUE
ORDER BY p.outcome IS NULL, p.node_no LIMIT :limit
""")
# The nearest of the nodes that it waits for, however indirectly, which can never run; itself comes first.
NEVER_MET = text("""
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
    """`unmet`: up to `limit` of the nodes that have not ended as the job asks, with their jobs' ids and states, those
    that never will first. `hopeless`: the number of the node because of which it waits for ever, None if it does not.
    """
    rows = connection.execute(UNMET_DEPENDENCIES, {"id": job_id, "limit": limit}).mappings()
    hopeless = connection.execute(NEVER_MET, {"id": job_id}).scalar_one_or_none()
    return {"unmet": [dict(row) for row in rows], "hopeless": hopeless}
