-- Return properties in normal form: each has a sorted array of distinct values.
CREATE OR REPLACE FUNCTION normal_properties(given jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_object_agg(p.key, CASE jsonb_typeof(p.value)
        WHEN 'array' THEN (SELECT jsonb_agg(DISTINCT v ORDER BY v) FROM jsonb_array_elements(p.value) v)
        ELSE jsonb_build_array(p.value) END), '{}')
    FROM jsonb_each(given) p
$$;
