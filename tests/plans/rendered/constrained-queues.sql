-- schema/picking/constrained.py: QUEUES
WITH RECURSIVE gated AS (
    SELECT first.*, 1 AS nth FROM (
    SELECT cohort, instance, platform, constraint_set FROM jobs
    WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NOT NULL AND (cohort, instance, platform, constraint_set) < (:cohort, :instance, :platform, :constraint_set)
    ORDER BY cohort DESC, instance DESC, platform DESC, constraint_set DESC LIMIT 1) first
    UNION ALL
    SELECT following.*, g.nth + 1 FROM gated g
    CROSS JOIN LATERAL (
    SELECT cohort, instance, platform, constraint_set FROM jobs
    WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NOT NULL AND (cohort, instance, platform, constraint_set) < (g.cohort, g.instance, g.platform, g.constraint_set)
    ORDER BY cohort DESC, instance DESC, platform DESC, constraint_set DESC LIMIT 1) following
    WHERE g.nth < :queues
), queues AS MATERIALIZED (
    SELECT DISTINCT cohort, instance, platform FROM gated
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
), roomy AS MATERIALIZED (
    SELECT id, cohort, instance, pool, capacity - in_use - reserved AS units FROM bots
    WHERE free AND (CAST(:cohorts AS integer[]) IS NULL OR cohort = ANY (CAST(:cohorts AS integer[]))) LIMIT :batch
), room AS MATERIALIZED (
    SELECT least(:batch, coalesce(sum(units), 0)) AS jobs FROM roomy
), served AS MATERIALIZED (
    SELECT w.*, row_number() OVER () AS nth FROM wanted w WHERE (SELECT jobs FROM room) > 0 AND (
    EXISTS (
        SELECT FROM (SELECT * FROM roomy LIMIT 2) b
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = b.id OFFSET 0) bp
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool) OFFSET 0)
    OR EXISTS (
        SELECT FROM (
    (SELECT * FROM (
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key >= :start ORDER BY sample_key LIMIT :look)
        UNION ALL
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key < :start ORDER BY sample_key LIMIT :look)
    ) ring LIMIT :look)) near
        CROSS JOIN LATERAL (
            SELECT FROM bots b
            WHERE b.id = near.bot_id AND b.free AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool) OFFSET 0) b
        OFFSET 0)
    OR EXISTS (
        SELECT FROM (
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)) near
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = near.bot_id OFFSET 0) bp
        OFFSET 0))
), judged AS MATERIALIZED (
    SELECT g.*, w.cohort IS NOT NULL AS open, s.nth IS NOT NULL AS served, w.headroom FROM gated g
    FULL JOIN wanted w ON w.cohort = g.cohort AND w.instance = g.instance AND w.platform = g.platform
    FULL JOIN served s ON s.cohort = g.cohort AND s.instance = g.instance AND s.platform = g.platform
)
SELECT g.*, i.name, i.managed, t.terms, (SELECT jobs FROM room) AS free_units,
    greatest(q.min_quota - q.usage, 0) AS missing_units, statement_timestamp() AS now, EXISTS (SELECT FROM backpressure) AS pressed
FROM judged g
JOIN constraint_sets t ON t.id = g.constraint_set
JOIN instances i ON i.id = g.instance
LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
ORDER BY g.nth
