-- schema/picking/preemption.py: STARVED_AMONG
WITH below AS MATERIALIZED (
    SELECT q.cohort, q.instance, i.name, q.usage, q.min_quota, c.reclaim_min, q.min_quota - q.usage - coalesce((
        SELECT sum(v.units) FROM reservations v JOIN jobs j ON j.id = v.job_id
        WHERE j.cohort = q.cohort AND j.instance = q.instance AND j.state = 'queued'), 0) AS short
    FROM quotas q JOIN instances i ON i.id = q.instance JOIN cohorts c ON c.id = q.cohort
    WHERE q.usage < q.min_quota AND NOT i.draining
        AND (CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR q.cohort = ANY (CAST(:cohorts AS integer[])))
), held AS MATERIALIZED (
    SELECT * FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) AND state = 'queued' AND (queue_deadline IS NULL OR queue_deadline > clock_timestamp() + make_interval(secs => :sync + 5.0))
)
SELECT j.id, j.public_id, j.fence, j.cohort, j.instance, b.name, j.platform, j.priority, j.units, b.usage,
    b.min_quota, b.reclaim_min, extract(epoch FROM clock_timestamp() - j.queued_at) AS waited,
    clock_timestamp() AS now, b.short
FROM held j JOIN below b ON b.cohort = j.cohort AND b.instance = j.instance
WHERE b.short > 0 AND j.queued_at <= clock_timestamp() - make_interval(secs => :delay)
ORDER BY array_position(CAST(:job_ids AS bigint[]), j.id)
