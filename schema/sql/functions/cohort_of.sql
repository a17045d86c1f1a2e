-- Return the cohort of a job's label or of a bot's labels; 0 is the default cohort.
--
-- The first cohort by position that has all the labels wins; without labels it is the default. The variant for one
-- label is in PL/pgSQL, because submits call it: PostgreSQL plans its statement once in a session and not at each
-- call.
CREATE OR REPLACE FUNCTION cohort_of(wanted text[]) RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT c.id FROM cohorts c WHERE wanted <> '{}' AND c.labels @> wanted
                     ORDER BY c.position, c.id LIMIT 1), 0)
$$;

CREATE OR REPLACE FUNCTION cohort_of(label text) RETURNS integer LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF label = '' THEN
        RETURN 0;
    END IF;
    RETURN coalesce((SELECT c.id FROM cohorts c WHERE c.labels @> ARRAY[label] ORDER BY c.position, c.id LIMIT 1), 0);
END $$;
