"""The front of constrained jobs: the first jobs of a cohort, whatever their queues, and these queues.

Jobs that hold many different keys wait in as many queues. Where each of few jobs has a queue of its own, to read the
first jobs costs much less than to read the queues. Nearly always the gates of most of them are open.
"""

from typing import Any, NamedTuple

from schema.accounting import class_reserves, rates
from schema.picking import constrained, head_cursor
from schema.picking.constrained import FIRST_QUEUE, ConstrainedQueue, QueueHead, QueueId, QueueScan, Terms
from schema.picking.head_cursor import HeadCursor
from schema.picking.pick import WIDTHS
from schema.picking.ready import ROOM, SERVED, Scope, queues_in_scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.predicates import IN_CONSTRAINED_FRONT, STILL_READY

_FRONT = head_cursor.head_jobs(
    cohorts="(CAST(:cohorts AS integer[]) IS NULL OR c.id = ANY (CAST(:cohorts AS integer[])))",
    limit="(SELECT jobs FROM room) * :spare * :reach",
    ready=IN_CONSTRAINED_FRONT,
)
# What holds for all queues of an instance comes once, with the first row. The queue of each job is looked up, because
# the planner would compare each job with each queue that is offered.
_INSTANCES = """
    SELECT jsonb_agg(jsonb_build_array(cohort, instance, name, headroom, managed)) FROM (
        SELECT DISTINCT cohort, instance, name, headroom, managed FROM offered) i"""
FRONT = Statement(f"""
WITH RECURSIVE {ROOM}, {_FRONT}, waiting AS MATERIALIZED (SELECT DISTINCT queue FROM front
), {queues_in_scope(constrained.AWAKE_CONSTRAINED, more=constrained.MORE)}, offered AS MATERIALIZED (
    SELECT w.* FROM wanted w WHERE (SELECT jobs FROM room) > 0 AND ({SERVED})
), heads AS MATERIALIZED (
    SELECT id FROM front WHERE (queue IN (SELECT queue FROM offered)) IS TRUE
), picked AS MATERIALIZED (
    SELECT {constrained.JOB_COLUMNS}, queue, cohort, instance, platform
    FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND {STILL_READY}
    ORDER BY rank, queued_at, id LIMIT (SELECT jobs FROM room) * :spare FOR NO KEY UPDATE SKIP LOCKED
)
SELECT {constrained.HEAD}, j.queue, j.cohort, j.instance, j.platform, k.constraint_set, k.looks > 0 AS tried,
    CASE WHEN row_number() OVER () = 1 THEN ({head_cursor.SCANNED}) END AS scan,
    CASE WHEN row_number() OVER () = 1 THEN ({_INSTANCES}) END AS instances,
    (SELECT jobs FROM room) AS free_units, (SELECT count(*) FROM heads) AS heads, statement_timestamp() AS now,
    {rates.ANY_ADVICE} AS pressed, {class_reserves.ANY_RESERVE} AS reserved
FROM (SELECT) nothing LEFT JOIN picked j ON true
LEFT JOIN LATERAL (SELECT constraint_set, looks FROM queues WHERE id = j.queue OFFSET 0) k ON true
{constrained.CONSTRAINTS}
ORDER BY j.rank, j.queued_at, j.id
""")


class Front(NamedTuple):
    """What was read of the front.

    scan: the queues of the heads, as `constrained.queues` returns them. heads: the jobs, locked, in their order.
    is_cut: there are jobs behind them.
    """

    scan: QueueScan
    heads: list[QueueHead]
    is_cut: bool


def read_front(
    connection: Connection, scope: Scope, cursor: HeadCursor, *, batch: int, spare: int, terms: Terms
) -> Front | None:
    """Lock the first jobs for which some bot has room: up to `batch` times `spare`, and no more than there are free
    units times `spare`. None if most of the front may not be taken.

    cursor: what the caller remembers of the front. terms: as of `constrained.queues`.
    """
    values = {**scope.values(), "batch": batch, "served": scope.served, "spare": spare}
    for reach in WIDTHS:
        scan = cursor.begin()
        rows = connection.execute(FRONT, {**values, **scan.values(), "reach": reach}).all()
        seen = rows[0]
        wanted = seen.free_units * spare
        walked = cursor.learn(scan, seen.scan, limit=wanted * reach)
        found = [row for row in rows if row[0] is not None]
        if len(found) == wanted or walked < wanted * reach:
            break
        if 2 * seen.heads < walked:
            return None
    return _front(connection, found, seen, terms, is_cut=walked >= wanted * reach or len(found) < seen.heads)


def _front(connection: Connection, rows: list[Row], seen: Row, terms: Terms, *, is_cut: bool) -> Front:
    constrained.add_terms(connection, {row[17] for row in rows}, terms)
    instances = {(each[0], each[1]): each[2:] for each in seen.instances or ()}
    queues, heads = dict[QueueId, ConstrainedQueue](), list[QueueHead]()
    # Columns are taken by position. Names would take half of the time, once for each job.
    for row in rows:
        values: tuple[Any, ...] = row[13:19]
        queue_id, cohort, instance, platform, constraint_set, tried = values
        queue = queues.get(queue_id)
        if queue is None:
            name, headroom, managed = instances[cohort, instance]
            known = terms[constraint_set]
            queue = queues[queue_id] = ConstrainedQueue(
                queue_id, cohort, instance, platform, constraint_set, name, known, headroom, 0, managed, tried
            )
        heads.append(constrained.head(row, queue))
    now = seen.now if rows or is_cut else None
    scan = QueueScan([*queues.values()], [], seen.free_units, now, FIRST_QUEUE, seen.pressed, seen.reserved)
    return Front(scan, heads, is_cut)
