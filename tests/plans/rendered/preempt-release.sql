-- schema/moves/preempt.py: RELEASE
WITH over AS MATERIALIZED (
    SELECT id, kept_units FROM bots WHERE kept_units > 0 AND (kept_until < clock_timestamp() OR NOT (status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0)) ORDER BY kept_for LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE bots b SET kept_units = 0 FROM over o WHERE b.id = o.id
RETURNING b.id, b.name, (SELECT name FROM instances WHERE id = b.kept_for) AS instance, o.kept_units,
    b.capacity - b.in_use AS room
