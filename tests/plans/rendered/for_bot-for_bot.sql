-- schema/picking/for_bot.py: FOR_BOT
WITH RECURSIVE waiting AS (
    SELECT (SELECT queue FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY queue DESC LIMIT 1) AS queue
    UNION ALL
    SELECT (SELECT queue FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < w.queue ORDER BY queue DESC LIMIT 1) FROM waiting w WHERE w.queue IS NOT NULL
), offered AS MATERIALIZED (
    SELECT q.* FROM (
    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM (
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()) each GROUP BY cohort, instance
    )
    SELECT k.id AS queue, w.cohort, w.instance, k.platform, k.units, k.looks, w.pool, w.headroom FROM (
        SELECT g.cohort, g.instance, g.members, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT count(*) FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown))) END) - q.usage - coalesce(k.units, 0) AS headroom
        FROM (SELECT k.cohort, k.instance, array_agg(k) AS members FROM queues k
              WHERE k.id = ANY (ARRAY(SELECT queue FROM waiting)) AND k.constraint_set IS NULL AND k.units <= :room
              GROUP BY k.cohort, k.instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.members) AS k
    WHERE (w.headroom IS NULL OR k.units <= w.headroom)
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool))
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))
    AND (:any OR k.schedule_after >= now() OR NOT :literal AND k.looks = 0)) q
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
), first_heads AS MATERIALIZED (
    SELECT q.cohort, q.instance, h.* FROM offered q CROSS JOIN LATERAL (
        SELECT id, rank, queued_at FROM jobs WHERE queue = q.queue AND state = 'queued' AND schedule_after IS NULL AND units >= 1
        ORDER BY rank, queued_at, id LIMIT :reach) h
), ranked AS MATERIALIZED (
    SELECT b.*, coalesce(q.min_quota - q.usage, 0) < row_number() OVER (
        PARTITION BY b.cohort, b.instance ORDER BY b.rank, b.queued_at, b.id) AS beyond_minimum
    FROM first_heads b LEFT JOIN quotas q ON q.cohort = b.cohort AND q.instance = b.instance
), heads AS MATERIALIZED (
    SELECT id FROM ranked ORDER BY beyond_minimum, rank, queued_at, id LIMIT :reach
), picked AS MATERIALIZED (
    SELECT j.id, j.public_id::text AS public_id, j.queue, j.cohort, j.instance, j.platform, j.priority, j.units, j.locality_hint
    FROM unnest(ARRAY(SELECT id FROM heads)) WITH ORDINALITY AS h (id, nth) JOIN jobs j ON j.id = h.id
    WHERE state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
    ORDER BY h.nth LIMIT :limit FOR NO KEY UPDATE OF j SKIP LOCKED
)
SELECT r.heads, p.*, p.queue = ANY (ARRAY(SELECT queue FROM offered WHERE looks > 0)) AS tried
FROM (SELECT count(*) AS heads FROM heads) r LEFT JOIN picked p ON true
