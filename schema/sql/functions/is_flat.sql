-- True if a request has its command at the top and not in a payload.
CREATE OR REPLACE FUNCTION is_flat(request jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_typeof(request) = 'object' AND request ? 'command'
        AND jsonb_typeof(request->'payload'->'command') IS DISTINCT FROM 'array'
$$;
