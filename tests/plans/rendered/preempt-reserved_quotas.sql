-- schema/moves/preempt.py: RESERVED_QUOTAS
WITH involved AS MATERIALIZED (
    SELECT l.cohort, l.instance FROM bots b
    CROSS JOIN LATERAL (SELECT cohort, instance FROM leases WHERE bot_id = b.id AND state NOT IN ('completed', 'cancelled') ORDER BY granted_at DESC LIMIT greatest(b.held, 0)) l
    WHERE b.id = ANY (CAST(:bot_ids AS bigint[]))
    UNION
    SELECT j.cohort, j.instance FROM reservations v JOIN jobs j ON j.id = v.job_id
    WHERE v.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND j.state = 'queued'
)
SELECT q.cohort FROM quotas q JOIN involved i ON i.cohort = q.cohort AND i.instance = q.instance
ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q
