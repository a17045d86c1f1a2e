-- The history of all jobs. Events of one job are in the order of their ids.
--
-- A submit is told by the row of the payload; a grant, an acknowledgement and an end by the row of the lease. Writing a
-- row of its own for each of these cost a job a fifth of its write-ahead log. All other events are stored.
CREATE OR REPLACE VIEW job_events AS
SELECT id, job_id, at, move, from_state, to_state, fence, actor, details FROM stored_events
UNION ALL
SELECT 0, p.job_id, j.created_at, 'submit', NULL, 'queued', 0, p.submitted_by, p.origin
FROM job_payloads p JOIN jobs j ON j.id = p.job_id
WHERE p.submitted_by IS NOT NULL
UNION ALL
SELECT e.id, l.job_id, e.at, e.move, e.from_state, e.to_state, e.fence, e.actor, e.details
FROM leases l CROSS JOIN LATERAL (VALUES
    (l.granted_event, l.granted_at, 'grant', 'queued', 'leased', l.fence, l.assigner, l.decision),
    (l.acknowledged_event, l.acknowledged_at, 'acknowledge', 'leased', 'running', l.fence, l.acknowledged_by, NULL),
    (l.ended_event, l.ended_at,
        CASE
            WHEN l.ended_to IN ('succeeded', 'failed') THEN 'finish'
            WHEN l.ended_to = 'cancelled' THEN 'confirm_cancel'
            WHEN l.ended_to = 'dead' THEN 'give_up'
            WHEN l.verdict IN ('failed', 'error') THEN 'retry'
            WHEN l.verdict = 'lost' THEN 'expire'
            WHEN l.verdict IN ('stopped', 'released') AND l.stop_reason = 'preempt' THEN 'evict'
            ELSE 'requeue' END,
        l.ended_from, l.ended_to, l.fence + CASE WHEN l.ended_to IN ('succeeded', 'failed') THEN 0 ELSE 1 END,
        l.ended_by, coalesce(l.report, '{}') || jsonb_build_object('verdict', l.verdict))
) AS e (id, at, move, from_state, to_state, fence, actor, details)
WHERE e.id IS NOT NULL;
