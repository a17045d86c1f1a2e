-- schema/fleet/candidates.py: KEEPING
SELECT w.nth, b.id, b.name, b.kept_units
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[])) WITH ORDINALITY AS g (cohort, instance, platform, units, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT * FROM bots WHERE kept_units >= w.units AND kept_units > 0 AND kept_for = w.instance
        AND kept_units <= capacity - in_use OFFSET 0) b
WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND b.free AND b.capacity - b.in_use - CASE WHEN b.kept_for = w.instance AND b.kept_units <= b.capacity - b.in_use THEN 0 ELSE b.kept_units END >= w.units AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool) AND EXISTS (SELECT FROM kind_platforms o WHERE o.platform = w.platform AND o.kind = b.kind OFFSET 0)
ORDER BY w.nth, b.kept_units, b.id
