-- Lock, in one order for all submitters, what a submit with queue limits or deduplication keys needs.
--
-- Submitters to a label or an instance with a queue limit take turns, so that a count stays true until commit. So do
-- those with the same deduplication key, in 64 groups, because the server has room for few advisory locks. Then
-- platforms and instances are made, and the jobs to be joined are locked in the order of all moves, so that none ends
-- before it is joined. `of_instance` is the instance of a graph, whose nodes name none.
CREATE OR REPLACE FUNCTION prepare_submit(requests jsonb, of_instance text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('leasehold.queue'), limited.hash) FROM (
        SELECT hashtext(q.label) AS hash
        FROM queue_limits q JOIN jsonb_array_elements(requests) r ON r->>'label' = q.label
        UNION
        SELECT hashtext('instance:' || i.name) FROM (
            SELECT DISTINCT coalesce(of_instance, r->>'instance', 'default') AS name
            FROM jsonb_array_elements(requests) r) i
        WHERE queue_limit_of(i.name) IS NOT NULL ORDER BY 1) limited;
    IF NOT EXISTS (SELECT FROM jsonb_array_elements(requests) r WHERE r->>'dedup_key' IS NOT NULL) THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('leasehold.dedup'), alike.bucket) FROM (
        SELECT DISTINCT hashtext(coalesce(r->>'instance', 'default') || '/' || (r->>'dedup_key')) & 63 AS bucket
        FROM jsonb_array_elements(requests) r WHERE r->>'dedup_key' IS NOT NULL ORDER BY 1) alike;
    PERFORM intern_platform(p.properties) FROM (
        SELECT DISTINCT normal_properties(coalesce(r->'properties', '{}')) AS properties
        FROM jsonb_array_elements(requests) r ORDER BY 1) p;
    PERFORM intern_preferred(p.properties, p.preferred) FROM (
        SELECT DISTINCT coalesce(r->'properties', '{}') AS properties, r->'preferred_properties' AS preferred
        FROM jsonb_array_elements(requests) r WHERE r ? 'preferred_properties' ORDER BY 1, 2) p;
    PERFORM intern_instance(i.name) FROM (
        SELECT DISTINCT coalesce(r->>'instance', 'default') AS name FROM jsonb_array_elements(requests) r ORDER BY 1) i;
    PERFORM FROM jobs j WHERE j.id = ANY (ARRAY(
        SELECT (SELECT s.id FROM jobs s WHERE s.instance = i.id AND s.dedup_key = r->>'dedup_key'
                AND s.dedup_key IS NOT NULL AND s.state IN ('queued', 'parked', 'leased', 'running'))
        FROM jsonb_array_elements(requests) r JOIN instances i ON i.name = coalesce(r->>'instance', 'default')
        WHERE r->>'dedup_key' IS NOT NULL))
        ORDER BY j.id FOR NO KEY UPDATE;
END $$;
