"""Set jobs aside whose label or task is paused, and make them ready again.

Such a job is refused when it would be given to a bot, whoever has picked it. It also rests until its pause is over, so
that a pick does not read it again and again. Its state stays `queued`, so these moves write no event.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from leasehold.wire import COMMAND

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import ANY_PAUSE, IS_SET_ASIDE, PAUSED_UNTIL, READY, STILL_READY

# The rows of pauses are locked, so that who ends one waits, and then finds what is set aside here. A pause that is just
# being ended is passed over; then the grant refuses the job once more.
_KEPT = """kept AS MATERIALIZED (
    SELECT kind, name, instance FROM pauses WHERE kind IN ('label', 'task')
    ORDER BY kind, name, instance FOR KEY SHARE SKIP LOCKED
)"""
_PAUSED_BY_KEPT = """
    CROSS JOIN LATERAL (SELECT pause_of(j.id, j.label, j.instance) AS pause OFFSET 0) p
    JOIN kept k ON k.kind = (p.pause).kind AND k.name = (p.pause).name AND k.instance = (p.pause).instance"""
SET_ASIDE = Statement(f"""
WITH {_KEPT}, found AS MATERIALIZED (
    SELECT j.id FROM (SELECT id, label, instance FROM jobs
        WHERE id = ANY (CAST(:ids AS bigint[])) AND {STILL_READY}) j{_PAUSED_BY_KEPT}
)
UPDATE jobs SET schedule_after = {PAUSED_UNTIL} WHERE id = ANY (ARRAY(SELECT id FROM found)) AND {STILL_READY}
RETURNING id, queue
""")
# What `looked` holds is bounded, because it takes a look at its payload to tell whether the task of a job is paused.
_SET_LOOKED_ASIDE = f"""ready AS MATERIALIZED (SELECT j.id FROM looked j{_PAUSED_BY_KEPT}), found AS MATERIALIZED (
    SELECT id FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM ready)) AND {{STILL_READY}}
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs SET schedule_after = {PAUSED_UNTIL} WHERE id = ANY (ARRAY(SELECT id FROM found)) RETURNING id
)"""
SET_FRONT_ASIDE = Statement(f"""
WITH {_KEPT}, looked AS MATERIALIZED (
    SELECT j.* FROM unnest(CAST(:queues AS integer[])) AS q (id)
    CROSS JOIN (VALUES (false), (true)) AS c (constrained)
    CROSS JOIN LATERAL (
        SELECT id, label, instance FROM jobs WHERE constrained = c.constrained AND queue = q.id AND {READY}
        ORDER BY constrained, queue, rank, queued_at, id LIMIT :limit) j
    LIMIT :limit
), {_SET_LOOKED_ASIDE.format(STILL_READY=STILL_READY)}
SELECT count(*) FROM moved
""")
_PAGE = """SELECT (SELECT count(*) FROM moved) AS moved, last.* FROM (
    SELECT {position} FROM looked WHERE (SELECT count(*) FROM looked) = :limit ORDER BY {order} LIMIT 1
) last RIGHT JOIN (SELECT) one ON true
"""
_POSITION = "constrained", "queue", "rank", "queued_at", "id"
_ORDER = ", ".join(_POSITION)
SET_ASIDE_READY = Statement(f"""
WITH {_KEPT}, looked AS MATERIALIZED (
    SELECT {_ORDER}, label, instance FROM jobs WHERE {READY} AND ({_ORDER})
        > (CAST(:constrained AS boolean), CAST(:queue AS integer), CAST(:rank AS double precision),
            CAST(:queued_at AS timestamptz), CAST(:id AS bigint))
        AND (label = ANY (ARRAY(SELECT name FROM pauses WHERE kind = 'label'))
            OR EXISTS (SELECT FROM pauses WHERE kind = 'task'))
    ORDER BY {_ORDER} LIMIT :limit
), {_SET_LOOKED_ASIDE.format(STILL_READY=STILL_READY)}
{_PAGE.format(position=_ORDER, order=", ".join(f"{column} DESC" for column in _POSITION))}""")
MAKE_READY = Statement(f"""
WITH looked AS MATERIALIZED (
    SELECT id, label, instance FROM jobs WHERE {IS_SET_ASIDE} AND id > CAST(:id AS bigint)
        AND label <> ALL (ARRAY(SELECT name FROM pauses WHERE kind = 'label' AND instance = ''))
        AND (CAST(:label AS text) IS NULL OR label = :label)
        AND (CAST(:task AS text) IS NULL OR EXISTS (
            SELECT FROM job_payloads o WHERE o.job_id = jobs.id AND o.payload->'command'->>2 = :task
                AND o.payload->'command'->>0 = '{COMMAND}'))
    ORDER BY id LIMIT :limit
), found AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE id = ANY (ARRAY(SELECT id FROM looked WHERE (pause_of(id, label, instance)).kind IS NULL)) AND {IS_SET_ASIDE}
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs SET schedule_after = NULL WHERE id = ANY (ARRAY(SELECT id FROM found)) RETURNING id
)
{_PAGE.format(position="id", order="id DESC")}""")
_ANY = Statement(f"SELECT {ANY_PAUSE}")


#: The most jobs that are looked at because all of those in front are paused.
IN_FRONT = 2000
#: Before the first ready job, and before the first job that is set aside.
FIRST_READY: Mapping[str, Any] = {
    "constrained": False,
    "queue": 0,
    "rank": -math.inf,
    "queued_at": "-infinity",
    "id": 0,
}
FIRST_ASIDE: Mapping[str, Any] = {"id": 0}


class Walked(NamedTuple):
    """What one page of a walk has done. moved: how many jobs. after: where the next page begins; None = it was the last
    one."""

    moved: int
    after: Mapping[str, Any] | None


def any_pause(connection: Connection) -> bool:
    """Return whether a label or a task is paused."""
    found: bool = connection.execute(_ANY).scalar_one()
    return found


def set_aside(connection: Connection, job_ids: Collection[int]) -> set[int]:
    """Set those of these jobs aside that are paused; returns their ids. The caller has locked the jobs.

    If all of them are paused, many more may be in front of the others in their queues, and are set aside too.
    """
    found = {row.id: row.queue for row in connection.execute(SET_ASIDE, {"ids": list(job_ids)})}
    if found and len(found) == len(job_ids):
        connection.execute(SET_FRONT_ASIDE, {"queues": sorted({*found.values()}), "limit": IN_FRONT})
    return {*found}


def set_aside_ready(connection: Connection, *, after: Mapping[str, Any] | None = None, limit: int) -> Walked:
    """Set those of the next `limit` ready jobs aside that are paused. Costs nothing while nothing is paused.

    after: what the page before has returned.
    """
    if not any_pause(connection):
        return Walked(0, None)
    return _page(connection, SET_ASIDE_READY, {**(after or FIRST_READY), "limit": limit})


def make_ready(
    connection: Connection,
    *,
    after: Mapping[str, Any] | None = None,
    label: str | None = None,
    task: str | None = None,
    limit: int,
) -> Walked:
    """Make those of the next `limit` jobs ready that were set aside and whose pause is over.

    after: what the page before has returned. label, task: look at jobs with this label, or of this task, alone.
    Each page reads the index entries of all jobs that are set aside.
    """
    values = {**(after or FIRST_ASIDE), "label": label, "task": task, "limit": limit}
    return _page(connection, MAKE_READY, values)


def _page(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> Walked:
    row = connection.execute(statement, values).one()._asdict()
    moved = row.pop("moved")
    return Walked(moved, None if row["id"] is None else row)
