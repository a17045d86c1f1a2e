-- schema/fleet/candidates.py: WARM
SELECT w.nth, s.id, s.name, s.priority, s.room, s.capacity
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[]), CAST(:counts AS integer[]), CAST(:hints AS text[]))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, hint, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT b.*, near.seq
    FROM (SELECT bot_id, seq FROM bot_localities WHERE hint = w.hint ORDER BY seq DESC LIMIT :look) near
    CROSS JOIN LATERAL (
        SELECT b.id, b.name, b.priority, b.capacity - b.in_use - b.kept_units AS room, b.capacity FROM (SELECT * FROM bots WHERE true AND id >= near.bot_id AND id <= near.bot_id ORDER BY id DESC LIMIT 1 ) b WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND b.free AND b.capacity - b.in_use - CASE WHEN b.kept_for = w.instance AND b.kept_units <= b.capacity - b.in_use THEN 0 ELSE b.kept_units END >= w.units AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool) AND EXISTS (SELECT FROM kind_platforms o WHERE o.platform = w.platform AND o.kind = b.kind OFFSET 0) OFFSET 0
    ) b
    ORDER BY near.seq DESC LIMIT w.count
) s
ORDER BY w.nth, s.seq DESC
