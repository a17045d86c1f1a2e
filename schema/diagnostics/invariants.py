"""The safety invariants as queries (`db verify`). On a sound database each returns no rows at any instant.

All run as one statement and so see one snapshot, whatever the isolation level of the caller's transaction. Tests end
with `check`; operators run `verify`.
"""

from dataclasses import dataclass
from math import ceil

import psycopg

from schema.fleet.kinds import LINKS
from schema.postgres import waits
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.fragments import most_lost
from schema.postgres.statements import Row, Statement
from schema.validation import MAX_FORGIVEN, MAX_KILLS

#: The most ids shown of rows that break an invariant.
SAMPLE = 5


@dataclass(frozen=True)
class Invariant:
    """One invariant. `title` names what breaks it; `broken` selects the ids of that as one column, `id`."""

    id: str
    title: str
    broken: str


@dataclass(frozen=True)
class Finding:
    """The number of rows that break an invariant, 0 on a sound database, and their first ids.

    `sample` has at most 5 ids, smallest first.
    """

    id: str
    title: str
    rows: int
    sample: list[str]


ONE_LIVE_LEASE = Invariant(
    "S1",
    "jobs with more than one live lease",
    "SELECT job_id AS id FROM live GROUP BY job_id HAVING count(*) > 1",
)

# A full join also finds a live lease of an absent job, or of an older fence of a job.
JOB_AND_LEASE_AGREE = Invariant(
    "S2",
    "jobs whose state and live lease contradict each other",
    """SELECT DISTINCT coalesce(j.id, l.job_id) AS id
       FROM jobs j FULL JOIN live l ON l.job_id = j.id AND l.fence = j.fence
       WHERE (j.state IN ('leased', 'running', 'cancelling')) IS DISTINCT FROM (l.job_id IS NOT NULL)
          OR (l.state = 'pending' AND j.state <> 'leased')
          OR (l.state = 'active' AND j.state <> 'running')
          OR (j.state = 'cancelling' AND l.state <> 'cancelling')""",
)

CAPACITY_IS_KEPT = Invariant(
    "S3",
    "bots whose stored units or lease count differ from their live leases, or exceed their capacity, and bots that keep"
    " more units than they have, or keep some without a session",
    """SELECT b.id
       FROM bots b
       LEFT JOIN (SELECT bot_id, sum(units) AS units, count(*) AS leases FROM live GROUP BY bot_id) l
           ON l.bot_id = b.id
       WHERE b.in_use <> coalesce(l.units, 0) OR b.in_use NOT BETWEEN 0 AND b.capacity
          OR b.held <> coalesce(l.leases, 0)
          OR b.kept_units > CASE WHEN b.status = 'gone' THEN 0 ELSE b.capacity END""",
)

USAGE_IS_COUNTED = Invariant(
    "S4",
    "quotas (cohort/instance) whose usage differs from the units of the live leases",
    """SELECT q.cohort || '/' || q.instance AS id
       FROM quotas q
       LEFT JOIN (SELECT cohort, instance, sum(units) AS units FROM live GROUP BY cohort, instance) l
           ON l.cohort = q.cohort AND l.instance = q.instance
       WHERE q.usage <> coalesce(l.units, 0)""",
)

RESULT_IS_CURRENT = Invariant(
    "S6",
    "jobs whose result has another fence than the job, or that have a result without having succeeded or failed",
    """SELECT id FROM jobs
       WHERE result_fence IS DISTINCT FROM CASE WHEN state IN ('succeeded', 'failed') THEN fence END""",
)

FINAL_STAYS_FINAL = Invariant(
    "S7",
    "jobs that left a final state",
    """SELECT DISTINCT job_id AS id FROM job_events
       WHERE from_state IN ('succeeded', 'failed', 'cancelled', 'dead') AND to_state <> from_state""",
)

FENCE_NEVER_GOES_BACK = Invariant(
    "S8",
    "jobs whose fence went back",
    """SELECT h.job_id AS id
       FROM (SELECT job_id, fence, lag(fence) OVER (PARTITION BY job_id ORDER BY id) AS before FROM job_events) h
       WHERE h.fence < h.before
       UNION
       SELECT j.id FROM jobs j
       JOIN (SELECT job_id, max(fence) AS fence FROM leases GROUP BY job_id) l ON l.job_id = j.id
       WHERE j.fence < l.fence
       UNION
       SELECT j.id FROM jobs j
       JOIN (SELECT job_id, max(fence) AS fence FROM job_events GROUP BY job_id) e ON e.job_id = j.id
       WHERE j.fence < e.fence""",
)

LEASES_OF_LIVE_SESSIONS = Invariant(
    "S9",
    "jobs with a live lease on a session that is over, or that has never synced",
    """SELECT l.job_id AS id FROM live l LEFT JOIN bots b ON b.id = l.bot_id
       WHERE b.epoch IS DISTINCT FROM l.bot_epoch OR b.session IS NULL OR b.sync_seq = 0""",
)

NO_JOB_IS_DROPPED = Invariant(
    "S10",
    "jobs whose state is not that of their last event, and job ids in other tables without a job",
    """SELECT j.id
       FROM jobs j
       LEFT JOIN (SELECT DISTINCT ON (job_id) job_id, to_state FROM job_events ORDER BY job_id, id DESC) e
           ON e.job_id = j.id
       WHERE j.state IS DISTINCT FROM e.to_state
       UNION ALL
       SELECT o.job_id
       FROM (SELECT job_id FROM job_events UNION SELECT job_id FROM job_payloads UNION SELECT job_id FROM leases
             UNION SELECT job_id FROM job_followers UNION SELECT job_id FROM job_metadata
             UNION SELECT job_id FROM preference_waits
             UNION SELECT job_id FROM job_results r WHERE NOT EXISTS (
                 SELECT FROM graph_nodes n
                 WHERE n.job_id = r.job_id AND n.outcome = 'succeeded' AND n.callback IS NULL)
             UNION SELECT job_id FROM job_checkpoints UNION SELECT job_id FROM job_progress
             UNION SELECT job_id FROM submission_metadata) o
       LEFT JOIN jobs j ON j.id = o.job_id
       WHERE j.id IS NULL""",
)

HISTORY_IS_A_CHAIN = Invariant(
    "S11",
    "jobs with an event that does not start where the one before it ended",
    """SELECT DISTINCT h.job_id AS id
       FROM (SELECT job_id, from_state, lag(to_state) OVER (PARTITION BY job_id ORDER BY id) AS before
             FROM job_events) h
       WHERE h.from_state IS DISTINCT FROM h.before""",
)

# An earlier session of the bot may have had other properties, so only leases of the current session are checked.
PLACEMENT_IS_LEGAL = Invariant(
    "S13",
    "jobs leased to a bot that lacks a required property, or keeps one that they do not ask for, or does not serve"
    " their instance, or in another cohort",
    """SELECT l.job_id AS id
       FROM live l
       JOIN jobs j ON j.id = l.job_id
       JOIN bots b ON b.id = l.bot_id AND b.epoch = l.bot_epoch
       LEFT JOIN kinds k ON k.id = b.kind
       LEFT JOIN platforms p ON p.id = j.platform
       LEFT JOIN platforms f ON f.id = j.preferred
       LEFT JOIN instances i ON i.id = j.instance
       WHERE (offers(k.properties, p.properties) AND coalesce(f.properties, p.properties) ?& k.exclusive) IS NOT TRUE
          OR b.instance <> j.instance
          OR b.pool IS NOT NULL AND b.pool IS DISTINCT FROM i.pool
          OR l.cohort <> j.cohort
          OR l.instance <> j.instance""",
)

# An edge counts as unmet until its parent has succeeded, or with `on_failure = 'run'` until its parent has ended. A
# blocked job may be cancelled at any time. An edge is passed if its child had started when its parent was tried again.
# A parent's job may be deleted; its node keeps the outcome.
DEPENDENCIES_FIRST = Invariant(
    "S14",
    "jobs that could run before their dependencies ended as required, or whose node's counts differ from its edges",
    """SELECT n.job_id AS id
       FROM graph_nodes n
       LEFT JOIN jobs j ON j.id = n.job_id
       LEFT JOIN (
           SELECT e.child,
               count(*) FILTER (WHERE NOT e.passed AND (p.outcome = 'succeeded'
                   OR p.outcome IS NOT NULL AND e.on_failure = 'run') IS NOT TRUE) AS unmet,
               count(*) FILTER (WHERE NOT e.passed AND p.outcome <> 'succeeded' AND e.on_failure <> 'run') AS dead
           FROM graph_edges e LEFT JOIN graph_nodes p ON p.job_id = e.parent GROUP BY e.child) d ON d.child = n.job_id
       WHERE n.pending_deps <> coalesce(d.unmet, 0) + cardinality(n.missing)
          OR n.dead_ends <> coalesce(d.dead, 0) + cardinality(n.missing)
          OR n.pending_deps > 0 AND (j.state NOT IN ('blocked', 'cancelled') OR j.attempts > 0)
          OR n.pending_deps = 0 AND j.state = 'blocked' AND NOT n.due
          OR n.outcome IS DISTINCT FROM CASE WHEN j.finished_at IS NOT NULL THEN j.state END AND j.id IS NOT NULL
          OR n.outcome IS NULL AND j.id IS NULL
       UNION
       SELECT j.id FROM jobs j LEFT JOIN graph_nodes n ON n.job_id = j.id WHERE j.state = 'blocked' AND n.job_id IS NULL
       UNION
       SELECT e.child FROM graph_edges e
       LEFT JOIN graph_nodes p ON p.job_id = e.parent LEFT JOIN graph_nodes c ON c.job_id = e.child
       WHERE p.graph IS DISTINCT FROM c.graph OR c.graph IS NULL""",
)

ATTEMPTS_ARE_BOUNDED = Invariant(
    "S16",
    "jobs with more attempts than allowed, or alive after killing three bots",
    f"""SELECT id FROM jobs
       WHERE attempts > max_attempts
           OR kills >= 3 AND state NOT IN ('dead', 'cancelled') AND kills >= {most_lost("jobs.id", MAX_KILLS)}""",
)

# History may have been shortened, but never between an attempt and what is told of it later.
LOSSES_ARE_TAKEN_BACK_ONCE = Invariant(
    "S26",
    "jobs whose lost attempts were taken back twice or too often, and attempts listed as lost that still run",
    f"""SELECT job_id AS id FROM job_events WHERE move = 'forgive'
       GROUP BY job_id HAVING count(*) > {MAX_FORGIVEN} OR count(*) > count(DISTINCT details->>'lost_fence')
       UNION SELECT j.id FROM lost_attempts t JOIN jobs j ON j.id = t.job_id WHERE t.fence >= j.fence""",
)

CHARGES_ARE_LIVE = Invariant(
    "S18",
    "live leases of constrained jobs that have taken nothing, and those of other jobs that have taken something",
    """SELECT l.job_id AS id FROM live l JOIN jobs j ON j.id = l.job_id
       WHERE (l.taken IS NOT NULL) <> j.constrained""",
)

COUNTERS_ARE_RIGHT = Invariant(
    "S19",
    "counters that differ from what live leases have taken plus, for costs, the usage within the window",
    """SELECT c.name AS id
       FROM counters c
       LEFT JOIN (SELECT t.key AS name, sum(t.value::numeric) AS amount FROM live
                  CROSS JOIN LATERAL jsonb_each_text(taken) t GROUP BY t.key) t ON t.name = c.name
       LEFT JOIN (SELECT name, sum(amount) AS amount FROM usage WHERE NOT rolled GROUP BY name) u ON u.name = c.name
       WHERE c.used <> coalesce(t.amount, 0) + coalesce(u.amount, 0)""",
)

RESOURCES_ARE_KEPT = Invariant(
    "S20",
    "resources of bots with more in use than declared, and live leases that have not taken what their jobs need, or"
    " that have taken of another bot",
    """SELECT name AS id FROM counters WHERE name LIKE 'bot:%' AND used > most
       UNION ALL
       SELECT live.job_id::text
       FROM live JOIN jobs j ON j.id = live.job_id JOIN queues q ON q.id = j.queue
       JOIN constraint_sets g ON g.id = q.constraint_set
       CROSS JOIN LATERAL jsonb_each_text(g.terms->'resources') n
       JOIN counters k ON k.name = 'bot:' || live.bot_id || ':' || n.key
       WHERE ((live.taken->>k.name)::numeric = n.value::numeric) IS NOT TRUE
       UNION ALL
       SELECT DISTINCT live.job_id::text FROM live CROSS JOIN LATERAL jsonb_object_keys(live.taken) AS k (name)
       WHERE k.name LIKE 'bot:%' AND split_part(k.name, ':', 2) <> live.bot_id::text""",
)

# A part of a GPU is taken of one device, and a whole GPU is a device of which nobody else has a part. The counter of a
# device bounds the sum (S20, S19), so that this looks at each lease.
GPUS_ARE_DEVICES = Invariant(
    "S23",
    "live leases on bots with GPUs that have not taken what their jobs need: whole GPUs, and a part of one other GPU",
    """SELECT live.job_id AS id
       FROM live JOIN jobs j ON j.id = live.job_id JOIN queues q ON q.id = j.queue
       JOIN constraint_sets g ON g.id = q.constraint_set AND g.terms->'resources' ?| '{gpus,gpu_milli}'
       JOIN counters k ON k.name = 'bot:' || live.bot_id || '\\:gpus'
       CROSS JOIN LATERAL (
           SELECT coalesce(array_agg(t.value::numeric ORDER BY t.value::numeric DESC), '{}') AS amounts
           FROM jsonb_each_text(live.taken) t WHERE t.key LIKE 'bot:' || live.bot_id || '\\:gpu\\:%') d
       WHERE d.amounts <> array_fill(1000::numeric, ARRAY[coalesce((g.terms->'resources'->>'gpus')::integer, 0)])
           || CASE WHEN g.terms->'resources' ? 'gpu_milli'
               THEN ARRAY[(g.terms->'resources'->>'gpu_milli')::numeric] ELSE '{}'::numeric[] END""",
)

# What a job repeats of its queue may be read without the queue.
JOBS_ARE_IN_THEIR_QUEUES = Invariant(
    "S21",
    "jobs without a queue, or that differ from their queue, and jobs without constraints that are ranked by something"
    " else than their priority",
    """SELECT j.id FROM jobs j LEFT JOIN queues q ON q.id = j.queue
       WHERE q.id IS NULL OR (j.cohort, j.instance, j.platform, j.units) <> (q.cohort, q.instance, q.platform, q.units)
           OR j.preferred IS DISTINCT FROM q.preferred
           OR j.constrained <> (q.constraint_set IS NOT NULL) OR NOT j.constrained AND j.rank <> j.priority""",
)

# A link says that a kind of bots offers all that a requirement set asks for, and that the set names each property that
# the kind offers exclusively. Of a set that is new, upkeep may still have to add links.
KINDS_ARE_LINKED = Invariant(
    "S22",
    "bots of a kind that is not there, and kinds and requirement sets that are linked wrongly",
    f"""SELECT 'bot ' || b.id AS id FROM bots b WHERE b.kind IS NOT NULL AND b.kind NOT IN (SELECT id FROM kinds)
       UNION ALL
       SELECT coalesce(o.platform, c.platform) || ' ' || coalesce(o.kind, c.kind)
       FROM kind_platforms o FULL JOIN (
           SELECT p.id AS platform, k.id AS kind, p.linked FROM {LINKS}) c
           ON c.platform = o.platform AND c.kind = o.kind
       WHERE o.kind IS NULL AND c.linked OR c.kind IS NULL""",
)

PREFERENCE_WAITS_END = Invariant(
    "S24",
    "unfinished jobs that insist on a preferred bot without an end",
    """SELECT j.id FROM jobs j JOIN queues q ON q.id = j.queue
       WHERE q.required IS NOT NULL AND j.finished_at IS NULL
           AND NOT EXISTS (SELECT FROM preference_waits w WHERE w.job_id = j.id)""",
)

SUBMITS_ARE_CHECKED = Invariant(
    "S25",
    "tables of limits on submits that submits do not look at, or look at for nothing",
    """SELECT coalesce(s.source, c.source) AS id FROM (
           SELECT 'queue_limits' AS source WHERE EXISTS (SELECT FROM queue_limits)
           UNION ALL SELECT 'ceilings' WHERE EXISTS (SELECT FROM ceilings)
           UNION ALL SELECT 'submit_rules' WHERE EXISTS (SELECT FROM submit_rules)) s
       FULL JOIN submit_checks c ON c.source = s.source
       WHERE s.source IS NULL OR c.source IS NULL""",
)

# The fence of a cancelled or dead job has grown when its last attempt ended.
LEFT_BY_THEIR_ATTEMPTS = Invariant(
    "S27",
    "jobs with a result that have not ended, or whose result is not of their last attempt, and jobs with a checkpoint"
    " or a progress of an attempt that they have not had",
    """SELECT r.job_id AS id
       FROM job_results r
       JOIN jobs j ON j.id = r.job_id
       LEFT JOIN (SELECT job_id, max(fence) AS fence FROM leases GROUP BY job_id) l ON l.job_id = r.job_id
       WHERE j.finished_at IS NULL OR r.fence IS DISTINCT FROM l.fence
       UNION
       SELECT c.job_id
       FROM (SELECT job_id, fence FROM job_checkpoints UNION ALL SELECT job_id, fence FROM job_progress) c
       JOIN jobs j ON j.id = c.job_id
       LEFT JOIN leases l ON l.job_id = c.job_id AND l.fence = c.fence
       WHERE l.job_id IS NULL""",
)

# The keys of ticks differ, so that two jobs of one tick would have been submitted without them.
SCHEDULES_ARE_SOUND = Invariant(
    "S28",
    "schedules with a next tick although disabled, without one although enabled, or declared by an unknown kind of"
    " source, and ticks that have made more than one job",
    """SELECT 'schedule ' || s.id AS id FROM schedules s
       WHERE s.enabled <> (s.next_tick IS NOT NULL)
           OR NOT (s.declared_by = 'config' OR s.declared_by LIKE 'app:_%')
       UNION ALL
       SELECT 'job ' || max(j.id) FROM job_events e JOIN jobs j ON j.id = e.job_id
       JOIN job_metadata t ON t.job_id = j.id AND t.key = 'tick'
       WHERE e.move = 'submit' AND e.actor LIKE 'schedule:%'
       GROUP BY j.instance, e.actor, t.value HAVING count(*) > 1""",
)

SAMPLES_DO_NOT_OVERLAP = Invariant(
    "S29",
    "pool samples (scope/name) that cover a time which the next one covers too",
    """SELECT DISTINCT s.scope || '/' || s.name AS id
       FROM (SELECT scope, name, at, span, lead(at) OVER (PARTITION BY scope, name ORDER BY at) AS following
             FROM pool_samples) s
       WHERE s.following < s.at + make_interval(secs => s.span)""",
)

# Of the journal, which may be much larger than all other tables together, the last day is looked at.
JOURNAL_TAKES_OVER = Invariant(
    "S30",
    "jobs of the journal's last day that are still kept, or have not one last attempt, or whose queue it does not know",
    """SELECT k.job_id AS id FROM jobs j JOIN journal k ON k.finished_at = j.finished_at AND k.job_id = j.id
       WHERE k.finished_at >= (SELECT max(finished_at) - interval '1 day' FROM journal)
       UNION
       SELECT k.job_id
       FROM journal k LEFT JOIN journal_queues q ON q.queue = k.queue
       WHERE k.finished_at >= (SELECT max(finished_at) - interval '1 day' FROM journal)
       GROUP BY k.finished_at, k.job_id
       HAVING count(*) FILTER (WHERE k.is_last) <> 1 OR min(k.fence) = 0 AND count(*) > 1
           OR bool_or(q.queue IS NULL)""",
)

INVARIANTS = (
    ONE_LIVE_LEASE,
    JOB_AND_LEASE_AGREE,
    CAPACITY_IS_KEPT,
    USAGE_IS_COUNTED,
    RESULT_IS_CURRENT,
    FINAL_STAYS_FINAL,
    FENCE_NEVER_GOES_BACK,
    LEASES_OF_LIVE_SESSIONS,
    NO_JOB_IS_DROPPED,
    HISTORY_IS_A_CHAIN,
    PLACEMENT_IS_LEGAL,
    DEPENDENCIES_FIRST,
    ATTEMPTS_ARE_BOUNDED,
    LOSSES_ARE_TAKEN_BACK_ONCE,
    CHARGES_ARE_LIVE,
    COUNTERS_ARE_RIGHT,
    RESOURCES_ARE_KEPT,
    GPUS_ARE_DEVICES,
    JOBS_ARE_IN_THEIR_QUEUES,
    KINDS_ARE_LINKED,
    PREFERENCE_WAITS_END,
    SUBMITS_ARE_CHECKED,
    LEFT_BY_THEIR_ATTEMPTS,
    SCHEDULES_ARE_SOUND,
    SAMPLES_DO_NOT_OVERLAP,
    JOURNAL_TAKES_OVER,
)


def _counted(place: int, invariant: Invariant) -> str:
    """A query of how many rows break an invariant, and of the ids of the first of them."""
    return f"""(
    WITH broken AS ({invariant.broken})
    SELECT {place} AS place, (SELECT count(*) FROM broken) AS rows,
        CAST(ARRAY(SELECT id FROM broken ORDER BY id LIMIT {SAMPLE}) AS text[]) AS sample
)"""


CHECK = Statement(" UNION ALL ".join(map(_counted, range(len(INVARIANTS)), INVARIANTS)) + " ORDER BY place")

# All invariants must see one snapshot, and a large history takes longer than a move may.
SNAPSHOT = Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
STATEMENT_TIMEOUT = Statement("SELECT set_config('statement_timeout', :milliseconds, true)")
#: SQLSTATE of a statement that took longer.
CANCELLED = "57014"
# Compiling this wide statement costs more than running it. It reads whole tables, so sequential scans are right.
NO_JIT = Statement("SET LOCAL jit = off")
WHOLE_TABLES = Statement("SET LOCAL enable_seqscan = on")


def check(connection: Connection) -> list[Finding]:
    """Check every invariant in one snapshot. Returns a finding for each, also for those with 0 rows.

    If a stored value makes the statement fail, each is checked alone.
    """
    try:
        with connection.savepoint():
            rows = connection.execute(CHECK).all()
    except psycopg.DataError:
        return [_checked_alone(connection, invariant) for invariant in INVARIANTS]
    return [_finding(invariant, row) for invariant, row in zip(INVARIANTS, rows, strict=True)]


def _checked_alone(connection: Connection, invariant: Invariant) -> Finding:
    """Check one invariant; one that cannot be checked counts as broken by one row."""
    try:
        with connection.savepoint():
            return _finding(invariant, connection.execute(Statement(_counted(0, invariant))).one())
    except psycopg.DataError as error:
        return Finding(invariant.id, f"could not be checked: {invariant.title}", 1, [error.diag.message_primary or ""])


def _finding(invariant: Invariant, row: Row) -> Finding:
    return Finding(id=invariant.id, title=invariant.title, rows=row.rows, sample=list(row.sample))


def verify(database: Database) -> list[Finding]:
    """Run `check` in a read-only transaction of its own, without a time limit. Raises NotReady without a database."""
    return database.run(lambda connection: _verified(connection, seconds=0.0), urgent=True)


def verify_within(database: Database, *, seconds: float) -> list[Finding] | None:
    """Run `check` as `verify` does, for at most so many seconds; None if that was not enough."""
    try:
        return database.run(lambda connection: _verified(connection, seconds=seconds))
    except psycopg.Error as error:
        if error.sqlstate == CANCELLED:
            return None
        raise


def _verified(connection: Connection, *, seconds: float) -> list[Finding]:
    """seconds: the longest time of the statement; 0 = any."""
    for setting in (SNAPSHOT, NO_JIT, WHOLE_TABLES):
        connection.execute(setting)
    connection.execute(STATEMENT_TIMEOUT, {"milliseconds": str(ceil(seconds * 1000))})
    connection.allow(seconds or waits.LONGEST)
    return check(connection)
