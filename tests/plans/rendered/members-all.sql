-- schema/fleet/members.py: ALL
SELECT CAST(s.now AS text), b.id, true AS healthy, b.cohort, b.instance, b.pool, b.kind FROM (SELECT pg_current_snapshot() AS now) s
LEFT JOIN LATERAL (SELECT * FROM bots b WHERE b.status <> 'gone' AND b.status = 'ok' AND NOT b.draining AND NOT b.closing AND b.sync_seq > 0 OFFSET 0) b ON true
