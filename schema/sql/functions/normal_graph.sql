-- Return a graph in the form that `submit_normal_graph` works on: `normal_requests` for graphs.
--
-- It is checked as `GraphRequest` is in `schema/requests.py` and refused with the same words.
CREATE OR REPLACE FUNCTION normal_graph(request jsonb) RETURNS jsonb LANGUAGE plpgsql STABLE AS $$
DECLARE
    refused text;
    edges bigint;
    nodes jsonb;
    callback jsonb := nullif(request->'callback', 'null');
BEGIN
    IF jsonb_typeof(request) <> 'object' THEN
        RAISE EXCEPTION 'request: input should be an object' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT regexp_replace(left(c.key, 60), '[^ -~]', '?', 'g') || c.refused INTO refused FROM (
        SELECT f.nth, coalesce(g.key, f.name) AS key, CASE
            WHEN f.name IS NULL THEN ': there is no such field'
            WHEN g.key IS NULL AND f.name IN ('name', 'nodes') THEN ': field required'
            WHEN f.kind = 'callback' THEN
                CASE WHEN jsonb_typeof(g.value) NOT IN ('object', 'null') THEN ': input should be an object' END
            WHEN g.key IS NOT NULL AND (NOT f.nullable OR jsonb_typeof(g.value) <> 'null') THEN
                refusal(f.kind, f.at_least, f.at_most, g.value) END AS refused
        FROM jsonb_each(request) g
        FULL JOIN (VALUES
            (1, 'name', 'name', false, NULL, NULL),
            (2, 'instance', 'name', true, NULL, NULL),
            (3, 'key', 'text', true, 1, 200),
            (4, 'priority', 'integer', false, -1000, 1000),
            (5, 'on_failure', 'on_failure', false, NULL, NULL),
            (6, 'on_phantom', 'on_phantom', false, NULL, NULL),
            (7, 'fair_share', 'boolean', false, NULL, NULL),
            (8, 'nodes', 'nodes', false, 1, 10000),
            (9, 'callback', 'callback', true, NULL, NULL)
        ) AS f (nth, name, kind, nullable, at_least, at_most) ON f.name = g.key) c
        WHERE c.refused IS NOT NULL ORDER BY c.nth LIMIT 1;
    IF refused IS NULL THEN
        nodes := flat_requests(request->'nodes', 'nodes');
        SELECT format('nodes.%s%s', n.ordinality - 1, c.refused) INTO refused
            FROM jsonb_array_elements(nodes) WITH ORDINALITY n
            CROSS JOIN LATERAL (SELECT CASE
                WHEN jsonb_typeof(n.value) <> 'object' THEN ': input should be an object'
                WHEN n.value ? 'command' THEN '.payload: there is no such field'
                ELSE '.command: field required' END AS refused) c
            WHERE NOT is_flat(n.value) ORDER BY n.ordinality LIMIT 1;
    END IF;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
    END IF;
    nodes := normal_requests(nodes, 'nodes');
    IF callback IS NOT NULL THEN
        nodes := nodes || with_callback(nodes, callback, coalesce(request->>'on_failure', 'block'));
    END IF;
    SELECT sum(jsonb_array_length(n->'after')) INTO edges FROM jsonb_array_elements(nodes) n
        WHERE jsonb_typeof(n->'after') = 'array';
    IF edges > 100000 THEN
        RAISE EXCEPTION 'nodes: have % dependencies, at most 100000 are allowed', edges
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN jsonb_build_object('name', request->'name', 'instance', coalesce(request->>'instance', 'default'),
            'priority', coalesce(request->'priority', '0'), 'on_failure', coalesce(request->>'on_failure', 'block'),
            'on_phantom', coalesce(request->>'on_phantom', 'warn'), 'nodes', nodes)
        || CASE WHEN (request->>'fair_share')::boolean THEN '{"fair_share": true}' ELSE '{}'::jsonb END
        || CASE WHEN request->>'key' IS NOT NULL THEN jsonb_build_object('key', request->'key') ELSE '{}' END;
END $$;
