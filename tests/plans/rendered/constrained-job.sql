-- schema/picking/constrained.py: JOB
SELECT j.id, j.public_id::text AS public_id, j.priority, j.units, j.locality_hint, j.preferred, j.rank, j.queued_at, j.attempts,
    CAST(t.estimate AS double precision), t.seconds, t.deadline, t.priority_inputs, q.id AS queue, q.cohort, q.instance, q.platform, q.constraint_set, i.name, g.terms, i.managed,
    q.looks > 0 AS tried, statement_timestamp() AS now
FROM jobs j JOIN queues q ON q.id = j.queue
JOIN constraint_sets g ON g.id = q.constraint_set
JOIN instances i ON i.id = j.instance
LEFT JOIN job_constraints t ON t.job_id = j.id
WHERE j.id = :id
