"""The live leases of bots whose calls are settled: what they held before, what they are due after."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, TextClause, text

from bots.visits import Visit
from schema.newest import NOT_OVER, latest_leases

# A bot's live leases are as many as its row says: those that are known, looked up by their keys, and for the rest the
# latest ones. So neither short jobs nor long ones make anybody look through what has ended between them.
_LEASE = "bot_id, job_id, fence, instance, state, delivered_at, stop_reason"
_LATEST = latest_leases("b.id", "b.held - coalesce(c.leases, 0)", columns=_LEASE, but="coalesce(c.jobs, '{}')")
_FOUND = f"""counted AS MATERIALIZED (
    SELECT bot_id, count(*) AS leases, array_agg(job_id) AS jobs FROM known GROUP BY bot_id
), found AS MATERIALIZED (
    SELECT * FROM known
    UNION ALL
    SELECT l.* FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:held AS integer[])) AS b (id, held)
    LEFT JOIN counted c ON c.bot_id = b.id
    CROSS JOIN LATERAL {_LATEST} l
)"""
# Before the call: known is what the bot says that it still has, as far as that is true.
HELD = text(f"""
WITH known AS MATERIALIZED (
    SELECT DISTINCT ON (l.job_id) l.*
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS uuid[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT id FROM jobs WHERE public_id = k.job OFFSET 0) j
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = j.id AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_FOUND}
SELECT l.bot_id, l.job_id, j.public_id, l.fence, l.state FROM found l JOIN jobs j ON j.id = l.job_id ORDER BY l.job_id
""")
# After it: known is what was held and has not ended. The payload travels until the bot has said that it has the lease.
DUE = text(f"""
WITH known AS MATERIALIZED (
    SELECT l.*
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS bigint[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = k.job AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_FOUND}
SELECT l.bot_id, l.job_id, j.public_id, l.fence, l.state, i.name AS instance, j.attempts, j.timeout_seconds, p.payload,
    l.delivered_at IS NOT NULL AS delivered, CASE WHEN l.state = 'cancelling' THEN l.stop_reason END AS stop_reason
FROM found l JOIN jobs j ON j.id = l.job_id JOIN instances i ON i.id = l.instance
LEFT JOIN job_payloads p ON p.job_id = l.job_id AND l.state = 'pending'
ORDER BY l.job_id
""")

Known = Iterable[tuple[object, int]]


def held(connection: Connection, visits: Sequence[Visit]) -> None:
    """Give each visit the live leases that its bot has when its call begins, in the order of their jobs. The bots' rows
    are locked."""
    _gather(connection, HELD, visits, _reported, lambda visit: visit.held)


def due(connection: Connection, visits: Sequence[Visit]) -> None:
    """Give each visit the live leases that its bot has when all else is settled, likewise."""
    _gather(connection, DUE, visits, _left, lambda visit: visit.due)


def _reported(visit: Visit) -> Known:
    for report in visit.sync.leases if visit.sync is not None else ():
        try:
            yield UUID(report.job), report.fence
        except ValueError:
            continue


def _left(visit: Visit) -> Known:
    ended = {job.job_id for job in visit.ended}
    return ((lease.job_id, lease.fence) for lease in visit.held if lease.job_id not in ended)


def _gather(
    connection: Connection,
    query: TextClause,
    visits: Sequence[Visit],
    known: Callable[[Visit], Known],
    into: Callable[[Visit], list[Row[Any]]],
) -> None:
    by_bot = {visit.bot.id: visit for visit in visits}
    keys = [(bot_id, job, fence) for bot_id, visit in by_bot.items() for job, fence in known(visit)]
    if not keys and not any(visit.room.held for visit in visits):
        return
    values = {
        "bot_ids": list(by_bot),
        "held": [visit.room.held for visit in by_bot.values()],
        "known_bots": [bot_id for bot_id, _, _ in keys],
        "known_jobs": [job for _, job, _ in keys],
        "known_fences": [fence for _, _, fence in keys],
    }
    for row in connection.execute(query, values).all():
        into(by_bot[row.bot_id]).append(row)
