"""Finished jobs leave, with everything that belongs to them, in one statement per batch."""

from sqlalchemy import Connection, text

from schema.validation import KINDS

# Ids go into each part as one array, which leaves the planner nothing but an index on them.
DELETE_FINISHED = text("""
WITH old AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE finished_at IS NOT NULL AND finished_at < now() - make_interval(secs => :oldest_age)
        AND finished_at < now() - make_interval(secs => CASE state
            WHEN 'succeeded' THEN :succeeded WHEN 'failed' THEN :failed
            WHEN 'cancelled' THEN :cancelled ELSE :dead END)
        AND NOT EXISTS (SELECT FROM reservations v WHERE v.job_id = jobs.id)
    ORDER BY finished_at LIMIT :limit FOR UPDATE SKIP LOCKED
), payloads AS (DELETE FROM job_payloads WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
outputs AS (DELETE FROM job_outputs WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
keys AS (DELETE FROM submit_keys WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
terms AS (DELETE FROM job_constraints WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
followers AS (DELETE FROM job_followers WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
history AS (DELETE FROM job_events WHERE job_id = ANY (ARRAY(SELECT id FROM old))),
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
resources AS (DELETE FROM counters WHERE name = ANY (ARRAY(
    SELECT 'bot:' || old.id || ':' || kind FROM old, unnest(CAST(:kinds AS text[])) AS k (kind))))
DELETE FROM bots WHERE id = ANY (ARRAY(SELECT id FROM old))
""")
# Of jobs that never ended where failures are judged, and of failures long past.
OLD_BLAMES = text("""
DELETE FROM blames WHERE job_id = ANY (ARRAY(
    SELECT job_id FROM blames WHERE at < now() - make_interval(secs => :age) LIMIT :limit FOR UPDATE SKIP LOCKED))
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


def delete_old_evictions(connection: Connection, *, age: float, limit: int) -> int:
    """Delete evictions older than `age` seconds among the `limit` oldest; returns how many."""
    return connection.execute(OLD_EVICTIONS, {"age": age, "limit": limit}).rowcount


def delete_old_audit(connection: Connection, *, age: float, limit: int) -> int:
    """Delete notes of the audit older than `age` seconds among the `limit` oldest; returns how many."""
    return connection.execute(OLD_AUDIT, {"age": age, "limit": limit}).rowcount


def delete_gone_bots(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` bots that have no session and no lease, whose last session began more than `age` seconds
    ago and which nobody has drained; returns how many. Reads all leases if there are such bots."""
    return connection.execute(GONE_BOTS, {"age": age, "limit": limit, "kinds": list(KINDS)}).rowcount


def delete_old_blames(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` blames for failures more than `age` seconds ago; returns how many. Reads all of them."""
    return connection.execute(OLD_BLAMES, {"age": age, "limit": limit}).rowcount


def delete_old_usage(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` minutes of usage that count no more and are older than `age` seconds; returns how many."""
    return connection.execute(OLD_USAGE, {"age": age, "limit": limit}).rowcount


def delete_unseen_assigners(connection: Connection, *, age: float) -> int:
    """Delete the rows of assigner processes that have not been seen for `age` seconds; returns how many."""
    return connection.execute(UNSEEN_ASSIGNERS, {"age": age}).rowcount
