"""leased -> running: acknowledge."""

from collections.abc import Sequence

from sqlalchemy import Connection, text

from schema.timing import KILL_GRACE

# The server's own execution deadline is the job's timeout and some grace, because the bot enforces it first.
ACKNOWLEDGE = text(f"""
WITH told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
), held AS MATERIALIZED (
    SELECT j.id, j.timeout_seconds FROM jobs j JOIN told t ON t.job_id = j.id AND t.fence = j.fence
    WHERE j.state = 'leased' ORDER BY j.id FOR NO KEY UPDATE OF j
), active AS (
    UPDATE leases l SET state = 'active', acknowledged_at = clock_timestamp(),
        due_at = now() + make_interval(secs => h.timeout_seconds + :sync + {KILL_GRACE})
    FROM told t JOIN held h ON h.id = t.job_id
    WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.bot_id = :bot_id AND l.bot_epoch = :epoch
        AND l.state = 'pending'
    RETURNING l.job_id
), moved AS (
    UPDATE jobs j SET state = 'running', started_at = clock_timestamp(), queue_deadline = NULL
    FROM active a WHERE j.id = a.job_id AND j.state = 'leased'
    RETURNING j.id, j.fence
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor)
    SELECT id, 'acknowledge', 'leased', 'running', fence, :actor FROM moved
)
SELECT id FROM moved
""")

HOLD = text("SELECT id FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) ORDER BY id FOR NO KEY UPDATE")


def hold(connection: Connection, job_ids: Sequence[int]) -> None:
    """Lock jobs that the transaction is about to move by more than one move.

    Each move locks its own jobs in order, but two of them after each other would not: a job of the first and a lower
    one of the second are locked the other way round by whoever cancels both.
    """
    connection.execute(HOLD, {"job_ids": list(job_ids)})


DELIVER = text("""
UPDATE leases l SET delivered_at = clock_timestamp()
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.state = 'pending'
""")


def acknowledge(
    connection: Connection,
    leases: Sequence[tuple[int, int]],
    *,
    bot_id: int,
    epoch: int,
    sync: float,
    actor: str,
) -> list[int]:
    """The bot runs these leases, given as (job id, fence); returns the ids of the jobs that moved.

    `sync` is the bots' sync period in seconds, the time the bot's own report of a timeout may take to arrive.
    """
    if not leases:
        return []
    rows = connection.execute(
        ACKNOWLEDGE,
        {
            "job_ids": [job_id for job_id, _ in leases],
            "fences": [fence for _, fence in leases],
            "bot_id": bot_id,
            "epoch": epoch,
            "sync": sync,
            "actor": actor,
        },
    )
    return [row.id for row in rows]


def deliver(connection: Connection, leases: Sequence[tuple[int, int]]) -> None:
    """These leases, given as (job id, fence), are about to be told to their bot, with everything needed to start."""
    if leases:
        job_ids, fences = zip(*leases, strict=True)
        connection.execute(DELIVER, {"job_ids": list(job_ids), "fences": list(fences)})
