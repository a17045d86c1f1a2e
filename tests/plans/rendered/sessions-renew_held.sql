-- schema/moves/sessions.py: RENEW_HELD
WITH due AS MATERIALIZED (
    SELECT b.id FROM unnest(CAST(:ids AS bigint[]), CAST(:epochs AS bigint[])) AS held (id, epoch)
    JOIN bots b ON b.id = held.id AND b.epoch = held.epoch
    WHERE NOT b.closing AND b.status <> 'gone'
        AND b.expires_at < now() + make_interval(secs => :ttl * 0.5)
    ORDER BY b.id FOR NO KEY UPDATE OF b SKIP LOCKED
)
UPDATE bots b SET expires_at = now() + make_interval(secs => :ttl) FROM due WHERE b.id = due.id
RETURNING b.id, b.epoch
