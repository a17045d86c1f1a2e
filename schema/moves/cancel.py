"""Cancel jobs, and ask bots to stop what runs.

    blocked, queued, parked, deferred -> cancelled: cancel
    leased, running -> cancelling: cancel

A job that several submissions share goes on while one of them still wants it: cancelling a submission withdraws that
submission only. Asking a bot to stop changes the lease, not the job.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leasehold.states import JobState

from schema.moves.dependencies import ANY_OPEN_GRAPH, unblock
from schema.postgres.connection import Connection
from schema.postgres.fragments import SUBMISSIONS, kill_seconds
from schema.postgres.statements import Statement


@dataclass(frozen=True)
class Cancelled:
    """What cancel found. `state` is the submission's state afterwards, None if there is no such one to see."""

    public_id: str
    state: str | None
    changed: bool


WAITS = "f.state IN ('blocked', 'queued', 'parked', 'deferred')"

# Locks first, so that the next statement's snapshot shows what the rows became while we waited. Whoever joins a job,
# or withdraws from it, holds its row.
LOCK_SUBMITTED = Statement(f"""
SELECT id FROM jobs
WHERE id = ANY (ARRAY(SELECT s.job_id FROM ({SUBMISSIONS}) s))
    AND (CAST(:instances AS text[]) IS NULL
        OR instance IN (SELECT id FROM instances WHERE name = ANY (CAST(:instances AS text[]))))
ORDER BY id FOR NO KEY UPDATE
""")

# The statement that cancels. A job has one submission, and one more for each that joined it. It is cancelled once none
# of them wants it; until then a submission that is cancelled only leaves it.

#: Jobs that a submission wants which is not named in the call.
_WANTED = """
    SELECT DISTINCT o.job_id
    FROM (SELECT job_id, public_id FROM job_followers
          WHERE job_id = ANY (CAST(:job_ids AS bigint[])) AND cancelled_at IS NULL
          UNION ALL SELECT id, public_id FROM found WHERE abandoned_at IS NULL) o
    LEFT JOIN named n ON n.id = o.public_id
    WHERE n.id IS NULL AND NOT CAST(:all_submissions AS boolean)"""
#: Jobs that can still be cancelled, and whether they are `shared` with such a submission.
_JUDGED = """
    SELECT f.*, w.job_id IS NOT NULL AS shared FROM found f LEFT JOIN wanted w ON w.job_id = f.id
    WHERE f.state IN ('blocked', 'queued', 'parked', 'deferred', 'leased', 'running')"""
#: Cancel a job that waits. Of one that has a bot, the bot's confirmation decides where it goes.
_JOBS = f"""
    UPDATE jobs j SET
        state = CASE WHEN {WAITS} THEN 'cancelled' ELSE 'cancelling' END,
        finished_at = CASE WHEN {WAITS} THEN clock_timestamp() END,
        schedule_after = NULL,
        reason = CASE WHEN {WAITS} THEN 'cancelled before it started' ELSE j.reason END
    FROM judged f WHERE j.id = f.id AND NOT f.shared
    RETURNING j.id, j.public_id, j.state, j.fence, f.state AS from_state"""
_LEASES = f"""
    UPDATE leases l SET state = 'cancelling', stop_reason = 'cancel',
        due_at = now() + make_interval(secs => :sync + {kill_seconds("l.bot_id")})
    WHERE l.job_id = ANY (ARRAY(SELECT id FROM moved)) AND l.state IN ('pending', 'active', 'cancelling')
    RETURNING l.bot_id"""
#: Submissions that leave a shared job.
_LEAVING = """
    SELECT n.id, f.id AS job_id, f.public_id, f.state, f.fence
    FROM named n JOIN judged f ON f.id = n.job_id WHERE f.shared AND n.withdrawn_at IS NULL"""
#: Of a job's first submission the row of the job says that it has left, of one that joined its own row.
_FIRST = """
    UPDATE jobs j SET abandoned_at = clock_timestamp() FROM leaving l WHERE j.id = l.job_id AND l.id = l.public_id"""
_JOINED = """
    UPDATE job_followers SET cancelled_at = clock_timestamp() WHERE public_id = ANY (ARRAY(SELECT id FROM leaving))"""
_EVENTS = """
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'cancel', from_state, state, fence, :actor,
        CASE WHEN CAST(:all_submissions AS boolean) THEN jsonb_build_object('all_submissions', true) END FROM moved
    UNION ALL
    SELECT job_id, 'withdraw', state, state, fence, :actor, jsonb_build_object('submission', id) FROM leaving"""
CANCEL = Statement(f"""
WITH named AS MATERIALIZED (
    SELECT s.id, s.job_id, s.withdrawn_at FROM ({SUBMISSIONS}) s WHERE s.job_id = ANY (CAST(:job_ids AS bigint[]))
), found AS MATERIALIZED (
    SELECT id, public_id, state, fence, abandoned_at FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[]))
), wanted AS MATERIALIZED ({_WANTED}
), judged AS MATERIALIZED ({_JUDGED}
), moved AS ({_JOBS}
), leaving AS MATERIALIZED ({_LEAVING}
), own AS ({_FIRST}
), joined AS ({_JOINED}
), asked AS ({_LEASES}
), noted AS ({_EVENTS}
), told AS (
    SELECT wake('bots', string_agg(bot_id::text, ',')) FROM asked HAVING count(*) > 0
), done AS (
    SELECT wake('done', string_agg(public_id::text, ',')) FROM (
        SELECT public_id FROM moved WHERE state = 'cancelled' UNION SELECT public_id FROM leaving) news
    HAVING count(*) > 0
)
SELECT n.id, coalesce(l.job_id, m.id) IS NOT NULL AS changed,
    CASE WHEN coalesce(l.id, w.id) IS NULL THEN coalesce(m.state, f.state) ELSE 'cancelled' END AS state,
    CASE WHEN m.state = 'cancelled' THEN m.id END AS ended, {ANY_OPEN_GRAPH} AS graphs,
    (SELECT count(*) FROM told) + (SELECT count(*) FROM done) AS woken
FROM named n JOIN found f ON f.id = n.job_id
LEFT JOIN moved m ON m.id = f.id LEFT JOIN leaving l ON l.id = n.id
LEFT JOIN (SELECT id FROM named WHERE withdrawn_at IS NOT NULL) w ON w.id = n.id
""")

# A stop that the server asks for leaves the job's state; the bot's confirmation decides where it goes. Leases are
# locked here without their jobs, hence SKIP LOCKED: whoever holds one is about to end or acknowledge it.
ASK_STOP = Statement(f"""
WITH overdue AS MATERIALIZED (
    SELECT l.job_id, l.fence
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
    JOIN leases l ON l.job_id = t.job_id AND l.fence = t.fence
    WHERE l.state = :from_state AND l.due_at < clock_timestamp()
    FOR NO KEY UPDATE OF l SKIP LOCKED
), asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = :reason,
        due_at = now() + make_interval(secs => :sync + {kill_seconds("l.bot_id")})
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
    all_submissions: bool = False,
) -> list[Cancelled]:
    """Cancel submissions, and each job that nobody wants any more: a waiting one at once, a held one by asking its bot.

    A finished job keeps its result. `all_submissions` cancels jobs that others want too. Only jobs of `instances` are
    seen, None means all. `sync` is the bots' sync period in seconds. Answers are in the order of `public_ids`, which
    must be UUIDs.
    """
    where = {"ids": list(public_ids), "instances": None if instances is None else list(instances)}
    job_ids = [row.id for row in connection.execute(LOCK_SUBMITTED, where)]
    values = {
        "ids": list(public_ids),
        "job_ids": job_ids,
        "sync": sync,
        "actor": actor,
        "all_submissions": all_submissions,
    }
    rows = connection.execute(CANCEL, values).all()
    ended = {row.ended: JobState.CANCELLED.value for row in rows if row.ended is not None}
    if ended and rows[0].graphs:
        unblock(connection, ended)
    found = {str(row.id): Cancelled(str(row.id), row.state, row.changed) for row in rows}
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
