-- schema/fleet/kinds.py: LINK_MISSED
INSERT INTO kind_platforms (platform, kind)
SELECT p.id, k.id FROM
platforms p LEFT JOIN platforms f ON f.id = p.preferred JOIN kinds k
    ON is_open_to(k.properties, k.exclusive, p.properties) OR is_open_to(k.properties, k.exclusive, f.properties)
WHERE p.created_at > now() - make_interval(secs => :age)
ON CONFLICT DO NOTHING
