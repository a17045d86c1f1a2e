"""The report: what waits now, and waits, throughput, fairness, efficiency, utilisation and others of a recent period.

It reads the jobs that ended last, at most `MAX_ENDED`, so its cost does not grow with the history. If that bound
shortens the period, the report gives the shorter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

from schema.accounting import fair_share
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.predicates import AT_REST, READY
from schema.validation import RESOURCES

#: Longest span that a report may cover, seconds.
MAX_WINDOW = 366 * 86400.0
#: The most ended jobs that one report reads, the newest.
MAX_ENDED = 50_000

_ENDED = """
ended AS MATERIALIZED (
    SELECT id, instance, cohort, state, priority, units, created_at, started_at, finished_at, result_fence
    FROM jobs WHERE finished_at IS NOT NULL AND finished_at >= now() - make_interval(secs => :window)
    ORDER BY finished_at DESC LIMIT :most
), ran AS MATERIALIZED (
    SELECT e.*, i.name, l.bot_id, extract(epoch FROM l.granted_at - e.created_at)::float AS wait,
        extract(epoch FROM l.ended_at - l.granted_at)::float AS seconds
    FROM ended e JOIN instances i ON i.id = e.instance
    LEFT JOIN LATERAL (
        SELECT bot_id, granted_at, ended_at FROM leases
        WHERE job_id = e.id ORDER BY job_id, fence DESC LIMIT 1) l ON true
)"""
# Queued jobs whose earliest start is past, of the first that the indexes of queued jobs have. Ready ones are counted by
# queue, which the index tells with the times: their rows are not read where the table has been vacuumed.
WAITING = Statement(f"""
SELECT i.name, sum(w.jobs)::bigint AS jobs, extract(epoch FROM now() - min(w.since))::float AS oldest
FROM (
    SELECT k.instance, r.jobs, r.since
    FROM (SELECT queue, count(*) AS jobs, min(queued_at) AS since
          FROM (SELECT queue, queued_at FROM jobs WHERE {READY}
                ORDER BY constrained, queue, rank, queued_at, id LIMIT :most) j
          WHERE queued_at <= now() GROUP BY queue) r
    JOIN queues k ON k.id = r.queue
    UNION ALL
    SELECT instance, count(*), min(queued_at)
    FROM (SELECT instance, queued_at FROM jobs WHERE {AT_REST} ORDER BY schedule_after LIMIT :most) j
    WHERE queued_at <= now() GROUP BY instance) w
JOIN instances i ON i.id = w.instance
GROUP BY i.name ORDER BY i.name
""")
SPAN = Statement("""
SELECT least(:window, coalesce(extract(epoch FROM now() - (
    SELECT min(finished_at) FROM (
        SELECT finished_at FROM jobs WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT :most) newest
    HAVING count(*) = :most)), :window))::float AS seconds, now() AS until
""")
INSTANCES = Statement(f"""
WITH {_ENDED}
SELECT name, count(*) AS ended, count(*) FILTER (WHERE state = 'succeeded') AS succeeded,
    count(*) FILTER (WHERE state IN ('failed', 'dead')) AS failed, avg(wait) AS wait_mean,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY wait) AS wait_p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY wait) AS wait_p95, max(wait) AS wait_max,
    coalesce(sum(units * seconds), 0)::float AS unit_seconds
FROM ran GROUP BY name ORDER BY name
""")
DAYS = Statement(f"""
WITH {_ENDED}
SELECT (finished_at AT TIME ZONE 'UTC')::date AS day, avg(wait) AS wait_mean, count(bot_id) AS scheduled,
    count(*) FILTER (WHERE state = 'succeeded') AS completed, avg(priority)::float AS priority_mean
FROM ran GROUP BY 1 ORDER BY 1 DESC
""")
ESTIMATES = Statement(f"""
WITH {_ENDED}
SELECT count(*) AS jobs, avg(t.seconds) AS estimated_mean, avg(r.seconds) AS actual_mean,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY r.seconds / greatest(t.seconds, 0.001)) AS ratio_p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY r.seconds / greatest(t.seconds, 0.001)) AS ratio_p95
FROM ran r JOIN job_constraints t ON t.job_id = r.id
WHERE t.seconds IS NOT NULL AND r.seconds IS NOT NULL AND r.state = 'succeeded'
""")
BOTS = Statement(f"""
WITH {_ENDED}
SELECT c.name AS cohort, s.bots, s.jobs, s.busiest, s.squares / (s.jobs::float * s.jobs) AS concentrated
FROM (SELECT cohort, count(*) AS bots, sum(jobs)::bigint AS jobs, max(jobs) AS busiest,
          sum(jobs * jobs)::float AS squares
      FROM (SELECT cohort, bot_id, count(*) AS jobs FROM ran WHERE bot_id IS NOT NULL GROUP BY 1, 2) each
      GROUP BY cohort) s
JOIN cohorts c ON c.id = s.cohort ORDER BY c.name
""")
HOURS = Statement("""
SELECT name, extract(hour FROM bucket AT TIME ZONE 'UTC')::integer AS hour, sum(amount)::float AS amount
FROM usage WHERE bucket >= now() - make_interval(secs => :window) AND name LIKE 'instance\\:%'
GROUP BY 1, 2 ORDER BY 1, 2
""")
EFFICIENCY = Statement("""
SELECT sum(amount) FILTER (WHERE name = 'pool:busy')::float AS busy,
    sum(amount) FILTER (WHERE name = 'pool:available')::float AS available, count(DISTINCT bucket) AS minutes
FROM usage WHERE bucket >= now() - make_interval(secs => :window) AND name IN ('pool:busy', 'pool:available')
""")
RESOURCE_USE = Statement("""
SELECT split_part(name, ':', 2) AS name,
    avg(amount) FILTER (WHERE split_part(name, ':', 3) = 'busy')::float AS used,
    avg(amount) FILTER (WHERE split_part(name, ':', 3) = 'available')::float AS declared
FROM usage
WHERE bucket >= now() - make_interval(secs => :window) AND name = ANY (ARRAY(
    SELECT 'pool:' || name || ':' || part FROM unnest(CAST(:resources AS text[])) AS r (name),
        unnest(ARRAY['busy', 'available']) AS p (part)))
GROUP BY 1 ORDER BY 1
""")
METERS = Statement("""
SELECT name, (sum(percents) / sum(readings))::float AS mean, max(percents / readings)::float AS busiest_hour
FROM meter_hours WHERE hour > now() - make_interval(secs => :window) - interval '1 hour'
GROUP BY name ORDER BY name
""")


@dataclass(frozen=True)
class InstanceReport:
    """One instance in the report.

    ended, succeeded, failed: numbers of jobs; `failed` includes dead ones.
    wait_…: seconds from submit to the last grant; None if no job was granted.
    unit_seconds: units of capacity times the seconds for which jobs held them.
    """

    name: str
    ended: int
    succeeded: int
    failed: int
    wait_mean: float | None
    wait_p50: float | None
    wait_p95: float | None
    wait_max: float | None
    unit_seconds: float


@dataclass(frozen=True)
class WaitingReport:
    """Queued jobs of one instance now, of at most 2 * `MAX_ENDED` in all; oldest: seconds that the first has waited."""

    name: str
    jobs: int
    oldest: float


@dataclass(frozen=True)
class DayReport:
    """One day (UTC): mean wait in seconds, jobs granted, jobs succeeded, and the mean priority of all that ended."""

    day: date
    wait_mean: float | None
    scheduled: int
    completed: int
    priority_mean: float


@dataclass(frozen=True)
class EstimateReport:
    """Succeeded jobs with an estimated run time: mean seconds, and the ratio of actual to estimated time."""

    jobs: int
    estimated_mean: float | None
    actual_mean: float | None
    ratio_p50: float | None
    ratio_p95: float | None


@dataclass(frozen=True)
class ConcentrationReport:
    """The spread of a cohort's jobs over its bots.

    busiest_share: the share of the busiest bot.
    index: the sum of the squares of all shares (Herfindahl index): 1 / bots if even, 1 if one bot ran everything.
    """

    cohort: str
    bots: int
    jobs: int
    busiest_share: float
    index: float


@dataclass(frozen=True)
class HourReport:
    """The usage of a counter at an hour of the day (UTC), in the counter's unit."""

    name: str
    hour: int
    amount: float


@dataclass(frozen=True)
class ResourceReport:
    """The use of a resource of bots, on average over the minutes in which jobs were ready.

    name: cpu_milli or gpu_milli, in thousandths, memory_mib or disk_mib, in MiB, or gpus. Of GPUs that are devices,
        gpus are those that jobs have to themselves, and gpu_milli counts these, too.
    used: what running jobs have taken, as they asked for it. declared: what healthy bots have declared.
    utilisation: used / declared.
    """

    name: str
    used: float
    declared: float
    utilisation: float


@dataclass(frozen=True)
class MeterReport:
    """The readings of a meter, in percent of its limit: the mean of all, and the mean of the busiest hour."""

    name: str
    mean: float
    busiest_hour: float


@dataclass(frozen=True)
class Report:
    """The report on the `seconds` before `until`.

    fairness: Jain's index over the unit seconds of instances with ended jobs, 1 if all had the same; None without any.
    efficiency: units in use divided by units of healthy bots, in the minutes in which jobs were ready; None without
        such minutes.
    throughput: ended jobs per second.
    resources: only resources that bots have declared. meters: only meters that were read, in whole hours.
    """

    until: datetime
    seconds: float
    throughput: float
    fairness: float | None
    efficiency: float | None
    waiting: Sequence[WaitingReport]
    instances: Sequence[InstanceReport]
    days: Sequence[DayReport]
    estimates: EstimateReport
    concentration: Sequence[ConcentrationReport]
    hours: Sequence[HourReport]
    resources: Sequence[ResourceReport]
    meters: Sequence[MeterReport]


def report(connection: Connection, *, window: float) -> Report:
    """Make the report on the last `window` seconds."""

    def rows(statement: Statement) -> Sequence[Row]:
        return connection.execute(statement, values).all()

    values = {"window": window, "most": MAX_ENDED, "resources": list(RESOURCES)}
    span = connection.execute(SPAN, values).one()
    instances = [InstanceReport(**row._asdict()) for row in rows(INSTANCES)]
    seen = connection.execute(EFFICIENCY, {"window": window}).one()
    return Report(
        until=span.until,
        seconds=span.seconds,
        throughput=sum(each.ended for each in instances) / span.seconds,
        fairness=fair_share.jain_index(each.unit_seconds for each in instances),
        efficiency=seen.busy / seen.available if seen.available else None,
        waiting=[WaitingReport(**row._asdict()) for row in rows(WAITING)],
        instances=instances,
        days=[DayReport(**row._asdict()) for row in rows(DAYS)],
        estimates=EstimateReport(**rows(ESTIMATES)[0]._asdict()),
        concentration=[
            ConcentrationReport(row.cohort, row.bots, row.jobs, row.busiest / row.jobs, row.concentrated)
            for row in rows(BOTS)
        ],
        hours=[HourReport(**row._asdict()) for row in rows(HOURS)],
        resources=[
            ResourceReport(row.name, row.used, row.declared, row.used / row.declared) for row in rows(RESOURCE_USE)
        ],
        meters=[MeterReport(**row._asdict()) for row in rows(METERS)],
    )
