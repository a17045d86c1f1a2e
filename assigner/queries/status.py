"""The status of the pool: waiting, running and ended jobs, bots, quotas, and rates of the last minute.

The cost does not grow with the history or the queue. Waiting and running jobs are counted in partial indexes that hold
only them, up to a bound; ended jobs among the newest. Rates come from the newest jobs, the jobs that ended last, and
the leases of these and of running jobs. If a bound cuts a count short, the answer says so.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from leasehold.states import FINAL, JobState

from assigner.queries.jobs import VISIBLE
from schema.accounting import quotas
from schema.accounting.fair_share import jain_index
from schema.accounting.pool_samples import MAX_NAMES, Counted, Scope
from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.fleet import success
from schema.fleet.candidates import able_bots
from schema.picking.queues import ready_ranks
from schema.policy import pauses
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, READY_PLAIN, ready_in, ready_queues
from schema.sql import SCHEMA
from schema.states import COUNTS

Rows = list[dict[str, Any]]

#: The most jobs counted of each kind: ready, in backoff, constrained, parked (for each instance), blocked, deferred, on
#: bots. Of the first three, each pair of cohort and instance gets an even share. Doubling it doubles the longest time
#: of one status.
MAX_COUNTED = 100_000
#: The most finished jobs counted, the newest.
MAX_FINISHED = 50_000
#: The most queues read for the age of the oldest job.
MAX_QUEUES = 1_000
#: How many of the newest jobs are read for the rate of submits: the first of these numbers that reaches a minute back.
RATE_JOBS = (1_000, 10_000, 25_000)
#: The most jobs, those that ended last, read for the other rates. It and the last of RATE_JOBS suffice for 400 jobs per
#: second; above that the rates cover less than a minute.
MAX_ENDED = 25_000
#: The most pauses that are told.
MAX_PAUSES = 100
#: The most grants whose waits are read, the newest.
MAX_WAITS = 5_000

#: The condition that no present bot could run the jobs of a row `q` with cohort, instance, pool, platform and units.
#: OFFSET 0 keeps the planner from reading every requirement set of every bot to learn that none matches.
UNMATCHABLE = f"""NOT EXISTS (
    {able_bots("b.id", "q", which="status <> 'gone' AND capacity >= q.units", limit="1")} OFFSET 0)"""
_OF_JOB = Statement(f"""
SELECT {UNMATCHABLE} FROM (SELECT j.platform, j.cohort, j.instance, i.pool, j.units
    FROM jobs j JOIN instances i ON i.id = j.instance WHERE j.id = :job_id OFFSET 0) q
""")
# Queued jobs by instance, and how many of them no present bot could run, even if it were idle: of each instance the
# jobs up to an even share of the bound.
_COUNTED = f"""
WITH RECURSIVE {ready_queues("plain")}, {ready_queues("constrained", constrained=True)}, holding AS MATERIALIZED (
    SELECT k.* FROM queues k
    WHERE k.id = ANY (ARRAY(SELECT queue FROM plain UNION ALL SELECT queue FROM constrained))
), seen AS MATERIALIZED (
    SELECT h.cohort, h.instance, i.name, i.pool, :most / count(*) OVER () + 1 AS share
    FROM (SELECT DISTINCT cohort, instance FROM holding) h JOIN instances i ON i.id = h.instance WHERE {VISIBLE}
), retrying AS MATERIALIZED (
    SELECT j.queue, count(*) AS jobs, min(j.queued_at) FILTER (WHERE j.queued_at <= now()) AS oldest,
        count(*) FILTER (WHERE j.queued_at > now()) AS later, sum(count(*)) OVER () > :most AS more
    FROM (SELECT j.queue, j.queued_at FROM jobs j JOIN instances i ON i.id = j.instance
          WHERE {AT_REST} AND {VISIBLE} ORDER BY j.schedule_after LIMIT :most + 1) j
    GROUP BY j.queue
), waiting AS MATERIALIZED (
    SELECT s.cohort, s.instance, s.name, s.pool, w.platform, w.units, w.jobs, w.oldest, 0 AS later,
        w.seen >= s.share AS more
    FROM seen s CROSS JOIN LATERAL (
        SELECT platform, units, count(*) AS jobs, min(queued_at) AS oldest, sum(count(*)) OVER () AS seen FROM (
            SELECT coalesce(h.required, h.platform) AS platform, h.units, j.queued_at
            FROM holding h CROSS JOIN LATERAL (
                SELECT queued_at FROM jobs WHERE {ready_in("h")}
                ORDER BY queue, rank, queued_at, id LIMIT s.share) j
            WHERE h.cohort = s.cohort AND h.instance = s.instance LIMIT s.share) first
        GROUP BY platform, units) w
    UNION ALL
    SELECT k.cohort, k.instance, i.name, i.pool, coalesce(k.required, k.platform) AS platform, k.units, r.jobs,
        r.oldest, r.later, r.more
    FROM retrying r JOIN queues k ON k.id = r.queue JOIN instances i ON i.id = k.instance
)
"""
WAITING = Statement(f"""{_COUNTED}SELECT q.name AS instance, sum(q.jobs) AS jobs, bool_or(q.more) AS more,
    sum(q.later) AS later, extract(epoch FROM now() - min(q.oldest)) AS oldest_seconds,
    coalesce(sum(q.jobs) FILTER (WHERE {UNMATCHABLE}), 0) AS unmatchable
FROM waiting q GROUP BY q.name ORDER BY q.name
""")

# The same jobs by cohort and instance.
WAITING_BY_PAIR = Statement(f"""{_COUNTED}SELECT c.name AS cohort, q.name AS instance, sum(q.jobs - q.later) AS jobs,
    bool_or(q.more) AS more, extract(epoch FROM now() - min(q.oldest))::float AS oldest_seconds
FROM waiting q JOIN cohorts c ON c.id = q.cohort GROUP BY c.name, q.name
""")

# Jobs on bots and their units, by cohort and instance.
HELD_BY_PAIR = Statement("""
SELECT c.name AS cohort, i.name AS instance, h.jobs, h.units, h.more
FROM (SELECT cohort, instance, count(*) AS jobs, sum(units) AS units, sum(count(*)) OVER () >= :most AS more
      FROM (SELECT cohort, instance, units FROM leases WHERE state IN ('pending', 'active', 'cancelling')
            LIMIT :most) first
      GROUP BY cohort, instance) h
JOIN cohorts c ON c.id = h.cohort JOIN instances i ON i.id = h.instance
""")

WEIGHTS = Statement("""
SELECT i.name, coalesce(a.credit_weight, 1) AS weight FROM instances i LEFT JOIN accounts a ON a.instance = i.id
WHERE i.name = ANY (CAST(:names AS text[]))
""")

# Jobs that ended in the minute from `at` on, by cohort, instance and state.
ENDED_BY_PAIR = Statement("""
SELECT c.name AS cohort, i.name AS instance, e.state, e.jobs, e.more
FROM (SELECT cohort, instance, state, count(*) AS jobs, sum(count(*)) OVER () >= :most AS more
      FROM (SELECT cohort, instance, state FROM jobs WHERE finished_at >= :at
                AND finished_at < CAST(:at AS timestamptz) + interval '1 minute' ORDER BY finished_at LIMIT :most) ended
      GROUP BY cohort, instance, state) e
JOIN cohorts c ON c.id = e.cohort JOIN instances i ON i.id = e.instance
""")

# The age of the oldest ready job without constraints, from the head of each rank of each queue.
OLDEST = Statement(f"""
WITH RECURSIVE {ready_queues("ready")}
SELECT extract(epoch FROM now() - min(head.queued_at)) AS seconds, count(*) >= :most AS more
FROM (SELECT q.id FROM queues q JOIN instances i ON i.id = q.instance
      WHERE q.id = ANY (ARRAY(SELECT queue FROM ready)) AND {VISIBLE} LIMIT :most) q
CROSS JOIN LATERAL ({ready_ranks("q.id")}) z
CROSS JOIN LATERAL (
    SELECT queued_at FROM jobs WHERE queue = q.id AND rank = z.rank AND {READY_PLAIN}
    ORDER BY queue, rank, queued_at, id LIMIT 1) head
""")

# Parked jobs, by instance.
PARKED = Statement(f"""
SELECT i.name AS instance, p.jobs, p.jobs >= :most AS more
FROM instances i CROSS JOIN LATERAL (
    SELECT count(*) AS jobs FROM (
        SELECT FROM jobs WHERE instance = i.id AND state = 'parked' ORDER BY instance, priority LIMIT :most) w) p
WHERE {VISIBLE} AND p.jobs > 0
""")

# Nodes of graphs that wait for other nodes, by instance.
BLOCKED = Statement(f"""
SELECT i.name AS instance, count(*) AS jobs, bool_or(b.seen >= :most) AS more
FROM (
    SELECT instance, count(*) OVER () AS seen FROM (
        SELECT g.instance FROM graphs g CROSS JOIN LATERAL (
            SELECT FROM graph_nodes WHERE graph = g.id AND outcome IS NULL AND pending_deps > 0 OFFSET 0) n
        WHERE g.finished_at IS NULL ORDER BY g.id LIMIT :most) first) b
JOIN instances i ON i.id = b.instance WHERE {VISIBLE} GROUP BY i.name
""")

# Deferred jobs, by instance.
DEFERRED = Statement(f"""
SELECT i.name AS instance, d.jobs, d.more FROM (
    SELECT instance, count(*) AS jobs, sum(count(*)) OVER () >= :most AS more FROM (
        SELECT instance FROM jobs WHERE state = 'deferred' ORDER BY queued_at, id LIMIT :most) w GROUP BY instance) d
JOIN instances i ON i.id = d.instance WHERE {VISIBLE}
""")

# Jobs on bots, of every instance, counted by their leases. For a lease that is being cancelled the state comes from the
# job.
HELD = Statement("""
SELECT i.name AS instance, h.state, h.jobs, h.more
FROM (
    SELECT l.instance, coalesce(l.state, j.state) AS state, count(*) AS jobs, bool_or(l.seen >= :most) AS more
    FROM (
        SELECT job_id, instance, count(*) OVER () AS seen,
            CASE state WHEN 'pending' THEN 'leased' WHEN 'active' THEN 'running' END AS state
        FROM (SELECT job_id, instance, state FROM leases WHERE state IN ('pending', 'active', 'cancelling')
              ORDER BY instance LIMIT :most) first) l
    LEFT JOIN LATERAL (SELECT state FROM jobs WHERE id = l.job_id AND l.state IS NULL OFFSET 0) j ON true
    GROUP BY 1, 2) h
JOIN instances i ON i.id = h.instance
""")

# The newest finished jobs, of every instance, by state.
FINISHED = Statement("""
SELECT i.name AS instance, j.state, j.jobs, j.more
FROM (SELECT instance, state, count(*) AS jobs, sum(count(*)) OVER () >= :most AS more
      FROM (SELECT instance, state FROM jobs WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT :most) newest
      GROUP BY instance, state) j
JOIN instances i ON i.id = j.instance
""")

# The number of finished jobs that the last VACUUM or ANALYZE counted in their index; negative = never counted.
ESTIMATE = Statement(f"SELECT reltuples FROM pg_class WHERE oid = '{SCHEMA}.jobs_finished'::regclass")

BOT_COUNTS = Statement(f"""
SELECT CASE WHEN b.status <> 'gone' AND b.draining THEN 'draining' ELSE b.status END AS status, count(*) AS bots,
    sum(b.capacity) AS capacity, sum(b.in_use) AS in_use
FROM bots b LEFT JOIN instances i ON i.id = b.instance
WHERE b.instance IS NULL OR {VISIBLE} GROUP BY 1 ORDER BY 1
""")

# The newest alone: the name of the other one was for a process that could not have the row of the first.
TICKS = Statement("""
SELECT name, extract(epoch FROM clock_timestamp() - at) AS age_seconds, grace_until > clock_timestamp() AS grace
FROM ticks ORDER BY at DESC LIMIT 1
""")

# Whether the newest `jobs` jobs reach a minute back.
REACHES = Statement("""
SELECT coalesce((SELECT created_at < now() - interval '1 minute' FROM jobs
                 ORDER BY id DESC OFFSET :jobs - 1 LIMIT 1), true)
""")

_OURS = f"""(CAST(:instances AS text[]) IS NULL
    OR instance = ANY (ARRAY(SELECT i.id FROM instances i WHERE {VISIBLE})))"""

# Rates over the last minute, or over a shorter time if the bounds cut it; `span` is that time in seconds. For a job
# that returned to the queue, earlier leases count only once it has a new lease or has ended. A wait begins when the job
# last entered the queue; the events of a job are ordered by id.
RATES = Statement(f"""
WITH newest AS MATERIALIZED (
    SELECT instance, created_at FROM jobs ORDER BY id DESC LIMIT :jobs
), latest AS MATERIALIZED (
    SELECT id, instance, state, finished_at FROM jobs WHERE finished_at >= now() - interval '1 minute'
    ORDER BY finished_at DESC LIMIT :ended
), begin AS MATERIALIZED (
    SELECT greatest(now() - interval '1 minute',
        (SELECT min(created_at) FROM newest HAVING count(*) = :jobs),
        (SELECT min(finished_at) FROM latest HAVING count(*) = :ended)) AS at
), ended AS MATERIALIZED (
    SELECT id, state FROM latest WHERE finished_at >= (SELECT at FROM begin) AND {_OURS}
), held AS MATERIALIZED (
    SELECT job_id FROM (
        SELECT job_id, instance, granted_at, acknowledged_at FROM leases
        WHERE state IN ('pending', 'active', 'cancelling') ORDER BY instance LIMIT :held) l
    WHERE greatest(granted_at, acknowledged_at) >= (SELECT at FROM begin) AND {_OURS}
), leased AS MATERIALIZED (
    SELECT l.* FROM (SELECT id FROM ended UNION ALL SELECT job_id FROM held) j
    CROSS JOIN LATERAL (
        SELECT job_id, fence, granted_at, acknowledged_at FROM leases
        WHERE job_id = j.id ORDER BY job_id, fence OFFSET 0) l
), waits AS MATERIALIZED (
    SELECT greatest(0, extract(epoch FROM g.granted_at - queued.at))::float AS seconds
    FROM (SELECT job_id, fence, granted_at FROM leased WHERE granted_at >= (SELECT at FROM begin)
          ORDER BY granted_at DESC LIMIT :waits) g
    CROSS JOIN LATERAL (
        SELECT e.at FROM job_events e
        WHERE e.job_id = g.job_id AND e.fence < g.fence
            AND e.to_state = 'queued' AND e.from_state IS DISTINCT FROM 'queued'
        ORDER BY e.job_id DESC, e.id DESC LIMIT 1) queued
)
SELECT (SELECT count(*) FROM newest WHERE created_at >= begin.at AND {_OURS}) AS submitted, leases.*, endings.*,
    greatest(1.0, extract(epoch FROM now() - begin.at)) AS span,
    (SELECT count(*) FROM waits) AS waits,
    (SELECT percentile_disc(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY seconds) FROM waits) AS percentiles
FROM begin
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE granted_at >= begin.at) AS granted,
        count(*) FILTER (WHERE acknowledged_at >= begin.at) AS started FROM leased) leases
CROSS JOIN (
    SELECT count(*) AS finished,
        {", ".join(f"count(*) FILTER (WHERE state = '{state}') AS {state}" for state in sorted(FINAL))}
    FROM ended) endings
""")


@dataclass(frozen=True)
class Backlog:
    """The jobs that have not ended.

    jobs: their number by state, each kind counted up to `MAX_COUNTED`. oldest: seconds for which the oldest queued job
    has waited, 0 without any. unmatchable: queued jobs that no present bot could run, even if it were idle.
    """

    jobs: Mapping[str, int]
    oldest: float
    unmatchable: int


def pool_status(
    connection: Connection, *, instances: Sequence[str] | None, cooldown: Cooldown = EVICTION_COOLDOWN
) -> dict[str, Any]:
    """The status of the pool as rows of this module's queries.

    `more` lists the states whose jobs were not all counted. Only a caller who sees every instance receives
    `finished_estimate` (None if PostgreSQL has none) and `swarm`, the bots of each cohort.
    """
    where: dict[str, Any] = {"instances": instances}
    counts = _not_begun(connection, instances)
    others = _rows(connection, HELD, {"most": MAX_COUNTED}) + _rows(connection, FINISHED, {"most": MAX_FINISHED})
    counts += [row for row in others if instances is None or row["instance"] in instances]
    held = quotas.quotas(connection, cooldown=cooldown)
    return {
        "counts": counts,
        "more": sorted({str(row["state"]) for row in counts + others if row["more"]}),
        "oldest": dict(connection.execute(OLDEST, where | {"most": MAX_QUEUES}).mappings().one()),
        "finished_estimate": _estimate(connection) if instances is None else None,
        "bots": _rows(connection, BOT_COUNTS, where),
        "swarm": [asdict(one) for one in success.swarms(connection)] if instances is None else [],
        "ticks": _rows(connection, TICKS, {}),
        "paused": pauses.pauses(connection)[:MAX_PAUSES] if instances is None else [],
        "quotas": [asdict(quota) for quota in held if instances is None or quota.instance in instances],
        "rates": _rates(connection, instances=instances),
    }


def count_backlog(connection: Connection) -> Backlog:
    """Count the waiting and running jobs of the whole pool."""
    waiting = _not_begun(connection, None)
    jobs = Counter(dict.fromkeys((state.value for state in JobState if state not in FINAL), 0))
    for row in waiting + _rows(connection, HELD, {"most": MAX_COUNTED}):
        jobs[str(row["state"])] += int(row["jobs"])
    queued = [row for row in waiting if row["state"] == JobState.QUEUED]
    return Backlog(
        jobs,
        oldest=max((float(row["oldest_seconds"] or 0) for row in queued), default=0.0),
        unmatchable=sum(int(row["unmatchable"]) for row in queued),
    )


def count_minute(connection: Connection, at: datetime) -> list[Counted]:
    """Count what waits and runs, and what ended in the minute from `at` on: the pool, its cohorts and its instances.

    At most `MAX_NAMES` cohorts and as many instances are named, those with the most jobs.
    """
    pairs: dict[tuple[str, str], Counter[str]] = {}
    oldest: dict[tuple[str, str], float] = {}
    units: Counter[str] = Counter()
    short: set[tuple[str, str]] = set()
    most = {"most": MAX_COUNTED}
    read = (
        ("waiting", WAITING_BY_PAIR, most | {"instances": None}),
        ("running", HELD_BY_PAIR, most),
        (None, ENDED_BY_PAIR, most | {"at": at}),
    )
    for kind, statement, values in read:
        for row in _rows(connection, statement, values):
            pair = row["cohort"], row["instance"]
            pairs.setdefault(pair, Counter())[kind or row["state"]] += int(row["jobs"])
            if row["more"]:
                short.add(pair)
            if kind == "waiting" and row["oldest_seconds"] is not None:
                oldest[pair] = max(0.0, row["oldest_seconds"])
            if kind == "running":
                units[row["instance"]] += int(row["units"])
    fairness = _fairness(connection, {instance for (_, instance), jobs in pairs.items() if jobs["waiting"]}, units)
    return [
        *(replace(one, fairness=fairness) for one in _counted(Scope.POOL, lambda _: "", pairs, oldest, short)),
        *_counted(Scope.COHORT, lambda pair: pair[0], pairs, oldest, short),
        *_counted(Scope.INSTANCE, lambda pair: pair[1], pairs, oldest, short),
    ]


def _fairness(connection: Connection, waiting: Collection[str], units: Mapping[str, int]) -> float | None:
    """Return Jain's index of units in use over weight of the instances that wait; None if fewer than two have a weight.

    An instance without waiting jobs has all that it asked for, and an instance of weight 0 is due nothing.
    """
    rows = connection.execute(WEIGHTS, {"names": sorted(waiting)}).all()
    levels = [units.get(row.name, 0) / row.weight for row in rows if row.weight > 0]
    return jain_index(levels) if len(levels) > 1 else None


def _counted(
    scope: Scope,
    name: Callable[[tuple[str, str]], str],
    pairs: Mapping[tuple[str, str], Counter[str]],
    oldest: Mapping[tuple[str, str], float],
    short: Collection[tuple[str, str]],
) -> list[Counted]:
    """Sum the counts of pairs of cohort and instance by a name of them."""
    sums: dict[str, Counter[str]] = {}
    for pair, counts in pairs.items():
        sums.setdefault(name(pair), Counter()).update(counts)
    return [
        Counted(
            scope,
            each,
            **{kind: sums[each][kind] for kind in COUNTS},
            oldest_wait=max((age for pair, age in oldest.items() if name(pair) == each), default=None),
            incomplete=any(name(pair) == each for pair in short),
        )
        for each in sorted(sums, key=lambda each: (-sums[each].total(), each))[:MAX_NAMES]
    ]


def _not_begun(connection: Connection, instances: Sequence[str] | None) -> Rows:
    """Waiting jobs, by instance and state."""
    where = {"instances": instances, "most": MAX_COUNTED}
    kinds = {
        JobState.QUEUED: WAITING,
        JobState.PARKED: PARKED,
        JobState.BLOCKED: BLOCKED,
        JobState.DEFERRED: DEFERRED,
    }
    return [
        {**row, "state": state} for state, statement in kinds.items() for row in _rows(connection, statement, where)
    ]


def _rates(connection: Connection, *, instances: Sequence[str] | None) -> dict[str, Any]:
    jobs = next(
        (jobs for jobs in RATE_JOBS if connection.execute(REACHES, {"jobs": jobs}).scalar_one()),
        RATE_JOBS[-1],
    )
    bounds = {"jobs": jobs, "ended": MAX_ENDED, "held": MAX_COUNTED, "waits": MAX_WAITS}
    return dict(connection.execute(RATES, {"instances": instances} | bounds).mappings().one())


def _estimate(connection: Connection) -> int | None:
    found = float(connection.execute(ESTIMATE).scalar_one())
    return None if found < 0 else round(found)


def _rows(connection: Connection, statement: Any, values: dict[str, Any]) -> Rows:
    return [dict(row) for row in connection.execute(statement, values).mappings()]


def is_unmatchable(connection: Connection, job_id: int) -> bool:
    """Return True if no present bot could run this waiting job, even if it were idle."""
    return bool(connection.execute(_OF_JOB, {"job_id": job_id}).scalar_one())
