-- Take usage that is older than the window of `seconds` off its counters; at most `minutes` buckets at once.
--
-- Usage is counted by the minute for this purpose. Returns the number of buckets.
CREATE OR REPLACE FUNCTION roll_usage(seconds double precision, minutes integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    old_names text[];
    old_amounts numeric[];
    found integer;
BEGIN
    PERFORM FROM counters c WHERE c.name IN (
        SELECT u.name FROM usage u
        WHERE NOT u.rolled AND u.bucket < statement_timestamp() - make_interval(secs => seconds)
        ORDER BY u.bucket, u.name LIMIT minutes) ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE;
    WITH old AS (
        UPDATE usage u SET rolled = true FROM (
            SELECT name, bucket FROM usage
            WHERE NOT rolled AND bucket < statement_timestamp() - make_interval(secs => seconds)
            ORDER BY bucket, name LIMIT minutes FOR NO KEY UPDATE SKIP LOCKED) o
        WHERE u.name = o.name AND u.bucket = o.bucket RETURNING u.name, u.amount
    )
    SELECT array_agg(s.name), array_agg(s.amount), coalesce(sum(s.rows), 0) INTO old_names, old_amounts, found
        FROM (SELECT name, sum(amount) AS amount, count(*) AS rows FROM old GROUP BY name) s;
    UPDATE counters c SET used = c.used - w.amount
        FROM unnest(old_names, old_amounts) AS w (name, amount) WHERE c.name = w.name;
    RETURN found;
END $$;
