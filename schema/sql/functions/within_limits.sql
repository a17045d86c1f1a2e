-- Return requests as their jobs are to be stored under ceilings and submit rules. Raises LH004 for the first refused one.
--
-- `place` is `jobs` or `nodes` and begins the path of the field in an error; `of_instance` and `base_priority` are those
-- of a graph, for nodes without their own. Requests with a known key, or that join a job, are not refused. A time that
-- the request itself gives is refused above its ceiling. A timeout that it does not give is that of its service level or
-- the default, cut at the ceiling. A requeued job keeps the penalty of the old one, and its times cut at the ceilings of
-- now; what its owner has used is not looked at again.
CREATE OR REPLACE FUNCTION within_limits(requests jsonb, place text, of_instance text DEFAULT NULL,
    base_priority integer DEFAULT 0) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    refused record;
BEGIN
    IF NOT EXISTS (SELECT FROM ceilings UNION ALL SELECT FROM submit_rules) THEN
        RETURN requests;
    END IF;
    SELECT format('%s.%s.%s', place, a.n, f.field) AS field, f.reason INTO refused
        FROM new_requests(requests, of_instance) a
        CROSS JOIN LATERAL (
            SELECT t.nth, t.field,
                format('must be at most %s, a ceiling of the pool, of its instance or of its label', t.most) AS reason
            FROM ceiling_of(a.instance, a.request->>'label') c
            CROSS JOIN LATERAL (VALUES
                (1, 'timeout_seconds', c.max_timeout), (2, 'queue_timeout_seconds', c.max_queue_age)
            ) AS t (nth, field, most)
            WHERE (a.request->>t.field)::double precision > t.most AND NOT a.request ? 'from'
            UNION ALL
            SELECT 3, f.name || '.' || regexp_replace(left(k, 60), '[^ -~]', '?', 'g'),
                'is not among the property keys that jobs may name'
            FROM submit_rules s CROSS JOIN (VALUES ('preferred_properties'), ('properties')) AS f (name)
            CROSS JOIN LATERAL jsonb_object_keys(coalesce(a.request->f.name, '{}')) k
            WHERE (s.instance IS NULL OR s.instance = a.instance) AND k <> ALL (s.property_keys)
            UNION ALL
            SELECT 4, 'command', format('''%s'' is not among the programs that jobs may run',
                regexp_replace(left(a.request->'payload'->'command'->>0, 60), '[^ -~]', '?', 'g'))
            FROM submit_rules s
            WHERE (s.instance IS NULL OR s.instance = a.instance)
                AND coalesce(a.request->'payload'->'command'->>0, '') <> ALL (s.commands)
            UNION ALL
            SELECT 5, 'owner', format('has used %s within the rolling window, and above %s its jobs are refused',
                h.used::double precision, h.most::double precision)
            FROM heavy_use(a.instance_name, a.request->'terms'->>'owner') h
            WHERE h.penalty IS NULL AND NOT a.request ? 'from'
        ) f
        ORDER BY a.n, f.nth, f.field LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '%: %', refused.field, refused.reason
            USING ERRCODE = 'LH004', COLUMN = refused.field, DETAIL = refused.reason;
    END IF;
    RETURN (
        SELECT jsonb_agg(r.value || jsonb_strip_nulls(jsonb_build_object(
                'timeout_seconds', CASE WHEN r.value->>'timeout_seconds' IS NULL OR r.value ? 'from' THEN
                    least(coalesce((r.value->>'timeout_seconds')::double precision, l.timeout_seconds,
                        c.default_timeout), c.max_timeout) END,
                'queue_timeout_seconds', CASE WHEN r.value ? 'from' AND r.value->>'queue_timeout_seconds' IS NOT NULL
                    THEN least((r.value->>'queue_timeout_seconds')::double precision, c.max_queue_age) END,
                'lowered', h.penalty,
                'own', CASE WHEN p.priced THEN (r.value->'own') || jsonb_build_object('penalty', h.penalty) END,
                'priority', CASE WHEN NOT p.priced THEN
                    least(1000, coalesce((r.value->>'priority')::integer, base_priority) + h.penalty) END))
            ORDER BY r.ordinality)
        FROM jsonb_array_elements(requests) WITH ORDINALITY r
        CROSS JOIN LATERAL (SELECT coalesce(of_instance, r.value->>'instance', 'default') AS name) n
        LEFT JOIN LATERAL (SELECT id FROM instances WHERE name = n.name OFFSET 0) i ON true
        LEFT JOIN service_levels l ON l.name = r.value->'own'->>'level'
        CROSS JOIN LATERAL ceiling_of(i.id, r.value->>'label') c
        LEFT JOIN LATERAL heavy_use(n.name, r.value->'terms'->>'owner') h
            ON h.penalty IS NOT NULL AND NOT r.value ? 'from'
        -- The points of a class or a service level give the priority, unless the request gives one.
        LEFT JOIN LATERAL (
            SELECT r.value->>'priority' IS NULL AND coalesce(r.value->'own', '{}') ?| '{class,level}' AS priced
        ) p ON h.penalty IS NOT NULL);
END $$;
