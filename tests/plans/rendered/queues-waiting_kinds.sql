-- schema/picking/queues.py: WAITING_KINDS
WITH RECURSIVE plain AS (
    SELECT (SELECT queue FROM jobs WHERE NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY queue DESC LIMIT 1) AS queue
    UNION ALL
    SELECT (SELECT queue FROM jobs WHERE NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < w.queue ORDER BY queue DESC LIMIT 1) FROM plain w WHERE w.queue IS NOT NULL
), needy AS (
    SELECT (SELECT queue FROM jobs WHERE constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY queue DESC LIMIT 1) AS queue
    UNION ALL
    SELECT (SELECT queue FROM jobs WHERE constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < w.queue ORDER BY queue DESC LIMIT 1) FROM needy w WHERE w.queue IS NOT NULL
)
SELECT k.cohort, k.units, t.terms, sum(n.jobs)::integer AS jobs
FROM queues k LEFT JOIN constraint_sets t ON t.id = k.constraint_set
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs FROM (SELECT FROM jobs WHERE constrained = (k.constraint_set IS NOT NULL) AND queue = k.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 LIMIT :most) counted) n
WHERE k.id = ANY (ARRAY(SELECT queue FROM plain UNION ALL SELECT queue FROM needy))
GROUP BY k.cohort, k.units, t.id
