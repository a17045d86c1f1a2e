-- schema/accounting/quotas.py: SHORT_AMONG
SELECT EXISTS (
    SELECT FROM (SELECT CAST(:cohort AS integer) AS cohort, unnest(CAST(:instances AS integer[])) AS instance) w
    CROSS JOIN LATERAL (SELECT * FROM quotas WHERE cohort = w.cohort AND instance >= w.instance AND instance <= w.instance ORDER BY instance DESC LIMIT 1 ) q
    LEFT JOIN (SELECT cohort, instance, sum(units) AS units FROM (
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()) kept GROUP BY cohort, instance) k
        ON k.cohort = q.cohort AND k.instance = q.instance
    WHERE q.max_quota IS NOT NULL AND (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT count(*) FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown))) END) - q.usage - coalesce(k.units, 0) < :units)
