-- schema/moves/backoff.py: POSTPONE
WITH alike AS MATERIALIZED (
    SELECT j.id FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                            CAST(:units AS integer[])) AS g (cohort, instance, platform, units)
    CROSS JOIN LATERAL (
        SELECT id FROM jobs
        WHERE cohort = g.cohort AND instance = g.instance AND platform = g.platform AND units >= g.units
            AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
        ORDER BY priority, queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
), gated AS MATERIALIZED (
    SELECT j.id FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                            CAST(:units AS integer[])) AS g (cohort, instance, platform, units)
    CROSS JOIN LATERAL (
        SELECT id FROM jobs
        WHERE cohort = g.cohort AND instance = g.instance AND platform = g.platform AND units >= g.units
            AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NOT NULL
        ORDER BY cohort, instance, platform, constraint_set, rank, queued_at, id LIMIT :limit
        FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
)
UPDATE jobs j SET considered = j.considered + 1, reason = :reason,
    schedule_after = now() + make_interval(secs =>
        least(:cap, :base * 2.0 ^ least(j.considered, 30)) * (1 + 0.1 * random()))
WHERE j.id = ANY (ARRAY(SELECT id FROM alike UNION ALL SELECT id FROM gated))
RETURNING j.id
