-- schema/moves/grant.py: LOCK
SELECT b.id FROM (SELECT DISTINCT id FROM unnest(CAST(:bot_ids AS bigint[])) AS w (id) ORDER BY id) w
CROSS JOIN LATERAL (SELECT id FROM bots WHERE status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND id >= w.id AND id <= w.id ORDER BY id DESC LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) b
