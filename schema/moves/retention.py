"""Finished jobs leave, with everything that belongs to them, in one statement per batch."""

from sqlalchemy import Connection, text

from schema.accounting.counters import OF_BOTS
from schema.postgres.advisory import try_block_new_sessions
from schema.predicates import has_ready_jobs

# Ids go into each part as one array, which leaves the planner nothing but an index on them.
DELETE_FINISHED = text("""
WITH old AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE finished_at IS NOT NULL AND finished_at < now() - make_interval(secs => :oldest_age)
        AND finished_at < now() - make_interval(secs => CASE state
            WHEN 'succeeded' THEN :succeeded WHEN 'failed' THEN :failed
            WHEN 'cancelled' THEN :cancelled ELSE :dead END)
    ORDER BY finished_at LIMIT :limit FOR UPDATE SKIP LOCKED
), payloads AS (DELETE FROM job_payloads WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
outputs AS (DELETE FROM job_outputs WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
results AS (DELETE FROM job_results WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
checkpoints AS (DELETE FROM job_checkpoints WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
keys AS (DELETE FROM submit_keys WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
described AS (DELETE FROM job_metadata WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
preferences AS (DELETE FROM preference_waits WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
terms AS (DELETE FROM job_constraints WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
followers AS (DELETE FROM job_followers WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
history AS (DELETE FROM stored_events WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
grants AS (DELETE FROM leases WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
gone AS (DELETE FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id)
SELECT count(*) FROM gone
""")


def delete_finished(
    connection: Connection, *, succeeded: float, failed: float, cancelled: float, dead: float, limit: int
) -> int:
    """Delete up to `limit` jobs that have been final for longer than their state's seconds; returns how many."""
    ages = {"succeeded": succeeded, "failed": failed, "cancelled": cancelled, "dead": dead}
    found = connection.execute(DELETE_FINISHED, {**ages, "oldest_age": min(ages.values()), "limit": limit})
    return int(found.scalar_one())


# What is kept for a while: evictions, blames, the audit, bots that have gone, assigners not seen.


# The ids are given out in the order of time, so that the oldest rows are those with the lowest.
OLD_EVICTIONS = text("""
DELETE FROM evictions WHERE at < now() - make_interval(secs => :age)
    AND id = ANY (ARRAY(SELECT id FROM evictions ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
OLD_AUDIT = text("""
DELETE FROM audit WHERE at < now() - make_interval(secs => :age)
    AND id = ANY (ARRAY(SELECT id FROM audit ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED))
""")

# Leases name their bot for as long as their job is kept. What an operator has drained stays drained.
GONE_BOTS = text("""
WITH old AS MATERIALIZED (
    SELECT b.id FROM bots b
    WHERE b.status = 'gone' AND NOT b.draining AND b.opened_at < now() - make_interval(secs => :age)
        AND NOT EXISTS (SELECT FROM leases l WHERE l.bot_id = b.id)
    ORDER BY b.id LIMIT :limit FOR UPDATE SKIP LOCKED
), localities AS (DELETE FROM bot_localities WHERE bot_id = ANY (ARRAY(SELECT id FROM old))),
success AS (DELETE FROM bot_success WHERE bot_id = ANY (ARRAY(SELECT id FROM old))),
changes AS (DELETE FROM bot_changes WHERE bot_id = ANY (ARRAY(SELECT id FROM old))),
resources AS (DELETE FROM counters WHERE name = ANY (ARRAY(
    SELECT 'bot:' || old.id || ':' || kind FROM old, unnest(CAST(:kinds AS text[])) AS k (kind))))
DELETE FROM bots WHERE id = ANY (ARRAY(SELECT id FROM old))
""")
# Of jobs that never ended where failures are judged, and of failures long past.
OLD_BLAMES = text("""
DELETE FROM blames WHERE job_id = ANY (ARRAY(
    SELECT job_id FROM blames WHERE at < now() - make_interval(secs => :age) LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
# Of bots that have not come back.
OLD_LOST_ATTEMPTS = text("""
WITH old AS MATERIALIZED (
    SELECT job_id, fence FROM lost_attempts WHERE at < now() - make_interval(secs => :age)
    ORDER BY at LIMIT :limit FOR UPDATE SKIP LOCKED
)
DELETE FROM lost_attempts l USING old o WHERE l.job_id = o.job_id AND l.fence = o.fence
""")
# What is within the window still counts, however short a time it is to be kept.
OLD_USAGE = text("""
WITH old AS MATERIALIZED (
    SELECT name, bucket FROM usage WHERE rolled AND bucket < now() - make_interval(secs => :age)
    ORDER BY bucket LIMIT :limit FOR UPDATE SKIP LOCKED
)
DELETE FROM usage u USING old o WHERE u.name = o.name AND u.bucket = o.bucket
""")
UNSEEN_ASSIGNERS = text("DELETE FROM assigners WHERE seen_at < now() - make_interval(secs => :age)")


# Queues, and the sets that only they name.
#
# A submit looks its queue up without a lock on its row, because all submits would lock the same one. So a queue that no
# job has is deleted in two rounds. The first one marks queues without ready jobs, by minus its number, so that no mark
# is like an earlier one. Who looks up a marked queue holds its row (`intern_queue`). The second round finds the mark
# committed, and waits for the end of all transactions that may have looked the queue up before: each of them holds the
# lock on the table `queues` that a statement takes before its snapshot, and keeps until its end. At a stricter
# isolation level a snapshot may be older, so that such a transaction holds the row too. Then the round locks the row,
# unless somebody holds it or the mark is another one, looks again and deletes it.

MARK_IDLE_QUEUES = text(f"""
UPDATE queues SET idle_since = -CAST(CAST(pg_current_xact_id() AS text) AS bigint) WHERE id = ANY (ARRAY(
    SELECT q.id FROM queues q WHERE q.idle_since IS NULL AND NOT {has_ready_jobs("q")}
    ORDER BY q.id FOR NO KEY UPDATE SKIP LOCKED))
""")
UNUSED_QUEUES = text("""
WITH idle AS MATERIALIZED (SELECT id, idle_since FROM queues WHERE idle_since IS NOT NULL)
SELECT id, idle_since FROM idle WHERE id NOT IN (SELECT DISTINCT queue FROM jobs WHERE EXISTS (SELECT FROM idle))
""")
READERS_OF_QUEUES = text("""
SELECT DISTINCT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = CAST('queues' AS regclass) AND granted
    AND pid IS DISTINCT FROM pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")
LOCK_QUEUES = text("""
SELECT q.id FROM unnest(CAST(:ids AS integer[]), CAST(:marks AS bigint[])) AS unused (id, mark)
JOIN queues q ON q.id = unused.id AND q.idle_since = unused.mark
ORDER BY q.id FOR UPDATE OF q SKIP LOCKED
""")
# A statement of its own: it sees the jobs of all who held a row before it was locked.
DELETE_QUEUES = text("""
DELETE FROM queues q USING unnest(CAST(:ids AS integer[])) AS idle (id)
WHERE q.id = idle.id AND q.id NOT IN (SELECT DISTINCT queue FROM jobs)
""")
#: Reading all jobs may take long.
NO_TIMEOUT = text("SET LOCAL statement_timeout = 0")
# A queue may appear that names a set which was just looked up: then the foreign key refuses it, and the submit is tried
# again. Rarely has anybody looked up a set that was made long ago and then waits: a bulk submit, for another one's key.
DELETE_UNUSED_CONSTRAINT_SETS = text("""
DELETE FROM constraint_sets WHERE id = ANY (ARRAY(
    SELECT s.id FROM constraint_sets s
    WHERE s.created_at < now() - make_interval(secs => :age)
        AND NOT EXISTS (SELECT FROM queues q WHERE q.constraint_set = s.id)
    ORDER BY s.id LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
DELETE_UNUSED_PLATFORMS = text("""
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
DELETE_UNUSED_KINDS = text("""
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


def unused_queues(connection: Connection) -> dict[int, int]:
    """Marked queues that no job has, whatever its state: id -> mark. Reads all jobs if a queue is marked."""
    connection.execute(NO_TIMEOUT)
    return {row.id: row.idle_since for row in connection.execute(UNUSED_QUEUES)}


def readers_of_queues(connection: Connection) -> set[str]:
    """The transactions in progress that may have looked a queue up."""
    return set(connection.execute(READERS_OF_QUEUES).scalars())


def delete_queues(connection: Connection, unused: dict[int, int]) -> int:
    """Delete those of these queues that still have the same mark and that no job has; returns how many.

    An earlier transaction has found them by `unused_queues`, and all who read the table before that have ended. Reads
    all jobs.
    """
    connection.execute(NO_TIMEOUT)
    locked = list(connection.execute(LOCK_QUEUES, {"ids": [*unused], "marks": [*unused.values()]}).scalars())
    return connection.execute(DELETE_QUEUES, {"ids": locked}).rowcount


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


def delete_old_audit(connection: Connection, *, age: float, limit: int) -> int:
    """Delete notes of the audit older than `age` seconds among the `limit` oldest; returns how many."""
    return connection.execute(OLD_AUDIT, {"age": age, "limit": limit}).rowcount


def delete_gone_bots(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` bots that have no session and no lease, whose last session began more than `age` seconds
    ago and which nobody has drained; returns how many. Reads all leases if there are such bots."""
    return connection.execute(GONE_BOTS, {"age": age, "limit": limit, "kinds": list(OF_BOTS)}).rowcount


def delete_old_blames(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` blames for failures more than `age` seconds ago; returns how many. Reads all of them."""
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
