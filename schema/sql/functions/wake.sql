-- Notify those who sleep on a topic. Returns false, and sends nothing, if nobody sleeps.
--
-- NOTIFY takes a lock that all commits share.
CREATE OR REPLACE FUNCTION wake(topic text, keys text DEFAULT '') RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF is_awaited(topic) THEN
        PERFORM pg_notify('leasehold_' || topic, CASE WHEN octet_length(keys) > 7900 THEN '' ELSE keys END);
        RETURN true;
    END IF;
    RETURN false;
END $$;
