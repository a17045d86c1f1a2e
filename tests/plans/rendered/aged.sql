SELECT j.id, j.public_id::text AS public_id, j.priority, j.units, j.locality_hint, j.preferred, j.rank, j.queued_at, j.attempts,
    CAST(t.estimate AS double precision), t.seconds, t.deadline, t.priority_inputs, w.nth
FROM unnest(CAST(:ids AS integer[]), CAST(:limits AS integer[]), CAST(:skips AS integer[])) WITH ORDINALITY
    AS w (queue, most, skip, nth)
CROSS JOIN LATERAL (
    SELECT id, public_id::text AS public_id, priority, units, locality_hint, preferred, rank, queued_at, attempts FROM (
        WITH RECURSIVE ranks AS (
            SELECT first.rank, 1 AS step FROM (SELECT rank FROM jobs WHERE queue = w.queue AND constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY queue, rank LIMIT 1) first
            UNION ALL
            SELECT following.rank, r.step + 1 FROM ranks r CROSS JOIN LATERAL (
                SELECT rank FROM jobs WHERE queue = w.queue AND constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND rank > r.rank ORDER BY queue, rank LIMIT 1) following
            WHERE r.step < :ranks
        )
        SELECT c.id AS job_id, c.queued_at AS since, c.rank - least(:cap,
            :rate * greatest(extract(epoch FROM CAST(:now AS timestamptz) - c.queued_at), 0) / 3600) AS effective
        FROM ranks r CROSS JOIN LATERAL (
            SELECT id, rank, queued_at FROM jobs WHERE queue = w.queue AND rank = r.rank AND constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1
            ORDER BY queue, rank, queued_at, id LIMIT w.skip + 2 * w.most) c
        ORDER BY 3, 2, 1 LIMIT w.skip + 2 * w.most) best
    JOIN jobs ON jobs.id = best.job_id AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
    ORDER BY best.effective, best.since, best.job_id
    LIMIT w.most OFFSET w.skip FOR NO KEY UPDATE OF jobs SKIP LOCKED) j
LEFT JOIN LATERAL (SELECT * FROM job_constraints WHERE job_id = j.id OFFSET 0) t ON true
ORDER BY w.nth, j.rank, j.queued_at, j.id
