WITH RECURSIVE waiting AS (
    SELECT (SELECT queue FROM jobs WHERE constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < :after ORDER BY queue DESC LIMIT 1) AS queue, 1 AS nth
    UNION ALL
    SELECT (SELECT queue FROM jobs WHERE constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < g.queue ORDER BY queue DESC LIMIT 1), g.nth + 1 FROM waiting g WHERE g.queue IS NOT NULL AND g.nth < :queues
), wanted AS MATERIALIZED (

    SELECT k.id AS queue, w.cohort, w.instance, k.platform, k.units, k.preferred, k.looks, w.pool, w.headroom, k.constraint_set, w.name, w.managed, w.below_minimum
    FROM (
        SELECT g.cohort, g.instance, g.members, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT CASE WHEN e.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN e.evicted ELSE 0 END FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)) END) - q.usage AS headroom, i.name, i.managed,
            q.min_quota - q.usage AS below_minimum
        FROM (SELECT k.cohort, k.instance, array_agg(k) AS members FROM queues k
              WHERE k.id = ANY (ARRAY(SELECT queue FROM waiting)) AND k.constraint_set IS NOT NULL AND (k.schedule_after IS NULL OR k.schedule_after <= now())
              GROUP BY k.cohort, k.instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.members) AS k
    WHERE (w.headroom IS NULL OR k.units <= w.headroom)
        AND (CAST(:instances AS integer[]) IS NULL OR w.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR w.cohort = ANY (CAST(:cohorts AS integer[])))
), free_kinds AS (
    (SELECT cohort, kind FROM bots WHERE free ORDER BY cohort, kind LIMIT 1)
    UNION ALL
    SELECT b.cohort, b.kind FROM free_kinds f CROSS JOIN LATERAL (
        SELECT cohort, kind FROM bots WHERE free AND (cohort, kind) > (f.cohort, f.kind)
        ORDER BY cohort, kind LIMIT 1) b
), roomy AS MATERIALIZED (
    SELECT b.* FROM cohorts c CROSS JOIN LATERAL (
        SELECT id, kind, cohort, instance, pool, capacity, in_use, kept_units, kept_for FROM bots
        WHERE free AND cohort = c.id LIMIT :batch) b
    WHERE CAST(:cohorts AS integer[]) IS NULL OR c.id = ANY (CAST(:cohorts AS integer[]))
), rooms AS MATERIALIZED (
    SELECT cohort, units FROM (
        SELECT cohort, sum(capacity - in_use) AS units FROM roomy GROUP BY cohort) r
    WHERE CASE WHEN units >= :batch THEN true
        ELSE pg_try_advisory_xact_lock(hashtext('leasehold.room' || CAST(:served AS text)), cohort) END
), room AS MATERIALIZED (
    SELECT CAST(least(:batch, coalesce(sum(units), 0)) AS integer) AS jobs FROM rooms
), walk AS MATERIALIZED (
    SELECT CASE WHEN max(nth) = :queues THEN min(queue) END AS last FROM waiting
)
SELECT w.queue, w.cohort, w.instance, w.platform, w.constraint_set, w.name, w.headroom,
    greatest(w.below_minimum - coalesce(f.units, 0), 0) AS missing_units, w.managed, w.looks > 0 AS tried,
    (SELECT jobs FROM room) > 0 AND (w.cohort = ANY (ARRAY(SELECT cohort FROM rooms)) AND (
    EXISTS (
        SELECT FROM (SELECT * FROM roomy LIMIT 2) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND b.capacity - b.in_use - CASE WHEN b.kept_for = w.instance AND b.kept_units <= b.capacity - b.in_use THEN 0 ELSE b.kept_units END > 0 AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool)
            AND EXISTS (SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (w.platform, b.kind) AND (o.platform, o.kind) <= (w.platform, b.kind) OFFSET 0) OFFSET 0)
    OR EXISTS (
    (SELECT b.id FROM (
        SELECT kind AS offered FROM kind_platforms WHERE platform = w.platform AND (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND (kind IN (SELECT f.kind FROM free_kinds f)) IS TRUE OFFSET 0) k
    CROSS JOIN LATERAL ((SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END > 0 AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT 1)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END > 0 AND kind = k.offered AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT 1)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END > 0 AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT 1)) b LIMIT 1)
    UNION ALL
    (SELECT b.id FROM ((SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END > 0 AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END > 0 AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE free AND capacity - in_use - CASE WHEN kept_for = w.instance AND kept_units <= capacity - in_use THEN 0 ELSE kept_units END > 0 AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT ALL)) b
    WHERE NOT (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND EXISTS (SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (w.platform, b.kind) AND (o.platform, o.kind) <= (w.platform, b.kind) OFFSET 0) LIMIT 1) OFFSET 0))) AS served,
    CASE WHEN row_number() OVER (ORDER BY w.queue DESC) = 1 THEN statement_timestamp() END AS now,
    (SELECT jobs FROM room) AS free_units, k.last, EXISTS (SELECT FROM backpressure) AS pressed,
    EXISTS (SELECT FROM class_reserves) AS reserved, w.queue IS NOT NULL OR EXISTS (
        SELECT FROM queues k WHERE k.id = ANY (ARRAY(SELECT queue FROM waiting)) AND k.constraint_set IS NOT NULL AND (k.schedule_after IS NULL OR k.schedule_after <= now())) AS any
FROM walk k LEFT JOIN (
    wanted w
    LEFT JOIN (
    SELECT cohort, kept_for AS instance, sum(kept_units) AS units FROM bots
    WHERE kept_units > 0 AND kept_units > capacity - in_use GROUP BY cohort, kept_for) f ON f.cohort = w.cohort AND f.instance = w.instance) ON true
ORDER BY w.queue DESC
