"""queued -> cancelled, and leased, running -> cancelling: cancel. Asking a bot to stop is a change of the lease."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.timing import KILL_GRACE


@dataclass(frozen=True)
class Cancelled:
    """What cancel found. `state` is the job's state afterwards, None if there is no such job to see."""

    public_id: str
    state: str | None
    changed: bool


# Locks first, so that the next statement's snapshot shows what the rows became while we waited.
LOCK = text("""
SELECT id FROM jobs
WHERE public_id = ANY (CAST(:public_ids AS uuid[]))
    AND (CAST(:instances AS text[]) IS NULL
        OR instance IN (SELECT id FROM instances WHERE name = ANY (CAST(:instances AS text[]))))
ORDER BY id FOR NO KEY UPDATE
""")

CANCEL = text(f"""
WITH found AS MATERIALIZED (
    SELECT id, public_id, state FROM jobs WHERE id = ANY (CAST(:ids AS bigint[]))
), moved AS (
    UPDATE jobs j SET
        state = CASE f.state WHEN 'queued' THEN 'cancelled' ELSE 'cancelling' END,
        finished_at = CASE f.state WHEN 'queued' THEN clock_timestamp() END,
        schedule_after = NULL,
        reason = CASE f.state WHEN 'queued' THEN 'cancelled before it started' ELSE j.reason END
    FROM found f WHERE j.id = f.id AND f.state IN ('queued', 'leased', 'running')
    RETURNING j.id, j.public_id, j.state, j.fence, f.state AS from_state
), asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = 'cancel',
        due_at = now() + make_interval(secs => :sync + {KILL_GRACE})
    WHERE l.job_id = ANY (ARRAY(SELECT id FROM moved)) AND l.state IN ('pending', 'active', 'cancelling')
    RETURNING l.bot_id
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor)
    SELECT id, 'cancel', from_state, state, fence, :actor FROM moved
), told AS (
    SELECT wake('bots', string_agg(bot_id::text, ',')) FROM asked HAVING count(*) > 0
), done AS (
    SELECT wake('done', string_agg(public_id::text, ',')) FROM moved WHERE state = 'cancelled' HAVING count(*) > 0
)
SELECT f.public_id, coalesce(m.state, f.state) AS state, m.id IS NOT NULL AS changed,
    (SELECT count(*) FROM told) + (SELECT count(*) FROM done) AS woken
FROM found f LEFT JOIN moved m ON m.id = f.id
""")

# A stop that the server asks for leaves the job's state; the bot's confirmation decides where it goes. Leases are
# locked here without their jobs, hence SKIP LOCKED: whoever holds one is about to end or acknowledge it.
ASK_STOP = text(f"""
WITH overdue AS MATERIALIZED (
    SELECT l.job_id, l.fence
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
    JOIN leases l ON l.job_id = t.job_id AND l.fence = t.fence
    WHERE l.state = :from_state AND l.due_at < clock_timestamp()
    FOR NO KEY UPDATE OF l SKIP LOCKED
), asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = :reason,
        due_at = now() + make_interval(secs => :sync + {KILL_GRACE})
    FROM overdue o WHERE l.job_id = o.job_id AND l.fence = o.fence
    RETURNING l.bot_id
), told AS (
    SELECT wake('bots', string_agg(bot_id::text, ',')) FROM asked HAVING count(*) > 0
)
SELECT count(*), (SELECT count(*) FROM told) FROM asked
""")


def cancel(
    connection: Connection,
    public_ids: Sequence[str],
    *,
    instances: Sequence[str] | None,
    sync: float,
    actor: str,
) -> list[Cancelled]:
    """Cancel jobs: a queued one at once, a held one by asking its bot; a finished one keeps its result.

    Only jobs of `instances` are seen, None means all. `sync` is the bots' sync period in seconds. Answers are in the
    order of `public_ids`, which must be UUIDs.
    """
    where = {"public_ids": list(public_ids), "instances": None if instances is None else list(instances)}
    ids = [row.id for row in connection.execute(LOCK, where)]
    found = {
        str(row.public_id): Cancelled(str(row.public_id), row.state, row.changed)
        for row in connection.execute(CANCEL, {"ids": ids, "sync": sync, "actor": actor})
    }
    return [found.get(public_id, Cancelled(public_id, None, changed=False)) for public_id in public_ids]


def ask_stop(
    connection: Connection,
    leases: Sequence[tuple[int, int]],
    *,
    from_state: str,
    reason: str,
    sync: float,
) -> int:
    """Ask the bots of overdue leases, given as (job id, fence), to stop; returns how many were asked.

    Leases that somebody else has locked are left for the next time.

    `reason` is `unacknowledged` for pending leases and `timeout` for active ones.
    """
    row = connection.execute(
        ASK_STOP,
        {
            "job_ids": [job_id for job_id, _ in leases],
            "fences": [fence for _, fence in leases],
            "from_state": from_state,
            "reason": reason,
            "sync": sync,
        },
    ).one()
    return int(row[0])
