-- schema/fleet/candidates.py: SOME_FREE
WITH w AS MATERIALIZED (
    SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
        CAST(:platform AS integer) AS platform, (SELECT pool FROM instances WHERE id = :instance) AS pool,
        CAST(:units AS integer) AS units)
SELECT n.* FROM w CROSS JOIN LATERAL (
    (SELECT b.id, b.name, b.priority, b.capacity - b.in_use - b.kept_units AS room, b.capacity FROM (
        SELECT kind AS offered FROM kind_platforms WHERE platform = w.platform AND (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND true OFFSET 0) k
    CROSS JOIN LATERAL ((SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END >= w.units AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT :count)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END >= w.units AND kind = k.offered AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT :count)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END >= w.units AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT :count)) b LIMIT :count)
    UNION ALL
    (SELECT b.id, b.name, b.priority, b.capacity - b.in_use - b.kept_units AS room, b.capacity FROM ((SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END >= w.units AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END >= w.units AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END >= w.units AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT ALL)) b
    WHERE NOT (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND EXISTS (SELECT FROM kind_platforms o WHERE o.platform = w.platform AND o.kind = b.kind OFFSET 0) LIMIT :count)) n LIMIT :count
