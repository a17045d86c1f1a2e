-- schema/moves/sessions.py: OPEN
UPDATE bots b SET epoch = b.epoch + 1, session = o.session, sync_seq = 0, status = 'ok', closing = false,
    kept_units = 0, instance = o.instance, pool = o.pool, labels = o.labels, cohort = cohort_of(o.labels),
    priority = o.priority, capacity = o.capacity, kind = o.kind, host = o.host, pid = o.pid,
    kill_grace = o.kill_grace, opened_at = now(),
    expires_at = now() + make_interval(secs => :ttl)
FROM (
    SELECT id, session, instance, pool, ARRAY(SELECT jsonb_array_elements_text(labels)) AS labels, priority, capacity,
        kind, host, pid, kill_grace
    FROM unnest(
        CAST(:ids AS bigint[]), CAST(:sessions AS bytea[]), CAST(:instances AS integer[]), CAST(:pools AS text[]),
        CAST(string_to_array(:labels, chr(30)) AS jsonb[]), CAST(:priorities AS integer[]), CAST(:capacities AS integer[]),
        CAST(:bot_kinds AS integer[]), CAST(:hosts AS text[]), CAST(:pids AS integer[]),
        CAST(:graces AS double precision[]))
        AS o (id, session, instance, pool, labels, priority, capacity, kind, host, pid, kill_grace)
) o
WHERE b.id = o.id RETURNING b.name, b.id, b.epoch
