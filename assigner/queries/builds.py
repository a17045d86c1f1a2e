"""The newest builds of the farm door, with what has become of their jobs so far."""

from collections.abc import Sequence
from typing import Any

from leasehold.states import FINAL

from assigner.queries.jobs import VISIBLE
from schema.postgres.connection import Connection
from schema.postgres.fragments import DESCRIBED
from schema.postgres.statements import Statement

#: The most jobs of a build that are looked at, the newest of them.
MOST_JOBS = 5_000

NEWEST = Statement(f"""
WITH named AS MATERIALIZED (
    SELECT b.*, i.name FROM builds b JOIN instances i ON i.id = b.instance
    WHERE {VISIBLE} AND (CAST(:instance AS text) IS NULL OR i.name = :instance)
    ORDER BY b.seen_at DESC, b.invocation LIMIT :limit
)
SELECT n.name AS instance, n.invocation, n.tool, n.began_at, n.cached, n.joined, n.made, s.*,
    extract(epoch FROM CASE WHEN s.unfinished > 0 THEN now() ELSE greatest(n.seen_at, s.ended_at) END - n.began_at)
        AS seconds
FROM named n CROSS JOIN LATERAL (
    SELECT count(*) AS looked, count(*) FILTER (WHERE j.waits) AS waiting,
        count(*) FILTER (WHERE NOT j.waits AND NOT j.is_final) AS running,
        count(*) FILTER (WHERE NOT j.is_final) AS unfinished,
        count(*) FILTER (WHERE j.state IN ('failed', 'dead')) AS failed,
        count(*) FILTER (WHERE j.state = 'cancelled') AS cancelled, max(j.finished_at) AS ended_at,
        extract(epoch FROM max(coalesce(j.started_at, j.finished_at, now()) - j.queued_at)) AS longest_wait,
        count(DISTINCT j.bot_id) AS bots
    FROM (
        SELECT DISTINCT f.job_id FROM (
            SELECT d.job_id FROM {DESCRIBED} d
            WHERE d.instance = n.instance AND d.key = 'invocation' AND d.value = n.invocation
            ORDER BY d.job_id DESC LIMIT :most) f) u
    CROSS JOIN LATERAL (
        SELECT o.state, o.queued_at, o.started_at, o.finished_at, o.state = ANY (CAST(:final AS text[])) AS is_final,
            o.state IN ('blocked', 'queued', 'parked', 'deferred') AS waits,
            (SELECT l.bot_id FROM leases l WHERE l.job_id = o.id ORDER BY l.fence DESC LIMIT 1) AS bot_id
        FROM jobs o WHERE o.id = u.job_id OFFSET 0) j) s
ORDER BY n.seen_at DESC, n.invocation
""")


def newest(
    connection: Connection, *, instances: Sequence[str] | None, instance: str | None, limit: int
) -> list[dict[str, Any]]:
    """Return the builds that asked for an action last, at most `limit`. instances: those that may be seen; None = all.

    Of each build the newest `MOST_JOBS` jobs are counted; `more`: it has others.
    """
    names = None if instances is None else list(instances)
    values = {"instances": names, "instance": instance, "limit": limit, "final": sorted(FINAL), "most": MOST_JOBS + 1}
    rows = connection.execute(NEWEST, values).mappings()
    return [dict(row) | {"more": row["looked"] > MOST_JOBS} for row in rows]
