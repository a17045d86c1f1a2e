WITH RECURSIVE free_kinds AS (
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
), missing AS MATERIALIZED (
    SELECT q.cohort, q.instance, q.min_quota - q.usage - coalesce(k.units, 0) AS units FROM quotas q
    LEFT JOIN (
    SELECT cohort, kept_for AS instance, sum(kept_units) AS units FROM bots
    WHERE kept_units > 0 AND kept_units > capacity - in_use GROUP BY cohort, kept_for) k ON k.cohort = q.cohort AND k.instance = q.instance
    WHERE CAST(:minimums_first AS boolean) AND q.usage < q.min_quota
        AND q.min_quota - q.usage > coalesce(k.units, 0) AND (CAST(:cohorts AS integer[]) IS NULL OR q.cohort = ANY (CAST(:cohorts AS integer[]))) AND (CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[]))) AND EXISTS (
    SELECT FROM queues k WHERE k.instance = q.instance AND k.cohort = q.cohort AND k.constraint_set IS NULL AND (k.schedule_after IS NULL OR k.schedule_after <= now())
        AND (SELECT true FROM jobs WHERE constrained = (k.constraint_set IS NOT NULL) AND queue = k.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY rank DESC, queued_at DESC, id DESC LIMIT 1) IS NOT NULL OFFSET 0)
        AND EXISTS (SELECT FROM instances i WHERE i.id = q.instance AND NOT i.draining OFFSET 0)
),
stretches AS MATERIALIZED (
    SELECT c.id AS cohort, coalesce(m.rank, -1000000000.0) AS rank, coalesce(m.until, 1001.0) AS until,
        to_timestamp(coalesce(m.since, '-infinity')) AS since, coalesce(m.first, 0) AS first
    FROM cohorts c
    LEFT JOIN unnest(CAST(:lane_cohorts AS integer[]), CAST(:lane_ranks AS double precision[]),
                     CAST(:lane_sinces AS double precision[]), CAST(:lane_firsts AS bigint[]),
                     CAST(:lane_untils AS double precision[]))
        AS m (cohort, rank, since, first, until) ON m.cohort = c.id
    WHERE (CAST(:cohorts AS integer[]) IS NULL OR c.id = ANY (CAST(:cohorts AS integer[])))
), front AS MATERIALIZED (
    SELECT h.* FROM stretches s CROSS JOIN LATERAL (
        SELECT id, cohort, queue, rank, queued_at FROM jobs
        WHERE cohort = s.cohort AND (rank, queued_at, id) >= (s.rank, s.since, s.first)
            AND rank < s.until AND state = 'queued' AND schedule_after IS NULL AND NOT constrained AND priority >= -1000
        ORDER BY cohort, rank, queued_at, id LIMIT (SELECT jobs FROM room) * :reach) h
    ORDER BY h.rank, h.queued_at, h.id LIMIT (SELECT jobs FROM room) * :reach
), waiting AS MATERIALIZED (SELECT DISTINCT queue FROM front), wanted AS MATERIALIZED (

    SELECT k.id AS queue, w.cohort, w.instance, k.platform, k.units, k.preferred, k.looks, w.pool, w.headroom
    FROM (
        SELECT g.cohort, g.instance, g.members, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT CASE WHEN e.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN e.evicted ELSE 0 END FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)) END) - q.usage AS headroom, i.name, i.managed,
            q.min_quota - q.usage AS below_minimum
        FROM (SELECT k.cohort, k.instance, array_agg(k) AS members FROM queues k
              WHERE k.id = ANY (ARRAY(SELECT queue FROM waiting)) AND k.constraint_set IS NULL AND (k.schedule_after IS NULL OR k.schedule_after <= now())
              GROUP BY k.cohort, k.instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.members) AS k
    WHERE (w.headroom IS NULL OR k.units <= w.headroom)
        AND (CAST(:instances AS integer[]) IS NULL OR w.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR w.cohort = ANY (CAST(:cohorts AS integer[])))
), offered AS MATERIALIZED (
    SELECT w.* FROM wanted w WHERE (SELECT jobs FROM room) > 0 AND (w.cohort = ANY (ARRAY(SELECT cohort FROM rooms)) AND (
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
    WHERE NOT (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND EXISTS (SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (w.platform, b.kind) AND (o.platform, o.kind) <= (w.platform, b.kind) OFFSET 0) LIMIT 1) OFFSET 0)))
), fit AS MATERIALIZED (
    SELECT f.id, f.rank, f.queued_at, o.headroom / o.units AS most,
        CASE WHEN o.headroom IS NOT NULL
            THEN row_number() OVER (PARTITION BY o.queue ORDER BY f.rank, f.queued_at, f.id) END AS nth
    FROM front f JOIN offered o USING (queue)
), heads AS MATERIALIZED (
    SELECT id, true AS beyond FROM fit WHERE coalesce(nth <= most * :reach, true) AND NOT EXISTS (SELECT FROM missing)
), picked AS MATERIALIZED (
    SELECT id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint, preferred, queued_at FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
    ORDER BY id <> ALL (ARRAY(SELECT id FROM heads WHERE NOT beyond)), rank, queued_at, id
    LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT r.*, CASE WHEN row_number() OVER () = 1 THEN (
    SELECT jsonb_build_array(count(*), extract(epoch FROM now()), (
        SELECT jsonb_agg(jsonb_build_array(cohort, rank, extract(epoch FROM queued_at), id))
        FROM (SELECT DISTINCT ON (cohort, rank) cohort, rank, queued_at, id FROM front
              ORDER BY cohort, rank, queued_at, id) lane))
    FROM front) END AS walked, CASE WHEN row_number() OVER () = 1 THEN (
    SELECT jsonb_agg(jsonb_build_array(cohort, instance, headroom)) FROM (
        SELECT DISTINCT cohort, instance, headroom FROM offered
        WHERE headroom IS NOT NULL AND (queue IN (SELECT queue FROM picked)) IS TRUE) q) END AS headrooms,
    p.id, p.public_id, p.queue, p.cohort, p.instance, p.platform, p.priority, p.units, p.locality_hint, p.queue = ANY (ARRAY(SELECT queue FROM offered WHERE looks > 0)) AS tried,
    p.preferred, CAST(NULL AS integer) AS headroom,
    p.queued_at, p.id <> ALL (ARRAY(SELECT id FROM heads WHERE NOT beyond)) AS beyond
FROM (SELECT (SELECT jobs FROM room) AS jobs, (SELECT count(*) FROM heads) AS heads,
    EXISTS (SELECT FROM missing) AS below) r
LEFT JOIN picked p ON true
