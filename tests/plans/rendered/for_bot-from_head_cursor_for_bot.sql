-- schema/picking/for_bot.py: FROM_HEAD_CURSOR_FOR_BOT
WITH RECURSIVE below AS MATERIALIZED (SELECT EXISTS (
    SELECT FROM quotas q WHERE q.usage < q.min_quota
        AND (EXISTS (SELECT FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL OFFSET 0) OR EXISTS (SELECT FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL OFFSET 0)) AND q.cohort = :cohort) AS is),

stretches AS MATERIALIZED (
    SELECT c.id AS cohort, coalesce(m.priority, -1000) AS priority, coalesce(m.until, 1001) AS until,
        to_timestamp(coalesce(m.since, '-infinity')) AS since, coalesce(m.first, 0) AS first
    FROM cohorts c
    LEFT JOIN unnest(CAST(:lane_cohorts AS integer[]), CAST(:lane_priorities AS integer[]),
                     CAST(:lane_sinces AS double precision[]), CAST(:lane_firsts AS bigint[]),
                     CAST(:lane_untils AS integer[]))
        AS m (cohort, priority, since, first, until) ON m.cohort = c.id
    WHERE c.id = :cohort
), front AS MATERIALIZED (
    SELECT h.* FROM stretches s CROSS JOIN LATERAL (
        SELECT id, cohort, instance, platform, priority, queued_at, units, considered FROM jobs
        WHERE cohort = s.cohort AND (priority, queued_at, id) >= (s.priority, s.since, s.first)
            AND priority < s.until AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units >= 1
        ORDER BY cohort, priority, queued_at, id LIMIT :reach) h
    ORDER BY h.priority, h.queued_at, h.id LIMIT :reach
),
queues AS MATERIALIZED (SELECT DISTINCT cohort, instance, platform FROM front),
resting AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM resting q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
),
open_queues AS MATERIALIZED (
    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM (
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()) each GROUP BY cohort, instance
    )
    SELECT w.cohort, w.instance, p.platform, w.pool, w.headroom FROM (
        SELECT g.cohort, g.instance, g.platforms, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT count(*) FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown))) END) - q.usage - coalesce(k.units, 0) AS headroom
        FROM (SELECT cohort, instance, array_agg(platform) AS platforms FROM queues GROUP BY cohort, instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.platforms) AS p (platform)
    WHERE coalesce(w.headroom, 1) > 0
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool))
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))),
open_resting AS MATERIALIZED (
    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM (
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()) each GROUP BY cohort, instance
    )
    SELECT w.cohort, w.instance, p.platform, w.pool, w.headroom FROM (
        SELECT g.cohort, g.instance, g.platforms, i.pool, (CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT count(*) FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown))) END) - q.usage - coalesce(k.units, 0) AS headroom
        FROM (SELECT cohort, instance, array_agg(platform) AS platforms FROM resting GROUP BY cohort, instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.platforms) AS p (platform)
    WHERE coalesce(w.headroom, 1) > 0
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool))
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))),
offered AS MATERIALIZED (
    SELECT q.* FROM open_queues q CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
), fit AS MATERIALIZED (
    SELECT f.id, f.priority, f.queued_at FROM front f JOIN offered q USING (cohort, instance, platform)
    WHERE f.units <= :room AND (q.headroom IS NULL OR f.units <= q.headroom) AND (:any OR considered = 0)
), heads AS MATERIALIZED (
    SELECT id FROM (
        SELECT * FROM fit
        UNION ALL
        SELECT id, priority, queued_at FROM (
    SELECT q.cohort, q.instance, q.platform, h.id, h.priority, h.queued_at FROM open_resting q
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM (
            SELECT id, priority, queued_at, units, considered, schedule_after FROM jobs
            WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform
                AND state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
            ORDER BY priority, queued_at, id LIMIT :look) first
        WHERE units <= :room AND (q.headroom IS NULL OR units <= q.headroom) AND considered > 0 AND (:any OR schedule_after >= now())
        ORDER BY priority, queued_at, id LIMIT :reach) h
    WHERE true) resting
        WHERE (SELECT count(*) FROM front) < :reach OR (priority, queued_at, id) <= (
            SELECT priority, queued_at, id FROM front ORDER BY priority DESC, queued_at DESC, id DESC LIMIT 1)
    ) both_kinds
    WHERE NOT (SELECT below.is FROM below)
    ORDER BY priority, queued_at, id LIMIT :reach
), picked AS MATERIALIZED (
    SELECT j.id, j.public_id::text AS public_id, j.cohort, j.instance, j.platform, j.priority, j.units, j.locality_hint, j.considered
    FROM unnest(ARRAY(SELECT id FROM heads)) WITH ORDINALITY AS h (id, nth) JOIN jobs j ON j.id = h.id
    WHERE j.state = 'queued' AND (coalesce(j.schedule_after, '-infinity') = '-infinity' OR j.considered > 0)
    ORDER BY h.nth LIMIT :limit FOR NO KEY UPDATE OF j SKIP LOCKED
)
SELECT r.fit, r.below, CASE WHEN row_number() OVER () = 1 THEN (
    SELECT jsonb_build_array(count(*), extract(epoch FROM now()), (
        SELECT jsonb_agg(jsonb_build_array(cohort, priority, extract(epoch FROM queued_at), id))
        FROM (SELECT DISTINCT ON (cohort, priority) cohort, priority, queued_at, id FROM front
              ORDER BY cohort, priority, queued_at, id) lane))
    FROM front) END AS walked, p.* FROM (
    SELECT (SELECT count(*) FROM fit) AS fit, (SELECT below.is FROM below) AS below) r
LEFT JOIN picked p ON true
