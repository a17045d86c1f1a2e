-- Return the pattern that gives a lock or a rate its limit, as one value; null if none does.
CREATE OR REPLACE FUNCTION limit_pattern(wanted_name text) RETURNS limit_patterns LANGUAGE sql STABLE AS $$
    SELECT p FROM matching_pattern(wanted_name) p
$$;
