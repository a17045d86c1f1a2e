-- schema/accounting/quotas.py: SHORT_AMONG
SELECT EXISTS (
    SELECT FROM (SELECT CAST(:cohort AS integer) AS cohort, unnest(CAST(:instances AS integer[])) AS instance) w
    CROSS JOIN LATERAL (SELECT * FROM quotas WHERE cohort = w.cohort AND instance >= w.instance AND instance <= w.instance ORDER BY instance DESC LIMIT 1 ) q
    WHERE q.max_quota IS NOT NULL AND (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT CASE WHEN e.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN e.evicted ELSE 0 END FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)) END) - q.usage < :units)
