-- schema/moves/preempt.py: STILL_VALID
WITH victims AS MATERIALIZED (
    SELECT l.job_id, l.cohort, l.instance, l.units FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]))
        AS t (job_id, fence)
    JOIN leases l ON l.job_id = t.job_id AND l.fence = t.fence
    WHERE l.state IS NOT DISTINCT FROM 'active' AND l.bot_id = :bot_id
), asked AS MATERIALIZED (
    SELECT v.cohort, v.instance, sum(v.units) AS units FROM victims v GROUP BY v.cohort, v.instance
), stopping AS MATERIALIZED (
    SELECT a.cohort, a.instance, sum(l.units) AS units FROM asked a CROSS JOIN LATERAL (
        SELECT units FROM leases WHERE state = 'cancelling' AND cohort = a.cohort AND instance = a.instance OFFSET 0) l
    GROUP BY a.cohort, a.instance
), kept AS MATERIALIZED (
    SELECT coalesce(sum(b.kept_units), 0) AS units,
        count(*) FILTER (WHERE s.bot_id IS NULL
            AND b.kept_until <> now() + make_interval(secs => :patience + b.kill_grace)) AS unseen
    FROM bots b
    LEFT JOIN unnest(CAST(:seen_bots AS bigint[]), CAST(:seen_untils AS timestamptz[])) AS s (bot_id, until)
        ON s.bot_id = b.id AND s.until = b.kept_until
    WHERE b.kept_units > 0 AND b.cohort = :cohort AND b.kept_for = :instance
)
SELECT (SELECT count(*) FROM victims) = cardinality(CAST(:job_ids AS bigint[]))
    AND (SELECT b.capacity - b.in_use - b.kept_units + (SELECT sum(units) FROM victims) + coalesce((
             SELECT sum(l.units) FROM (SELECT units, state FROM leases WHERE bot_id = b.id AND state NOT IN ('completed', 'cancelled') ORDER BY granted_at DESC LIMIT greatest(b.held, 0)) l
             WHERE l.state = 'cancelling'), 0) >= :units
         FROM bots b WHERE b.id = :bot_id)
    AND NOT EXISTS (
        SELECT FROM asked a JOIN quotas q ON q.cohort = a.cohort AND q.instance = a.instance
        LEFT JOIN stopping s ON s.cohort = a.cohort AND s.instance = a.instance
        WHERE q.usage - coalesce(s.units, 0) - a.units < q.min_quota)
    AND EXISTS (
        SELECT FROM jobs p JOIN quotas q ON q.cohort = p.cohort AND q.instance = p.instance
        JOIN instances i ON i.id = p.instance AND NOT i.draining CROSS JOIN kept k
        WHERE p.id = :preemptor AND p.state = 'queued' AND k.unseen = 0
            AND (p.queue_deadline IS NULL OR p.queue_deadline > clock_timestamp() + make_interval(secs => :sync + (SELECT kill_grace + 6.0 FROM bots WHERE true AND id >= :bot_id AND id <= :bot_id ORDER BY id DESC LIMIT 1 )))
            AND q.usage + p.units + k.units <= q.min_quota)
