-- Return properties in normal form: each has an array of distinct values, sorted by code point whatever the collation of
-- the database, as Python sorts them.
CREATE OR REPLACE FUNCTION normal_properties(given jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_object_agg(p.key, CASE jsonb_typeof(p.value)
        WHEN 'array' THEN (
            SELECT jsonb_agg(v ORDER BY v #>> '{}' COLLATE "C")
            FROM (SELECT DISTINCT v FROM jsonb_array_elements(p.value) v) found)
        ELSE jsonb_build_array(p.value) END), '{}')
    FROM jsonb_each(given) p
$$;
