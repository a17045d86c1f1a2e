-- schema/moves/preempt.py: PREEMPT
WITH asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = 'preempt',
        due_at = now() + make_interval(secs => :sync + 5.0)
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
    WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.state = 'active'
    RETURNING l.job_id, l.fence
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT job_id, 'preempted', 'running', 'running', fence, :actor,
        CAST(:receipt AS jsonb) || jsonb_build_object('rule', CAST(:rule AS text)) FROM asked
    UNION ALL
    SELECT id, 'preempt', 'queued', 'queued', fence, :actor, CAST(:receipt AS jsonb) FROM jobs WHERE id = :preemptor
), rests AS (
    UPDATE jobs j SET schedule_after = clock_timestamp() + make_interval(secs => :patience),
        reason = 'a bot is being freed for it'
    WHERE j.id = :preemptor RETURNING j.id, j.units, j.schedule_after
), reserved AS (
    INSERT INTO reservations (job_id, bot_id, units, until)
    SELECT id, :bot_id, units, schedule_after FROM rests
)
UPDATE bots b SET reserved = b.reserved + r.units FROM rests r WHERE b.id = :bot_id
