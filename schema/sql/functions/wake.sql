-- Notify those who sleep on a topic. Returns false, and sends nothing, if nobody sleeps or `leasehold.wake` is off.
--
-- Each sleeper holds the topic's advisory lock shared, so if it can be had exclusively nobody sleeps. NOTIFY takes a lock
-- that all commits share. A transaction that notifies cannot be prepared for a two-phase commit, and is refused while the
-- server's queue of notifications is full. With the setting off, work waits for the next poll.
CREATE OR REPLACE FUNCTION wake(topic text, keys text DEFAULT '') RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('leasehold.wake', true) IS NOT DISTINCT FROM 'off' THEN
        RETURN false;
    END IF;
    IF pg_try_advisory_lock(hashtext('leasehold.idle'), hashtext(topic)) THEN
        RETURN NOT pg_advisory_unlock(hashtext('leasehold.idle'), hashtext(topic));  -- false: it was locked
    END IF;
    PERFORM pg_notify('leasehold_' || topic, CASE WHEN octet_length(keys) > 7900 THEN '' ELSE keys END);
    RETURN true;
END $$;
