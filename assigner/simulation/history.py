"""The past of a pool, as its tables and its journal tell it: what arrived, how it ran, which bots there were, and what
was in force.

Everything is read in one snapshot, in which a job is in the tables or in the journal, and nothing is written. Payloads,
results, tokens and the output of jobs are not read. A job whose run has not ended by itself gets the median run time of
those jobs of its instance that ran for longer than it has. Nodes of graphs arrive when their parents had ended, so a
simulation does not move them. The time of an attempt is that of its lease, which includes the delays of bots and
gateways; simulated bots add none.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from leasehold.errors import BadInput

from assigner.simulation.past import Attempt, Past, PastBot, PastJob
from assigner.simulation.records import read_records
from schema.diagnostics.invariants import SNAPSHOT
from schema.moves.in_force import read_in_force
from schema.moves.retention import USUAL_ATTEMPTS
from schema.moves.submit_again import LIKE_JOB
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement

#: The most jobs that are read. Each takes some kilobytes of memory, and some look-ups of the live database.
MOST_READ = 200_000
#: Why a job is left out: wrong JSON is stored for it, or what its row refers to is not there.
UNUSABLE = "cannot be used as stored"
#: Seconds that a statement of the read may take, and that the transaction may wait for this program in between.
READ_WITHIN = 120.0

# What waited, ran or ended within the span. A job that was cancelled before it was ready never waited for a bot.
_PAST = """
    SELECT j.id FROM jobs j
    WHERE j.state NOT IN ('blocked', 'parked', 'deferred') AND j.queued_at <= now()
        AND (j.finished_at IS NULL OR j.finished_at >= now() - make_interval(secs => :seconds))
        AND (j.state <> 'cancelled' OR EXISTS (SELECT FROM leases l WHERE l.job_id = j.id)
            OR EXISTS (SELECT FROM stored_events e WHERE e.job_id = j.id AND e.to_state = 'cancelled'
                AND e.from_state = 'queued'))"""
_JOURNAL = """
    SELECT * FROM journal
    WHERE finished_at >= now() - make_interval(secs => :seconds) AND queued_at <= now()
        AND (state <> 'cancelled' OR fence > 0 OR withdrawn)"""
_COUNT = Statement(f"""
SELECT count(*) FROM (
    SELECT FROM ({_PAST} LIMIT :most) p UNION ALL SELECT FROM ({_JOURNAL} AND is_last LIMIT :most) k) past
""")
# A job arrives when it was queued, at the begin if that was before. Of what ran at the begin only the rest is repeated.
_JOBS = Statement(f"""
WITH past AS MATERIALIZED (
    SELECT j.id, j.public_id, j.queued_at, j.finished_at, j.state,
        greatest(j.queued_at, now() - make_interval(secs => :seconds)) AS arrived
    FROM ({_PAST}) p JOIN jobs j ON j.id = p.id
)
SELECT extract(epoch FROM past.arrived)::double precision AS arrived,
    CASE WHEN past.state = 'cancelled' THEN extract(epoch FROM past.finished_at) END::double precision AS cancelled,
    past.finished_at IS NOT NULL AS is_over, ran.begun, ran.attempts, ran.at_least,
    like_job.request - '{{from,metadata}}'::text[] || coalesce((
        SELECT jsonb_build_object('deadline_seconds', greatest(1.0, extract(epoch FROM t.deadline - past.arrived)))
        FROM job_constraints t WHERE t.job_id = past.id AND t.deadline > past.arrived), '{{}}') AS request,
    past.queued_at, past.id, past.public_id
FROM past
CROSS JOIN LATERAL (
    SELECT coalesce(bool_or(l.granted_at < past.arrived), false) AS begun,
        coalesce(jsonb_agg(jsonb_build_array(
            extract(epoch FROM l.ended_at - greatest(l.granted_at, past.arrived)), l.verdict) ORDER BY l.fence)
            FILTER (WHERE l.ended_at > past.arrived AND l.verdict IN ('succeeded', 'failed', 'error')), '[]')
            AS attempts,
        max(extract(epoch FROM coalesce(l.ended_at, now()) - greatest(l.granted_at, past.arrived)))::double precision
            AS at_least
    FROM leases l WHERE l.job_id = past.id
) ran
CROSS JOIN LATERAL ({LIKE_JOB.format(job="past.id", name="past.public_id")}) like_job
""")
# The same of jobs that are gone.
_JOBS_OF_JOURNAL = Statement(f"""
WITH past AS MATERIALIZED (
    SELECT k.*, greatest(k.queued_at, now() - make_interval(secs => :seconds)) AS arrived FROM ({_JOURNAL}) k
), ran AS MATERIALIZED (
    SELECT job_id, coalesce(bool_or(granted_at < arrived), false) AS begun,
        coalesce(jsonb_agg(jsonb_build_array(extract(epoch FROM ended_at - greatest(granted_at, arrived)), verdict)
            ORDER BY fence)
            FILTER (WHERE ended_at > arrived AND verdict IN ('succeeded', 'failed', 'error')), '[]') AS attempts,
        max(extract(epoch FROM ended_at - greatest(granted_at, arrived)))::double precision AS at_least
    FROM past GROUP BY job_id
)
SELECT extract(epoch FROM past.arrived)::double precision AS arrived,
    CASE WHEN past.state = 'cancelled' THEN extract(epoch FROM past.finished_at) END::double precision AS cancelled,
    true AS is_over, ran.begun, ran.attempts, ran.at_least,
    jsonb_build_object(
        'instance', q.instance, 'properties', q.properties, 'label', past.label, 'priority', past.priority,
        'units', past.units, 'locality_hint', NULL, 'timeout_seconds', NULL, 'max_attempts', {USUAL_ATTEMPTS},
        'retry_failed', false, 'queue_timeout_seconds', NULL)
        || jsonb_strip_nulls(jsonb_build_object('preferred_properties', q.preferred_properties, 'terms', q.terms))
        || coalesce(past.job, '{{}}') AS request, past.queued_at, past.job_id AS id,
    NULL AS public_id
FROM past JOIN ran ON ran.job_id = past.job_id JOIN journal_queues q ON q.queue = past.queue
WHERE past.is_last
""")
# Present bots, and sessions that ended in the span.
_BOTS = Statement("""
SELECT b.name, b.capacity, b.priority, k.properties, k.exclusive, b.labels, i.name AS instance, b.pool,
    extract(epoch FROM b.opened_at)::double precision AS opened, NULL::double precision AS ended
FROM bots b JOIN kinds k ON k.id = b.kind LEFT JOIN instances i ON i.id = b.instance
WHERE b.status <> 'gone'
UNION ALL
SELECT bot, capacity, priority, properties, exclusive, labels, instance, pool,
    extract(epoch FROM opened_at)::double precision, extract(epoch FROM ended_at)::double precision
FROM bot_sessions WHERE ended_at > now() - make_interval(secs => :seconds)
ORDER BY opened, name
""")
_BEGIN = Statement("SELECT extract(epoch FROM min(finished_at))::double precision FROM journal")


def read(connection: Connection, seconds: float) -> Past:
    """Read the last `seconds` of the pool. The transaction must not have begun yet.

    Raises BadInput if there are more than MOST_READ jobs.
    """
    connection.allow(READ_WITHIN)
    connection.execute(SNAPSHOT)
    for setting in ("statement_timeout", "idle_in_transaction_session_timeout"):
        connection.execute_sql(f"SET LOCAL {setting} = '{READ_WITHIN:g}s'")
    until = connection.now().timestamp()
    span = {"seconds": seconds}
    count = connection.execute(_COUNT, {**span, "most": MOST_READ + 1}).scalar_one()
    if count > MOST_READ:
        raise BadInput("--since", f"the pool had more than {MOST_READ:,} jobs in that time: choose a shorter one")
    read_jobs = (row for each in (_JOBS, _JOBS_OF_JOURNAL) for row in connection.execute(each, span))
    found = [row for row in read_jobs if _is_usable(row.request)]
    found.sort(key=lambda row: (row.queued_at, row.id))
    usual, bots = _usual(found), connection.execute(_BOTS, span).all()
    return Past(
        until - seconds,
        until,
        [_job(row, usual) for row in found],
        [PastBot(*row) for row in bots if _are_properties(row.properties)],
        sum(not row.attempts for row in found),
        read_records(connection, since=until - seconds, until=until),
        read_in_force(connection),
        left_out={UNUSABLE: count - len(found)} if count > len(found) else {},
        bots_left_out=sum(not _are_properties(row.properties) for row in bots),
        journal_begins=connection.execute(_BEGIN).scalar_one(),
    )


def _is_usable(request: Any) -> bool:
    """Return whether a request has the form that it is submitted in, whatever is stored."""
    if not isinstance(request, dict) or not _are_properties(request["properties"]):
        return False
    others = all(isinstance(request.get(name, {}), dict) for name in ("terms", "own"))
    return others and _are_properties(request.get("preferred_properties", {}))


def _are_properties(stored: Any) -> bool:
    return isinstance(stored, dict) and all(
        isinstance(values, list) and all(isinstance(value, str) for value in values) for values in stored.values()
    )


def _usual(found: Sequence[Row]) -> Mapping[str, Sequence[float]]:
    """The run times of each instance in order, and under '' those of all; a minute if nothing has run."""
    runs: dict[str, list[float]] = {"": []}
    for row in found:
        for seconds, _ in () if row.begun else row.attempts:
            runs.setdefault(row.request["instance"], []).append(float(seconds))
            runs[""].append(float(seconds))
    return {name: sorted(each) or [60.0] for name, each in runs.items()}


def _job(row: Row, usual: Mapping[str, Sequence[float]]) -> PastJob:
    attempts = [Attempt(max(0.0, float(seconds)), verdict) for seconds, verdict in row.attempts]
    if not attempts or not row.is_over:
        ran, runs = row.at_least or 0.0, usual.get(row.request["instance"], usual[""])
        # What has run for long already is one of those that run for long.
        longer = runs[bisect_right(runs, ran) :]
        attempts.append(Attempt(median(longer) if longer else ran, "succeeded"))
    cancelled = row.cancelled if row.at_least is None else None
    public_id = None if row.public_id is None else str(row.public_id)
    return PastJob(str(row.id), row.arrived, cancelled, row.begun, row.is_over, row.request, attempts, public_id)
