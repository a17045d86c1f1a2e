WITH RECURSIVE room AS MATERIALIZED (SELECT CAST(:limit AS integer) AS jobs), waiting AS (
    SELECT (SELECT queue FROM jobs WHERE NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY queue DESC LIMIT 1) AS queue
    UNION ALL
    SELECT (SELECT queue FROM jobs WHERE NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < w.queue ORDER BY queue DESC LIMIT 1) FROM waiting w WHERE w.queue IS NOT NULL
), offered AS MATERIALIZED (
    SELECT q.* FROM (
    SELECT k.id AS queue, w.cohort, w.instance, k.platform, k.units, k.preferred, k.looks, w.pool, w.headroom
    FROM (
        SELECT g.cohort, g.instance, g.members, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT CASE WHEN e.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN e.evicted ELSE 0 END FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)) END) - q.usage AS headroom, i.name, i.managed,
            q.min_quota - q.usage AS below_minimum
        FROM (SELECT k.cohort, k.instance, array_agg(k) AS members FROM queues k
              WHERE k.id = ANY (ARRAY(SELECT queue FROM waiting)) AND k.constraint_set IS NULL AND k.units <= :room
              GROUP BY k.cohort, k.instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.members) AS k
    WHERE (w.headroom IS NULL OR k.units <= w.headroom)
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool))
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))
    AND (:any OR k.schedule_after >= now() OR NOT :literal AND k.looks = 0)) q
    WHERE EXISTS (
        SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (coalesce(q.preferred, q.platform), CAST(:kind AS integer)) AND (o.platform, o.kind) <= (coalesce(q.preferred, q.platform), CAST(:kind AS integer)) OFFSET 0)
), missing AS MATERIALIZED (
    SELECT q.cohort, q.instance, q.min_quota - q.usage - coalesce(k.units, 0) AS units FROM quotas q
    LEFT JOIN (
    SELECT cohort, kept_for AS instance, sum(kept_units) AS units FROM bots
    WHERE kept_units > 0 AND kept_units > capacity - in_use GROUP BY cohort, kept_for) k ON k.cohort = q.cohort AND k.instance = q.instance
    WHERE CAST(:minimums_first AS boolean) AND q.usage < q.min_quota
        AND q.min_quota - q.usage > coalesce(k.units, 0) AND (q.cohort, q.instance) IN (SELECT cohort, instance FROM offered)
), lanes AS MATERIALIZED (
    SELECT o.*, row_number() OVER () AS lane, m.units / o.units + 1 AS needed
    FROM offered o LEFT JOIN missing m ON m.cohort = o.cohort AND m.instance = o.instance
), share AS MATERIALIZED (
    SELECT jobs * :reach AS all_heads,
        greatest(8, 4 * jobs * :reach / greatest((SELECT count(*) FROM lanes), 1)) AS heads
    FROM room
), first_heads AS MATERIALIZED (
    SELECT l.lane, s.heads < s.all_heads AS is_cut_short, s.heads, l.cohort, l.instance, l.units, h.*
    FROM lanes l CROSS JOIN LATERAL (
        SELECT all_heads, least(all_heads, greatest(heads, l.needed * :reach)) AS heads FROM share) s
    CROSS JOIN LATERAL (
        SELECT id, rank, queued_at FROM jobs WHERE queue = l.queue AND NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1
        ORDER BY rank, queued_at, id LIMIT least(l.headroom / l.units * :reach, s.heads)) h
), ranked AS MATERIALIZED (
    SELECT *, true AS beyond FROM first_heads WHERE NOT EXISTS (SELECT FROM missing)
    UNION ALL
    SELECT h.*, coalesce(
        sum(h.units) OVER (PARTITION BY h.cohort, h.instance ORDER BY rank, queued_at, id) - h.units >= m.units, true)
    FROM first_heads h LEFT JOIN missing m ON m.cohort = h.cohort AND m.instance = h.instance
    WHERE EXISTS (SELECT FROM missing)
), cut AS MATERIALIZED (
    SELECT beyond, rank, queued_at, id FROM (
        SELECT DISTINCT ON (h.lane) h.* FROM ranked h
        JOIN (SELECT lane, count(*) AS heads FROM first_heads GROUP BY lane) f ON f.lane = h.lane
        WHERE h.is_cut_short AND f.heads >= h.heads
        ORDER BY h.lane, h.beyond DESC, h.rank DESC, h.queued_at DESC, h.id DESC) last
    ORDER BY beyond, rank, queued_at, id LIMIT 1
), heads AS MATERIALIZED (
    SELECT id, beyond FROM ranked
    WHERE coalesce((beyond, rank, queued_at, id) <= (SELECT beyond, rank, queued_at, id FROM cut), true)
    ORDER BY beyond, rank, queued_at, id LIMIT (SELECT jobs FROM room) * :reach
), picked AS MATERIALIZED (
    SELECT id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint, preferred, queued_at FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
    ORDER BY id <> ALL (ARRAY(SELECT id FROM heads WHERE NOT beyond)), rank, queued_at, id
    LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT r.*, EXISTS (SELECT FROM cut) AS is_cut, CASE WHEN row_number() OVER () = 1 THEN (
    SELECT jsonb_agg(jsonb_build_array(cohort, instance, headroom)) FROM (
        SELECT DISTINCT cohort, instance, headroom FROM offered
        WHERE headroom IS NOT NULL AND (queue IN (SELECT queue FROM picked)) IS TRUE) q) END AS headrooms,
    p.id, p.public_id, p.queue, p.cohort, p.instance, p.platform, p.priority, p.units, p.locality_hint, p.queue = ANY (ARRAY(SELECT queue FROM offered WHERE looks > 0)) AS tried,
    p.preferred, CAST(NULL AS integer) AS headroom,
    p.queued_at, p.id <> ALL (ARRAY(SELECT id FROM heads WHERE NOT beyond)) AS beyond
FROM (SELECT (SELECT jobs FROM room) AS jobs, (SELECT count(*) FROM heads) AS heads,
    EXISTS (SELECT FROM missing) AS below) r
LEFT JOIN picked p ON true
