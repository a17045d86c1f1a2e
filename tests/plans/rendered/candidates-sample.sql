-- schema/fleet/candidates.py: SAMPLE
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest((SELECT CAST(:cohorts AS integer[])), (SELECT CAST(:instances AS integer[])),
                (SELECT CAST(:platforms AS integer[])), (SELECT CAST(:units AS integer[])),
                (SELECT CAST(:counts AS integer[])), (SELECT CAST(:starts AS double precision[])))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, start, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT b.id, b.name, b.priority, b.capacity, b.room
    FROM (

    (SELECT * FROM (
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key >= w.start ORDER BY sample_key LIMIT w.count * :ring)
        UNION ALL
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key < w.start ORDER BY sample_key LIMIT w.count * :ring)
    ) ring LIMIT w.count * :ring)
        UNION
        SELECT f.bot_id FROM (
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.count * :ring)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.count * :ring)
    ) ring LIMIT w.count * :ring)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.count * :ring)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.count * :ring)
    ) ring LIMIT w.count * :ring)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.count * :ring)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.count * :ring)
    ) ring LIMIT w.count * :ring)) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) near
    CROSS JOIN LATERAL (
        SELECT c.id, c.name, c.priority, c.capacity, c.capacity - c.in_use - c.reserved AS room, c.sample_key
        FROM (SELECT * FROM bots WHERE true AND id >= near.bot_id AND id <= near.bot_id ORDER BY id DESC LIMIT 1 ) c
        WHERE c.cohort IS NOT DISTINCT FROM w.cohort AND c.free AND c.capacity - c.in_use - c.reserved >= w.units AND (c.instance IS NULL AND c.pool IS NULL OR c.instance = w.instance OR c.pool = w.pool)
        OFFSET 0
    ) b
    ORDER BY b.sample_key < w.start, b.sample_key LIMIT w.count
) s
