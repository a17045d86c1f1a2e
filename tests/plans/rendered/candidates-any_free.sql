-- schema/fleet/candidates.py: ANY_FREE
WITH w AS MATERIALIZED (
    SELECT random() AS start, CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
        CAST(:platform AS integer) AS platform, (SELECT pool FROM instances WHERE id = :instance) AS pool,
        CAST(:units AS integer) AS units
), near AS MATERIALIZED (
    SELECT n.bot_id FROM w CROSS JOIN LATERAL (

    (SELECT * FROM (
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key >= w.start ORDER BY sample_key LIMIT :look)
        UNION ALL
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key < w.start ORDER BY sample_key LIMIT :look)
    ) ring LIMIT :look)
        UNION ALL
        SELECT f.bot_id FROM (
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) n
)
SELECT b.id, b.name, b.priority, b.capacity, b.capacity - b.in_use - b.reserved AS room
FROM bots b CROSS JOIN w
WHERE b.id = ANY (ARRAY(SELECT bot_id FROM near)) AND b.cohort IS NOT DISTINCT FROM w.cohort AND b.free AND b.capacity - b.in_use - b.reserved >= w.units AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool)
ORDER BY b.sample_key LIMIT :count FOR NO KEY UPDATE OF b SKIP LOCKED
