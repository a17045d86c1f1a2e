-- Return per quota, in the order given, the units kept by reservations and the evictions within the cooldown.
--
-- Volatile, so that it sees what was committed before the call, when the quotas are locked. The first of the two
-- comparisons of `until` can use an index. ROWS 1, because the default of a thousand makes the planner read whole
-- tables.
CREATE OR REPLACE FUNCTION withheld(cohorts integer[], instances integer[], cooldown double precision)
RETURNS TABLE (kept bigint, evicted bigint) LANGUAGE plpgsql VOLATILE ROWS 1
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH keeping AS MATERIALIZED (
        SELECT j.cohort, j.instance, sum(v.units) AS units FROM reservations v
        CROSS JOIN LATERAL (
            SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
        WHERE v.until >= now() AND v.until >= clock_timestamp()
        GROUP BY j.cohort, j.instance
    )
    SELECT coalesce(k.units, 0), e.evicted
    FROM unnest(withheld.cohorts, withheld.instances) WITH ORDINALITY AS w (cohort, instance, nth)
    LEFT JOIN keeping k ON k.cohort = w.cohort AND k.instance = w.instance
    CROSS JOIN LATERAL (
        SELECT count(*) AS evicted FROM evictions e
        WHERE e.cohort = w.cohort AND e.instance = w.instance
            AND e.at > now() - make_interval(secs => withheld.cooldown) OFFSET 0) e
    ORDER BY w.nth;
END $$;
