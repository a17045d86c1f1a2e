-- schema/moves/end.py: RETURN_UNITS
WITH returned AS MATERIALIZED (
    SELECT s.* FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:units AS bigint[]))
        AS s (cohort, instance, units)
    CROSS JOIN LATERAL (SELECT usage FROM quotas WHERE cohort = s.cohort AND instance >= s.instance AND instance <= s.instance ORDER BY instance DESC LIMIT 1 FOR NO KEY UPDATE) q
)
UPDATE quotas q SET usage = q.usage - r.units FROM returned r
WHERE q.cohort = r.cohort AND q.instance = r.instance AND r.units <> 0
