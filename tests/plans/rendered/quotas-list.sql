-- schema/accounting/quotas.py: _LIST
SELECT c.name AS cohort, i.name AS instance, q.min_quota, q.max_quota, q.usage, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT CASE WHEN e.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN e.evicted ELSE 0 END FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)) END) AS effective_max
FROM quotas q JOIN cohorts c ON c.id = q.cohort JOIN instances i ON i.id = q.instance
ORDER BY c.position, c.name, i.name
