"""queued -> dead: time_out, for jobs that nobody started in time."""

from sqlalchemy import Connection, text

from schema.moves.unblocking import ANY_GRAPH, settle
from schema.states import JobState

# Judged on the locked rows: what somebody else is about to grant, to park or to cancel is left to them.
TIME_OUT = text(f"""
WITH late AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE state = 'queued' AND queue_deadline IS NOT NULL AND queue_deadline < now()
    ORDER BY queue_deadline LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs j SET state = 'dead', finished_at = clock_timestamp(), schedule_after = NULL,
        reason = 'waited longer than its queue timeout'
    WHERE j.id = ANY (ARRAY(SELECT id FROM late)) AND j.state = 'queued'
    RETURNING j.id, j.public_id, j.fence, j.queue_deadline
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'time_out', 'queued', 'dead', fence, :actor, jsonb_build_object('queue_deadline', queue_deadline)
    FROM moved
), done AS (
    SELECT wake('done', string_agg(public_id::text, ',')) FROM moved HAVING count(*) > 0
)
SELECT id, {ANY_GRAPH} AS graphs, (SELECT count(*) FROM done) FROM moved
""")


def time_out(connection: Connection, limit: int, *, actor: str) -> int:
    """Give up on up to `limit` jobs that have been queued beyond their deadline; returns how many.

    A job that has been started once has no deadline any more, and a parked one is not queued. Rows that somebody else
    has locked are left for the next time.
    """
    rows = connection.execute(TIME_OUT, {"limit": limit, "actor": actor}).all()
    if rows and rows[0].graphs:
        settle(connection, {row.id: JobState.DEAD.value for row in rows})
    return len(rows)
