-- Return what a request does if its deduplication key is taken: `join`, `replace` or `refuse`.
CREATE OR REPLACE FUNCTION on_conflict(request jsonb) RETURNS text LANGUAGE sql IMMUTABLE
    RETURN coalesce(request->>'on_conflict', CASE WHEN request ? 'debounce' THEN 'replace' ELSE 'join' END);
