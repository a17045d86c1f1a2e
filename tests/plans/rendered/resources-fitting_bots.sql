-- schema/fleet/resources.py: FITTING_BOTS
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool, random() AS start,
        greatest(:look, g.count * :ring) AS look
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[]), CAST(:counts AS integer[]),
                CAST(:needs AS jsonb[]))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, need, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT b.* FROM
    (

    (SELECT * FROM (
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key >= w.start ORDER BY sample_key LIMIT w.look)
        UNION ALL
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key < w.start ORDER BY sample_key LIMIT w.look)
    ) ring LIMIT w.look)
        UNION
        SELECT f.bot_id FROM (
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.look)
    ) ring LIMIT w.look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.look)
    ) ring LIMIT w.look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key >= w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key < w.start ORDER BY cohort, instance, pool, sample_key LIMIT w.look)
    ) ring LIMIT w.look)) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) near
    CROSS JOIN LATERAL (
        SELECT c.id, c.name, c.priority, c.capacity, c.capacity - c.in_use - c.reserved AS room, c.sample_key
        FROM (SELECT * FROM bots WHERE true AND id >= near.bot_id AND id <= near.bot_id ORDER BY id DESC LIMIT 1 ) c
        WHERE c.cohort IS NOT DISTINCT FROM w.cohort AND c.free AND c.capacity - c.in_use - c.reserved >= w.units AND (c.instance IS NULL AND c.pool IS NULL OR c.instance = w.instance OR c.pool = w.pool)
        OFFSET 0
    ) b
    WHERE NOT EXISTS (
        SELECT FROM jsonb_each_text(w.need) n JOIN counters k ON k.name = 'bot:' || b.id || ':' || n.key
        WHERE k.used + CAST(n.value AS numeric) > k.most)
    ORDER BY b.sample_key < w.start, b.sample_key LIMIT w.count
) s
