WITH below AS MATERIALIZED (
    SELECT q.cohort, q.instance, i.name, q.usage, q.min_quota, c.reclaim_min, k.units AS kept, k.bot_ids, k.untils,
        q.min_quota - q.usage - k.units AS short
    FROM quotas q JOIN instances i ON i.id = q.instance JOIN cohorts c ON c.id = q.cohort
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(kept_units), 0)::integer AS units, array_agg(id) AS bot_ids,
            array_agg(kept_until) AS untils FROM bots
        WHERE kept_units > 0 AND kept_for = q.instance AND cohort = q.cohort OFFSET 0) k
    WHERE q.usage < q.min_quota AND NOT i.draining
        AND (CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR q.cohort = ANY (CAST(:cohorts AS integer[])))
), heads AS MATERIALIZED (
    SELECT id FROM (
    SELECT w.cohort, w.instance, h.* FROM below b
    JOIN queues w ON w.cohort = b.cohort AND w.instance = b.instance AND w.units <= b.short + b.kept
        AND w.constraint_set IS NULL
    CROSS JOIN LATERAL (
        SELECT row_number() OVER (ORDER BY rank, queued_at, id) AS nth, id, rank, queued_at
        FROM (
            SELECT id, rank, queued_at, queue_deadline FROM jobs WHERE queue = w.id AND NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1
            ORDER BY queue, rank, queued_at, id LIMIT :look + b.kept) first
        WHERE queued_at <= clock_timestamp() - make_interval(secs => :delay)
            AND (queue_deadline IS NULL OR queue_deadline > clock_timestamp() + make_interval(secs => :sync + 6.0))
        ORDER BY nth LIMIT :limit + b.kept) h) found
    ORDER BY nth, row_number() OVER (PARTITION BY cohort, instance ORDER BY nth, rank, queued_at, id),
        rank, queued_at, id
    LIMIT :limit + (SELECT coalesce(sum(kept), 0) FROM below)
), wanting AS MATERIALIZED (
    SELECT * FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued'
        AND (NOT EXISTS (SELECT FROM pauses WHERE kind IN ('label', 'task')) OR (pause_of(jobs.id, jobs.label, jobs.instance)).kind IS NULL)
), keeping AS MATERIALIZED (
    SELECT g.*, k.bots FROM (
        SELECT DISTINCT w.cohort, w.instance, w.platform, w.units
        FROM wanting w JOIN below b ON b.cohort = w.cohort AND b.instance = w.instance AND b.kept > 0) g
    CROSS JOIN LATERAL (
        SELECT jsonb_object_agg(k.id, k.kept_units) AS bots FROM bots k
        WHERE k.kept_units >= g.units AND k.kept_units > 0 AND k.kept_for = g.instance AND k.cohort = g.cohort
            AND EXISTS (SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (g.platform, k.kind) AND (o.platform, o.kind) <= (g.platform, k.kind) OFFSET 0) OFFSET 0) k
)
SELECT j.id, j.public_id, j.fence, j.cohort, j.instance, b.name, j.platform, j.priority, j.units, b.usage,
    b.min_quota, b.reclaim_min, extract(epoch FROM clock_timestamp() - j.queued_at) AS waited,
    clock_timestamp() AS now, j.queue_deadline, b.short, b.bot_ids, b.untils, k.bots AS kept_bots
FROM wanting j JOIN below b ON b.cohort = j.cohort AND b.instance = j.instance
LEFT JOIN keeping k ON k.cohort = j.cohort AND k.instance = j.instance AND k.platform = j.platform
    AND k.units = j.units
ORDER BY j.rank, j.queued_at, j.id
