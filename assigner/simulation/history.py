"""The past of a pool, as its tables tell it: what arrived, how it ran, which bots there were, and what was in force.

Everything is read in one snapshot, and nothing is written. Payloads, results, tokens and the output of jobs are not
read. A job that never ran gets the median run time of its instance's jobs. Nodes of graphs arrive when their parents
had ended, so a simulation does not move them. Bots are those of now. An attempt lasts from its grant to its end, and so
with the time that bots and gateways take. Simulated ones take none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from schema.moves.in_force import read_in_force
from schema.moves.submit_again import LIKE_JOB
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement

SNAPSHOT = Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")

# A job arrives when it was queued, at the begin if that was before.
_JOBS = Statement(f"""
WITH past AS MATERIALIZED (
    SELECT j.id, j.public_id, greatest(j.queued_at, now() - make_interval(secs => :seconds)) AS arrived,
        CASE WHEN j.state = 'cancelled' THEN j.finished_at END AS cancelled
    FROM jobs j
    WHERE j.state NOT IN ('blocked', 'parked', 'deferred') AND j.queued_at <= now()
        AND (j.finished_at IS NULL OR j.finished_at >= now() - make_interval(secs => :seconds))
    ORDER BY j.queued_at, j.id
)
SELECT past.id, extract(epoch FROM past.arrived)::double precision AS arrived,
    extract(epoch FROM past.cancelled)::double precision AS cancelled, like_job.request AS request,
    (SELECT coalesce(jsonb_agg(jsonb_build_array(extract(epoch FROM l.ended_at - l.granted_at), l.verdict)
        ORDER BY l.fence), '[]') FROM leases l
     WHERE l.job_id = past.id AND l.ended_at IS NOT NULL AND l.acknowledged_at IS NOT NULL
        AND l.verdict IN ('succeeded', 'failed', 'error')) AS attempts,
    (SELECT max(extract(epoch FROM coalesce(l.ended_at, now()) - l.granted_at)) FROM leases l
     WHERE l.job_id = past.id AND l.acknowledged_at IS NOT NULL)::double precision AS at_least
FROM past CROSS JOIN LATERAL ({LIKE_JOB.format(job="past.id", name="past.public_id")}) like_job
ORDER BY past.arrived, past.id
""")
_BOTS = Statement("""
SELECT b.name, b.capacity, b.priority, k.properties, k.exclusive, b.labels, i.name AS instance, b.pool
FROM bots b JOIN kinds k ON k.id = b.kind LEFT JOIN instances i ON i.id = b.instance
WHERE b.status <> 'gone' ORDER BY b.name
""")


@dataclass(frozen=True)
class Attempt:
    """How one attempt went: it ran for `seconds`, and ended with `verdict`."""

    seconds: float
    verdict: str


@dataclass(frozen=True)
class PastJob:
    """One job. arrived, cancelled: seconds since 1970; cancelled: None if it was not. request: as it was submitted,
    without its payload. attempts: those that ended by themselves, the first one first; never empty."""

    arrived: float
    cancelled: float | None
    request: Mapping[str, Any]
    attempts: Sequence[Attempt]


@dataclass(frozen=True)
class PastBot:
    """One bot: what it offers, and whom it serves."""

    name: str
    capacity: int
    priority: int
    properties: Mapping[str, Any]
    exclusive: Sequence[str]
    labels: Sequence[str]
    instance: str | None
    pool: str | None


@dataclass(frozen=True)
class Past:
    """The past of a pool from `since` to `until`, in seconds since 1970. guessed: jobs whose run times nobody knows.

    rows: what operators have set, as of `read_in_force`.
    """

    since: float
    until: float
    jobs: Sequence[PastJob]
    bots: Sequence[PastBot]
    rows: Mapping[str, str] = field(repr=False)
    guessed: int = 0


def read(connection: Connection, seconds: float) -> Past:
    """Read the last `seconds` of the pool. The transaction must not have begun yet."""
    connection.execute(SNAPSHOT)
    until = connection.now().timestamp()
    found = connection.execute(_JOBS, {"seconds": seconds}).all()
    usual = _usual(found)
    jobs = [_job(row, usual) for row in found]
    bots = [PastBot(*row) for row in connection.execute(_BOTS)]
    rows = read_in_force(connection)
    guessed = sum(not row.attempts for row in found)
    return Past(until - seconds, until, jobs, bots, rows, guessed)


def _usual(found: Sequence[Row]) -> Mapping[str, float]:
    """The median run time of each instance, and under '' that of all; a minute if nothing has run."""
    runs: dict[str, list[float]] = {"": []}
    for row in found:
        for seconds, _ in row.attempts:
            runs.setdefault(row.request["instance"], []).append(float(seconds))
            runs[""].append(float(seconds))
    return {name: median(each) if each else 60.0 for name, each in runs.items()}


def _job(row: Row, usual: Mapping[str, float]) -> PastJob:
    attempts = [
        Attempt(max(0.0, float(seconds)), "failed" if verdict == "error" else verdict)
        for seconds, verdict in row.attempts
    ]
    if not attempts:
        guess = usual.get(row.request["instance"], usual[""])
        attempts = [Attempt(max(guess, row.at_least or 0.0), "succeeded")]
    cancelled = row.cancelled if row.at_least is None else None
    return PastJob(row.arrived, cancelled, row.request, attempts)
