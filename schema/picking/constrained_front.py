"""The front of constrained jobs: the first jobs of a cohort, whatever their queues, and these queues.

Jobs that hold many different keys wait in as many queues. Where each of few jobs has a queue of its own, to read the
first jobs costs much less than to read the queues. Nearly always the gates of most of them are open.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from schema.accounting import class_reserves, rates
from schema.picking import constrained, head_cursor
from schema.picking.constrained import FIRST_QUEUE, ConstrainedQueue, QueueHead, QueueId, QueueScan, Terms
from schema.picking.head_cursor import HeadCursor
from schema.picking.pick import WIDTHS
from schema.picking.queues import AWAKE, CONSTRAINED
from schema.picking.ready import OFFERED, ROOM, Scope, queues_in_scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.predicates import IN_CONSTRAINED_FRONT, STILL_READY

_FRONT = head_cursor.head_jobs(
    cohorts="(CAST(:cohorts AS integer[]) IS NULL OR c.id = ANY (CAST(:cohorts AS integer[])))",
    limit="(SELECT jobs FROM room) * :spare * :reach",
    ready=IN_CONSTRAINED_FRONT,
)
# Whether some bot has room is judged for one of the queues that differ only in their keys, and in whether they rest.
# Those for which it has come as one value with the first row, because a join would compare each job with each of them.
# The queue of a job is looked up.
_ALIKE = """
    SELECT jsonb_agg(jsonb_build_array(cohort, instance, platform, units, name, headroom, managed)) FROM offered"""
FRONT = Statement(f"""
WITH RECURSIVE {ROOM}, {_FRONT}, picked AS MATERIALIZED (
    SELECT {constrained.JOB_COLUMNS}, queue, cohort, instance, platform
    FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM front)) AND {STILL_READY}
    ORDER BY rank, queued_at, id LIMIT (SELECT jobs FROM room) * :spare FOR NO KEY UPDATE SKIP LOCKED
), waiting AS MATERIALIZED (SELECT min(queue) AS queue FROM picked GROUP BY cohort, instance, platform, units
), {queues_in_scope(CONSTRAINED, more=constrained.MORE)}, {OFFERED}
SELECT {constrained.HEAD}, j.queue, j.cohort, j.instance, j.platform, q.constraint_set, q.tried, q.awake,
    CASE WHEN row_number() OVER () = 1 THEN statement_timestamp() END AS now,
    CASE WHEN row_number() OVER () = 1 THEN jsonb_build_array(
        ({head_cursor.WALKED}), ({_ALIKE}), (SELECT jobs FROM room), {rates.ANY_ADVICE}, {class_reserves.ANY_RESERVE}
    ) END AS seen
FROM (SELECT) nothing LEFT JOIN picked j ON true
LEFT JOIN LATERAL (
    SELECT k.constraint_set, k.looks > 0 AS tried, {AWAKE} AS awake FROM queues k WHERE k.id = j.queue OFFSET 0
) q ON true
{constrained.CONSTRAINTS}
""")
#: Where a row has the queue of the job.
_QUEUE = 13


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
        walk = cursor.begin()
        rows = connection.execute(FRONT, {**values, **walk.values(), "reach": reach}).all()
        told, alike, free_units, pressed, reserved = rows[0].seen
        wanted = free_units * spare
        walked = cursor.learn(walk, told, limit=wanted * reach)
        picked = [row for row in rows if row[0] is not None]
        is_cut = walked >= wanted * reach
        if len(picked) == wanted or not is_cut:
            break
    heads = _heads(connection, picked, {(*each[:4],): each[4:] for each in alike or ()}, terms)
    is_cut = is_cut or len(picked) < walked
    if is_cut and 2 * len(heads) < len(picked):
        return None
    queues = [*dict.fromkeys(head.queue for head in heads)]
    now = rows[0].now if picked or is_cut else None
    return Front(QueueScan(queues, [], free_units, now, FIRST_QUEUE, pressed, reserved), heads, is_cut)


def _heads(
    connection: Connection, rows: list[Row], offered: dict[tuple[int, ...], list[Any]], terms: Terms
) -> list[QueueHead]:
    """Return the jobs whose queues are awake and are offered to some bot, in their order."""
    constrained.add_terms(connection, {row[_QUEUE + 4] for row in rows}, terms)
    queues, found = dict[QueueId, ConstrainedQueue](), list[QueueHead]()
    # Columns are taken by position. Names would take half of the time, once for each job.
    for row in rows:
        values: Sequence[Any] = row
        queue_id, cohort, instance, platform, constraint_set, tried, is_awake = values[_QUEUE : _QUEUE + 7]
        of_queue = offered.get((cohort, instance, platform, values[3]))
        if of_queue is None or not is_awake:
            continue
        queue = queues.get(queue_id)
        if queue is None:
            name, headroom, managed = of_queue
            known = terms[constraint_set]
            queue = queues[queue_id] = ConstrainedQueue(
                queue_id, cohort, instance, platform, constraint_set, name, known, headroom, 0, managed, tried
            )
        found.append(constrained.head(row, queue))
    return found
