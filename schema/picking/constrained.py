"""Constrained jobs: the queues in which they wait, and the first jobs of these queues.

Jobs with the same constraints that are alike for the choice of a bot wait in one queue. So their gates are judged once
for all of them. Within a queue jobs are ordered by rank.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from schema.accounting import class_reserves, rates
from schema.accounting.fair_share import DEMAND_INTERVAL
from schema.accounting.quotas import BEING_FREED
from schema.fleet.candidates import able_bots
from schema.picking.pick import ReadyJob
from schema.picking.queues import AWAKE, CONSTRAINED
from schema.picking.ready import ROOM, SERVED, Scope, queues_in_scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.predicates import DRAIN, READY_CONSTRAINED, STILL_READY, has_ready_jobs

#: The id of a queue.
QueueId = int
#: Constraint sets by their ids.
Terms = MutableMapping[int, Mapping[str, Any]]

#: The most queues that one cycle reads. The next cycle goes on behind the last of them.
MAX_QUEUES = 2000
#: The most ranks of one queue that are read if waiting makes jobs more urgent: more than ageing can make up for.
MAX_RANKS = 64

#: Where jobs do not start in the order in which they are read, those that start are chosen among so many jobs in front
#: of each queue; fewer if all queues that are read at a time would have more than `MOST_IN_WINDOWS` together.
WINDOW, MOST_IN_WINDOWS = 1000, 10_000

#: The queue id behind which a walk over all queues begins; the walk goes backwards.
FIRST_QUEUE: QueueId = 2**31 - 1

#: Further columns of the constraints of queue `k` and of its instance `w`.
_AWAKE, MORE = f"{CONSTRAINED} AND {AWAKE}", ", k.constraint_set, w.name, w.managed, w.below_minimum"
# One step along the index for each queue, however many jobs it holds. The walk goes backwards, because the entries of
# jobs that have just started are in front of a queue.
_STEP = f"SELECT queue FROM jobs WHERE {READY_CONSTRAINED} AND queue < {{before}} ORDER BY queue DESC LIMIT 1"
# Whether a bot has room is a column and no condition, so that queues without one come too. No two sets of queues are
# joined, because the planner expects few of them and would compare each pair.
QUEUES = Statement(f"""
WITH RECURSIVE waiting AS (
    SELECT ({_STEP.format(before=":after")}) AS queue, 1 AS nth
    UNION ALL
    SELECT ({_STEP.format(before="g.queue")}), g.nth + 1 FROM waiting g WHERE g.queue IS NOT NULL AND g.nth < :queues
), {queues_in_scope(_AWAKE, more=MORE)}, {ROOM}, walk AS MATERIALIZED (
    SELECT CASE WHEN max(nth) = :queues THEN min(queue) END AS last FROM waiting
)
SELECT w.queue, w.cohort, w.instance, w.platform, w.constraint_set, w.name, w.headroom,
    greatest(w.below_minimum - coalesce(f.units, 0), 0) AS missing_units, w.managed, w.looks > 0 AS tried,
    (SELECT jobs FROM room) > 0 AND ({SERVED}) AS served,
    CASE WHEN row_number() OVER (ORDER BY w.queue DESC) = 1 THEN statement_timestamp() END AS now,
    (SELECT jobs FROM room) AS free_units, k.last, {rates.ANY_ADVICE} AS pressed,
    {class_reserves.ANY_RESERVE} AS reserved, w.queue IS NOT NULL OR EXISTS (
        SELECT FROM queues k WHERE k.id = ANY (ARRAY(SELECT queue FROM waiting)) AND {_AWAKE}) AS any
FROM walk k LEFT JOIN (
    wanted w
    LEFT JOIN ({BEING_FREED}) f ON f.cohort = w.cohort AND f.instance = w.instance) ON true
ORDER BY w.queue DESC
""")

_TEXT = lambda value: isinstance(value, str)  # noqa: E731
_NUMBER = lambda value: isinstance(value, int | float) and not isinstance(value, bool)  # noqa: E731
#: What the values of constraints are. Others have been stored by another version; keys that are not listed are ignored.
_FORMS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("resource_class", "model", "job_class", "project", "owner", "preferred_zone", "graph"), _TEXT),
    **dict.fromkeys(("graph_priority", "units"), _NUMBER),
    "locks": lambda value: isinstance(value, list) and all(map(_TEXT, value)),
    "preferred_hours": lambda value: isinstance(value, list) and all(map(_NUMBER, value)),
    "resources": lambda value: isinstance(value, dict) and all(map(_NUMBER, value.values())),
}
#: Stands for constraints that cannot be used; its value says why.
UNUSABLE = "unusable"


def usable(terms: Any) -> Mapping[str, Any]:
    """Return these stored constraints, or in their place why they cannot be used, so that only their jobs wait."""
    if not isinstance(terms, dict):
        return {UNUSABLE: "they are no object"}
    wrong = [key for key, value in terms.items() if key in _FORMS and not _FORMS[key](value)]
    return {UNUSABLE: f"{wrong[0]} has a value of another version"} if wrong else terms


# One value for all of them, because to read a value of JSON takes as long as to read ten small ones in a list.
TERMS = Statement("""
SELECT json_agg(json_build_array(id, terms)) FROM constraint_sets WHERE id = ANY (CAST(:ids AS integer[]))
""")

#: Columns of a job; what else is known of it is the same for its whole queue.
JOB_COLUMNS = "id, public_id::text AS public_id, priority, units, locality_hint, preferred, rank, queued_at, attempts"
#: The columns of a job `j` with its constraints `t`, in the order in which `head` takes them.
HEAD = f"""{", ".join(f"j.{column}" for column in JOB_COLUMNS.split(", "))},
    CAST(t.estimate AS double precision), t.seconds, t.deadline, t.priority_inputs"""
#: The constraints `t` of a job `j`: a look-up for each job, because the planner estimates their number wrongly.
CONSTRAINTS = "LEFT JOIN LATERAL (SELECT * FROM job_constraints WHERE job_id = j.id OFFSET 0) t ON true"
_LOCKED = "FOR NO KEY UPDATE{of} SKIP LOCKED"
_HEADS = f"""
SELECT {HEAD}, w.nth
FROM unnest(
    CAST(:ids AS integer[]), CAST(:limits AS integer[]),
    CAST(:ranks AS double precision[]), CAST(:times AS timestamptz[]), CAST(:jobs AS bigint[])
) WITH ORDINALITY AS w (queue, most, rank, queued_at, job, nth)
CROSS JOIN LATERAL (
    SELECT {JOB_COLUMNS} FROM jobs
    WHERE queue = w.queue AND {READY_CONSTRAINED} AND (rank, queued_at, id)
        > (coalesce(w.rank, '-infinity'), coalesce(w.queued_at, '-infinity'), coalesce(w.job, 0))
    ORDER BY queue, rank, queued_at, id
    LIMIT w.most {{locked}}) j
{CONSTRAINTS}
ORDER BY w.nth, j.rank, j.queued_at, j.id
"""
HEADS = Statement(_HEADS.format(locked=_LOCKED.format(of="")))
WINDOW_OF_HEADS = Statement(_HEADS.format(locked=""))

# The oldest jobs of each rank are read, and the best of them at this moment are locked. Of two jobs of one rank the
# older one is never behind, so that no other job of a rank can be among the first. Others may have
# locked some, so twice as many as are wanted are read.
_RANK = f"SELECT rank FROM jobs WHERE queue = w.queue AND {READY_CONSTRAINED}"
_AGED = f"""
SELECT {HEAD}, w.nth
FROM unnest(CAST(:ids AS integer[]), CAST(:limits AS integer[]), CAST(:skips AS integer[])) WITH ORDINALITY
    AS w (queue, most, skip, nth)
CROSS JOIN LATERAL (
    SELECT {JOB_COLUMNS} FROM (
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
            ORDER BY queue, rank, queued_at, id LIMIT w.skip + {{read}}) c
        ORDER BY 3, 2, 1 LIMIT w.skip + {{read}}) best
    JOIN jobs ON jobs.id = best.job_id AND {STILL_READY}
    ORDER BY best.effective, best.since, best.job_id
    LIMIT w.most OFFSET w.skip {{locked}}) j
{CONSTRAINTS}
ORDER BY w.nth, j.rank, j.queued_at, j.id
"""
AGED = Statement(_AGED.format(read="2 * w.most", locked=_LOCKED.format(of=" OF jobs")))
WINDOW_OF_AGED = Statement(_AGED.format(read="w.most", locked=""))

LOCK_FIRST = Statement(f"""
SELECT jobs.id FROM unnest(CAST(:ids AS bigint[])) WITH ORDINALITY AS c (job, place)
JOIN jobs ON jobs.id = c.job AND {STILL_READY}
ORDER BY c.place LIMIT :most FOR NO KEY UPDATE OF jobs SKIP LOCKED
""")

# One job, and what the gates need to know of its queue.
JOB = Statement(f"""
SELECT {HEAD}, q.id AS queue, q.cohort, q.instance, q.platform, q.constraint_set, i.name, g.terms, i.managed,
    q.looks > 0 AS tried, statement_timestamp() AS now
FROM jobs j JOIN queues q ON q.id = j.queue
JOIN constraint_sets g ON g.id = q.constraint_set
JOIN instances i ON i.id = j.instance
LEFT JOIN job_constraints t ON t.job_id = j.id
WHERE j.id = :id
""")


@dataclass(eq=False, slots=True)
class ConstrainedQueue:
    """The ready jobs of one cohort, instance and requirement set that have equal constraints.

    Nobody changes it. It is not frozen, which would make it take four times as long: a cycle makes one for each queue.
    """

    id: QueueId
    cohort: int
    instance: int
    platform: int
    constraint_set: int
    instance_name: str
    constraints: Mapping[str, Any]
    #: Units that the instance's quota leaves; None for any number.
    headroom: int | None
    #: Units that the instance lacks of its minimum and that are not being freed for it.
    missing_units: int
    #: The instance has a share of the pool.
    managed: bool = False
    #: An earlier look into it found no bot.
    tried: bool = False


class QueueHead(NamedTuple):
    """One of the first jobs of a queue. estimate: its expected cost. seconds: its expected run time; None if it
    is unknown. priority_inputs: what its priority is computed from."""

    job: ReadyJob
    queue: ConstrainedQueue
    rank: float
    queued_at: datetime
    attempts: int
    estimate: float
    seconds: float | None
    deadline: datetime | None
    priority_inputs: Mapping[str, Any]


class ReadHeads(NamedTuple):
    """The heads of a queue that have been read: their number, and the last one in the order of the queue."""

    jobs: int = 0
    rank: float | None = None
    queued_at: datetime | None = None
    job_id: int | None = None


NO_HEADS = ReadHeads()
# Made once for each job. `_make` would count the values, which takes as long as all else.
_made_job: Callable[[tuple[Any, ...]], ReadyJob] = partial(tuple.__new__, ReadyJob)
_made_head: Callable[[tuple[Any, ...]], QueueHead] = partial(tuple.__new__, QueueHead)


@dataclass(frozen=True)
class Ageing:
    """How waiting makes a job more urgent: by `rate` points an hour, up to `cap` points (at most 50)."""

    rate: float
    cap: float

    def gain(self, seconds: float) -> float:
        """Return the points that a job has gained after this wait."""
        return min(self.rate * seconds / 3600.0, self.cap)


@dataclass(frozen=True)
class QueueScan:
    """The result of a walk over queues of constrained jobs."""

    #: Open queues for which some bot has room.
    queues: Sequence[ConstrainedQueue]
    #: Open queues of instances below their minimum, with or without such a bot.
    below_minimum: Sequence[ConstrainedQueue]
    #: Free units of the pool, at most a batch.
    free_units: int
    #: The database's time; None without a queue.
    now: datetime | None
    #: The queue behind which the next walk begins.
    last: QueueId
    #: There is advice of backpressure.
    pressed: bool = False
    #: Something is kept for a class.
    reserved: bool = False


def queues(
    connection: Connection, scope: Scope, *, batch: int, after: QueueId, terms: Terms | None = None
) -> QueueScan:
    """Read up to `MAX_QUEUES` queues behind `after`. terms: constraint sets that the caller knows, which never change;
    those that it lacks are read, and added."""
    terms = {} if terms is None else terms
    values = {**scope.values(), "after": after, "queues": MAX_QUEUES, "batch": batch, "served": scope.served}
    rows = connection.execute(QUEUES, values).all()
    seen = rows[0]
    if seen.queue is None:
        rows = []
    add_terms(connection, {row[4] for row in rows}, terms)
    served, below_minimum = list[ConstrainedQueue](), list[ConstrainedQueue]()
    # Columns are taken by position. Names would take half of the time, once for each queue.
    for row in rows:
        queue_id, cohort, instance, platform, constraints, name, headroom, missing, managed, tried, is_served = row[:11]
        known = terms[constraints]
        queue = ConstrainedQueue(
            queue_id, cohort, instance, platform, constraints, name, known, headroom, missing, managed, tried
        )
        if is_served:
            served.append(queue)
        if missing:
            below_minimum.append(queue)
    return QueueScan(
        served if scope.minimums_first else [_without_minimum(queue) for queue in served],
        below_minimum,
        seen.free_units,
        seen.now if seen.any else None,
        FIRST_QUEUE if seen.last is None else seen.last,
        seen.pressed,
        seen.reserved,
    )


def add_terms(connection: Connection, ids: Collection[int], terms: Terms) -> None:
    """Read the constraint sets that `terms` lacks, and add them."""
    if unknown := {*ids} - terms.keys():
        found = connection.execute(TERMS, {"ids": sorted(unknown)}).scalar_one() or ()
        terms.update((key, usable(value)) for key, value in found)


def heads(
    connection: Connection,
    queues: Sequence[ConstrainedQueue],
    *,
    limits: Sequence[int],
    now: datetime,
    read: Mapping[QueueId, ReadHeads] = MappingProxyType({}),
    ageing: Ageing | None = None,
    lock: bool = True,
) -> list[QueueHead]:
    """Read and lock the first jobs of each queue, up to its limit: those of the lowest rank.

    ageing: the rank is lowered by what a job has gained by `now`. read: what this transaction has read of the queues;
    the jobs behind it follow. Rows that others have locked are skipped. lock: False reads these too, and locks none.
    """
    if not queues:
        return []
    wanted = {"ids": [queue.id for queue in queues], "limits": list(limits)}
    before = [read.get(queue.id, NO_HEADS) for queue in queues] if read else []
    if ageing is None:
        last: dict[str, list[Any]] = {"ranks": [each.rank for each in before]}
        last |= {"times": [each.queued_at for each in before]}
        last |= {"jobs": [each.job_id for each in before]}
        rows = connection.execute(HEADS if lock else WINDOW_OF_HEADS, wanted | last)
    else:
        aged = {"rate": ageing.rate, "cap": ageing.cap, "now": now, "ranks": MAX_RANKS}
        skips = [each.jobs for each in before] or [0] * len(queues)
        rows = connection.execute(AGED if lock else WINDOW_OF_AGED, wanted | aged | {"skips": skips})
    return [head(row, queues[row[-1] - 1]) for row in rows.all()]


def lock_first(connection: Connection, job_ids: Sequence[int], *, most: int) -> set[int]:
    """Lock the first `most` of these jobs that are still ready and that nobody else has locked; returns their ids."""
    return {*connection.execute(LOCK_FIRST, {"ids": list(job_ids), "most": most}).scalars()}


def job(connection: Connection, job_id: int) -> tuple[QueueHead, datetime] | None:
    """Read one constrained job, without a lock, and the database's time; None for any other job."""
    row = connection.execute(JOB, {"id": job_id}).one_or_none()
    if row is None:
        return None
    place = (row.queue, row.cohort, row.instance, row.platform, row.constraint_set)
    queue = ConstrainedQueue(*place, row.name, usable(row.terms), None, 0, row.managed, row.tried)
    return head(row, queue), row.now


def _without_minimum(queue: ConstrainedQueue) -> ConstrainedQueue:
    return replace(queue, missing_units=0) if queue.missing_units else queue


def head(row: Row, queue: ConstrainedQueue) -> QueueHead:
    """Return the job of a row that begins with the columns `HEAD`."""
    # Columns are taken by position. Names would take a third of the time, once for each job.
    values: Sequence[Any] = row
    job_id, public_id, priority, units, hint, preferred, rank, queued_at, attempts = values[:9]
    estimate, seconds, deadline, priority_inputs = values[9:13]
    of_queue = (queue.id, queue.cohort, queue.instance, queue.platform)
    job = (job_id, public_id, *of_queue, priority, units, hint, queue.tried, preferred, queue.headroom, None, True)
    estimate = 1.0 if estimate is None else estimate
    return _made_head(
        (_made_job(job), queue, rank, queued_at, attempts, estimate, seconds, deadline, priority_inputs or {})
    )


# Demand of instances with a share: jobs that run, or that wait and that some bot could run, busy and unhealthy ones
# included.


# The counter of each instance is looked up by its name: there may be as many counters as keys.
UNRECORDED_DEMAND = Statement(f"""
SELECT a.instance FROM accounts a JOIN instances i ON i.id = a.instance
WHERE a.demand_at < now() - interval '{DEMAND_INTERVAL:g} s' AND (
    EXISTS (SELECT FROM counters c WHERE c.name = 'instance:' || i.name || '\\:jobs' AND c.used > 0 OFFSET 0)
    OR {DRAIN.of(instance="i")} AND EXISTS (
        SELECT FROM (SELECT q.*, i.pool FROM queues q WHERE q.instance = a.instance AND q.constraint_set IS NOT NULL) w
        WHERE {has_ready_jobs("w")}
            AND EXISTS ({able_bots("b.id", "w", which="status <> 'gone'", limit="1")} OFFSET 0)))
""")


def unrecorded_demand(connection: Connection) -> list[int]:
    """Return the ids of managed instances whose demand is due to be recorded."""
    return list(connection.execute(UNRECORDED_DEMAND).scalars())
