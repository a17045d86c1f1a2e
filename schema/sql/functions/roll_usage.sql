-- Take usage that is older than the window of `seconds` off its counters; at most `minutes` buckets at once.
--
-- Usage is counted by the minute for this purpose. Returns the number of buckets. With `passing_held`, counters that
-- somebody holds keep their usage until the next time, however much it is, and everything else goes on.
CREATE OR REPLACE FUNCTION roll_usage(seconds double precision, minutes integer, passing_held boolean DEFAULT false)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    oldest timestamptz := statement_timestamp() - make_interval(secs => seconds);
    held_names text[] := '{}';
    wanted_names text[];
    locked_names text[];
    old_names text[];
    old_amounts numeric[];
    rolled_rows integer;
BEGIN
    LOOP
        SELECT array_agg(DISTINCT w.name) INTO wanted_names FROM (
            SELECT u.name FROM usage u WHERE NOT u.rolled AND u.bucket < oldest AND u.name <> ALL (held_names)
            ORDER BY u.bucket, u.name LIMIT minutes) w;
        IF NOT passing_held THEN
            PERFORM FROM counters c WHERE c.name = ANY (wanted_names) ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE;
            EXIT;
        END IF;
        locked_names := ARRAY(SELECT c.name FROM counters c WHERE c.name = ANY (wanted_names)
            ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED);
        SELECT held_names || array_agg(c.name) INTO held_names FROM counters c
            WHERE c.name = ANY (wanted_names) AND c.name <> ALL (locked_names) HAVING count(*) > 0;
        EXIT WHEN NOT FOUND;
    END LOOP;
    WITH old AS (
        UPDATE usage u SET rolled = true FROM (
            SELECT name, bucket FROM usage WHERE NOT rolled AND bucket < oldest AND name = ANY (wanted_names)
            ORDER BY bucket, name LIMIT minutes FOR NO KEY UPDATE SKIP LOCKED) o
        WHERE u.name = o.name AND u.bucket = o.bucket RETURNING u.name, u.amount
    )
    SELECT array_agg(s.name), array_agg(s.amount), coalesce(sum(s.rows), 0) INTO old_names, old_amounts, rolled_rows
        FROM (SELECT name, sum(amount) AS amount, count(*) AS rows FROM old GROUP BY name) s;
    UPDATE counters c SET used = c.used - w.amount
        FROM unnest(old_names, old_amounts) AS w (name, amount) WHERE c.name = w.name;
    RETURN rolled_rows;
END $$;
