-- schema/picking/for_bot.py: FOR_BOT
WITH RECURSIVE queues AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM queues q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
),
resting AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM resting q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
),
open_queues AS MATERIALIZED (
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
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool))
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))),
open_resting AS MATERIALIZED (
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
        FROM (SELECT cohort, instance, array_agg(platform) AS platforms FROM resting GROUP BY cohort, instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.platforms) AS p (platform)
    WHERE coalesce(w.headroom, 1) > 0
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool))
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))),
first_heads AS MATERIALIZED (
    SELECT q.cohort, q.instance, q.platform, h.id, h.priority, h.queued_at FROM open_queues q
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM (
            SELECT id, priority, queued_at, units, considered, schedule_after FROM jobs
            WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform
                AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
            ORDER BY priority, queued_at, id LIMIT :look) first
        WHERE units <= :room AND (q.headroom IS NULL OR units <= q.headroom) AND (:any OR considered = 0)
        ORDER BY priority, queued_at, id LIMIT :reach) h
    WHERE (:any OR NOT :literal)),
both_kinds AS MATERIALIZED (
        SELECT * FROM first_heads
        UNION

    SELECT q.cohort, q.instance, q.platform, h.id, h.priority, h.queued_at FROM open_queues q
    LEFT JOIN (SELECT cohort, instance, platform, count(*) AS found FROM first_heads GROUP BY 1, 2, 3) f
        ON f.cohort = q.cohort AND f.instance = q.instance AND f.platform = q.platform
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM (
    WITH RECURSIVE sizes AS (
        (SELECT units FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units <= least(:room, q.headroom)
         ORDER BY cohort, instance, platform, units LIMIT 1)
        UNION ALL
        SELECT following.units FROM sizes z CROSS JOIN LATERAL (
            SELECT units FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units > z.units AND units <= least(:room, q.headroom)
            ORDER BY cohort, instance, platform, units LIMIT 1) following
    )
    SELECT fit.* FROM (SELECT units FROM sizes LIMIT :sizes) z CROSS JOIN LATERAL (
        SELECT id, priority, queued_at, considered FROM jobs
        WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units >= z.units AND units <= z.units
        ORDER BY cohort, instance, platform, units, priority, queued_at, id LIMIT :look) fit) fit
        WHERE (:any OR considered = 0) ORDER BY priority, queued_at, id LIMIT :reach) h
    WHERE (:any OR NOT :literal) AND coalesce(f.found, 0) < :reach
        UNION ALL

    SELECT q.cohort, q.instance, q.platform, h.id, h.priority, h.queued_at FROM open_resting q
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM (
            SELECT id, priority, queued_at, units, considered, schedule_after FROM jobs
            WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform
                AND state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
            ORDER BY priority, queued_at, id LIMIT :look) first
        WHERE units <= :room AND (q.headroom IS NULL OR units <= q.headroom) AND considered > 0 AND (:any OR schedule_after >= now())
        ORDER BY priority, queued_at, id LIMIT :reach) h
    WHERE true
), ranked AS MATERIALIZED (
    SELECT b.*, coalesce(q.min_quota - q.usage, 0) < row_number() OVER (
        PARTITION BY b.cohort, b.instance ORDER BY b.priority, b.queued_at, b.id) AS beyond_minimum
    FROM both_kinds b LEFT JOIN quotas q ON q.cohort = b.cohort AND q.instance = b.instance
), heads AS MATERIALIZED (
    SELECT id FROM ranked ORDER BY beyond_minimum, priority, queued_at, id LIMIT :reach
), picked AS MATERIALIZED (
    SELECT j.id, j.public_id::text AS public_id, j.cohort, j.instance, j.platform, j.priority, j.units, j.locality_hint, j.considered
    FROM unnest(ARRAY(SELECT id FROM heads)) WITH ORDINALITY AS h (id, nth) JOIN jobs j ON j.id = h.id
    WHERE j.state = 'queued' AND (coalesce(j.schedule_after, '-infinity') = '-infinity' OR j.considered > 0)
    ORDER BY h.nth LIMIT :limit FOR NO KEY UPDATE OF j SKIP LOCKED
)
SELECT r.heads, p.* FROM (SELECT count(*) AS heads FROM heads) r LEFT JOIN picked p ON true
