-- Lock the unfinished jobs that requests with deduplication keys will join, in the order of all moves, so that none ends
-- before it is joined. Before that, make the platforms and instances of these requests.
CREATE OR REPLACE FUNCTION lock_joined(requests jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM intern_platform(p.properties) FROM (
        SELECT DISTINCT normal_properties(coalesce(r->'properties', '{}')) AS properties
        FROM jsonb_array_elements(requests) r ORDER BY 1) p;
    PERFORM intern_preferred(p.properties, p.preferred) FROM (
        SELECT DISTINCT coalesce(r->'properties', '{}') AS properties, r->'preferred_properties' AS preferred
        FROM jsonb_array_elements(requests) r WHERE r ? 'preferred_properties' ORDER BY 1, 2) p;
    PERFORM intern_instance(i.name) FROM (
        SELECT DISTINCT coalesce(r->>'instance', 'default') AS name FROM jsonb_array_elements(requests) r ORDER BY 1) i;
    PERFORM FROM jobs j WHERE j.id = ANY (ARRAY(
        SELECT (SELECT s.id FROM jobs s
                WHERE s.instance = (SELECT i.id FROM instances i WHERE i.name = coalesce(r->>'instance', 'default'))
                    AND s.dedup_key = r->>'dedup_key' AND s.dedup_key IS NOT NULL
                    AND s.state IN ('queued', 'parked', 'leased', 'running'))
        FROM jsonb_array_elements(requests) r
        WHERE r->>'dedup_key' IS NOT NULL))
        ORDER BY j.id FOR NO KEY UPDATE;
END $$;
