-- schema/picking/queues.py: PENDING_WORK
SELECT EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND schedule_after <= now()) AS backoff_elapsed,
    EXISTS (SELECT FROM preference_waits WHERE until <= now()) AS preference_elapsed,
    EXISTS (SELECT FROM quotas q WHERE q.usage < q.min_quota AND EXISTS (
    SELECT FROM queues k WHERE k.instance = q.instance AND k.cohort = q.cohort AND k.constraint_set IS NULL
        AND EXISTS (SELECT FROM jobs WHERE constrained = (k.constraint_set IS NOT NULL) AND queue = k.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 OFFSET 0) OFFSET 0)) AS below_minimum,
    EXISTS (SELECT FROM quotas q WHERE q.usage < q.min_quota AND EXISTS (
    SELECT FROM queues k WHERE k.instance = q.instance AND k.cohort = q.cohort AND k.constraint_set IS NOT NULL
        AND EXISTS (SELECT FROM jobs WHERE constrained = (k.constraint_set IS NOT NULL) AND queue = k.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 OFFSET 0) OFFSET 0)) AS constrained_below_minimum,
    g.constrained,
    CASE WHEN g.constrained OR :quiet THEN EXISTS (SELECT FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND NOT constrained AND priority >= -1000) ELSE true END AS plain,
    (SELECT coalesce(sum(kept_units), 0)::integer FROM bots WHERE kept_units > 0) AS kept_units
FROM (SELECT EXISTS (SELECT FROM jobs WHERE constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1) AS constrained OFFSET 0) g
