-- schema/picking/queues.py: PENDING_WORK
SELECT EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND schedule_after <= now()) AS backoff_elapsed,
    EXISTS (SELECT FROM quotas q WHERE q.usage < q.min_quota AND EXISTS (
    SELECT FROM queues k WHERE k.instance = q.instance AND k.cohort = q.cohort AND k.constraint_set IS NULL
        AND EXISTS (SELECT FROM jobs WHERE queue = k.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 OFFSET 0) OFFSET 0)) AS below_minimum, EXISTS (SELECT FROM quotas q WHERE q.usage < q.min_quota AND EXISTS (
    SELECT FROM queues k WHERE k.instance = q.instance AND k.cohort = q.cohort AND k.constraint_set IS NOT NULL
        AND EXISTS (SELECT FROM jobs WHERE queue = k.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 OFFSET 0) OFFSET 0)) AS constrained_below_minimum,
    g.constrained,
    CASE WHEN g.constrained THEN EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND NOT constrained) ELSE true END AS plain
FROM (SELECT EXISTS (
    SELECT FROM queues q WHERE q.constraint_set IS NOT NULL AND EXISTS (SELECT FROM jobs WHERE queue = q.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 OFFSET 0)) AS constrained OFFSET 0) g
