"""What a pool did in a span of time, job by job and lease by lease: asked of a real and a simulated pool by the same
statements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# Jobs that were ready in the span, of the tables and of the journal.
_JOBS = Statement("""
SELECT j.id::text, i.name, g.terms->>'job_class', j.cohort, extract(epoch FROM j.queued_at)::double precision AS queued,
    extract(epoch FROM s.granted_at)::double precision, extract(epoch FROM j.finished_at)::double precision, j.state,
    j.locality_hint, extract(epoch FROM t.deadline)::double precision
FROM jobs j JOIN instances i ON i.id = j.instance JOIN queues q ON q.id = j.queue
LEFT JOIN constraint_sets g ON g.id = q.constraint_set
LEFT JOIN job_constraints t ON t.job_id = j.id
LEFT JOIN LATERAL (SELECT min(l.granted_at) AS granted_at FROM leases l WHERE l.job_id = j.id) s ON true
WHERE j.state NOT IN ('blocked', 'parked', 'deferred') AND j.queued_at <= to_timestamp(:until)
    AND (j.finished_at IS NULL OR j.finished_at >= to_timestamp(:since))
UNION ALL
SELECT k.job_id::text, i.name, k.class, k.cohort, extract(epoch FROM k.queued_at)::double precision,
    extract(epoch FROM k.granted_at)::double precision, extract(epoch FROM k.finished_at)::double precision, k.state,
    k.hint, NULL
FROM (
    SELECT job_id, min(instance) AS instance, min(class) AS class, min(cohort) AS cohort, min(queued_at) AS queued_at,
        min(granted_at) AS granted_at, finished_at, min(state) AS state, min(job->>'locality_hint') AS hint
    FROM journal WHERE finished_at >= to_timestamp(:since) GROUP BY finished_at, job_id
) k JOIN instances i ON i.id = k.instance
WHERE k.queued_at <= to_timestamp(:until)
ORDER BY queued, 1
""")
_LEASES = Statement("""
SELECT l.job_id::text, i.name, l.cohort, l.units, l.bot, extract(epoch FROM l.granted_at)::double precision,
    extract(epoch FROM l.ended_at)::double precision, l.verdict
FROM (
    SELECT l.job_id, l.fence, l.instance, l.cohort, l.units, b.name AS bot, l.granted_at, l.ended_at, l.verdict
    FROM leases l LEFT JOIN bots b ON b.id = l.bot_id
    UNION ALL
    SELECT job_id, fence, instance, cohort, units, bot, granted_at, ended_at, verdict FROM journal
    WHERE finished_at >= to_timestamp(:since) AND fence > 0
) l JOIN instances i ON i.id = l.instance
WHERE l.granted_at <= to_timestamp(:until) AND (l.ended_at IS NULL OR l.ended_at >= to_timestamp(:since))
ORDER BY l.granted_at, l.job_id, l.fence
""")
_MINIMUMS = Statement("""
SELECT q.cohort, i.name AS instance, q.min_quota FROM quotas q JOIN instances i ON i.id = q.instance
WHERE q.min_quota > 0 ORDER BY q.cohort, i.name
""")
_TOTALS = Statement("""
SELECT (SELECT count(*) FROM evictions WHERE at BETWEEN to_timestamp(:since) AND to_timestamp(:until))::integer
    AS evictions, (SELECT coalesce(sum(capacity), 0) FROM bots WHERE status <> 'gone')::integer AS units
""")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, by its number.

    Times in seconds since 1970: when it was queued, first started and ended, and by when it had to end.
    job_class, started, finished, hint, deadline: None if there is none.
    """

    name: str
    instance: str
    job_class: str | None
    cohort: int
    queued: float
    started: float | None
    finished: float | None
    state: str
    hint: str | None
    deadline: float | None


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One lease: of which job, how many units of which bot, from when to when. ended: None while it is live.

    bot: its name; None if it is gone.
    """

    job: str
    instance: str
    cohort: int
    units: int
    bot: str | None
    granted: float
    ended: float | None
    verdict: str | None


@dataclass(frozen=True)
class Records:
    """What a pool did from `since` to `until`, in seconds since 1970.

    jobs: in the order in which they were queued. leases: in the order in which they began. minimums: (cohort, instance)
    → units of the instance's minimum there. units: of all bots.
    """

    since: float
    until: float
    jobs: Sequence[JobRecord]
    leases: Sequence[LeaseRecord]
    minimums: Mapping[tuple[int, str], int]
    evictions: int
    units: int


def read_records(connection: Connection, *, since: float, until: float) -> Records:
    """Read what the pool of this database did from `since` to `until`, in seconds since 1970."""
    span = {"since": since, "until": until}
    totals = connection.execute(_TOTALS, span).one()
    return Records(
        since,
        until,
        [JobRecord(*row) for row in connection.execute(_JOBS, span)],
        [LeaseRecord(*row) for row in connection.execute(_LEASES, span)],
        {(row.cohort, row.instance): row.min_quota for row in connection.execute(_MINIMUMS)},
        totals.evictions,
        totals.units,
    )
