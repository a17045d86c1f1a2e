-- True if somebody sleeps on a topic: each sleeper holds the topic's advisory lock shared, so if it can be had exclusively
-- nobody sleeps.
CREATE OR REPLACE FUNCTION is_awaited(topic text) RETURNS boolean LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN pg_try_advisory_lock(hashtext('leasehold.idle'), hashtext(topic))
        THEN NOT pg_advisory_unlock(hashtext('leasehold.idle'), hashtext(topic)) ELSE true END
$$;
