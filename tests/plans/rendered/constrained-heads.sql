-- schema/picking/constrained.py: HEADS
SELECT j.id, j.public_id::text AS public_id, j.cohort, j.instance, j.platform, j.priority, j.units, j.locality_hint, j.considered, j.rank, j.queued_at, j.attempts, CAST(t.estimate AS double precision), t.seconds, t.deadline, t.priority_inputs, q.nth
FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
            CAST(:constraint_sets AS integer[]), CAST(:limits AS integer[]), CAST(:skips AS integer[])) WITH ORDINALITY
    AS q (cohort, instance, platform, constraint_set, most, skip, nth)
CROSS JOIN LATERAL (
    SELECT id, public_id::text AS public_id, cohort, instance, platform, priority, units, locality_hint, considered, rank, queued_at, attempts FROM jobs
    WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform
        AND constraint_set = q.constraint_set AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NOT NULL
    ORDER BY cohort, instance, platform, constraint_set, rank, queued_at, id
    LIMIT q.most OFFSET q.skip FOR NO KEY UPDATE SKIP LOCKED) j
LEFT JOIN LATERAL (SELECT * FROM job_constraints WHERE job_id = j.id OFFSET 0) t ON true
ORDER BY q.nth, j.rank, j.queued_at, j.id
