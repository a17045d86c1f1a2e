-- schema/fleet/kinds.py: LINK_MISSED
WITH new AS MATERIALIZED (
    SELECT id FROM platforms WHERE NOT linked ORDER BY id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), made AS (
    INSERT INTO kind_platforms (platform, kind)
    SELECT p.id, k.id FROM
platforms p LEFT JOIN platforms f ON f.id = p.preferred JOIN kinds k
    ON is_open_to(k.properties, k.exclusive, p.properties) OR is_open_to(k.properties, k.exclusive, f.properties) WHERE p.id = ANY (ARRAY(SELECT id FROM new))
    ON CONFLICT DO NOTHING RETURNING platform
), noted AS (
    UPDATE platforms SET linked = true WHERE id = ANY (ARRAY(SELECT id FROM new))
)
SELECT (SELECT count(*) FROM new) AS sets,
    ARRAY(SELECT id FROM queues WHERE platform = ANY (ARRAY(SELECT platform FROM made))) AS queues
