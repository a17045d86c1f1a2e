"""Picks: which jobs may be placed now, for an assigner and for one bot.

Jobs wait in one queue per instance and requirement set, which is how the indexes are ordered. A pick looks only into
queues for which a free bot is there, so that any number of jobs that nobody can run costs nothing; a job in backoff
is in no index of ready jobs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import Connection, Row, TextClause, text

from schema.candidates import LOOK

#: Heads read for each job that is wanted, so that assigners working side by side find jobs the others did not lock.
REACH = 8

#: Jobs of each queue that a bot looks through for some that it may have and that fit.
JOBS_LOOK = 500


class Order(Enum):
    """In which order queued jobs are taken."""

    PRIORITY = "priority, queued_at, id"
    AGE = "queued_at, id"


@dataclass(frozen=True)
class ReadyJob:
    """A queued job, locked by the transaction that picked it."""

    id: int
    public_id: str
    instance: int
    platform: int
    priority: int
    units: int
    locality_hint: str | None
    considered: int


@dataclass(frozen=True)
class Queue:
    """Jobs that wait for the same kind of bot."""

    instance: int
    platform: int


_COLUMNS = "id, public_id, instance, platform, priority, units, locality_hint, considered"

_WAITING = """{name} AS (
    (SELECT instance, platform FROM jobs WHERE state = 'queued' AND schedule_after {null}
     ORDER BY instance, platform LIMIT 1)
    UNION ALL
    SELECT following.instance, following.platform FROM {name} q CROSS JOIN LATERAL (
        SELECT instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after {null} AND (instance, platform) > (q.instance, q.platform)
        ORDER BY instance, platform LIMIT 1) following
)"""


def waiting_queues(name: str, null: str) -> str:
    """A recursive CTE `name` of the queues that hold ready (`IS NULL`) or resting (`IS NOT NULL`) jobs.

    It takes one step along the index for each queue, however many jobs the queue holds.
    """
    return _WAITING.format(name=name, null=null)


_QUEUES = f"""
WITH RECURSIVE {waiting_queues("queues", "IS NULL")}, wanted AS MATERIALIZED (
    SELECT q.instance, q.platform FROM queues q
    WHERE CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[]))
)"""

# Two short looks, each of which ends with the first hit: at some bots of the requirement set around a random place,
# which nearly always decides it, and at some free bots around that place. Lateral subqueries with
# OFFSET 0 keep the planner from joining, and so reading, whole tables when its statistics are old or missing.
_SERVED = """
    EXISTS (
        SELECT FROM (
            SELECT bot_id FROM (
                (SELECT bot_id FROM bot_platforms
                 WHERE platform = w.platform AND sample_key >= :start ORDER BY sample_key LIMIT :look)
                UNION ALL
                (SELECT bot_id FROM bot_platforms
                 WHERE platform = w.platform AND sample_key < :start ORDER BY sample_key LIMIT :look)
            ) ring LIMIT :look) near
        CROSS JOIN LATERAL (
            SELECT FROM bots b
            WHERE b.id = near.bot_id AND b.free AND (b.instance IS NULL OR b.instance = w.instance) OFFSET 0) b
        OFFSET 0)
    OR EXISTS (
        SELECT FROM (
            SELECT id, instance FROM (
                (SELECT id, instance FROM bots WHERE free AND sample_key >= :start ORDER BY sample_key LIMIT :look)
                UNION ALL
                (SELECT id, instance FROM bots WHERE free AND sample_key < :start ORDER BY sample_key LIMIT :look)
            ) ring LIMIT :look) b
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = b.id OFFSET 0) bp
        WHERE b.instance IS NULL OR b.instance = w.instance
        OFFSET 0)"""

# No more jobs are picked, and locked, than there are free units for. The heads are looked up as one array and looked at
# again in words that fit no index of ready jobs, which leaves the planner nothing but their primary keys.
_PICK = """
{queues}, room AS MATERIALIZED (
    SELECT least(:batch, coalesce(sum(f.units), 0)) AS jobs
    FROM (SELECT capacity - in_use AS units FROM bots WHERE free LIMIT :batch) f
), served AS MATERIALIZED (
    SELECT w.instance, w.platform FROM wanted w WHERE (SELECT jobs FROM room) > 0 AND ({served})
), heads AS MATERIALIZED (
    SELECT h.id FROM served s CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM jobs
        WHERE instance = s.instance AND platform = s.platform AND state = 'queued' AND schedule_after IS NULL
        ORDER BY {order} LIMIT (SELECT jobs FROM room) * :reach) h
    ORDER BY {order} LIMIT (SELECT jobs FROM room) * :reach
)
SELECT {columns} FROM jobs
WHERE id = ANY (ARRAY(SELECT id FROM heads))
    AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
ORDER BY {order} LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
"""

PICK: dict[Order, TextClause] = {
    order: text(_PICK.format(queues=_QUEUES, served=_SERVED, order=order.value, columns=_COLUMNS)) for order in Order
}

# Queues that no healthy bot could serve, were it ever so idle: their jobs are considered, and fail.
UNSERVED = text(f"""
{_QUEUES}
SELECT w.instance, w.platform FROM wanted w
WHERE NOT EXISTS (
    SELECT FROM (SELECT bot_id FROM bot_platforms WHERE platform = w.platform OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT FROM bots b
        WHERE b.id = bp.bot_id AND (b.instance IS NULL OR b.instance = w.instance)
            AND b.status = 'ok' AND NOT b.draining AND NOT b.closing AND b.capacity > 0 OFFSET 0) b
    OFFSET 0)
LIMIT :limit
""")

# What one bot may take when it has just finished something. Without `:any`, ready jobs that an assigner has tried
# before are left to the assigners, while those still waiting out their backoff are not.
_FOR_BOT_HEADS = """
    SELECT h.id, h.priority, h.queued_at FROM {queues} q
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM (
            SELECT id, priority, queued_at, units, considered, schedule_after FROM jobs
            WHERE instance = q.instance AND platform = q.platform AND state = 'queued' AND schedule_after {null}
            ORDER BY priority, queued_at, id LIMIT :look) first
        WHERE units <= :room AND {condition}
        ORDER BY priority, queued_at, id LIMIT :reach) h
    WHERE {gate} AND (CAST(:instance AS integer) IS NULL OR q.instance = :instance)"""

_NEW, _NEW_GATE = "(:any OR considered = 0)", "(:any OR NOT :literal)"
# A job that rests because an attempt failed, and not because no bot was found, has been considered by nobody.
_RESTING = "considered > 0 AND (:any OR schedule_after >= now())"

FOR_BOT = text(f"""
WITH RECURSIVE {waiting_queues("queues", "IS NULL")},
{waiting_queues("resting", "IS NOT NULL")},
heads AS MATERIALIZED (
    SELECT id FROM (
        {_FOR_BOT_HEADS.format(queues="queues", null="IS NULL", condition=_NEW, gate=_NEW_GATE)}
        UNION ALL
        {_FOR_BOT_HEADS.format(queues="resting", null="IS NOT NULL", condition=_RESTING, gate="true")}
    ) both_kinds ORDER BY priority, queued_at, id LIMIT :reach
)
SELECT {_COLUMNS} FROM jobs
WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued'
    AND (coalesce(schedule_after, '-infinity') = '-infinity' OR considered > 0)
ORDER BY priority, queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
""")

INSTANCES = text("SELECT id FROM instances WHERE name = ANY (CAST(:names AS text[]))")


def pick(
    connection: Connection, *, order: Order, batch: int, instances: Sequence[int] | None, chance: random.Random
) -> list[ReadyJob]:
    """Lock jobs for which a free bot is there, in `order`: up to `batch`, and no more than there are free units.

    Rows that others hold are skipped.
    """
    rows = connection.execute(
        PICK[order],
        {
            "instances": None if instances is None else list(instances),
            "start": chance.random(),
            "look": LOOK,
            "reach": REACH,
            "batch": batch,
        },
    )
    return [_job(row) for row in rows]


def unserved(connection: Connection, *, instances: Sequence[int] | None, limit: int) -> list[Queue]:
    """Queues that hold ready jobs which no healthy bot satisfies, whether free or full."""
    where = {"instances": None if instances is None else list(instances), "limit": limit}
    return [Queue(row.instance, row.platform) for row in connection.execute(UNSERVED, where)]


def pick_for_bot(
    connection: Connection, *, bot_id: int, instance: int | None, room: int, limit: int, any_wait: bool, literal: bool
) -> list[ReadyJob]:
    """Lock up to `limit` jobs that this bot satisfies and that fit into `room` units, most urgent first.

    Without `any_wait`: new jobs and jobs still in backoff, but none whose backoff has run out, which are the
    assigners' (BuildGrid, proactive fetching). `literal` leaves out the new ones too, as a bare comparison of times
    would. With `any_wait`: every queued job.
    """
    rows = connection.execute(
        FOR_BOT,
        {
            "bot_id": bot_id,
            "instance": instance,
            "room": room,
            "limit": limit,
            "look": max(JOBS_LOOK, limit * REACH),
            "reach": limit * REACH,
            "any": any_wait,
            "literal": literal,
        },
    )
    return [_job(row) for row in rows]


def _job(row: Row[Any]) -> ReadyJob:
    return ReadyJob(
        row.id,
        str(row.public_id),
        row.instance,
        row.platform,
        row.priority,
        row.units,
        row.locality_hint,
        row.considered,
    )


def instance_ids(connection: Connection, names: Sequence[str]) -> list[int]:
    """The ids of those instances that exist."""
    return [row.id for row in connection.execute(INSTANCES, {"names": list(names)})]
