"""What the pool did within a window of time: waits, throughput, shares, efficiency, estimates, concentration.

Read from the newest jobs that ended, at most `MAX_ENDED`, so that it costs the same whatever the history is; where that
cut the window short, the report says from when on it speaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

from sqlalchemy import Connection, Row, TextClause, text

from assigner.admission import fair_share

#: Jobs that ended that one report is made from, the newest.
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
SPAN = text("""
SELECT least(:window, coalesce(extract(epoch FROM now() - (
    SELECT min(finished_at) FROM (
        SELECT finished_at FROM jobs WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT :most) newest
    HAVING count(*) = :most)), :window))::float AS seconds, now() AS until
""")
INSTANCES = text(f"""
WITH {_ENDED}
SELECT name, count(*) AS ended, count(*) FILTER (WHERE state = 'succeeded') AS succeeded,
    count(*) FILTER (WHERE state IN ('failed', 'dead')) AS failed, avg(wait) AS wait_mean,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY wait) AS wait_p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY wait) AS wait_p95, max(wait) AS wait_max,
    coalesce(sum(units * seconds), 0)::float AS unit_seconds
FROM ran GROUP BY name ORDER BY name
""")
DAYS = text(f"""
WITH {_ENDED}
SELECT (finished_at AT TIME ZONE 'UTC')::date AS day, avg(wait) AS wait_mean, count(bot_id) AS scheduled,
    count(*) FILTER (WHERE state = 'succeeded') AS completed, avg(priority)::float AS priority_mean
FROM ran GROUP BY 1 ORDER BY 1 DESC
""")
ESTIMATES = text(f"""
WITH {_ENDED}
SELECT count(*) AS jobs, avg(t.seconds) AS estimated_mean, avg(r.seconds) AS actual_mean,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY r.seconds / t.seconds) AS ratio_p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY r.seconds / t.seconds) AS ratio_p95
FROM ran r JOIN job_constraints t ON t.job_id = r.id
WHERE t.seconds IS NOT NULL AND r.seconds IS NOT NULL AND r.state = 'succeeded'
""")
BOTS = text(f"""
WITH {_ENDED}
SELECT c.name AS cohort, s.bots, s.jobs, s.busiest, s.squares / (s.jobs::float * s.jobs) AS concentrated
FROM (SELECT cohort, count(*) AS bots, sum(jobs)::bigint AS jobs, max(jobs) AS busiest,
          sum(jobs * jobs)::float AS squares
      FROM (SELECT cohort, bot_id, count(*) AS jobs FROM ran WHERE bot_id IS NOT NULL GROUP BY 1, 2) each
      GROUP BY cohort) s
JOIN cohorts c ON c.id = s.cohort ORDER BY c.name
""")
HOURS = text("""
SELECT name, extract(hour FROM bucket AT TIME ZONE 'UTC')::integer AS hour, sum(amount)::float AS amount
FROM usage WHERE bucket >= now() - make_interval(secs => :window) AND name LIKE 'instance\\:%'
GROUP BY 1, 2 ORDER BY 1, 2
""")
EFFICIENCY = text("""
SELECT sum(amount) FILTER (WHERE name = 'pool:busy')::float AS busy,
    sum(amount) FILTER (WHERE name = 'pool:available')::float AS available, count(DISTINCT bucket) AS minutes
FROM usage WHERE bucket >= now() - make_interval(secs => :window) AND name IN ('pool:busy', 'pool:available')
""")


@dataclass(frozen=True)
class InstanceReport:
    """One instance: jobs that ended, waits in seconds from submit to the last grant, None if none was granted, and
    units of capacity times the seconds that they were held."""

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
class DayReport:
    """One day (UTC): mean wait in seconds, jobs that were granted, those that succeeded, and their mean priority."""

    day: date
    wait_mean: float | None
    scheduled: int
    completed: int
    priority_mean: float


@dataclass(frozen=True)
class EstimateReport:
    """Jobs that said how long they would run, and succeeded: seconds, and what they took over what they said."""

    jobs: int
    estimated_mean: float | None
    actual_mean: float | None
    ratio_p50: float | None
    ratio_p95: float | None


@dataclass(frozen=True)
class ConcentrationReport:
    """How the jobs of a cohort were spread: the share of the busiest bot, and the sum of the squares of all shares
    (Herfindahl), which is 1 / bots if they were spread evenly and 1 if one bot had them all."""

    cohort: str
    bots: int
    jobs: int
    busiest_share: float
    index: float


@dataclass(frozen=True)
class HourReport:
    """What was used of something at an hour of the day (UTC), in its own unit."""

    name: str
    hour: int
    amount: float


@dataclass(frozen=True)
class Report:
    """What the pool did in `seconds` until `until`.

    `fairness`: Jain's index over the unit seconds of the instances that had jobs, 1 if all had the same; None without
    any. `efficiency`: units in use over units of healthy bots in those minutes in which jobs were ready, None if there
    were none. `throughput`: jobs that ended per second.
    """

    until: datetime
    seconds: float
    throughput: float
    fairness: float | None
    efficiency: float | None
    instances: Sequence[InstanceReport]
    days: Sequence[DayReport]
    estimates: EstimateReport
    concentration: Sequence[ConcentrationReport]
    hours: Sequence[HourReport]


def report(connection: Connection, *, window: float) -> Report:
    """The report of the last `window` seconds."""

    def rows(statement: TextClause) -> Sequence[Row[tuple[object, ...]]]:
        wants = statement.compile().params
        return connection.execute(statement, {name: values[name] for name in wants}).all()

    values = {"window": window, "most": MAX_ENDED}
    span = connection.execute(SPAN, values).one()
    instances = [InstanceReport(**row._mapping) for row in rows(INSTANCES)]
    seen = connection.execute(EFFICIENCY, {"window": window}).one()
    return Report(
        until=span.until,
        seconds=span.seconds,
        throughput=sum(each.ended for each in instances) / span.seconds,
        fairness=fair_share.jain_index(each.unit_seconds for each in instances),
        efficiency=seen.busy / seen.available if seen.available else None,
        instances=instances,
        days=[DayReport(**row._mapping) for row in rows(DAYS)],
        estimates=EstimateReport(**rows(ESTIMATES)[0]._mapping),
        concentration=[
            ConcentrationReport(row.cohort, row.bots, row.jobs, row.busiest / row.jobs, row.concentrated)
            for row in rows(BOTS)
        ],
        hours=[HourReport(**row._mapping) for row in rows(HOURS)],
    )
