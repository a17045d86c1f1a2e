SELECT j.id, j.public_id::text AS public_id, j.priority, j.units, j.locality_hint, j.preferred, j.rank, j.queued_at, j.attempts,
    CAST(t.estimate AS double precision), t.seconds, t.deadline, t.priority_inputs, w.nth
FROM unnest(
    CAST(:ids AS integer[]), CAST(:limits AS integer[]),
    CAST(:ranks AS double precision[]), CAST(:times AS timestamptz[]), CAST(:jobs AS bigint[])
) WITH ORDINALITY AS w (queue, most, rank, queued_at, job, nth)
CROSS JOIN LATERAL (
    SELECT id, public_id::text AS public_id, priority, units, locality_hint, preferred, rank, queued_at, attempts FROM jobs
    WHERE queue = w.queue AND constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND (rank, queued_at, id)
        > (coalesce(w.rank, '-infinity'), coalesce(w.queued_at, '-infinity'), coalesce(w.job, 0))
    ORDER BY queue, rank, queued_at, id
    LIMIT w.most FOR NO KEY UPDATE SKIP LOCKED) j
LEFT JOIN LATERAL (SELECT * FROM job_constraints WHERE job_id = j.id OFFSET 0) t ON true
ORDER BY w.nth, j.rank, j.queued_at, j.id
