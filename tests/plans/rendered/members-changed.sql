-- schema/fleet/members.py: CHANGED
SELECT CAST(s.now AS text), c.bot_id, coalesce(b.status = 'ok' AND NOT b.draining AND NOT b.closing AND b.sync_seq > 0, false) AS healthy, b.cohort, b.instance, b.pool, b.kind
FROM (SELECT CAST(:seen AS pg_snapshot) AS seen, pg_current_snapshot() AS now OFFSET 0) s
LEFT JOIN LATERAL (
    SELECT bot_id FROM bot_changes
    WHERE transaction >= CAST(CAST(pg_snapshot_xmin(s.seen) AS text) AS bigint) AND transaction < CAST(CAST(pg_snapshot_xmax(s.now) AS text) AS bigint)
        AND NOT pg_visible_in_snapshot(CAST(CAST(transaction AS text) AS xid8), s.seen)
    OFFSET 0) c ON true
LEFT JOIN LATERAL (SELECT * FROM bots WHERE true AND id >= c.bot_id AND id <= c.bot_id ORDER BY id DESC LIMIT 1 ) b ON true
