-- schema/picking/preemption.py: STARVED_JOBS
WITH RECURSIVE below AS MATERIALIZED (
    SELECT q.cohort, q.instance, i.name, q.usage, q.min_quota, c.reclaim_min, q.min_quota - q.usage - coalesce((
        SELECT sum(v.units) FROM reservations v JOIN jobs j ON j.id = v.job_id
        WHERE j.cohort = q.cohort AND j.instance = q.instance AND j.state = 'queued'), 0) AS short
    FROM quotas q JOIN instances i ON i.id = q.instance JOIN cohorts c ON c.id = q.cohort
    WHERE q.usage < q.min_quota AND NOT i.draining
        AND (CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR q.cohort = ANY (CAST(:cohorts AS integer[])))
), queues AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM queues q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
), resting AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM resting q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
), heads AS MATERIALIZED (
    SELECT id FROM (

    SELECT w.cohort, w.instance, h.nth, h.id, h.priority, h.queued_at FROM queues w
    JOIN below b ON b.cohort = w.cohort AND b.instance = w.instance AND b.short > 0
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at, units,
            row_number() OVER (PARTITION BY units ORDER BY priority, queued_at, id) AS nth
        FROM (
            SELECT id, priority, queued_at, units, considered, queue_deadline FROM (
                SELECT id, priority, queued_at, units, considered, queue_deadline FROM jobs
                WHERE cohort = w.cohort AND instance = w.instance AND platform = w.platform AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
                ORDER BY priority, queued_at, id LIMIT :walk) walked
            WHERE units <= b.short
            ORDER BY priority, queued_at, id LIMIT :look) first
        WHERE queued_at <= clock_timestamp() - make_interval(secs => :delay) AND true
            AND (queue_deadline IS NULL OR queue_deadline > clock_timestamp() + make_interval(secs => :sync + 5.0))
            AND NOT EXISTS (SELECT FROM reservations v WHERE v.job_id = first.id)
        ORDER BY nth, priority, queued_at, id LIMIT :limit) h
        UNION ALL

    SELECT w.cohort, w.instance, h.nth, h.id, h.priority, h.queued_at FROM resting w
    JOIN below b ON b.cohort = w.cohort AND b.instance = w.instance AND b.short > 0
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at, units,
            row_number() OVER (PARTITION BY units ORDER BY priority, queued_at, id) AS nth
        FROM (
            SELECT id, priority, queued_at, units, considered, queue_deadline FROM (
                SELECT id, priority, queued_at, units, considered, queue_deadline FROM jobs
                WHERE cohort = w.cohort AND instance = w.instance AND platform = w.platform AND state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
                ORDER BY priority, queued_at, id LIMIT :walk) walked
            WHERE units <= b.short
            ORDER BY priority, queued_at, id LIMIT :look) first
        WHERE queued_at <= clock_timestamp() - make_interval(secs => :delay) AND considered > 0
            AND (queue_deadline IS NULL OR queue_deadline > clock_timestamp() + make_interval(secs => :sync + 5.0))
            AND NOT EXISTS (SELECT FROM reservations v WHERE v.job_id = first.id)
        ORDER BY nth, priority, queued_at, id LIMIT :limit) h
    ) both_kinds
    ORDER BY nth, row_number() OVER (PARTITION BY cohort, instance ORDER BY nth, priority, queued_at, id),
        priority, queued_at, id
    LIMIT :limit
), held AS MATERIALIZED (
    SELECT * FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued'
    ORDER BY priority, queued_at, id FOR NO KEY UPDATE SKIP LOCKED
)
SELECT j.id, j.public_id, j.fence, j.cohort, j.instance, b.name, j.platform, j.priority, j.units, b.usage,
    b.min_quota, b.reclaim_min, extract(epoch FROM clock_timestamp() - j.queued_at) AS waited,
    clock_timestamp() AS now, b.short
FROM held j JOIN below b ON b.cohort = j.cohort AND b.instance = j.instance
ORDER BY j.priority, j.queued_at, j.id
