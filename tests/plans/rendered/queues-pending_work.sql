-- schema/picking/queues.py: PENDING_WORK
SELECT EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND considered = 0 AND schedule_after <= now())
        OR EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND considered > 0 AND schedule_after <= now()) AS backoff_elapsed,
    EXISTS (
    SELECT FROM quotas q WHERE q.usage < q.min_quota
        AND (EXISTS (SELECT FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL OFFSET 0) OR EXISTS (SELECT FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL OFFSET 0))) AS below_minimum, EXISTS (SELECT FROM quotas q WHERE q.usage < q.min_quota AND EXISTS (SELECT FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NOT NULL OFFSET 0)) AS constrained_below_minimum,
    g.gated AS constrained,
    CASE WHEN g.gated THEN EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units >= 1) ELSE true END AS plain
FROM (SELECT EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NOT NULL) AS gated OFFSET 0) g
