"""Pool samples: one row a minute for the pool and for its busiest cohorts and instances, merged as they grow old.

Minutes are kept for a day, ten minutes for two weeks, hours for a year. With at most `MAX_NAMES` cohorts and as many
instances in each minute, the table stays below 1,200,000 rows: 101 rows for each of 1,440 minutes, 1,872 times ten
minutes, and 8,424 hours.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.states import COUNTS

#: The most cohorts, and the most instances, that one minute has samples of: those with the most jobs.
MAX_NAMES = 50
DAY = 86400
#: Samples of the first span, seconds, are merged to the second when they are older than the third.
MERGES = ((60, 600, DAY), (600, 3600, 14 * DAY))
#: Seconds for which the longest are kept.
KEPT = 365 * DAY
#: The most hours of one read.
MAX_HOURS = KEPT / 3600

_COUNTS = ", ".join(COUNTS)

# The row of the pool is written first. Another process that writes the same minute waits for this transaction, and then
# writes nothing.
CLAIM = Statement("""
INSERT INTO pool_samples (at, scope, span)
VALUES (date_trunc('minute', now()) - interval '1 minute', 'pool', 60)
ON CONFLICT (scope, name, at) DO NOTHING RETURNING at
""")

STORE = Statement(f"""
INSERT INTO pool_samples (at, scope, name, span, {_COUNTS}, oldest_wait, fairness, incomplete)
SELECT :at, scope, name, 60, {_COUNTS}, oldest_wait, fairness, incomplete
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r (
    scope text, name text, {", ".join(f"{name} bigint" for name in COUNTS)},
    oldest_wait double precision, fairness double precision, incomplete boolean)
ON CONFLICT (scope, name, at) DO UPDATE SET
    {", ".join(f"{name} = excluded.{name}" for name in (*COUNTS, "oldest_wait", "fairness", "incomplete"))}
""")

# The oldest stretch of `coarse` seconds that lies wholly before the age. Its samples become one for each name: the mean
# of what waited and ran and of fairness, the sum of what ended, the longest wait. Every sampled minute has a row of the
# pool, so a name without a row had no jobs then.
MERGE = Statement(f"""
WITH stretch AS (
    SELECT to_timestamp(floor(extract(epoch FROM first.at) / :coarse) * :coarse) AS start
    FROM (SELECT min(at) AS at FROM pool_samples WHERE span = :fine) first
), old AS (
    DELETE FROM pool_samples s USING stretch t
    WHERE s.span = :fine AND s.at >= t.start AND s.at < t.start + make_interval(secs => :coarse)
        AND t.start + make_interval(secs => :coarse) <= now() - make_interval(secs => :age)
    RETURNING s.*, t.start
), sampled AS (
    SELECT count(*) AS parts FROM old WHERE scope = 'pool'
)
INSERT INTO pool_samples (at, scope, name, span, {_COUNTS}, oldest_wait, fairness, incomplete)
SELECT start, scope, name, :coarse, round(sum(waiting) / greatest(parts, 1)), round(sum(running) / greatest(parts, 1)),
    {", ".join(f"sum({name})" for name in COUNTS[2:])}, max(oldest_wait), avg(fairness),
    bool_or(incomplete) OR parts * :fine < :coarse
FROM old CROSS JOIN sampled GROUP BY start, scope, name, parts
""")

FORGET = Statement("""
DELETE FROM pool_samples WHERE (scope, name, at) IN (
    SELECT scope, name, at FROM pool_samples
    WHERE span = 3600 AND at < now() - make_interval(secs => :age) ORDER BY at LIMIT :limit)
""")

READ = Statement(f"""
SELECT at, span, {_COUNTS}, oldest_wait, incomplete FROM pool_samples
WHERE scope = :scope AND name = :name
    AND at + make_interval(secs => span) > now() - make_interval(secs => :seconds)
    AND at > now() - make_interval(secs => :seconds) - interval '1 hour'
ORDER BY at
""")

FAIRNESS = Statement("""
SELECT at, span, fairness FROM pool_samples
WHERE scope = 'pool' AND name = '' AND fairness IS NOT NULL
    AND at + make_interval(secs => span) > now() - make_interval(secs => :seconds)
    AND at > now() - make_interval(secs => :seconds) - interval '1 hour'
ORDER BY at
""")


class Scope(StrEnum):
    """What a sample is of."""

    POOL = "pool"
    COHORT = "cohort"
    INSTANCE = "instance"


@dataclass(frozen=True)
class Counted:
    """What a minute had, of the pool, a cohort or an instance.

    waiting, running: queued jobs and jobs on bots at its end. succeeded to dead: jobs that ended so in it.
    oldest_wait: seconds of the oldest queued job counted; None without any. fairness: Jain's index of units in use over
    weight at its end, of instances with waiting jobs; only of the pool, None if fewer than two can be compared.
    incomplete: a count stopped at its bound.
    """

    scope: Scope
    name: str
    waiting: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    dead: int = 0
    oldest_wait: float | None = None
    fairness: float | None = None
    incomplete: bool = False


def claim(connection: Connection) -> datetime | None:
    """Take the last minute that is over; return its beginning. None: a process has written it, or is about to."""
    found: datetime | None = connection.execute(CLAIM).scalar_one_or_none()
    return found


def store(connection: Connection, at: datetime, counted: Sequence[Counted]) -> None:
    """Write the samples of the minute `at`, which the same transaction has claimed."""
    connection.execute(STORE, {"at": at, "rows": json.dumps([asdict(each) for each in counted])})


def merge(connection: Connection, *, fine: int, coarse: int, age: float) -> int:
    """Merge the oldest `coarse` seconds of samples of `fine` seconds, if they are older than `age` seconds.

    Returns the number of samples that came of it, 0 if there was nothing to merge.
    """
    return connection.execute(MERGE, {"fine": fine, "coarse": coarse, "age": age}).rowcount


def forget(connection: Connection, *, limit: int) -> int:
    """Delete up to `limit` samples older than a year; return how many."""
    return connection.execute(FORGET, {"age": KEPT, "limit": limit}).rowcount


def read(connection: Connection, scope: Scope, name: str, *, hours: float) -> Sequence[Mapping[str, object]]:
    """Return the samples that reach into the last `hours`, oldest first."""
    where = {"scope": scope.value, "name": name, "seconds": hours * 3600}
    return [dict(row) for row in connection.execute(READ, where).mappings()]


def read_fairness(connection: Connection, *, hours: float) -> Sequence[Mapping[str, object]]:
    """Return the fairness index of samples that reach into the last `hours` and have one, oldest first."""
    return [dict(row) for row in connection.execute(FAIRNESS, {"seconds": hours * 3600}).mappings()]
