"""What a pool did in a span of time, job by job and lease by lease: asked of a real and a simulated pool by the same
statements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    AS evictions
""")
# Sessions of bots that are there, and of those that ended in the span.
_CAPACITY = Statement("""
SELECT capacity, greatest(extract(epoch FROM opened_at)::double precision, :since) AS begun,
    least(coalesce(extract(epoch FROM ended_at)::double precision, :until), :until) AS ended
FROM (
    SELECT capacity, opened_at, NULL AS ended_at FROM bots WHERE status <> 'gone'
    UNION ALL SELECT capacity, opened_at, ended_at FROM bot_sessions WHERE ended_at > to_timestamp(:since)
) s WHERE opened_at < to_timestamp(:until) ORDER BY 2, 3
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
    """One lease of a job: `units` of a bot, from `granted` to `ended`, in seconds since 1970.

    bot: its name; None if it is gone. ended: None while the lease is live.
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
    → units of the instance's minimum there. units: the most that bots had at once; unit_seconds: of all bots in the
    span. waits_from: when waits begin to count, before what is judged.
    """

    since: float
    until: float
    jobs: Sequence[JobRecord]
    leases: Sequence[LeaseRecord]
    minimums: Mapping[tuple[int, str], int]
    evictions: int
    units: int
    unit_seconds: float
    waits_from: float


def read_records(connection: Connection, *, since: float, until: float, waits_from: float | None = None) -> Records:
    """Read what the pool of this database did from `since` to `until`, in seconds since 1970.

    waits_from: when waits begin to count; None = at `since`.
    """
    span = {"since": since, "until": until}
    bots = [(row.capacity, row.begun, row.ended) for row in connection.execute(_CAPACITY, span)]
    return Records(
        since,
        until,
        [JobRecord(*row) for row in connection.execute(_JOBS, span)],
        [LeaseRecord(*row) for row in connection.execute(_LEASES, span)],
        {(row.cohort, row.instance): row.min_quota for row in connection.execute(_MINIMUMS)},
        connection.execute(_TOTALS, span).one().evictions,
        _most_at_once(bots),
        sum(capacity * max(0.0, ended - begun) for capacity, begun, ended in bots),
        since if waits_from is None else waits_from,
    )


def _most_at_once(bots: Sequence[tuple[int, float, float]]) -> int:
    changes = sorted(
        (at, units) for capacity, begun, ended in bots for at, units in ((begun, capacity), (ended, -capacity))
    )
    return max(accumulate(units for _, units in changes), default=0)
