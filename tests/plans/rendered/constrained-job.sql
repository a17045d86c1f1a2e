-- schema/picking/constrained.py: JOB
SELECT j.id, j.public_id::text AS public_id, j.cohort, j.instance, j.platform, j.priority, j.units, j.locality_hint, j.considered, j.rank, j.queued_at, j.attempts, CAST(t.estimate AS double precision), t.seconds, t.deadline, t.priority_inputs, j.constraint_set, g.terms, i.name, i.managed, statement_timestamp() AS now
FROM jobs j JOIN constraint_sets g ON g.id = j.constraint_set JOIN instances i ON i.id = j.instance
LEFT JOIN job_constraints t ON t.job_id = j.id
WHERE j.id = :id
