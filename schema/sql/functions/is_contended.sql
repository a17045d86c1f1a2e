-- Return whether another instance wants units of the cohort that this one's recent evictions have taken off its maximum:
-- it has a ready job in a queue that does not rest, and is below its own maximum, lowered by its own evictions.
--
-- A loose index scan finds the queues with ready jobs: one step for each, however many jobs it holds, up to the first hit.
CREATE OR REPLACE FUNCTION is_contended(cohort integer, instance integer, cooldown double precision)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    RETURN EXISTS (
        WITH RECURSIVE ready AS (
            SELECT constrained, (
                SELECT queue FROM jobs j
                WHERE j.constrained = c.constrained AND j.state = 'queued' AND j.schedule_after IS NULL AND j.units >= 1
                ORDER BY queue DESC LIMIT 1) AS queue
            FROM (VALUES (false), (true)) AS c (constrained)
            UNION ALL
            SELECT constrained, (
                SELECT queue FROM jobs j
                WHERE j.constrained = r.constrained AND j.state = 'queued' AND j.schedule_after IS NULL AND j.units >= 1
                    AND queue < r.queue
                ORDER BY queue DESC LIMIT 1)
            FROM ready r WHERE r.queue IS NOT NULL
        )
        SELECT FROM ready r CROSS JOIN LATERAL (SELECT * FROM queues WHERE id = r.queue OFFSET 0) k
        JOIN instances i ON i.id = k.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = k.cohort AND q.instance = k.instance
        WHERE k.cohort = is_contended.cohort AND k.instance <> is_contended.instance
            AND (k.schedule_after IS NULL OR k.schedule_after <= now())
            AND (q.max_quota IS NULL OR q.usage + k.units <= greatest(q.min_quota, q.max_quota - (
                SELECT count(*) FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                    AND e.at > now() - make_interval(secs => is_contended.cooldown)))));
END $$;
