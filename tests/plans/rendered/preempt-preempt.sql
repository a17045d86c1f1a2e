-- schema/moves/preempt.py: PREEMPT
WITH asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = 'preempt',
        due_at = now() + make_interval(secs => :sync + (SELECT kill_grace + 6.0 FROM bots WHERE true AND id >= l.bot_id AND id <= l.bot_id ORDER BY id DESC LIMIT 1 ))
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
    WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.state IS NOT DISTINCT FROM 'active'
    RETURNING l.job_id, l.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT job_id, 'preempted', 'running', 'running', fence, :actor,
        CAST(:receipt AS jsonb) || jsonb_build_object('rule', CAST(:rule AS text)) FROM asked
    UNION ALL
    SELECT id, 'preempt', 'queued', 'queued', fence, :actor, CAST(:receipt AS jsonb) FROM jobs WHERE id = :preemptor
)
UPDATE bots SET kept_for = :instance, kept_units = kept_units + :units,
    kept_until = now() + make_interval(secs => :patience + kill_grace)
WHERE id = :bot_id
