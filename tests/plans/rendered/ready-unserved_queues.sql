-- schema/picking/ready.py: UNSERVED_QUEUES
WITH RECURSIVE queues AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM queues q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
), wanted AS MATERIALIZED (

    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM (
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()) each GROUP BY cohort, instance
    )
    SELECT w.cohort, w.instance, p.platform, w.pool, w.headroom FROM (
        SELECT g.cohort, g.instance, g.platforms, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT count(*) FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown))) END) - q.usage - coalesce(k.units, 0) AS headroom
        FROM (SELECT cohort, instance, array_agg(platform) AS platforms FROM queues GROUP BY cohort, instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.platforms) AS p (platform)
    WHERE coalesce(w.headroom, 1) > 0
        AND (CAST(:instances AS integer[]) IS NULL OR w.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR w.cohort = ANY (CAST(:cohorts AS integer[])))
)
SELECT w.cohort, w.instance, w.platform FROM wanted w
WHERE NOT EXISTS (
    SELECT FROM (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT FROM bots b
        WHERE b.id = bp.bot_id AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool)
            AND b.status = 'ok' AND NOT b.draining AND NOT b.closing AND b.capacity > 0 OFFSET 0) b
    OFFSET 0)
LIMIT :limit
