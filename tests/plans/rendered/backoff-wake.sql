-- schema/moves/backoff.py: WAKE
WITH found AS MATERIALIZED (
    SELECT id FROM queues WHERE id = ANY (CAST(:ids AS integer[])) AND looks > 0
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)

UPDATE queues q SET looks = 0, schedule_after = NULL, reason = NULL
WHERE q.id = ANY (ARRAY(SELECT id FROM found)) RETURNING q.id
