"""Queues that hold ready jobs which nobody can run: their jobs are considered, and fail."""

from sqlalchemy import Connection, text

from schema.gates import HEALTHY, serves
from schema.ledger import Guard
from schema.queues import Queue, ready_queues
from schema.ready import Scope, wanted

# No healthy bot could serve them, were it ever so idle.
UNSERVED = text(f"""
WITH RECURSIVE {ready_queues("queues")}, {wanted(Guard.MAX)}
SELECT w.cohort, w.instance, w.platform FROM wanted w
WHERE NOT EXISTS (
    SELECT FROM (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT FROM bots b
        WHERE b.id = bp.bot_id AND {serves("b", "w")}
            AND {HEALTHY.of(bot="b")} AND b.capacity > 0 OFFSET 0) b
    OFFSET 0)
LIMIT :limit
""")


def unserved(connection: Connection, scope: Scope, *, limit: int) -> list[Queue]:
    """Queues that hold ready jobs which no healthy bot satisfies, whether free or full."""
    rows = connection.execute(UNSERVED, {**scope.values(), "limit": limit})
    return [Queue(row.cohort, row.instance, row.platform) for row in rows]
