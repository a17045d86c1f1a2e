"""What callers and operators may read of graphs: plain queries, none of them locking."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text

from assigner.queries import VISIBLE
from schema.errors import BadInput
from schema.limits import escaped

Rows = list[dict[str, Any]]

_FACTS = """
SELECT s.public_id AS id, s.graph, s.instance, s.name, s.state, s.priority, s.nodes, s.edges, s.missing, s.actor,
    s.created_at, s.finished_at, s.blocked, s.blocked_forever, s.queued, s.parked, s.active, s.succeeded, s.failed,
    s.cancelled, s.dead
FROM graph_stats s
"""
GRAPH = text(f"{_FACTS} WHERE s.graph = :graph")

BY_ID = text(f"""
SELECT g.id, g.public_id FROM graphs g JOIN instances i ON i.id = g.instance
WHERE g.public_id = CAST(:id AS uuid) AND {VISIBLE}
""")
# The newest of the name, in each instance that has one.
BY_NAME = text(f"""
SELECT g.id, g.public_id FROM instances i CROSS JOIN LATERAL (
    SELECT id, public_id FROM graphs WHERE instance = i.id AND name = :name ORDER BY id DESC LIMIT 1) g
WHERE {VISIBLE} AND (CAST(:instance AS text) IS NULL OR i.name = :instance) LIMIT 2
""")
# One page, newest first; `before` is the row of the last graph of the page before.
PAGE = text(f"""
WITH page AS MATERIALIZED (
    SELECT g.id FROM graphs g JOIN instances i ON i.id = g.instance
    WHERE {VISIBLE} AND (CAST(:instance AS text) IS NULL OR i.name = :instance)
        AND (NOT CAST(:open AS boolean) OR g.finished_at IS NULL)
        AND (CAST(:before AS bigint) IS NULL OR g.id < :before)
    ORDER BY g.id DESC LIMIT :limit
)
{_FACTS} WHERE s.graph = ANY (ARRAY(SELECT id FROM page)) ORDER BY s.graph DESC
""")
# One page of the nodes of a graph, by number; a node without a job has been over for long.
NODES = text("""
SELECT n.node_no AS node, j.public_id AS job, coalesce(j.state, n.outcome) AS state, n.depth, j.priority,
    n.pending_deps AS waits_for, n.missing, j.reason, n.dead_ends > 0 AND n.outcome IS NULL AS dead_end
FROM graph_nodes n LEFT JOIN LATERAL (SELECT * FROM jobs WHERE id = n.job_id OFFSET 0) j ON true
WHERE n.graph = :graph AND n.node_no > :after ORDER BY n.node_no LIMIT :limit
""")


def find(
    connection: Connection, *, public_id: str | None, name: str, instance: str | None, instances: Sequence[str] | None
) -> tuple[int, str] | None:
    """Row and public id of the graph with this id or, without one, of the newest of this name; None if there is none
    to see. Raises BadInput if several instances have one."""
    where: dict[str, Any] = {"instances": instances}
    if public_id is not None:
        rows = connection.execute(BY_ID, where | {"id": public_id}).all()
        if rows:
            return rows[0].id, str(rows[0].public_id)
    rows = connection.execute(BY_NAME, where | {"name": name, "instance": instance}).all()
    if len(rows) > 1:
        raise BadInput("instance", f"several instances have a graph '{escaped(name, 80)}': say which one is meant")
    return (rows[0].id, str(rows[0].public_id)) if rows else None


def graph(connection: Connection, row_id: int) -> dict[str, Any]:
    """One graph, with how many of its nodes are in which state."""
    return dict(connection.execute(GRAPH, {"graph": row_id}).mappings().one())


def nodes(connection: Connection, row_id: int, *, after: int, limit: int) -> Rows:
    """Nodes by number, from the first after `after`."""
    where = {"graph": row_id, "after": after, "limit": limit}
    return [dict(row) for row in connection.execute(NODES, where).mappings()]


def page(connection: Connection, *, instances: Sequence[str] | None, filters: Mapping[str, Any]) -> Rows:
    """One page of graphs; `filters` are instance, open, before (a row id) and limit."""
    return [dict(row) for row in connection.execute(PAGE, {"instances": instances} | dict(filters)).mappings()]
