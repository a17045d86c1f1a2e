-- schema/moves/sessions.py: HELD_BY
SELECT l.job_id, l.fence, l.bot_id, l.bot_epoch FROM bots b
CROSS JOIN LATERAL (SELECT job_id, fence, bot_id, bot_epoch FROM leases WHERE bot_id = b.id AND state NOT IN ('completed', 'cancelled') ORDER BY granted_at DESC LIMIT greatest(b.held, 0)) l
WHERE b.id = ANY (CAST(:bot_ids AS bigint[]))
