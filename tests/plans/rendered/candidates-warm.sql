-- schema/fleet/candidates.py: WARM
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[]), CAST(:counts AS integer[]), CAST(:hints AS text[]))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, hint, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT b.id, b.name, b.priority, b.capacity, b.room, near.seq
    FROM (SELECT bot_id, seq FROM bot_localities WHERE hint = w.hint ORDER BY seq DESC LIMIT :look) near
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = near.bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT c.id, c.name, c.priority, c.capacity, c.capacity - c.in_use - c.reserved AS room
        FROM (SELECT * FROM bots WHERE true AND id >= near.bot_id AND id <= near.bot_id ORDER BY id DESC LIMIT 1 ) c
        WHERE c.cohort IS NOT DISTINCT FROM w.cohort AND c.free AND c.capacity - c.in_use - c.reserved >= w.units AND (c.instance IS NULL AND c.pool IS NULL OR c.instance = w.instance OR c.pool = w.pool)
        OFFSET 0
    ) b
    ORDER BY near.seq DESC LIMIT w.count
) s
ORDER BY w.nth, s.seq DESC
