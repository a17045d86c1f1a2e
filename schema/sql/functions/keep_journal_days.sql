-- Make the days of the journal that are needed, and drop one that has been kept for `age` seconds. 0: keep none.
--
-- Needed are today, tomorrow, and the days on which jobs ended that are still there. Returns whether it has left some to
-- the next call. It runs with the rights of the tables' owner, because processes of the pool may have rights on rows
-- only; nobody gets more by it than by the right to delete rows of the journal, which it asks for.
--
-- A day becomes part of the journal beside readers and writers. Dropping one needs a moment without any: one that does
-- not come within a fifth of a second is left to the next call.
CREATE OR REPLACE FUNCTION keep_journal_days(age double precision) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    caller name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
    today timestamp := date_trunc('day', now() AT TIME ZONE 'UTC');
    oldest timestamp := date_trunc('day', (now() - make_interval(secs => age)) AT TIME ZONE 'UTC');
    one record;
    made integer := 0;
BEGIN
    IF NOT has_table_privilege(caller, 'journal', 'DELETE') THEN
        RAISE EXCEPTION 'permission denied for table journal' USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtext('leasehold.journal')) THEN
        RETURN false;
    END IF;
    FOR one IN
        SELECT day, 'journal_' || to_char(day, 'YYYYMMDD') AS name
        FROM generate_series(oldest, today + interval '1 day', interval '1 day') AS d (day)
        WHERE age > 0 AND to_regclass('journal_' || to_char(day, 'YYYYMMDD')) IS NULL
            AND (day >= today OR EXISTS (
                SELECT FROM jobs WHERE finished_at IS NOT NULL AND finished_at >= day AT TIME ZONE 'UTC'
                    AND finished_at < (day + interval '1 day') AT TIME ZONE 'UTC'))
        ORDER BY day
    LOOP
        IF made = 10 THEN
            RETURN true;
        END IF;
        EXECUTE format('CREATE TABLE %I (LIKE journal INCLUDING ALL)', one.name);
        EXECUTE format('ALTER TABLE journal ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', one.name,
            one.day AT TIME ZONE 'UTC', (one.day + interval '1 day') AT TIME ZONE 'UTC');
        made := made + 1;
    END LOOP;
    SELECT inhrelid::regclass::text AS name INTO one FROM pg_inherits
    WHERE inhparent = 'journal'::regclass
        AND (age = 0 OR right(inhrelid::regclass::text, 8) < to_char(oldest, 'YYYYMMDD'))
    ORDER BY 1 LIMIT 1;
    IF one.name IS NULL THEN
        RETURN false;
    END IF;
    BEGIN
        PERFORM set_config('lock_timeout', '200ms', true);
        EXECUTE 'DROP TABLE ' || one.name;
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
    RETURN true;
END $$;
