-- schema/moves/backoff.py: WAKE_FOR_BOTS
WITH roomy AS MATERIALIZED (
    SELECT c.kind, c.cohort, c.instance, c.pool, r.room AS capacity
    FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:rooms AS integer[])) AS r (bot_id, room)
    CROSS JOIN LATERAL (SELECT * FROM bots WHERE true AND id >= r.bot_id AND id <= r.bot_id ORDER BY id DESC LIMIT 1 ) c
), resting AS MATERIALIZED (
    SELECT q.id, q.cohort, q.instance, q.platform, q.units, i.pool FROM queues q
    CROSS JOIN LATERAL (SELECT pool FROM instances WHERE id = q.instance OFFSET 0) i
    WHERE q.schedule_after > now()
), found AS MATERIALIZED (
    SELECT id FROM queues WHERE id = ANY (ARRAY(
        SELECT w.id FROM resting w WHERE EXISTS (
            SELECT FROM roomy b
            WHERE b.cohort = w.cohort AND b.capacity >= w.units AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool)
                AND EXISTS (SELECT FROM kind_platforms o WHERE o.platform = w.platform AND o.kind = b.kind OFFSET 0) OFFSET 0)))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)

UPDATE queues q SET looks = 0, schedule_after = NULL, reason = NULL
WHERE q.id = ANY (ARRAY(SELECT id FROM found)) RETURNING q.id
