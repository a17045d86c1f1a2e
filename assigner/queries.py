"""What callers and operators may read: plain queries, each bounded, none of them locking."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text

Rows = list[dict[str, Any]]

#: Newest events of a job that are shown.
MAX_EVENTS = 1000
#: Newest events that rates are computed from: enough for 800 jobs a second with two events each.
RATE_EVENTS = 100_000

# Only jobs of these instances are seen, null = all; an absent job and a foreign one are the same.
_VISIBLE = "(CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))"

_ROW = """
    j.id AS row_id, j.public_id AS id, i.name AS instance, j.label, j.state, j.priority, j.units, j.attempts,
    j.max_attempts, j.reason, j.created_at, j.queued_at, j.schedule_after, j.started_at, j.finished_at, last.bot
"""

_LAST_BOT = """
LEFT JOIN LATERAL (
    SELECT b.name AS bot, l.fence FROM leases l JOIN bots b ON b.id = l.bot_id
    WHERE l.job_id = j.id ORDER BY l.fence DESC LIMIT 1) last ON true
"""

# One job with everything but its events.
JOB = text(f"""
SELECT {_ROW}, p.properties, j.platform, j.instance AS instance_id, j.timeout_seconds, j.locality_hint,
    j.retry_failed, j.kills, j.considered, greatest(0, extract(epoch FROM j.schedule_after - now())) AS backoff,
    w.payload, w.result
FROM jobs j JOIN instances i ON i.id = j.instance JOIN platforms p ON p.id = j.platform
LEFT JOIN job_payloads w ON w.job_id = j.id {_LAST_BOT}
WHERE j.public_id = CAST(:id AS uuid) AND {_VISIBLE}
""")

# The history of one job, oldest first, the newest MAX_EVENTS of it.
EVENTS = text("""
SELECT move, "from", "to", at, actor, fence, details FROM (
    SELECT id, move, from_state AS "from", to_state AS "to", at, actor, fence, details
    FROM job_events WHERE job_id = :job_id ORDER BY id DESC LIMIT :limit) newest
ORDER BY id
""")

# How the present bots stand to one queued job: have its properties, are large enough, take work, have room now.
CHANCES = text("""
SELECT count(*) AS matching, coalesce(max(b.capacity), 0) AS largest,
    count(*) FILTER (WHERE b.capacity >= :units) AS fitting,
    count(*) FILTER (WHERE b.capacity >= :units AND b.status = 'ok' AND NOT b.draining AND NOT b.closing) AS willing,
    count(*) FILTER (WHERE b.free AND b.capacity - b.in_use >= :units) AS free
FROM bot_platforms bp JOIN bots b ON b.id = bp.bot_id
WHERE bp.platform = :platform AND b.status <> 'gone' AND (b.instance IS NULL OR b.instance = :instance)
""")

# One page, newest first; `before` is the row of the last job of the page before.
LIST = text(f"""
SELECT {_ROW}
FROM jobs j JOIN instances i ON i.id = j.instance {_LAST_BOT}
WHERE {_VISIBLE}
    AND (CAST(:instance AS text) IS NULL OR i.name = :instance)
    AND (CAST(:state AS text) IS NULL OR j.state = :state)
    AND (CAST(:label AS text) IS NULL OR j.label = :label)
    AND (CAST(:before AS bigint) IS NULL OR j.id < :before)
ORDER BY j.id DESC LIMIT :limit
""")

ROW_OF = text(f"""
SELECT j.id FROM jobs j JOIN instances i ON i.id = j.instance WHERE j.public_id = CAST(:id AS uuid) AND {_VISIBLE}
""")

# States of many jobs by their primary key's twin, results only of those that have one.
STATES = text(f"""
SELECT j.public_id AS id, j.state, j.reason, j.attempts, j.finished_at, w.result
FROM jobs j JOIN instances i ON i.id = j.instance
LEFT JOIN job_payloads w ON w.job_id = j.id AND j.finished_at IS NOT NULL
WHERE j.public_id = ANY (CAST(:ids AS uuid[])) AND {_VISIBLE}
""")

# Where the output of a job's newest attempt is; attempts are counted by their leases, also those not charged.
ATTEMPT = text(f"""
SELECT j.id AS row_id, j.state, j.finished_at IS NOT NULL AS final, l.fence, l.attempt
FROM jobs j JOIN instances i ON i.id = j.instance
CROSS JOIN LATERAL (SELECT max(fence) AS fence, count(*) AS attempt FROM leases WHERE job_id = j.id) l
WHERE j.public_id = CAST(:id AS uuid) AND {_VISIBLE}
""")

# What there could be to tell those who wait for these jobs.
PROGRESS = text("""
SELECT j.public_id AS id, j.finished_at IS NOT NULL AS final, l.attempt, coalesce(o.written, 0) AS written
FROM jobs j
CROSS JOIN LATERAL (SELECT max(fence) AS fence, count(*) AS attempt FROM leases WHERE job_id = j.id) l
LEFT JOIN LATERAL (
    SELECT start + length(data) AS written FROM job_outputs
    WHERE job_id = j.id AND fence = l.fence ORDER BY start DESC LIMIT 1) o ON true
WHERE j.public_id = ANY (CAST(:ids AS uuid[]))
""")

COUNTS = text(f"""
SELECT i.name AS instance, j.state, count(*) AS jobs,
    extract(epoch FROM now() - min(j.queued_at) FILTER (WHERE j.state = 'queued')) AS oldest_queued_seconds
FROM jobs j JOIN instances i ON i.id = j.instance WHERE {_VISIBLE}
GROUP BY i.name, j.state ORDER BY i.name, j.state
""")

# Queued jobs that no present bot could run, even if it were idle.
UNMATCHABLE = text(f"""
SELECT coalesce(sum(q.jobs), 0) AS jobs FROM (
    SELECT j.instance, j.platform, j.units, count(*) AS jobs
    FROM jobs j JOIN instances i ON i.id = j.instance
    WHERE j.state = 'queued' AND {_VISIBLE} GROUP BY 1, 2, 3) q
WHERE NOT EXISTS (
    SELECT FROM bot_platforms bp JOIN bots b ON b.id = bp.bot_id
    WHERE bp.platform = q.platform AND b.status <> 'gone' AND b.capacity >= q.units
        AND (b.instance IS NULL OR b.instance = q.instance))
""")

BOT_COUNTS = text(f"""
SELECT CASE WHEN b.status <> 'gone' AND b.draining THEN 'draining' ELSE b.status END AS status, count(*) AS bots,
    sum(b.capacity) AS capacity, sum(b.in_use) AS in_use
FROM bots b LEFT JOIN instances i ON i.id = b.instance
WHERE b.instance IS NULL OR {_VISIBLE} GROUP BY 1 ORDER BY 1
""")

TICKS = text("""
SELECT name, extract(epoch FROM clock_timestamp() - at) AS age_seconds, grace_until > clock_timestamp() AS grace
FROM ticks ORDER BY name
""")

# The newest events, at most a minute old; `span` is the time they cover.
RATES = text(f"""
WITH newest AS MATERIALIZED (
    SELECT job_id, at, from_state, to_state FROM job_events ORDER BY id DESC LIMIT :limit
), recent AS (
    SELECT n.* FROM newest n WHERE n.at > clock_timestamp() - interval '1 minute'
        AND (CAST(:instances AS text[]) IS NULL OR n.job_id IN (
            SELECT j.id FROM jobs j JOIN instances i ON i.id = j.instance WHERE j.id = n.job_id AND {_VISIBLE}))
)
SELECT count(*) FILTER (WHERE from_state IS NULL) AS submitted,
    count(*) FILTER (WHERE to_state = 'leased') AS granted,
    count(*) FILTER (WHERE to_state IN ('succeeded', 'failed', 'cancelled', 'dead')) AS finished,
    CASE WHEN (SELECT count(*) FROM newest) < :limit THEN 60.0
        ELSE (SELECT least(60.0, greatest(1.0, extract(epoch FROM clock_timestamp() - min(at)))) FROM newest)
    END AS span
FROM recent
""")

BOTS = text("""
SELECT b.name, b.status, b.draining, i.name AS instance, b.priority, b.capacity, b.in_use, b.properties, b.epoch,
    b.opened_at, extract(epoch FROM b.expires_at - now()) AS expires_in,
    (SELECT count(*) FROM leases l WHERE l.bot_id = b.id AND l.state IN ('pending', 'active', 'cancelling')) AS leases
FROM bots b LEFT JOIN instances i ON i.id = b.instance
WHERE b.name > :after ORDER BY b.name LIMIT :limit
""")


def row_of(connection: Connection, job: str, *, instances: Sequence[str] | None) -> int | None:
    """The row id of a job, None if there is no such job to see."""
    found: int | None = connection.execute(ROW_OF, {"id": job, "instances": instances}).scalar_one_or_none()
    return found


def job(connection: Connection, job: str, *, instances: Sequence[str] | None) -> dict[str, Any] | None:
    """One job with `events`, and with `chances` (counts of bots) if it is queued; None if there is none to see."""
    row = connection.execute(JOB, {"id": job, "instances": instances}).mappings().one_or_none()
    if row is None:
        return None
    events = connection.execute(EVENTS, {"job_id": row["row_id"], "limit": MAX_EVENTS}).mappings()
    found = dict(row) | {"events": [dict(event) for event in events]}
    if row["state"] == "queued":
        where = {"platform": row["platform"], "instance": row["instance_id"], "units": row["units"]}
        found["chances"] = dict(connection.execute(CHANCES, where).mappings().one())
    return found


def page(connection: Connection, *, instances: Sequence[str] | None, filters: Mapping[str, Any]) -> Rows:
    """One page of jobs; `filters` are instance, state, label, before (a row id) and limit."""
    return [dict(row) for row in connection.execute(LIST, {"instances": instances} | dict(filters)).mappings()]


def states(connection: Connection, ids: Sequence[str], *, instances: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """State and result of those of the jobs that can be seen, by id."""
    rows = connection.execute(STATES, {"ids": list(ids), "instances": instances}).mappings()
    return {str(row["id"]): dict(row) for row in rows}


def pool(connection: Connection, *, instances: Sequence[str] | None) -> dict[str, Any]:
    """The pool at a glance, as its rows."""
    where = {"instances": instances}
    return {
        "counts": [dict(row) for row in connection.execute(COUNTS, where).mappings()],
        "unmatchable": int(connection.execute(UNMATCHABLE, where).scalar_one()),
        "bots": [dict(row) for row in connection.execute(BOT_COUNTS, where).mappings()],
        "ticks": [dict(row) for row in connection.execute(TICKS).mappings()],
        "rates": dict(connection.execute(RATES, where | {"limit": RATE_EVENTS}).mappings().one()),
    }


def bots(connection: Connection, *, after: str, limit: int) -> Rows:
    """Bots by name, from the first after `after`."""
    return [dict(row) for row in connection.execute(BOTS, {"after": after, "limit": limit}).mappings()]
