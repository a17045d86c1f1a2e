-- schema/picking/ready.py: PICK_FEW
WITH roomy AS MATERIALIZED (
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
), front AS MATERIALIZED (
    SELECT h.* FROM cohorts c CROSS JOIN LATERAL (
        SELECT id, queue FROM jobs WHERE cohort = c.id AND state = 'queued' AND schedule_after IS NULL AND NOT constrained AND priority >= -1000
        ORDER BY cohort, rank, queued_at, id LIMIT 9) h
    WHERE (CAST(:cohorts AS integer[]) IS NULL OR c.id = ANY (CAST(:cohorts AS integer[]))) LIMIT 9
), offered AS MATERIALIZED (
    SELECT w.queue, w.looks, w.headroom FROM (
        SELECT k.id AS queue, k.looks, k.cohort, k.instance, k.platform, k.units, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT CASE WHEN e.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN e.evicted ELSE 0 END FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)) END) - q.usage AS headroom
        FROM queues k JOIN instances i ON i.id = k.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = k.cohort AND q.instance = k.instance
        WHERE k.id = ANY (ARRAY(SELECT queue FROM front)) AND k.constraint_set IS NULL AND (k.schedule_after IS NULL OR k.schedule_after <= now()) OFFSET 0) w
    WHERE (w.headroom IS NULL OR w.units <= w.headroom) AND w.cohort = ANY (ARRAY(SELECT cohort FROM rooms)) AND
    EXISTS (
        SELECT FROM (SELECT * FROM roomy LIMIT 2) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND b.capacity - b.in_use - CASE WHEN b.kept_for = w.instance AND b.kept_units <= b.capacity - b.in_use THEN 0 ELSE b.kept_units END > 0 AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool)
            AND EXISTS (SELECT FROM kind_platforms o WHERE o.platform = w.platform AND o.kind = b.kind OFFSET 0) OFFSET 0)
), picked AS MATERIALIZED (
    SELECT id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint, rank, preferred, queued_at FROM jobs
    WHERE id = ANY (ARRAY(SELECT id FROM front WHERE queue IN (SELECT queue FROM offered))) AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
    ORDER BY rank, queued_at, id LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT (SELECT count(*) FROM front) AS ready, p.id, p.public_id, p.queue, p.cohort, p.instance, p.platform, p.priority, p.units, p.locality_hint,
    o.looks > 0 AS tried, p.preferred, o.headroom::integer, p.queued_at, true AS beyond
FROM (SELECT) one LEFT JOIN (picked p JOIN offered o ON o.queue = p.queue) ON true
ORDER BY p.rank, p.queued_at, p.id
