-- schema/fleet/candidates.py: AMONG
SELECT b.id, b.name, b.priority, b.capacity - b.in_use - b.kept_units AS room, b.capacity FROM unnest(CAST(:bot_ids AS bigint[])) AS drawn (id)
CROSS JOIN LATERAL (SELECT * FROM bots WHERE true AND id >= drawn.id AND id <= drawn.id ORDER BY id DESC LIMIT 1 ) b WHERE b.free
