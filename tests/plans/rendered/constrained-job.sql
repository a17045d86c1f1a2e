-- schema/picking/constrained.py: JOB
SELECT j.id, j.public_id::text AS public_id, j.queue, j.cohort, j.instance, j.platform, j.priority, j.units, j.locality_hint, q.tried, j.preferred, j.rank, j.queued_at, j.attempts, CAST(t.estimate AS double precision), t.seconds, t.deadline, t.priority_inputs, q.constraint_set, g.terms, i.name, i.managed, statement_timestamp() AS now
FROM jobs j JOIN (SELECT id, constraint_set, looks > 0 AS tried FROM queues) q ON q.id = j.queue
JOIN constraint_sets g ON g.id = q.constraint_set
JOIN instances i ON i.id = j.instance
LEFT JOIN job_constraints t ON t.job_id = j.id
WHERE j.id = :id
