-- Return the requests that will make or replace a job, with their positions from 0, and the names and ids of their
-- instances.
--
-- A request with a known key, that joins a job, or whose deduplication key is kept, makes none. `lock_joined` has locked
-- the jobs to be joined. The id is null for an instance that has no row yet. `of_instance` is the instance of a graph,
-- whose nodes name none. `replaced_label` is the label of the waiting job that is replaced, which is counted already;
-- null if there is none.
CREATE OR REPLACE FUNCTION new_requests(requests jsonb, of_instance text DEFAULT NULL)
RETURNS TABLE (n integer, request jsonb, instance_name text, instance integer, replaced_label text)
LANGUAGE sql STABLE AS $$
    SELECT a.n, a.request, a.name, i.id, CASE WHEN s.state IN ('queued', 'parked') THEN s.label END
    FROM (
        SELECT (r.ordinality - 1)::integer AS n, r.value AS request,
            coalesce(of_instance, r.value->>'instance', 'default') AS name
        FROM jsonb_array_elements(requests) WITH ORDINALITY r) a
    LEFT JOIN LATERAL (SELECT id FROM instances WHERE name = a.name OFFSET 0) i ON true
    LEFT JOIN LATERAL (
        SELECT s.state, s.label FROM jobs s WHERE s.instance = i.id AND s.dedup_key = a.request->>'dedup_key'
            AND s.dedup_key IS NOT NULL AND s.state IN ('queued', 'parked', 'leased', 'running') OFFSET 0) s ON true
    WHERE (SELECT true FROM submit_keys k WHERE k.instance = i.id AND k.key = a.request->>'key') IS NULL
        AND (s.state IS NULL OR on_conflict(a.request) = 'replace')
        AND (a.request->>'dedup_key' IS NULL OR NOT EXISTS (SELECT FROM kept_key(i.id, a.request->>'dedup_key')))
$$;
