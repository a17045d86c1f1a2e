"""Jobs that ask for more than a place: the queues in which they wait, and the heads of these.

Jobs that are alike for the choice of a bot and ask for the same wait in one queue, so that what they share is judged
once for all of them, and a queue that is closed costs nothing but that. Within a queue they come by rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, text

from schema.accounting import rates
from schema.accounting.quotas import BEING_FREED
from schema.picking.pick import COLUMNS, ReadyJob
from schema.picking.queues import AWAKE, CONSTRAINED
from schema.picking.ready import OFFERED, ROOM, Scope, queues_in_scope
from schema.predicates import READY_CONSTRAINED, STILL_READY

#: The id of a queue.
QueueId = int

#: Queues that one cycle looks at; the next cycle goes on behind the last of them.
MAX_QUEUES = 2000
#: Ranks of one queue that are looked at where waiting makes jobs more urgent: more than it can make up for.
MAX_RANKS = 64

#: Where a walk over the queues begins, which goes backwards.
FIRST_QUEUE: QueueId = 2**31 - 1

# One step along the index for each queue, however many jobs it holds: backwards, because what a queue ends with has
# mostly not been taken yet, while in front of it are the entries of jobs that have just started.
_STEP = f"SELECT queue FROM jobs WHERE {READY_CONSTRAINED} AND queue < {{before}} ORDER BY queue DESC LIMIT 1"
# What is wanted or served is one of the queues, so that the full joins give what left ones would; but they are never
# made by reading all of one for each of the other, which is what seems cheap where few queues are expected. Beside the
# inner joins below they would become left ones.
QUEUES = text(f"""
WITH RECURSIVE steps AS (
    SELECT ({_STEP.format(before=":after")}) AS queue, 1 AS nth
    UNION ALL
    SELECT ({_STEP.format(before="g.queue")}), g.nth + 1 FROM steps g WHERE g.queue IS NOT NULL AND g.nth < :queues
), waiting AS MATERIALIZED (
    SELECT k.id AS queue, k.cohort, k.instance, k.platform, k.constraint_set, k.units
    FROM queues k WHERE k.id = ANY (ARRAY(SELECT queue FROM steps)) AND {CONSTRAINED} AND {AWAKE}
), {queues_in_scope("true")}, {ROOM}, {OFFERED}, judged AS MATERIALIZED (
    SELECT g.*, w.queue IS NOT NULL AS open, s.queue IS NOT NULL AS served, w.headroom FROM waiting g
    FULL JOIN wanted w ON w.queue = g.queue
    FULL JOIN offered s ON s.queue = g.queue
), walk AS MATERIALIZED (
    SELECT CASE WHEN max(nth) = :queues THEN min(queue) END AS last FROM steps
)
SELECT g.*, i.name, i.managed, t.terms, (SELECT jobs FROM room) AS free_units, k.last,
    greatest(q.min_quota - q.usage - coalesce(f.units, 0), 0) AS missing_units, statement_timestamp() AS now,
    {rates.ANY_ADVICE} AS pressed
FROM walk k LEFT JOIN (
    judged g
    JOIN constraint_sets t ON t.id = g.constraint_set
    JOIN instances i ON i.id = g.instance
    LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
    LEFT JOIN ({BEING_FREED}) f ON f.cohort = g.cohort AND f.instance = g.instance) ON true
ORDER BY g.queue DESC
""")

#: What is read of a job `j` with its terms `t`: as many columns as `_head` takes.
_HEAD = ", ".join(
    [
        *(f"j.{column}" for column in COLUMNS.split(", ")),
        "q.tried",
        *(f"j.{column}" for column in ("rank", "queued_at", "attempts")),
        "CAST(t.estimate AS double precision)",
        *(f"t.{column}" for column in ("seconds", "deadline", "priority_inputs")),
    ]
)
# One look for each job: how many jobs there are is not what their number here is estimated by.
_CONSTRAINTS = "LEFT JOIN LATERAL (SELECT * FROM job_constraints WHERE job_id = j.id OFFSET 0) t ON true"
_WANTED = """unnest(CAST(:ids AS integer[]), CAST(:limits AS integer[]), CAST(:skips AS integer[])) WITH ORDINALITY
    AS w (queue, most, skip, nth)
CROSS JOIN LATERAL (SELECT looks > 0 AS tried FROM queues WHERE id = w.queue OFFSET 0) q"""
HEADS = text(f"""
SELECT {_HEAD}, w.nth
FROM {_WANTED}
CROSS JOIN LATERAL (
    SELECT {COLUMNS}, rank, queued_at, attempts FROM jobs
    WHERE queue = w.queue AND {READY_CONSTRAINED}
    ORDER BY queue, rank, queued_at, id
    LIMIT w.most OFFSET w.skip FOR NO KEY UPDATE SKIP LOCKED) j
{_CONSTRAINTS}
ORDER BY w.nth, j.rank, j.queued_at, j.id
""")

# The oldest jobs of each rank, of which the best at this moment are locked. Whatever ageing gives, of two jobs of one
# rank the older one is never behind: what is not among the first of its rank is not among the first of all.
_RANK = f"SELECT rank FROM jobs WHERE queue = w.queue AND {READY_CONSTRAINED}"
AGED = text(f"""
SELECT {_HEAD}, w.nth
FROM {_WANTED}
CROSS JOIN LATERAL (
    SELECT {COLUMNS}, rank, queued_at, attempts FROM (
        WITH RECURSIVE ranks AS (
            SELECT first.rank, 1 AS step FROM ({_RANK} ORDER BY queue, rank LIMIT 1) first
            UNION ALL
            SELECT following.rank, r.step + 1 FROM ranks r CROSS JOIN LATERAL (
                {_RANK} AND rank > r.rank ORDER BY queue, rank LIMIT 1) following
            WHERE r.step < :ranks
        )
        SELECT c.id AS job_id, c.queued_at AS since, c.rank - least(:cap,
            :rate * greatest(extract(epoch FROM CAST(:now AS timestamptz) - c.queued_at), 0) / 3600) AS effective
        FROM ranks r CROSS JOIN LATERAL (
            SELECT id, rank, queued_at FROM jobs WHERE queue = w.queue AND rank = r.rank AND {READY_CONSTRAINED}
            ORDER BY queue, rank, queued_at, id LIMIT 2 * (w.most + w.skip)) c
        ORDER BY 3, 2, 1 LIMIT 2 * (w.most + w.skip)) best
    JOIN jobs ON jobs.id = best.job_id AND {STILL_READY}
    ORDER BY best.effective, best.since, best.job_id
    LIMIT w.most OFFSET w.skip FOR NO KEY UPDATE OF jobs SKIP LOCKED) j
{_CONSTRAINTS}
ORDER BY w.nth, j.rank, j.queued_at, j.id
""")

# One job, and of its queue what its gates are judged by.
JOB = text(f"""
SELECT {_HEAD}, q.constraint_set, g.terms, i.name, i.managed, statement_timestamp() AS now
FROM jobs j JOIN (SELECT id, constraint_set, looks > 0 AS tried FROM queues) q ON q.id = j.queue
JOIN constraint_sets g ON g.id = q.constraint_set
JOIN instances i ON i.id = j.instance
LEFT JOIN job_constraints t ON t.job_id = j.id
WHERE j.id = :id
""")


@dataclass(frozen=True, eq=False)
class ConstrainedQueue:
    """Jobs that are alike for the choice of a bot and ask for the same constraints.

    `headroom`: units that the instance's quota leaves, None for any number; `missing_units`: those that are missing
    to its minimum and are not being freed for it; `managed`: the instance has a share of the pool.
    """

    id: QueueId
    cohort: int
    instance: int
    platform: int
    constraint_set: int
    instance_name: str
    constraints: Mapping[str, Any]
    headroom: int | None
    missing_units: int
    managed: bool = False


class QueueHead(NamedTuple):
    """One of the first jobs of a queue, locked. `estimate`: cost that it is expected to have; `seconds`: how long it is
    expected to run; `priority_inputs`: what its priority is made of."""

    job: ReadyJob
    queue: ConstrainedQueue
    rank: float
    queued_at: datetime
    attempts: int
    estimate: float
    seconds: float | None
    deadline: datetime | None
    priority_inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Ageing:
    """How waiting makes a job more urgent: `rate` points with every hour, `cap` at most, which is 50 at most."""

    rate: float
    cap: float

    def gain(self, seconds: float) -> float:
        """The points that a job has gained when it has waited so long."""
        return min(self.rate * seconds / 3600.0, self.cap)


@dataclass(frozen=True)
class QueueScan:
    """The queues that may be given anything and for which a free bot is there. `owed`: those of instances below
    their minimum, with or without a free bot; `room`: free units, at most as many as were asked for; `now`: the
    database's time, None without a queue; `last`: the queue behind which the next walk begins; `pressed`: there is
    advice to hold back."""

    queues: Sequence[ConstrainedQueue]
    below_minimum: Sequence[ConstrainedQueue]
    free_units: int
    now: datetime | None
    last: QueueId
    pressed: bool = False


def queues(connection: Connection, scope: Scope, *, batch: int, after: QueueId) -> QueueScan:
    """Up to `MAX_QUEUES` queues behind `after`."""
    values = {**scope.values(), "after": after, "queues": MAX_QUEUES, "batch": batch, "scope": scope.name}
    rows = connection.execute(QUEUES, values).all()
    found = [(row, _queue(row)) for row in rows if row.open]
    seen = rows[0]
    return QueueScan(
        [queue for row, queue in found if row.served],
        [queue for _, queue in found if queue.missing_units],
        seen.free_units,
        None if seen.queue is None else seen.now,
        FIRST_QUEUE if seen.last is None else seen.last,
        seen.pressed,
    )


def heads(
    connection: Connection,
    queues: Sequence[ConstrainedQueue],
    *,
    limits: Sequence[int],
    now: datetime,
    skips: Sequence[int] | None = None,
    ageing: Ageing | None = None,
) -> list[QueueHead]:
    """Lock the first jobs of each of the queues, up to its limit: those of the lowest rank or, with `ageing`, of the
    lowest rank less what they have gained by `now`. `skips`: so many of each the caller has locked already, and wants
    those behind them. Rows that others hold are passed over."""
    if not queues:
        return []
    aged = {} if ageing is None else {"rate": ageing.rate, "cap": ageing.cap, "now": now, "ranks": MAX_RANKS}
    rows = connection.execute(
        HEADS if ageing is None else AGED,
        aged
        | {
            "ids": [queue.id for queue in queues],
            "limits": list(limits),
            "skips": list(skips or [0] * len(queues)),
        },
    )
    return [_head(row, queues[row[-1] - 1]) for row in rows.all()]


def job(connection: Connection, job_id: int) -> tuple[QueueHead, datetime] | None:
    """One job that asks for more than a place, not locked, and the database's time; None for any other job."""
    row = connection.execute(JOB, {"id": job_id}).one_or_none()
    if row is None:
        return None
    place = (row.queue, row.cohort, row.instance, row.platform, row.constraint_set)
    queue = ConstrainedQueue(*place, row.name, row.terms, None, 0, row.managed)
    return _head(row, queue), row.now


def _queue(row: Row[Any]) -> ConstrainedQueue:
    return ConstrainedQueue(
        row.queue,
        row.cohort,
        row.instance,
        row.platform,
        row.constraint_set,
        row.name,
        row.terms,
        row.headroom,
        row.missing_units or 0,
        row.managed,
    )


def _head(row: Row[Any], queue: ConstrainedQueue) -> QueueHead:
    # By their places: this is done for each job, and looking for names takes a third of it.
    values: Sequence[Any] = row
    rank, queued_at, attempts, estimate, seconds, deadline, priority_inputs = values[10:17]
    return QueueHead(
        ReadyJob(*values[:10]),
        queue,
        rank,
        queued_at,
        attempts,
        1.0 if estimate is None else estimate,
        seconds,
        deadline,
        priority_inputs or {},
    )
