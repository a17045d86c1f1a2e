-- schema/moves/sessions.py: RECORD_SYNCS
UPDATE bots b SET sync_seq = s.seq, status = s.status, capacity = s.capacity, in_use = s.in_use, held = s.held,
    kept_units = s.kept,
    expires_at = CASE WHEN b.expires_at < now() + make_interval(secs => :ttl * 0.6666666666666666)
        THEN now() + make_interval(secs => :ttl) ELSE b.expires_at END
FROM (
    SELECT s.*, place.ctid FROM unnest(
        CAST(:ids AS bigint[]), CAST(:seqs AS bigint[]), CAST(:states AS text[]), CAST(:capacities AS integer[]),
        CAST(:in_use AS integer[]), CAST(:held AS integer[]), CAST(:kept AS integer[]))
        AS s (id, seq, status, capacity, in_use, held, kept)
    CROSS JOIN LATERAL (SELECT ctid FROM bots WHERE true AND id >= s.id AND id <= s.id ORDER BY id DESC LIMIT 1 ) place
) s
WHERE b.ctid = s.ctid
RETURNING b.id, extract(epoch FROM b.expires_at - clock_timestamp()) AS remaining
