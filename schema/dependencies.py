"""What a blocked job waits for."""

from typing import Any

from sqlalchemy import Connection, text

# Its parents that have not ended as it asks, those that never will first.
UNMET = text("""
SELECT p.node_no AS node, j.public_id AS job, coalesce(j.state, p.outcome) AS state, e.on_failure,
    p.outcome IS NOT NULL AS hopeless
FROM graph_edges e JOIN graph_nodes p ON p.job_id = e.parent LEFT JOIN jobs j ON j.id = e.parent
WHERE e.child = :id AND (p.outcome = 'succeeded' OR p.outcome IS NOT NULL AND e.on_failure = 'run') IS NOT TRUE
ORDER BY p.outcome IS NULL, p.node_no LIMIT :limit
""")
# The nearest of the nodes that it waits for, however indirectly, which can never run; itself comes first.
HOPELESS = text("""
WITH RECURSIVE above AS (
    SELECT job_id, node_no, dead_ends FROM graph_nodes WHERE job_id = :id
    UNION
    SELECT p.job_id, p.node_no, p.dead_ends FROM above a
    CROSS JOIN LATERAL (SELECT parent FROM graph_edges WHERE child = a.job_id OFFSET 0) e
    CROSS JOIN LATERAL (SELECT * FROM graph_nodes WHERE job_id = e.parent AND outcome IS NULL OFFSET 0) p
)
SELECT node_no FROM above WHERE dead_ends > 0 LIMIT 1
""")


def unmet(connection: Connection, job_id: int, *, limit: int) -> dict[str, Any]:
    """`unmet`: up to `limit` of the nodes that have not ended as the job asks, with their jobs' ids and states, those
    that never will first. `hopeless`: the number of the node because of which it waits for ever, None if it does not.
    """
    rows = connection.execute(UNMET, {"id": job_id, "limit": limit}).mappings()
    hopeless = connection.execute(HOPELESS, {"id": job_id}).scalar_one_or_none()
    return {"unmet": [dict(row) for row in rows], "hopeless": hopeless}
