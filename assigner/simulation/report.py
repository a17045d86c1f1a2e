"""What a pool did in a span of time: waits, starts, evictions and use of its bots, asked of a real and a simulated pool
by the same statements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# Of each job that became ready in the span: the seconds until its first start; if there was none, until it was given up
# or the span ended ("at least"). Who cancelled a job that waited knows why; it does not count.
_WAITS = Statement("""
SELECT i.name AS instance, count(*)::integer AS jobs, count(*) FILTER (WHERE j.granted_at IS NULL)::integer AS waiting,
    percentile_cont(ARRAY[0.5, 0.95, 1.0]) WITHIN GROUP (ORDER BY extract(epoch FROM
        greatest(coalesce(j.granted_at, j.finished_at, to_timestamp(:until))
            - greatest(j.queued_at, to_timestamp(:since)), interval '0'))::double precision) AS waits
FROM (
    SELECT o.instance, o.state, o.queued_at, o.finished_at, s.granted_at FROM jobs o
    LEFT JOIN LATERAL (SELECT min(l.granted_at) AS granted_at FROM leases l WHERE l.job_id = o.id) s ON true
    WHERE (o.public_id IN (SELECT unnest(CAST(:without AS uuid[])))) IS NOT TRUE
    UNION ALL
    SELECT min(instance), min(state), min(queued_at), finished_at, min(granted_at) FROM journal
    WHERE finished_at >= to_timestamp(:since) GROUP BY finished_at, job_id
) j JOIN instances i ON i.id = j.instance
WHERE j.state NOT IN ('blocked', 'parked', 'deferred') AND j.queued_at <= to_timestamp(:until)
    AND (j.finished_at IS NULL OR j.finished_at >= to_timestamp(:since))
    AND (j.granted_at IS NULL OR j.granted_at >= to_timestamp(:since))
    AND (j.granted_at IS NOT NULL OR j.state <> 'cancelled')
GROUP BY i.name ORDER BY i.name
""")
_USE = Statement("""
SELECT count(*) FILTER (WHERE granted_at >= to_timestamp(:since))::integer AS starts,
    coalesce(sum(units * extract(epoch FROM least(coalesce(ended_at, to_timestamp(:until)), to_timestamp(:until))
        - greatest(granted_at, to_timestamp(:since)))), 0)::double precision AS unit_seconds,
    (SELECT count(*) FROM evictions
     WHERE at BETWEEN to_timestamp(:since) AND to_timestamp(:until))::integer AS evictions,
    (SELECT coalesce(sum(capacity), 0) FROM bots WHERE status <> 'gone')::integer AS units
FROM (
    SELECT units, granted_at, ended_at FROM leases
    UNION ALL
    SELECT units, granted_at, ended_at FROM journal WHERE finished_at >= to_timestamp(:since) AND fence > 0
) l
WHERE granted_at <= to_timestamp(:until) AND (ended_at IS NULL OR ended_at >= to_timestamp(:since))
""")


@dataclass(frozen=True)
class Waits:
    """Of one instance: jobs that became ready, those of them that have not started, and waits for the start in seconds.

    A job that has not started counts with its wait until it was given up or the span ended: the least that it can be.
    """

    jobs: int
    waiting: int
    p50: float
    p95: float
    most: float


@dataclass(frozen=True)
class Measured:
    """What a pool did. utilisation: the part of the bots' units that leases took, 0 to 1."""

    waits: Mapping[str, Waits]
    starts: int
    evictions: int
    utilisation: float


def measure(connection: Connection, *, since: float, until: float, without: Sequence[str] = ()) -> Measured:
    """Return what the pool did from `since` to `until`, in seconds since 1970. The waits are those of other jobs than
    `without`."""
    span = {"since": since, "until": until}
    found = connection.execute(_WAITS, {**span, "without": list(without)})
    waits = {row.instance: Waits(row.jobs, row.waiting, *row.waits) for row in found}
    use = connection.execute(_USE, span).one()
    whole = use.units * (until - since)
    return Measured(waits, use.starts, use.evictions, use.unit_seconds / whole if whole else 0.0)


#: Jobs of an instance, from which on its waits say something about the replay.
LEAST_JOBS = 20


def error_of(real: Measured, replayed: Measured) -> float | None:
    """Return by which part the replayed median and 95 % waits differ from the real ones: the largest over instances
    with at least LEAST_JOBS jobs; None if there is none. Waits below a second count as one."""
    found = []
    for name, there in real.waits.items():
        here = replayed.waits.get(name)
        if here is not None and there.jobs >= LEAST_JOBS:
            pairs = ((there.p50, here.p50), (there.p95, here.p95))
            found += [abs(max(1.0, b) / max(1.0, a) - 1.0) for a, b in pairs]
    return max(found, default=None)


def is_told(before: float, after: float, *, error: float | None) -> bool:
    """Return whether a wait has changed by more than the error of the replay; differences below a second are none."""
    low, high = sorted((max(1.0, before), max(1.0, after)))
    return high - low >= 1.0 and high / low - 1.0 > (error or 0.0)


def instances_of(measured: Sequence[Measured]) -> list[str]:
    """Return the names of all instances with jobs."""
    return sorted({name for each in measured for name in each.waits})
