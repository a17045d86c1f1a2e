"""What preemption looks at: jobs of instances below their minimum that wait too long, and who holds what they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from schema.fleet.candidates import able_bots
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_leases
from schema.postgres.statements import Statement
from schema.predicates import DRAIN, HEALTHY, PAUSE, PROBATION, READY_PLAIN, REQUIREMENTS, UNITS
from schema.timing import KILL_ALLOWANCE

#: Bots looked at for victims of one job.
MAX_VICTIM_BOTS = 2000
#: The first jobs of one queue, of which those that have waited long enough are found.
MAX_JOBS_READ = 500


@dataclass(frozen=True)
class StarvedJob:
    """A queued job whose instance is below its minimum, and that has waited `waited` seconds.

    short: units that its instance lacks of its minimum beside those that are kept for it.
    kept_bots: the units that each bot keeps for it on which this job could run, by the bot's id.
    kept_until: the time until which each bot keeps units for it, by the bot's id.
    queue_deadline: when it is given up if it has not started; None = never.
    rule: that of its cohort, `lower_priority_only` or `any`.
    """

    id: int
    public_id: str
    fence: int
    cohort: int
    instance: int
    instance_name: str
    platform: int
    priority: int
    units: int
    waited: float
    usage: int
    min_quota: int
    short: int
    rule: str
    kept_bots: Mapping[int, int] = field(default_factory=dict)
    kept_until: Mapping[int, datetime] = field(default_factory=dict)
    queue_deadline: datetime | None = None


@dataclass(frozen=True)
class Occupant:
    """A job that holds units of a bot. `cohort` is that of its lease, which was another one than its bot's if the bot
    has changed its cohort since. `spare` are the units that its instance has there above its own minimum, infinite
    without a quota; `running` is false while it only starts or already stops."""

    job_id: int
    public_id: str
    fence: int
    cohort: int
    instance: int
    instance_name: str
    priority: int
    units: int
    queued_at: datetime
    started_at: datetime
    evictions: int
    running: bool
    spare: float


@dataclass(frozen=True)
class OccupiedBot:
    """A healthy bot that could run the job if it had room. `free_units`: what is free, or will be once those who have
    been asked to stop have done so, and is not kept for an instance."""

    id: int
    name: str
    capacity: int
    free_units: int
    occupants: tuple[Occupant, ...]


# Nothing is stopped for a job with this queue deadline that will have been given up by the time the room is there.
IN_TIME = "({deadline} IS NULL OR {deadline} > clock_timestamp() + make_interval(secs => :sync + {grace}))"
#: What is needed at least, where no bot is known yet: a bot may have no grace.
_LEAST = KILL_ALLOWANCE

# Ready jobs of queues that have no constraints, whether these rest or not: where every bot that is free is too small,
# only an eviction would help. The first of each queue come before the second of any, since where nothing can be done
# for one, nothing can for the next.
_HEADS = f"""
    SELECT w.cohort, w.instance, h.* FROM below b
    JOIN queues w ON w.cohort = b.cohort AND w.instance = b.instance AND w.units <= b.short + b.kept
        AND w.constraint_set IS NULL
    CROSS JOIN LATERAL (
        SELECT row_number() OVER (ORDER BY rank, queued_at, id) AS nth, id, rank, queued_at
        FROM (
            SELECT id, rank, queued_at, queue_deadline FROM jobs WHERE queue = w.id AND {READY_PLAIN}
            ORDER BY queue, rank, queued_at, id LIMIT :look + b.kept) first
        WHERE queued_at <= clock_timestamp() - make_interval(secs => :delay)
            AND {IN_TIME.format(deadline="queue_deadline", grace=_LEAST)}
        ORDER BY nth LIMIT :limit + b.kept) h"""

# What is kept for an instance is as good as used, by the first of its jobs.
_BELOW = f"""below AS MATERIALIZED (
    SELECT q.cohort, q.instance, i.name, q.usage, q.min_quota, c.reclaim_min, k.units AS kept, k.bot_ids, k.untils,
        q.min_quota - q.usage - k.units AS short
    FROM quotas q JOIN instances i ON i.id = q.instance JOIN cohorts c ON c.id = q.cohort
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(kept_units), 0)::integer AS units, array_agg(id) AS bot_ids,
            array_agg(kept_until) AS untils FROM bots
        WHERE kept_units > 0 AND kept_for = q.instance AND cohort = q.cohort OFFSET 0) k
    WHERE q.usage < q.min_quota AND {DRAIN.of(instance="i")}
        AND (CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR q.cohort = ANY (CAST(:cohorts AS integer[])))
)"""
# Which of the bots that keep units could run a job is found once for all jobs that are alike.
_KEEPING = f"""keeping AS MATERIALIZED (
    SELECT g.*, k.bots FROM (
        SELECT DISTINCT w.cohort, w.instance, w.platform, w.units
        FROM wanting w JOIN below b ON b.cohort = w.cohort AND b.instance = w.instance AND b.kept > 0) g
    CROSS JOIN LATERAL (
        SELECT jsonb_object_agg(k.id, k.kept_units) AS bots FROM bots k
        WHERE k.kept_units >= g.units AND k.kept_units > 0 AND k.kept_for = g.instance AND k.cohort = g.cohort
            AND {REQUIREMENTS.of(bot="k", want="g")} OFFSET 0) k
)"""
_FOUND = """SELECT j.id, j.public_id, j.fence, j.cohort, j.instance, b.name, j.platform, j.priority, j.units, b.usage,
    b.min_quota, b.reclaim_min, extract(epoch FROM clock_timestamp() - j.queued_at) AS waited,
    clock_timestamp() AS now, j.queue_deadline, b.short, b.bot_ids, b.untils, k.bots AS kept_bots
FROM wanting j JOIN below b ON b.cohort = j.cohort AND b.instance = j.instance
LEFT JOIN keeping k ON k.cohort = j.cohort AND k.instance = j.instance AND k.platform = j.platform
    AND k.units = j.units
"""

# Every instance, and in it every queue, gets its share of the batch, however urgent the jobs are for which nothing can
# be done.
STARVED_JOBS = Statement(f"""
WITH {_BELOW}, heads AS MATERIALIZED (
    SELECT id FROM ({_HEADS}) found
    ORDER BY nth, row_number() OVER (PARTITION BY cohort, instance ORDER BY nth, rank, queued_at, id),
        rank, queued_at, id
    LIMIT :limit + (SELECT coalesce(sum(kept), 0) FROM below)
), wanting AS MATERIALIZED (
    SELECT * FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued'
        AND {PAUSE.of(job="jobs")}
), {_KEEPING}
{_FOUND}ORDER BY j.rank, j.queued_at, j.id
""")

# Jobs that ask for more than a place, and that the caller has locked.
STARVED_AMONG = Statement(f"""
WITH {_BELOW}, wanting AS MATERIALIZED (
    SELECT * FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) AND state = 'queued'
        AND {PAUSE.of(job="jobs")}
        AND {IN_TIME.format(deadline="queue_deadline", grace=_LEAST)}
), {_KEEPING}
{_FOUND}WHERE b.short > 0 AND j.queued_at <= clock_timestamp() - make_interval(secs => :delay)
ORDER BY array_position(CAST(:job_ids AS bigint[]), j.id)
""")

#: A bot keeps units for an instance, and may not keep more for this one: only what is freed at the same time for one
#: instance is gathered on one bot, so that nobody waits for what others have stopped later.
KEPT_BY_OTHERS = (
    "(kept_units > 0 AND (kept_for <> :instance"
    " OR kept_until <> now() + make_interval(secs => :patience + kill_grace)))"
)
_IN_TIME = IN_TIME.format(deadline="CAST(:queue_deadline AS timestamptz)", grace=f"kill_grace + {KILL_ALLOWANCE}")
_OCCUPIED = (
    f"status <> 'gone' AND {HEALTHY.of(bot='')} AND {PROBATION.of(bot='')} AND NOT {KEPT_BY_OTHERS} AND {_IN_TIME}"
)
# A lease that is asked to stop counts as gone from its bot, where what is kept may be what it frees, and from what its
# instance has to spare. A bot that has changed its cohort still runs leases of the older one, which hold its units as
# any others do; what their instances have to spare is counted in that cohort.
OCCUPIED_BOTS = Statement(f"""
WITH want AS MATERIALIZED (
    SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
        (SELECT pool FROM instances WHERE id = :instance) AS pool, CAST(:platform AS integer) AS platform,
        CAST(:units AS integer) AS units
), able AS MATERIALIZED (
    SELECT b.id, b.name, b.capacity, b.held, b.capacity - b.in_use - b.kept_units AS room
    FROM want w CROSS JOIN LATERAL ({able_bots("b.*", "w", which=_OCCUPIED, limit=":look")} LIMIT :look) b
    WHERE {UNITS.of(bot="b", want="w")}
), stopping AS MATERIALIZED (
    SELECT cohort, instance, sum(units) AS units FROM leases WHERE state = 'cancelling' GROUP BY cohort, instance
)
SELECT a.id, a.name AS bot, a.capacity,
    a.room + coalesce(sum(l.units) FILTER (WHERE l.state = 'cancelling') OVER (PARTITION BY a.id), 0) AS room,
    l.job_id, j.public_id, l.fence, l.cohort, l.instance, i.name AS instance_name,
    j.priority, l.units, j.queued_at, coalesce(j.started_at, l.granted_at) AS started_at, j.evictions,
    l.state = 'active' AND j.state = 'running' AS running,
    q.usage - q.min_quota - coalesce(s.units, 0) AS spare
FROM able a
LEFT JOIN LATERAL {newest_leases("a.id", "a.held", columns="*")} l ON true
LEFT JOIN jobs j ON j.id = l.job_id
LEFT JOIN instances i ON i.id = l.instance
LEFT JOIN quotas q ON q.cohort = l.cohort AND q.instance = l.instance
LEFT JOIN stopping s ON s.cohort = l.cohort AND s.instance = l.instance
ORDER BY a.id, l.job_id
""")


def starved_jobs(
    connection: Connection, scope: Scope, *, delay: float, sync: float, limit: int
) -> tuple[list[StarvedJob], datetime | None]:
    """Find jobs of instances below their minimum that have been ready for a bot and queued for `delay` seconds.

    They come most urgent first, not locked, with the database's time. Each would fit into its instance's minimum and
    may still wait until somebody has stopped for it. There are up to `limit`, and one more for each unit that is kept.
    `sync` is the bots' sync period in seconds.
    """
    where = {**scope.values(), "delay": delay, "sync": sync, "limit": limit, "look": MAX_JOBS_READ}
    del where["cooldown"], where["literal"]
    return _read_starved(connection, STARVED_JOBS, where)


def starved_among(
    connection: Connection, scope: Scope, job_ids: Sequence[int], *, delay: float, sync: float
) -> tuple[list[StarvedJob], datetime | None]:
    """Those of these jobs, which the caller has locked, that `starved_jobs` would find if they asked for nothing but a
    place, in the order in which they are given; with the database's time."""
    where = {**scope.values(), "delay": delay, "sync": sync, "job_ids": list(job_ids)}
    del where["cooldown"], where["literal"]
    return _read_starved(connection, STARVED_AMONG, where)


def _read_starved(
    connection: Connection, statement: Statement, where: Mapping[str, Any]
) -> tuple[list[StarvedJob], datetime | None]:
    found: list[StarvedJob] = []
    now: datetime | None = None
    for row in connection.execute(statement, where):
        now = row.now
        found.append(
            StarvedJob(
                row.id,
                str(row.public_id),
                row.fence,
                row.cohort,
                row.instance,
                row.name,
                row.platform,
                row.priority,
                row.units,
                float(row.waited),
                row.usage,
                row.min_quota,
                row.short,
                row.reclaim_min,
                {int(bot_id): units for bot_id, units in (row.kept_bots or {}).items()},
                dict(zip(row.bot_ids or (), row.untils or (), strict=True)),
                row.queue_deadline,
            )
        )
    return found, now


def occupied_bots(connection: Connection, job: StarvedJob, *, patience: float, sync: float) -> Sequence[OccupiedBot]:
    """The healthy bots of the job's cohort that satisfy it, serve its instance, keep nothing but what this transaction
    keeps for the same instance, and stop a job before this one is given up, with what runs on each. `patience`: the
    seconds for which they keep it, beside their grace. `sync`: the bots' sync period in seconds."""
    rows = connection.execute(
        OCCUPIED_BOTS,
        {
            "cohort": job.cohort,
            "instance": job.instance,
            "platform": job.platform,
            "units": job.units,
            "look": MAX_VICTIM_BOTS,
            "patience": patience,
            "queue_deadline": job.queue_deadline,
            "sync": sync,
        },
    ).all()
    bots: dict[int, tuple[str, int, int, list[Occupant]]] = {}
    for row in rows:
        _, _, _, occupants = bots.setdefault(row.id, (row.bot, row.capacity, row.room, []))
        if row.job_id is None:
            continue
        occupants.append(
            Occupant(
                row.job_id,
                str(row.public_id),
                row.fence,
                row.cohort,
                row.instance,
                row.instance_name,
                row.priority,
                row.units,
                row.queued_at,
                row.started_at,
                row.evictions,
                row.running,
                float("inf") if row.spare is None else float(row.spare),
            )
        )
    return [OccupiedBot(key, name, capacity, room, tuple(held)) for key, (name, capacity, room, held) in bots.items()]
