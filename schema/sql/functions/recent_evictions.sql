-- Return per quota, in the order given, the evictions within the cooldown.
--
-- Volatile, so that it sees what was committed before the call, when the quotas are locked. ROWS 1, because the default
-- of a thousand makes the planner read whole tables.
CREATE OR REPLACE FUNCTION recent_evictions(cohorts integer[], instances integer[], cooldown double precision)
RETURNS TABLE (evicted bigint) LANGUAGE plpgsql VOLATILE ROWS 1 AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT e.evicted
    FROM unnest(recent_evictions.cohorts, recent_evictions.instances) WITH ORDINALITY AS w (cohort, instance, nth)
    CROSS JOIN LATERAL (
        SELECT count(*) AS evicted FROM evictions e
        WHERE e.cohort = w.cohort AND e.instance = w.instance
            AND e.at > now() - make_interval(secs => recent_evictions.cooldown) OFFSET 0) e
    ORDER BY w.nth;
END $$;
