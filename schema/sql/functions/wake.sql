-- Notify those who sleep on a topic. Returns false, and sends nothing, if nobody sleeps.
--
-- NOTIFY takes a lock that all commits share. Each sleeper holds the topic's advisory lock shared, so if it can be had
-- exclusively nobody sleeps.
CREATE OR REPLACE FUNCTION wake(topic text, keys text DEFAULT '') RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_lock(hashtext('leasehold.idle'), hashtext(topic)) THEN
        RETURN NOT pg_advisory_unlock(hashtext('leasehold.idle'), hashtext(topic));
    END IF;
    PERFORM pg_notify('leasehold_' || topic, CASE WHEN octet_length(keys) > 7900 THEN '' ELSE keys END);
    RETURN true;
END $$;
