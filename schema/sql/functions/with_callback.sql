-- Return a graph's callback as a node that waits for all others, in the form that `submit_normal_graph` works on.
--
-- It is checked as `CallbackRequest` is in `schema/requests.py` and refused with the same words. A node that might never
-- end is refused, because the callback would wait for it for ever. `on_failure` is that of the graph.
CREATE OR REPLACE FUNCTION with_callback(nodes jsonb, callback jsonb, on_failure text) RETURNS jsonb
LANGUAGE plpgsql STABLE AS $$
DECLARE
    runs_on text := CASE WHEN callback ? 'on' THEN callback->>'on' ELSE 'done' END;
    nos integer[] := ARRAY(SELECT (n->>'node')::integer FROM jsonb_array_elements(nodes) n);
    refused text;
BEGIN
    IF callback ?| '{node,after}' THEN
        refused := format('callback.%s: there is no such field',
            (SELECT k FROM jsonb_object_keys(callback) k WHERE k IN ('node', 'after') LIMIT 1));
    ELSIF coalesce(runs_on NOT IN ('done', 'succeeded', 'failed'), true) THEN
        refused := 'callback.on: input should be ''done'', ''succeeded'' or ''failed''';
    ELSIF 2147483647 = ANY (nos) THEN
        refused := 'callback: needs a number above those of the nodes, of which one is 2147483647';
    ELSE
        SELECT format('nodes.%s.after: %s', p.nth - 1, CASE
                WHEN p.node <> ALL (nos) THEN format('names node %s, which a callback would wait for', p.node)
                ELSE 'with a callback needs on_failure `run` or `cancel`, so that it ends' END) INTO refused
        FROM (SELECT n.nth, a.place, coalesce(a.value->>'node', a.value #>> '{}')::integer AS node,
                  coalesce(a.value->>'on_failure', on_failure) AS kind
              FROM jsonb_array_elements(nodes) WITH ORDINALITY n (value, nth)
              CROSS JOIN LATERAL jsonb_array_elements(coalesce(n.value->'after', '[]'))
                  WITH ORDINALITY a (value, place)) p
        WHERE p.node <> ALL (nos) OR p.kind = 'block' ORDER BY p.nth, p.place LIMIT 1;
    END IF;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
    END IF;
    BEGIN
        RETURN normal_requests(jsonb_build_array((callback - 'on') || jsonb_build_object(
            'node', (SELECT max(n) + 1 FROM unnest(nos) n),
            'after', (SELECT jsonb_agg(jsonb_build_object('node', n, 'on_failure',
                    CASE runs_on WHEN 'succeeded' THEN 'cancel' ELSE 'run' END) ORDER BY nth)
                FROM unnest(nos) WITH ORDINALITY AS o (n, nth)))), 'nodes')->0
            || jsonb_build_object('callback', runs_on);
    EXCEPTION WHEN invalid_parameter_value THEN
        refused := regexp_replace(SQLERRM, '^nodes\.0\.', 'callback.');
    END;
    RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
END $$;
