-- schema/accounting/quotas.py: USE
WITH shown AS MATERIALIZED (
    SELECT q.*, sum(greatest(0, q.usage - q.min_quota)) OVER (PARTITION BY q.cohort) AS above
    FROM quotas q ORDER BY q.cohort, q.instance LIMIT :most
), room AS MATERIALIZED (
    SELECT cohort, instance, pool, kept_for, sum(open) AS open, sum(units - open) AS kept
    FROM (SELECT cohort, instance, pool, CASE WHEN kept_units > 0 THEN kept_for END AS kept_for,
              capacity - in_use AS units, greatest(0, capacity - in_use - kept_units) AS open
          FROM bots WHERE free) b
    GROUP BY cohort, instance, pool, kept_for
), measured AS MATERIALIZED (
    SELECT q.*, c.name AS cohort_name, i.name AS instance_name, e.evicted,
        coalesce(a.units, 0) + coalesce(o.units, 0) + coalesce(p.units, 0) + coalesce(k.units, 0) AS free
    FROM shown q JOIN cohorts c ON c.id = q.cohort JOIN instances i ON i.id = q.instance
    LEFT JOIN (SELECT cohort, sum(open) AS units FROM room
               WHERE instance IS NULL AND pool IS NULL GROUP BY cohort) a ON a.cohort = q.cohort
    LEFT JOIN (SELECT cohort, instance, sum(open) AS units FROM room
               GROUP BY cohort, instance) o ON o.cohort = q.cohort AND o.instance = q.instance
    LEFT JOIN (SELECT cohort, pool, sum(open) AS units FROM room
               GROUP BY cohort, pool) p ON p.cohort = q.cohort AND p.pool = i.pool
    LEFT JOIN (SELECT cohort, kept_for, sum(kept) AS units FROM room
               GROUP BY cohort, kept_for) k ON k.cohort = q.cohort AND k.kept_for = q.instance
    CROSS JOIN LATERAL (
        SELECT count(*) AS evicted FROM evictions e
        WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e
)
SELECT t.pairs, q.cohort_name AS cohort, q.instance_name AS instance, q.min_quota, q.max_quota, q.usage,
    CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - CASE WHEN q.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN q.evicted ELSE 0 END) END AS effective_max, q.free, q.above - greatest(0, q.usage - q.min_quota) AS reclaimable, q.evicted
FROM (SELECT count(*) AS pairs FROM quotas) t LEFT JOIN measured q ON true
ORDER BY q.cohort, q.instance
