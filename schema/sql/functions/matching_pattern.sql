-- Return the pattern that gives a lock or a rate its limit: the one with the longest prefix; no row if none does.
--
-- The `*` of a pattern stands for no slash, so that `api-*` holds for classes and not for their models. In a FROM clause
-- the server puts the query in place of the call, which then costs a tenth.
CREATE OR REPLACE FUNCTION matching_pattern(wanted_name text) RETURNS SETOF limit_patterns LANGUAGE sql STABLE AS $$
    SELECT p.* FROM limit_patterns p
    WHERE starts_with(wanted_name, p.prefix) AND strpos(substr(wanted_name, length(p.prefix) + 1), '/') = 0
    ORDER BY length(p.prefix) DESC LIMIT 1
$$;
