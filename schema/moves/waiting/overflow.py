"""queued -> deferred: defer, where more jobs wait than may; deferred -> queued: return_deferred."""

from collections.abc import Sequence
from itertools import chain

from schema.accounting.held_rows import move_rows
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import IN_FRONT, READY_CONSTRAINED, STILL_READY

#: Ranks that are looked at: of all cohorts, and of all queues with constraints.
MAX_RANKS = 2000
#: Names in one notification, whose payload is bounded.
NAMES = 200


def _low_ranks(name: str, column: str, ready: str) -> str:
    """A recursive CTE: each rank above `:normal` of each `column`, one step along the index for each."""
    step = (
        f"SELECT {column}, rank FROM jobs WHERE {ready} AND ({column}, rank) > ({{}}) ORDER BY {column}, rank LIMIT 1"
    )
    return f"""{name} AS (
    SELECT f.*, 1 AS steps FROM ({step.format("-1, '-infinity'")}) f
    UNION ALL
    SELECT f.*, z.steps + 1 FROM {name} z CROSS JOIN LATERAL (
        {step.format(f"z.{column}, greatest(z.rank, :normal)")}) f WHERE z.steps < {MAX_RANKS}
)"""


def _newest(name: str, column: str, ready: str) -> str:
    """The newest jobs of each of those ranks, from the end of its stretch of the index. A job that somebody may join
    stays."""
    return f"""
    SELECT n.* FROM {name} z CROSS JOIN LATERAL (
        SELECT id, queued_at FROM jobs
        WHERE {column} = z.{column} AND rank = z.rank AND {ready} AND dedup_key IS NULL
        ORDER BY {column} DESC, rank DESC, queued_at DESC, id DESC LIMIT :limit) n
    WHERE z.rank > :normal"""


# What somebody else has locked is left for the next time.
DEFER = Statement(f"""
WITH RECURSIVE {_low_ranks("plain", "cohort", IN_FRONT)}, {_low_ranks("constrained", "queue", READY_CONSTRAINED)},
newest AS MATERIALIZED (
    SELECT * FROM ({_newest("plain", "cohort", IN_FRONT)}
    UNION ALL {_newest("constrained", "queue", READY_CONSTRAINED)}) low
    ORDER BY queued_at DESC, id DESC LIMIT :limit
), held AS MATERIALIZED (
    SELECT id FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM newest)) AND {STILL_READY}
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs j SET state = 'deferred', reason = 'more jobs wait than may'
    FROM held h WHERE j.id = h.id AND j.state = 'queued' RETURNING j.id, j.public_id, j.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'defer', 'queued', 'deferred', fence, :actor, jsonb_build_object('may_wait', CAST(:most AS integer))
    FROM moved
), told AS (
    SELECT wake('deferred', string_agg(public_id::text, ',')) FROM (
        SELECT public_id, row_number() OVER (ORDER BY id) / {NAMES} AS part FROM moved) parts GROUP BY part
)
SELECT public_id, (SELECT count(*) FROM told) AS woken FROM moved ORDER BY id
""")

FIND_DEFERRED = Statement("""
SELECT id FROM jobs WHERE state = 'deferred' ORDER BY queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
""")
# They keep their place in the order. The cohorts may have changed meanwhile.
RETURN = Statement("""
WITH moved AS (
    UPDATE jobs j SET state = 'queued', reason = NULL, cohort = cohort_of(j.label),
        queue = queue_in_cohort(j.queue, cohort_of(j.label))
    WHERE j.id = ANY (CAST(:ids AS bigint[])) AND j.state = 'deferred' RETURNING j.id, j.public_id, j.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)
    SELECT id, 'return', 'deferred', 'queued', fence, :actor FROM moved
), told AS (
    SELECT wake('jobs') FROM moved HAVING count(*) > 0
)
SELECT public_id, (SELECT count(*) FROM told) AS woken FROM moved ORDER BY id
""")


def defer(connection: Connection, limit: int, *, normal: int, most: int, actor: str) -> list[str]:
    """Take up to `limit` of the newest jobs of the low level, whose effective priority is above `normal`, off the
    queue, because more than `most` wait; returns their public ids."""
    rows = connection.execute(DEFER, {"limit": limit, "normal": normal, "most": most, "actor": actor})
    return [str(row.public_id) for row in rows]


def return_deferred(connection: Connection, limit: int, *, actor: str, tries: bool = False) -> list[str]:
    """Put up to `limit` of the oldest deferred jobs back where they were in the queue; returns their public ids.

    tries: what cannot be moved now is left: a row that it needs is held, or wrong.
    """

    def back(among: Sequence[int]) -> list[str]:
        rows = connection.execute(RETURN, {"ids": list(among), "actor": actor})
        return [str(row.public_id) for row in rows]

    found = [row.id for row in connection.execute(FIND_DEFERRED, {"limit": limit})]
    return [*chain.from_iterable(move_rows(connection, found, back, tries=tries))]
