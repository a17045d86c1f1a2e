-- Return the queue of a plain job, if there is one and no upkeep is about to delete it: of a job without a label and
-- without constraints that prefers no properties. A property set whose digest is known is in normal form already.
--
-- `intern_queue` is for all other jobs, and says why the look-up compares an array, and why no lock is needed. For that
-- the planner has to put this query in the place of its call: a statement that calls it as a function takes its snapshot
-- before the lock on the table.
CREATE OR REPLACE FUNCTION known_queue(request jsonb)
RETURNS TABLE (id integer, instance integer, platform integer, units integer) LANGUAGE sql STABLE AS $$
    SELECT q.id, q.instance, q.platform, q.units
    FROM queues q
    WHERE ARRAY[q.constraint_set, q.platform, q.instance, q.units, q.cohort, q.preferred, q.required] = ARRAY[
            NULL::integer,
            (SELECT p.id FROM platforms p
                WHERE p.digest = sha256(convert_to(coalesce(request->'properties', '{}')::text, 'UTF8'))),
            (SELECT i.id FROM instances i WHERE i.name = coalesce(request->>'instance', 'default') AND NOT i.managed),
            coalesce((request->>'units')::integer, 1), 0, NULL, NULL]
        AND q.idle_since IS NULL
        AND current_setting('transaction_isolation') = 'read committed'
$$;
