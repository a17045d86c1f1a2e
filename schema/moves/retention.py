"""Finished jobs leave, with everything that belongs to them, in one statement per batch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from leasehold.states import JobState

from schema.accounting.counters import OF_BOTS
from schema.fleet.kinds import TASK
from schema.moves.submit_again import OWN
from schema.postgres.advisory import try_block_new_sessions
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import has_ready_jobs
from schema.sql import OF_CLIENTS

# One state at a time, so that what is kept of one does not stand in front of what is due of another. Ids go into each
# part as one array, which leaves the planner nothing but an index on them. The lower bound steps over the entries of
# jobs that were deleted just before: they stay in the index until vacuum has removed them, and longer beside an old
# snapshot. The row of a key that a submit holds is left: it gets the name of the job that the submit makes. The result
# of a node that has succeeded stays with its graph: nodes that take it may start much later. None takes that of a
# callback, which a retry of the graph gives another job.
_DELETE_FINISHED = """
WITH old AS MATERIALIZED (
    SELECT id, finished_at FROM jobs
    WHERE state = :state AND finished_at IS NOT NULL AND finished_at < now() - make_interval(secs => :age)
        AND finished_at >= coalesce(CAST(:since AS timestamptz), '-infinity')
    ORDER BY state, finished_at LIMIT :limit FOR UPDATE SKIP LOCKED
), payloads AS (DELETE FROM job_payloads WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
outputs AS (DELETE FROM job_outputs WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
results AS (DELETE FROM job_results r WHERE job_id = ANY (ARRAY(SELECT id FROM old))
    AND NOT (:state = 'succeeded' AND EXISTS (
        SELECT FROM graph_nodes n WHERE n.job_id = r.job_id AND n.callback IS NULL OFFSET 0))),
checkpoints AS (DELETE FROM job_checkpoints WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
progress AS (DELETE FROM job_progress WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
described AS (DELETE FROM job_metadata WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
joined AS (DELETE FROM submission_metadata WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
preferences AS (DELETE FROM preference_waits WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
terms AS (DELETE FROM job_constraints WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
skips AS (DELETE FROM rate_skips WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
followers AS (DELETE FROM job_followers WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
history AS (DELETE FROM stored_events WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
grants AS (DELETE FROM leases WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
freed AS (DELETE FROM unique_keys WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM unique_keys WHERE :state <> 'succeeded' AND job_id = ANY (ARRAY(SELECT id FROM old))
    FOR UPDATE SKIP LOCKED))),
gone AS (DELETE FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING {gone}){journal}
SELECT (SELECT count(*) FROM gone) AS jobs, max(finished_at) AS last,
    coalesce(extract(epoch FROM now() - min(finished_at))::double precision - :age, 0) AS late
FROM old
"""
#: Attempts of a job that asks for no other number. The journal leaves them out.
USUAL_ATTEMPTS = 5
# Each part of a statement sees the rows as they were before the others deleted them. What belongs to a job is found by
# its id (OFFSET 0), because the planner does not know how many jobs there are.
_JOURNAL = f""", kept AS MATERIALIZED (
    SELECT * FROM gone WHERE finished_at >= now() - make_interval(secs => :journal)
), of_queues AS (
    INSERT INTO journal_queues (queue, instance, cohort, properties, preferred_properties, terms, used_at)
    SELECT q.id, i.name, coalesce(c.name, ''), coalesce(r.properties, p.properties) - '{TASK}',
        f.properties - '{TASK}', g.terms, k.used_at
    FROM (SELECT queue, max(finished_at) AS used_at FROM kept GROUP BY queue) k
    JOIN queues q ON q.id = k.queue
    JOIN instances i ON i.id = q.instance
    LEFT JOIN cohorts c ON c.id = q.cohort
    JOIN platforms p ON p.id = q.platform
    LEFT JOIN platforms r ON r.id = q.required
    LEFT JOIN platforms f ON f.id = q.preferred
    LEFT JOIN constraint_sets g ON g.id = q.constraint_set
    WHERE NOT EXISTS (
        SELECT FROM journal_queues o WHERE o.queue = q.id AND o.used_at >= k.used_at - interval '1 day')
    ORDER BY q.id
    ON CONFLICT (queue) DO UPDATE SET used_at = greatest(journal_queues.used_at, excluded.used_at)
), written AS (
    INSERT INTO journal (finished_at, job_id, fence, queued_at, granted_at, ended_at, seconds, queue, cohort, instance,
        units, priority, bot_kind, is_last, withdrawn, state, label, class, owner, verdict, stop_reason, bot, job)
    SELECT k.finished_at, k.id, coalesce(l.fence, 0), k.queued_at, l.granted_at, greatest(l.ended_at, l.granted_at),
        l.seconds, k.queue, coalesce(l.cohort, k.cohort), k.instance, k.units, k.priority, l.kind,
        coalesce(l.is_last, true), e.withdrawn, k.state, k.label, g.class, g.owner, l.verdict, l.stop_reason,
        l.bot, CASE WHEN coalesce(l.is_last, true) AND (k.max_attempts <> {USUAL_ATTEMPTS} OR k.retry_failed
                OR num_nonnulls(k.locality_hint, k.timeout_seconds, e.told, t.estimate) > 0)
            THEN nullif(jsonb_strip_nulls(jsonb_build_object(
                'locality_hint', k.locality_hint, 'timeout_seconds', k.timeout_seconds,
                'max_attempts', nullif(k.max_attempts, {USUAL_ATTEMPTS}), 'retry_failed', nullif(k.retry_failed, false),
                'queue_timeout_seconds', e.told->'queue_timeout_seconds', 'prefer_seconds', e.told->'prefer_seconds',
                'estimated_cost', t.estimate, 'estimated_seconds', t.seconds, 'own', t.own)), '{{}}') END
    FROM kept k
    LEFT JOIN LATERAL (
        SELECT l.fence, l.granted_at, l.ended_at, l.cohort, b.kind, b.name AS bot, l.verdict, l.stop_reason,
            CAST(l.report->>'seconds' AS double precision) AS seconds,
            NOT EXISTS (SELECT FROM leases n WHERE n.job_id = k.id AND n.fence > l.fence) AS is_last
        FROM leases l LEFT JOIN bots b ON b.id = l.bot_id WHERE l.job_id = k.id OFFSET 0) l ON true
    LEFT JOIN LATERAL (
        SELECT c.estimate, c.seconds, {OWN.format(terms="c", job="k")} AS own FROM job_constraints c
        WHERE c.job_id = k.id OFFSET 0) t ON true
    LEFT JOIN LATERAL (
        SELECT g.terms->>'job_class' AS class, g.terms->>'owner' AS owner
        FROM queues q JOIN constraint_sets g ON g.id = q.constraint_set
        WHERE q.id = k.queue AND k.constrained OFFSET 0) g ON true
    CROSS JOIN LATERAL (
        SELECT coalesce(bool_or(s.to_state = 'cancelled' AND s.from_state = 'queued'), false) AS withdrawn,
            coalesce((SELECT p.origin FROM job_payloads p WHERE p.job_id = k.id AND p.submitted_by IS NOT NULL),
                min(s.details::text) FILTER (WHERE s.move = 'submit')::jsonb) AS told
        FROM stored_events s WHERE s.job_id = k.id OFFSET 0) e
)"""
#: By whether the jobs are written to the journal.
DELETE_FINISHED = {
    False: Statement(_DELETE_FINISHED.format(gone="id", journal="")),
    True: Statement(_DELETE_FINISHED.format(gone="*", journal=_JOURNAL)),
}


@dataclass(frozen=True)
class Deleted:
    """What one batch has deleted: how many rows. last: the time from which the last of them was kept; None = there was
    none. late: seconds for which the first of them has outlived its age."""

    rows: int
    last: datetime | None
    late: float


def delete_finished(
    connection: Connection,
    state: JobState,
    *,
    age: float,
    limit: int,
    since: datetime | None = None,
    journal: float = 0.0,
) -> Deleted:
    """Delete up to `limit` jobs that have been in this final state for `age` seconds, the oldest first.

    since: pass over jobs that ended earlier. journal: write those that ended within so many seconds to the journal,
    whose days are there (`keep_journal_days`).
    """
    values = {"state": state.value, "age": age, "limit": limit, "since": since}
    if journal:
        values["journal"] = journal
    row = connection.execute(DELETE_FINISHED[journal > 0], values).one()
    return Deleted(row.jobs, row.last, row.late)


OLDEST_FINISHED = Statement("""
SELECT public_id, finished_at, extract(epoch FROM now() - finished_at) - :age AS late FROM jobs
WHERE state = :state AND finished_at >= coalesce(CAST(:since AS timestamptz), '-infinity')
ORDER BY state, finished_at LIMIT 1
""")


class Finished(NamedTuple):
    """A finished job: its public id, when it ended, and for how many seconds it has outlived its age."""

    public_id: str
    finished_at: datetime
    late: float


def oldest_finished(connection: Connection, state: JobState, *, age: float, since: datetime | None) -> Finished | None:
    """Return the job with which a batch of `delete_finished` begins."""
    row = connection.execute(OLDEST_FINISHED, {"state": state.value, "age": age, "since": since}).one_or_none()
    return None if row is None else Finished(row.public_id, row.finished_at, float(row.late))


# The journal leaves day by day, and what it names in batches.
KEEP_JOURNAL_DAYS = Statement("SELECT keep_journal_days(:age)")
OLD_JOURNAL = {
    table: Statement(f"""
DELETE FROM {table} WHERE {column} < now() - make_interval(secs => :age) AND {key} = ANY (ARRAY(
    SELECT {key} FROM {table} ORDER BY {column} LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
    for table, key, column in (("journal_queues", "queue", "used_at"), ("bot_sessions", "id", "ended_at"))
}


def keep_journal_days(connection: Connection, *, age: float) -> bool:
    """Make the days of the journal that are needed and drop one older than `age` seconds; 0 keeps none.

    Returns whether some are left to the next call.
    """
    return bool(connection.execute(KEEP_JOURNAL_DAYS, {"age": age}).scalar_one())


def delete_old_journal(connection: Connection, table: str, *, age: float, limit: int) -> int:
    """Delete rows of `journal_queues` or `bot_sessions` older than `age` seconds among the `limit` oldest."""
    return connection.execute(OLD_JOURNAL[table], {"age": age, "limit": limit}).rowcount


# Keys of submits, which outlive their jobs or not.
DELETE_KEYS = Statement(f"""
WITH old AS MATERIALIZED (
    SELECT ctid FROM submit_keys
    WHERE {OF_CLIENTS} = :of_clients AND created_at < now() - make_interval(secs => :age)
        AND created_at >= coalesce(CAST(:since AS timestamptz), '-infinity')
    ORDER BY {OF_CLIENTS}, created_at LIMIT :limit FOR UPDATE SKIP LOCKED
), gone AS (DELETE FROM submit_keys WHERE ctid = ANY (ARRAY(SELECT ctid FROM old)) RETURNING created_at)
SELECT count(*) AS keys, max(created_at) AS last,
    coalesce(extract(epoch FROM now() - min(created_at))::double precision - :age, 0) AS late
FROM gone
""")


def delete_keys(
    connection: Connection, *, of_clients: bool, age: float, limit: int, since: datetime | None = None
) -> Deleted:
    """Delete up to `limit` keys that were submitted `age` seconds ago, the oldest first, but none that a submit is just
    asking for.

    of_clients: those that clients made for their own repeats, or the others. since: pass over earlier ones.
    """
    values = {"of_clients": of_clients, "age": age, "limit": limit, "since": since}
    row = connection.execute(DELETE_KEYS, values).one()
    return Deleted(row.keys, row.last, row.late)


# The key is free already: a submit that holds the row makes it that of another job.
DELETE_UNIQUE_KEYS = Statement("""
WITH old AS MATERIALIZED (
    SELECT ctid FROM unique_keys
    WHERE until < now() AND until >= coalesce(CAST(:since AS timestamptz), '-infinity')
    ORDER BY until LIMIT :limit FOR UPDATE SKIP LOCKED
), gone AS (DELETE FROM unique_keys WHERE ctid = ANY (ARRAY(SELECT ctid FROM old)) RETURNING until)
SELECT count(*) AS keys, max(until) AS last,
    coalesce(extract(epoch FROM now() - min(until))::double precision, 0) AS late
FROM gone
""")


def delete_unique_keys(connection: Connection, *, limit: int, since: datetime | None = None) -> Deleted:
    """Delete up to `limit` deduplication keys that their jobs do not keep any more, the oldest first.

    since: pass over those that were kept until an earlier time.
    """
    row = connection.execute(DELETE_UNIQUE_KEYS, {"limit": limit, "since": since}).one()
    return Deleted(row.keys, row.last, row.late)


# What is kept for a while: evictions, blames, the audit, bots that have gone, assigners not seen.


# The ids are given out in the order of time, so that the oldest rows are those with the lowest.
OLD_EVICTIONS = Statement("""
DELETE FROM evictions WHERE at < now() - make_interval(secs => :age)
    AND id = ANY (ARRAY(SELECT id FROM evictions ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
OLD_BUILDS = Statement("""
DELETE FROM builds WHERE (instance, invocation) IN (
    SELECT instance, invocation FROM builds WHERE seen_at < now() - make_interval(secs => :age)
    ORDER BY seen_at LIMIT :limit FOR UPDATE SKIP LOCKED)
""")
OLD_AUDIT = Statement("""
DELETE FROM audit WHERE at < now() - make_interval(secs => :age)
    AND id = ANY (ARRAY(SELECT id FROM audit ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED))
""")

# Leases name their bot for as long as their job is kept. What an operator has drained stays drained. A bot gets leases
# in sessions only, each of which has another epoch.
_GONE = "status = 'gone' AND NOT draining AND opened_at < now() - make_interval(secs => :age)"
GONE_BOTS = Statement(f"SELECT id, epoch::text AS mark FROM bots WHERE {_GONE}")
DELETE_GONE_BOTS = Statement(f"""
WITH old AS MATERIALIZED (
    SELECT b.id FROM unnest(CAST(:ids AS bigint[]), CAST(:marks AS text[])) AS unnamed (id, mark)
    JOIN bots b ON b.id = unnamed.id AND b.epoch::text = unnamed.mark AND {_GONE}
    ORDER BY b.id FOR UPDATE OF b SKIP LOCKED
), localities AS (DELETE FROM bot_localities WHERE bot_id = ANY (ARRAY(SELECT id FROM old))),
success AS (DELETE FROM bot_success WHERE bot_id = ANY (ARRAY(SELECT id FROM old))),
changes AS (DELETE FROM bot_changes WHERE bot_id = ANY (ARRAY(SELECT id FROM old))),
resources AS (DELETE FROM counters WHERE name = ANY (ARRAY(
    SELECT 'bot:' || old.id || ':' || r.name FROM old, unnest(CAST(:resources AS text[])) AS r (name))))
DELETE FROM bots WHERE id = ANY (ARRAY(SELECT id FROM old))
""")
# Of jobs that never ended where failures are judged, and of failures long past.
OLD_BLAMES = Statement("""
DELETE FROM blames WHERE job_id = ANY (ARRAY(
    SELECT job_id FROM blames WHERE at < now() - make_interval(secs => :age)
    ORDER BY at LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
# Of bots that have not come back.
OLD_LOST_ATTEMPTS = Statement("""
WITH old AS MATERIALIZED (
    SELECT job_id, fence FROM lost_attempts WHERE at < now() - make_interval(secs => :age)
    ORDER BY at LIMIT :limit FOR UPDATE SKIP LOCKED
)
DELETE FROM lost_attempts l USING old o WHERE l.job_id = o.job_id AND l.fence = o.fence
""")
# What is within the window still counts, however short a time it is to be kept.
OLD_USAGE = Statement("""
WITH old AS MATERIALIZED (
    SELECT name, bucket FROM usage WHERE rolled AND bucket < now() - make_interval(secs => :age)
    ORDER BY bucket LIMIT :limit FOR UPDATE SKIP LOCKED
)
DELETE FROM usage u USING old o WHERE u.name = o.name AND u.bucket = o.bucket
""")
UNSEEN_ASSIGNERS = Statement("DELETE FROM assigners WHERE seen_at < now() - make_interval(secs => :age)")


# What no row of a big table names: a column without an index is read page by page in the order of the primary key.


@dataclass(frozen=True)
class NamedIds:
    """What one page of a table names. found: ids out of those that were asked for. last: where the next page begins;
    None after the last page."""

    found: frozenset[int]
    last: int | None


_NAMED = """
SELECT count(*) AS rows, max({key}) AS last, array_agg(DISTINCT name) FILTER (WHERE name = ANY (CAST(:ids AS bigint[])))
    AS found
FROM (SELECT {key}, {column} AS name FROM {table} WHERE {key} >= :first ORDER BY {key} LIMIT :limit) page
"""
NAMED_QUEUES = Statement(_NAMED.format(table="jobs", key="id", column="queue"))
NAMED_BOTS = Statement(_NAMED.format(table="leases", key="job_id", column="bot_id"))


def named_queues(connection: Connection, ids: Collection[int], *, first: int, limit: int) -> NamedIds:
    """Which of these queues the jobs from the id `first` on have, up to `limit` jobs (2 at least)."""
    return _named(connection, NAMED_QUEUES, ids, first=first, limit=limit)


def named_bots(connection: Connection, ids: Collection[int], *, first: int, limit: int) -> NamedIds:
    """Which of these bots the leases of jobs from the id `first` on name, up to `limit` leases, more than a job has."""
    return _named(connection, NAMED_BOTS, ids, first=first, limit=limit)


def _named(connection: Connection, statement: Statement, ids: Collection[int], *, first: int, limit: int) -> NamedIds:
    row = connection.execute(statement, {"ids": list(ids), "first": first, "limit": limit}).one()
    return NamedIds(frozenset(row.found or ()), row.last if row.rows == limit else None)


# Queues, and the sets that only they name.
#
# A submit looks its queue up without a lock on its row, because all submits would lock the same one. So a queue that no
# job has is deleted in two rounds. The first one marks queues without ready jobs, by minus its number, so that no mark
# is like an earlier one. Who looks up a marked queue holds its row (`intern_queue`), which the row shows from then on.
# The second round finds the mark committed, and waits for the end of all transactions that may have looked the queue up
# before: each of them holds the lock on the table `queues` that a statement takes before its snapshot, and keeps until
# its end. At a stricter isolation level a snapshot may be older, so that such a transaction holds the row too. Then the
# round reads all jobs, page by page, and deletes the queues that none of them has, unless somebody holds the row, has
# held it meanwhile, or the mark is another one.

MARK_IDLE_QUEUES = Statement(f"""
UPDATE queues SET idle_since = -CAST(CAST(pg_current_xact_id() AS text) AS bigint) WHERE id = ANY (ARRAY(
    SELECT q.id FROM queues q WHERE q.idle_since IS NULL AND NOT {has_ready_jobs("q")}
    ORDER BY q.id FOR NO KEY UPDATE SKIP LOCKED))
""")
# Whoever has held the row since has left his number in `xmax`.
_MARK = "q.idle_since || ' ' || q.xmax"
IDLE_QUEUES = Statement(f"SELECT q.id, {_MARK} AS mark FROM queues q WHERE q.idle_since IS NOT NULL")
READERS_OF_QUEUES = Statement("""
SELECT DISTINCT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = CAST('queues' AS regclass) AND granted
    AND pid IS DISTINCT FROM pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")
DELETE_QUEUES = Statement(f"""
WITH unused AS MATERIALIZED (
    SELECT q.id FROM unnest(CAST(:ids AS integer[]), CAST(:marks AS text[])) AS unnamed (id, mark)
    JOIN queues q ON q.id = unnamed.id AND {_MARK} = unnamed.mark
    ORDER BY q.id FOR UPDATE OF q SKIP LOCKED
)
DELETE FROM queues WHERE id = ANY (ARRAY(SELECT id FROM unused))
""")
# A queue may appear that names a set which was just looked up: then the foreign key refuses it, and the submit is tried
# again. Rarely has anybody looked up a set that was made long ago and then waits: a bulk submit, for another one's key.
DELETE_UNUSED_CONSTRAINT_SETS = Statement("""
DELETE FROM constraint_sets WHERE id = ANY (ARRAY(
    SELECT s.id FROM constraint_sets s
    WHERE s.created_at < now() - make_interval(secs => :age)
        AND NOT EXISTS (SELECT FROM queues q WHERE q.constraint_set = s.id)
    ORDER BY s.id LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
DELETE_UNUSED_PLATFORMS = Statement("""
WITH unused AS MATERIALIZED (
    SELECT p.id FROM platforms p
    WHERE p.created_at < now() - make_interval(secs => :age)
        AND NOT EXISTS (SELECT FROM queues q WHERE q.platform = p.id)
        AND NOT EXISTS (SELECT FROM queues q WHERE q.preferred = p.id)
        AND NOT EXISTS (SELECT FROM queues q WHERE q.required = p.id)
        AND NOT EXISTS (SELECT FROM platforms o WHERE o.preferred = p.id)
    ORDER BY p.id LIMIT :limit FOR UPDATE SKIP LOCKED
), unlinked AS (
    DELETE FROM kind_platforms WHERE platform = ANY (ARRAY(SELECT id FROM unused))
)
DELETE FROM platforms WHERE id = ANY (ARRAY(SELECT id FROM unused))
""")
# Only a session that opens gives a bot another kind, and none does meanwhile.
DELETE_UNUSED_KINDS = Statement("""
WITH unused AS MATERIALIZED (
    SELECT k.id FROM kinds k
    WHERE k.created_at < now() - make_interval(secs => :age)
        AND k.id NOT IN (SELECT DISTINCT kind FROM bots WHERE kind IS NOT NULL)
    ORDER BY k.id LIMIT :limit FOR UPDATE SKIP LOCKED
), unlinked AS (
    DELETE FROM kind_platforms WHERE kind = ANY (ARRAY(SELECT id FROM unused))
)
DELETE FROM kinds WHERE id = ANY (ARRAY(SELECT id FROM unused))
""")


def idle_queues(connection: Connection) -> dict[int, str]:
    """Marked queues: id -> mark."""
    return {row.id: row.mark for row in connection.execute(IDLE_QUEUES)}


def readers_of_queues(connection: Connection) -> set[str]:
    """The transactions in progress that may have looked a queue up."""
    return set(connection.execute(READERS_OF_QUEUES).scalars())


def delete_queues(connection: Connection, unnamed: Mapping[int, str]) -> int:
    """Delete those of these queues whose mark is still the same and that nobody holds; returns how many.

    An earlier transaction has found them by `idle_queues`, all who read the table before that have ended, and then no
    job was found to have one.
    """
    return connection.execute(DELETE_QUEUES, {"ids": [*unnamed], "marks": [*unnamed.values()]}).rowcount


def mark_idle_queues(connection: Connection) -> None:
    """Mark queues without ready jobs."""
    connection.execute(MARK_IDLE_QUEUES)


def delete_unused_constraint_sets(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` constraint sets older than `age` seconds that no queue names; returns how many."""
    return connection.execute(DELETE_UNUSED_CONSTRAINT_SETS, {"age": age, "limit": limit}).rowcount


def delete_unused_platforms(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` requirement sets older than `age` seconds that no queue names; returns how many, 0 while a
    session opens."""
    if not try_block_new_sessions(connection):
        return 0
    return connection.execute(DELETE_UNUSED_PLATFORMS, {"age": age, "limit": limit}).rowcount


def delete_unused_kinds(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` kinds of bots older than `age` seconds that no bot is of, whether it has a session or not;
    returns how many, 0 while a session opens. Reads all bots."""
    if not try_block_new_sessions(connection):
        return 0
    return connection.execute(DELETE_UNUSED_KINDS, {"age": age, "limit": limit}).rowcount


def delete_old_evictions(connection: Connection, *, age: float, limit: int) -> int:
    """Delete evictions older than `age` seconds among the `limit` oldest; returns how many."""
    return connection.execute(OLD_EVICTIONS, {"age": age, "limit": limit}).rowcount


def delete_old_builds(connection: Connection, *, age: float, limit: int) -> int:
    """Delete builds that asked for nothing for `age` seconds, the oldest `limit`; returns how many."""
    return connection.execute(OLD_BUILDS, {"age": age, "limit": limit}).rowcount


def delete_old_audit(connection: Connection, *, age: float, limit: int) -> int:
    """Delete notes of the audit older than `age` seconds among the `limit` oldest; returns how many."""
    return connection.execute(OLD_AUDIT, {"age": age, "limit": limit}).rowcount


def gone_bots(connection: Connection, *, age: float) -> dict[int, str]:
    """Bots that have no session, whose last one began more than `age` seconds ago and which nobody has drained:
    id -> mark."""
    return {row.id: row.mark for row in connection.execute(GONE_BOTS, {"age": age})}


def delete_gone_bots(connection: Connection, unnamed: Mapping[int, str], *, age: float) -> int:
    """Delete those of these bots whose mark is still the same and that nobody holds; returns how many.

    An earlier transaction has found them by `gone_bots`, and then no lease was found to name one.
    """
    values = {"ids": [*unnamed], "marks": [*unnamed.values()], "age": age, "resources": list(OF_BOTS)}
    return connection.execute(DELETE_GONE_BOTS, values).rowcount


def delete_old_blames(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` blames for failures more than `age` seconds ago; returns how many."""
    return connection.execute(OLD_BLAMES, {"age": age, "limit": limit}).rowcount


def delete_old_lost_attempts(connection: Connection, *, age: float, limit: int) -> int:
    """Forget up to `limit` lost attempts older than `age` seconds, which stay charged; returns how many."""
    return connection.execute(OLD_LOST_ATTEMPTS, {"age": age, "limit": limit}).rowcount


def delete_old_usage(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` minutes of usage that count no more and are older than `age` seconds; returns how many."""
    return connection.execute(OLD_USAGE, {"age": age, "limit": limit}).rowcount


def delete_unseen_assigners(connection: Connection, *, age: float) -> int:
    """Delete the rows of assigner processes that have not been seen for `age` seconds; returns how many."""
    return connection.execute(UNSEEN_ASSIGNERS, {"age": age}).rowcount
