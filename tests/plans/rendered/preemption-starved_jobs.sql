-- schema/picking/preemption.py: STARVED_JOBS
WITH below AS MATERIALIZED (
    SELECT q.cohort, q.instance, i.name, q.usage, q.min_quota, c.reclaim_min, q.min_quota - q.usage - coalesce((
        SELECT sum(v.units) FROM reservations v JOIN jobs j ON j.id = v.job_id
        WHERE j.cohort = q.cohort AND j.instance = q.instance AND j.state = 'queued'), 0) AS short
    FROM quotas q JOIN instances i ON i.id = q.instance JOIN cohorts c ON c.id = q.cohort
    WHERE q.usage < q.min_quota AND NOT i.draining
        AND (CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR q.cohort = ANY (CAST(:cohorts AS integer[])))
), heads AS MATERIALIZED (
    SELECT id FROM (
    SELECT w.cohort, w.instance, h.* FROM below b
    JOIN queues w ON w.cohort = b.cohort AND w.instance = b.instance AND w.units <= b.short AND w.constraint_set IS NULL
    CROSS JOIN LATERAL (
        SELECT row_number() OVER (ORDER BY rank, queued_at, id) AS nth, id, rank, queued_at
        FROM (
            SELECT id, rank, queued_at, queue_deadline FROM jobs WHERE queue = w.id AND NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1
            ORDER BY queue, rank, queued_at, id LIMIT :look) first
        WHERE queued_at <= clock_timestamp() - make_interval(secs => :delay)
            AND (queue_deadline IS NULL OR queue_deadline > clock_timestamp() + make_interval(secs => :sync + 5.0))
            AND NOT EXISTS (SELECT FROM reservations v WHERE v.job_id = first.id)
        ORDER BY nth LIMIT :limit) h) found
    ORDER BY nth, row_number() OVER (PARTITION BY cohort, instance ORDER BY nth, rank, queued_at, id),
        rank, queued_at, id
    LIMIT :limit
), held AS MATERIALIZED (
    SELECT * FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued'
    ORDER BY rank, queued_at, id FOR NO KEY UPDATE SKIP LOCKED
)
SELECT j.id, j.public_id, j.fence, j.cohort, j.instance, b.name, j.platform, j.priority, j.units, b.usage,
    b.min_quota, b.reclaim_min, extract(epoch FROM clock_timestamp() - j.queued_at) AS waited,
    clock_timestamp() AS now, b.short
FROM held j JOIN below b ON b.cohort = j.cohort AND b.instance = j.instance
ORDER BY j.rank, j.queued_at, j.id
