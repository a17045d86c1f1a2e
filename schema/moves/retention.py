"""Finished jobs leave, with everything that belongs to them, in one statement per batch."""

from sqlalchemy import Connection, text

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
