"""A change of the earliest start of a waiting job. Its state stays; its place in the order is that of the new time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from leasehold.states import JobState

from schema.moves import submissions
from schema.postgres.connection import Connection
from schema.postgres.fragments import WANTED_SUBMISSIONS
from schema.postgres.statements import Statement
from schema.predicates import PAUSED_UNTIL


@dataclass(frozen=True)
class Rescheduled:
    """What a change of the start found: the job's state, None if there is no such job to see, and the time at which it
    may start at the earliest, None if that is past or if the job does not wait. `is_shared`: the caller may not change
    it, because several submissions share it."""

    public_id: str
    state: str | None
    starts_at: datetime | None
    changed: bool
    is_shared: bool = False


# A job that waits already keeps its age when it may start at once. One whose bot was lost may still run there: it never
# starts before that time is over. A node of a graph that is blocked keeps its time with the graph.
CHANGE = Statement(f"""
WITH found AS MATERIALIZED (
    SELECT j.id, j.state, j.fence, j.queued_at, nullif(j.schedule_after, {PAUSED_UNTIL}) AS schedule_after,
        greatest(now(), CAST(:schedule_after AS timestamptz),
            now() + make_interval(secs => CAST(:delay AS double precision))) AS wanted,
        CASE WHEN j.fence > 0 THEN (
            SELECT coalesce((
                SELECT CAST(e.details->>'not_before' AS timestamptz) FROM stored_events e
                WHERE e.job_id = j.id AND e.move = 'reschedule' AND e.fence = j.fence AND e.details ? 'not_before'
                ORDER BY e.id DESC LIMIT 1), nullif(j.schedule_after, {PAUSED_UNTIL})) FROM (
                SELECT verdict FROM leases l WHERE l.job_id = j.id ORDER BY l.fence DESC LIMIT 1) last
            WHERE last.verdict = 'lost') END AS not_before,
        (SELECT n.schedule_after FROM graph_nodes n WHERE n.job_id = j.id AND j.state = 'blocked') AS of_node
    FROM jobs j WHERE j.id = ANY (CAST(:ids AS bigint[]))
        AND (:shared OR j.dedup_key IS NULL OR {WANTED_SUBMISSIONS} < 2)
), judged AS MATERIALIZED (
    SELECT f.*, CASE WHEN f.wanted > now() THEN f.wanted ELSE least(f.queued_at, now()) END AS queues_at,
        nullif(greatest(f.wanted, f.not_before), now()) AS starts_at
    FROM found f
), moved AS (
    UPDATE jobs j SET queued_at = d.queues_at, schedule_after = d.starts_at,
        queue_deadline = j.queue_deadline + (d.queues_at - d.queued_at)
    FROM judged d
    WHERE j.id = d.id AND d.state IN ('queued', 'parked') AND j.state = d.state
        AND (d.queues_at <> d.queued_at OR d.starts_at IS DISTINCT FROM d.schedule_after)
    RETURNING j.id, j.state, j.fence, d.schedule_after AS before, j.schedule_after AS after, d.not_before
), of_graphs AS (
    UPDATE graph_nodes n SET schedule_after = d.starts_at, delay = NULL
    FROM judged d WHERE n.job_id = d.id AND d.state = 'blocked'
        AND (d.starts_at IS DISTINCT FROM d.of_node OR n.delay IS NOT NULL)
    RETURNING n.job_id AS id, d.state, d.fence, d.of_node AS before, n.schedule_after AS after, d.not_before
), changed AS (
    SELECT * FROM moved UNION ALL SELECT * FROM of_graphs
), preferring AS (
    UPDATE preference_waits w SET until = d.queues_at + make_interval(secs => w.seconds)
    FROM judged d JOIN moved m ON m.id = d.id WHERE w.job_id = d.id
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'reschedule', state, state, fence, :actor, jsonb_strip_nulls(jsonb_build_object(
        'before', before, 'after', after, 'not_before', not_before, 'reason', CAST(:reason AS text)))
    FROM changed
), told AS (
    SELECT wake('jobs') FROM moved WHERE state = 'queued' HAVING count(*) > 0
)
SELECT j.id, j.state, c.id IS NOT NULL AS changed, d.id IS NULL AS is_shared, (SELECT count(*) FROM told) AS woken,
    CASE WHEN c.id IS NOT NULL THEN c.after
        WHEN j.state = 'blocked' THEN d.of_node
        WHEN j.state IN ('queued', 'parked') THEN nullif(j.schedule_after, {PAUSED_UNTIL}) END
        AS starts_at
FROM jobs j LEFT JOIN judged d ON d.id = j.id LEFT JOIN changed c ON c.id = j.id
WHERE j.id = ANY (CAST(:ids AS bigint[]))
""")


def reschedule(
    connection: Connection,
    public_ids: Sequence[str],
    *,
    schedule_after: str | None = None,
    delay: float | None = None,
    instances: Sequence[str] | None,
    shared: bool = True,
    reason: str | None,
    actor: str,
) -> list[Rescheduled]:
    """Let blocked, queued and held jobs start at `schedule_after`, or `delay` seconds from now, 0 = at once, at the
    earliest; all others stay as they are.

    schedule_after: a time with an offset. Only jobs of `instances` are seen, None means all; of those, jobs that
    several submissions share are left unless `shared`. Answers are in the order of `public_ids`, which must be UUIDs.
    """
    known = submissions.find_submissions(connection, public_ids, instances=instances)
    ids = submissions.wanted_job_ids(known.values())
    submissions.lock_jobs(connection, ids)
    wanted = {"schedule_after": schedule_after, "delay": delay, "reason": reason, "actor": actor}
    found = {row.id: row for row in connection.execute(CHANGE, {"ids": ids, "shared": shared, **wanted})}
    answers = []
    for public_id in public_ids:
        submission = known.get(public_id)
        row = None if submission is None else found.get(submission.job_id)
        if submission is not None and submission.withdrawn:
            answers.append(Rescheduled(public_id, JobState.CANCELLED, None, changed=False))
        elif row is None:
            answers.append(Rescheduled(public_id, None, None, changed=False))
        else:
            answers.append(Rescheduled(public_id, row.state, row.starts_at, row.changed, row.is_shared))
    return answers
