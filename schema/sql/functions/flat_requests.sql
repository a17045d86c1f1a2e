-- Return requests with those in the form in which requests are stored brought into the flat one, as `flat` does in
-- `schema/requests.py`, so that all of them are checked alike. Others are returned as they are.
--
-- An unknown name in a part becomes an unknown field. A part that is no object, a field that is given twice with different
-- values, and a mark without the field that it requires are refused. `place` begins the path of the field in an error.
CREATE OR REPLACE FUNCTION flat_requests(requests jsonb, place text) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    refused text;
    flat jsonb;
BEGIN
    WITH nested AS MATERIALIZED (
        SELECT r.ordinality - 1 AS n, r.value AS whole FROM jsonb_array_elements(requests) WITH ORDINALITY r
        WHERE jsonb_typeof(r.value) = 'object' AND r.value ? 'payload' AND NOT r.value ? 'command'
    ), parts AS MATERIALIZED (
        SELECT nested.n, p.nth, p.part, p.names, nested.whole->p.part AS inside
        FROM nested CROSS JOIN (VALUES
            (1, 'payload', '{"command": "command", "env": "env", "stdin": "stdin", "retry": "retry",
                "max_lost": "max_lost"}'::jsonb),
            (2, 'terms', '{"locks": "locks", "resource_class": "resource_class", "model": "model",
                "graph_priority": "graph_priority", "job_class": "job_class", "project": "project", "owner": "owner",
                "resources": "resources", "units": "units", "batch_key": "batch_key",
                "preferred_hours": "preferred_hours", "preferred_zone": "preferred_zone"}'),
            (3, 'own', '{"level": "service_level", "class": "job_class", "user_priority": "user_priority"}')
        ) AS p (nth, part, names)
        WHERE jsonb_typeof(nested.whole->p.part) <> 'null'
    ), given AS MATERIALIZED (
        SELECT n, f.key AS field, f.value, false AS is_mark, NULL AS needed, NULL AS mark
        FROM nested CROSS JOIN LATERAL jsonb_each(whole - '{payload,terms,own}'::text[]) f
        UNION ALL
        SELECT p.n, coalesce(p.names->>f.key, format('%s.%s', p.part, f.key)), f.value,
            m.mark IS NOT NULL AND f.value = 'true', m.needed, m.mark
        FROM parts p
        CROSS JOIN LATERAL jsonb_each(CASE WHEN jsonb_typeof(p.inside) = 'object' THEN p.inside ELSE '{}' END) f
        LEFT JOIN (VALUES ('terms.own', NULL), ('own.project', 'project'), ('own.fixed', 'priority'))
            AS m (mark, needed) ON m.mark = format('%s.%s', p.part, f.key)
    )
    SELECT (SELECT format('%s.%s.%s', place, c.n, c.refused) FROM (
                SELECT n, 1 AS nth, format('%s: is not an object', part) AS refused FROM parts
                WHERE jsonb_typeof(inside) <> 'object'
                UNION ALL
                SELECT n, 2, format('%s: is given twice, with different values', field) FROM given
                WHERE NOT is_mark GROUP BY n, field HAVING count(DISTINCT value) > 1
                UNION ALL
                SELECT g.n, 3, format('%s: is missing, although %s is true', g.needed, g.mark) FROM given g
                WHERE g.is_mark AND g.needed IS NOT NULL AND NOT EXISTS (
                    SELECT FROM given o WHERE o.n = g.n AND o.field = g.needed AND NOT o.is_mark AND o.value <> 'null')
            ) c ORDER BY c.n, c.nth LIMIT 1),
        (SELECT jsonb_agg(coalesce(f.request, r.value) ORDER BY r.ordinality)
            FROM jsonb_array_elements(requests) WITH ORDINALITY r
            LEFT JOIN (SELECT n, jsonb_object_agg(field, value) AS request FROM given WHERE NOT is_mark GROUP BY n) f
                ON f.n = r.ordinality - 1)
        INTO refused, flat;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN flat;
END $$;
