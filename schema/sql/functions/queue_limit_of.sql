-- Return how many jobs of an instance may wait, null for any number. An instance without a limit has the default one.
CREATE OR REPLACE FUNCTION queue_limit_of(instance_name text) RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT q.max_queued FROM queue_limits q
    WHERE q.label IS NULL
        AND (q.instance IS NULL OR q.instance = (SELECT i.id FROM instances i WHERE i.name = instance_name))
    ORDER BY q.instance NULLS LAST LIMIT 1
$$;
