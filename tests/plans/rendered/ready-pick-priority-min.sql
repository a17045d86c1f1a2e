-- schema/picking/ready.py: PICK, order=priority, guard=min
WITH RECURSIVE queues AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM queues q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
), wanted AS MATERIALIZED (

    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM (
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()) each GROUP BY cohort, instance
    )
    SELECT w.cohort, w.instance, p.platform, w.pool, w.headroom FROM (
        SELECT g.cohort, g.instance, g.platforms, i.pool, coalesce(q.min_quota - q.usage - coalesce(k.units, 0), 0) AS headroom
        FROM (SELECT cohort, instance, array_agg(platform) AS platforms FROM queues GROUP BY cohort, instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.platforms) AS p (platform)
    WHERE coalesce(w.headroom, 1) > 0
        AND (CAST(:instances AS integer[]) IS NULL OR w.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR w.cohort = ANY (CAST(:cohorts AS integer[])))
), roomy AS MATERIALIZED (
    SELECT id, cohort, instance, pool, capacity - in_use - reserved AS units FROM bots
    WHERE free AND (CAST(:cohorts AS integer[]) IS NULL OR cohort = ANY (CAST(:cohorts AS integer[]))) LIMIT :batch
), room AS MATERIALIZED (
    SELECT least(:batch, coalesce(sum(units), 0)) AS jobs FROM roomy
), served AS MATERIALIZED (
    SELECT w.*, row_number() OVER () AS nth FROM wanted w WHERE (SELECT jobs FROM room) > 0 AND (
    EXISTS (
        SELECT FROM (SELECT * FROM roomy LIMIT 2) b
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = b.id OFFSET 0) bp
        WHERE b.cohort IS NOT DISTINCT FROM w.cohort AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool) OFFSET 0)
    OR EXISTS (
        SELECT FROM (
    (SELECT * FROM (
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key >= :start ORDER BY sample_key LIMIT :look)
        UNION ALL
        (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort AND sample_key < :start ORDER BY sample_key LIMIT :look)
    ) ring LIMIT :look)) near
        CROSS JOIN LATERAL (
            SELECT FROM bots b
            WHERE b.id = near.bot_id AND b.free AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool) OFFSET 0) b
        OFFSET 0)
    OR EXISTS (
        SELECT FROM (
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND true AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND true AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)
 UNION ALL
    (SELECT * FROM (
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
        UNION ALL
        (SELECT id AS bot_id FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND true AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT :look)
    ) ring LIMIT :look)) near
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = near.bot_id OFFSET 0) bp
        OFFSET 0))
), lanes AS MATERIALIZED (
    SELECT s.*, row_number() OVER () AS lane FROM served s
), share AS MATERIALIZED (
    SELECT least(jobs * :reach,
                 greatest(8, 4 * jobs * :reach / greatest((SELECT count(*) FROM lanes), 1))) AS heads
    FROM room
), first_heads AS MATERIALIZED (
    SELECT s.nth, s.lane, h.* FROM lanes s CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM (
            SELECT id, priority, queued_at, units FROM jobs
            WHERE cohort = s.cohort AND instance = s.instance AND platform = s.platform
                AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL
            ORDER BY priority, queued_at, id
            LIMIT greatest((SELECT jobs FROM room) * :reach, CASE WHEN s.headroom IS NOT NULL THEN :jobs_look END)
            ) first
        WHERE (s.headroom IS NULL OR units <= s.headroom)
        ORDER BY priority, queued_at, id LIMIT least(s.headroom * :reach, (SELECT heads FROM share))) h
), found_in_lane AS MATERIALIZED (
    SELECT lane, count(*) AS heads FROM first_heads GROUP BY lane
), found AS MATERIALIZED (
    SELECT l.nth, min(coalesce(f.heads, 0)) AS heads FROM lanes l LEFT JOIN found_in_lane f ON f.lane = l.lane
    GROUP BY l.nth
), cut AS MATERIALIZED (
    SELECT priority, queued_at, id FROM (
        SELECT DISTINCT ON (h.lane) h.* FROM first_heads h JOIN found_in_lane f ON f.lane = h.lane
        WHERE f.heads >= (SELECT heads FROM share) AND f.heads < (SELECT jobs FROM room) * :reach
        ORDER BY h.lane, h.priority DESC, h.queued_at DESC, h.id DESC) last
    ORDER BY priority, queued_at, id LIMIT 1
), fitting_heads AS MATERIALIZED (
    SELECT h.id, h.priority, h.queued_at FROM served s
    LEFT JOIN found f ON f.nth = s.nth
    CROSS JOIN LATERAL (

    WITH RECURSIVE sizes AS (
        (SELECT units FROM jobs WHERE cohort = s.cohort AND instance = s.instance AND platform = s.platform AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units <= s.headroom
         ORDER BY cohort, instance, platform, units LIMIT 1)
        UNION ALL
        SELECT following.units FROM sizes z CROSS JOIN LATERAL (
            SELECT units FROM jobs WHERE cohort = s.cohort AND instance = s.instance AND platform = s.platform AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units > z.units AND units <= s.headroom
            ORDER BY cohort, instance, platform, units LIMIT 1) following
    )
    SELECT fit.* FROM (SELECT units FROM sizes LIMIT :sizes) z CROSS JOIN LATERAL (
        SELECT id, priority, queued_at, considered FROM jobs
        WHERE cohort = s.cohort AND instance = s.instance AND platform = s.platform AND state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL AND units >= z.units AND units <= z.units
        ORDER BY cohort, instance, platform, units, priority, queued_at, id LIMIT least((SELECT jobs FROM room), s.headroom) * :reach) fit) h
    WHERE s.headroom IS NOT NULL AND coalesce(f.heads, 0) < least(s.headroom * :reach, (SELECT heads FROM share))
), heads AS MATERIALIZED (
    SELECT id FROM (SELECT id, priority, queued_at FROM first_heads UNION SELECT * FROM fitting_heads) both_kinds
    WHERE coalesce((priority, queued_at, id) <= (SELECT priority, queued_at, id FROM cut), true)
    ORDER BY priority, queued_at, id LIMIT (SELECT jobs FROM room) * :reach
), picked AS MATERIALIZED (
    SELECT id, public_id::text AS public_id, cohort, instance, platform, priority, units, locality_hint, considered FROM jobs
    WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
    ORDER BY priority, queued_at, id LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT r.heads, r.jobs, r.cut, p.* FROM (
    SELECT (SELECT count(*) FROM heads) AS heads, (SELECT jobs FROM room) AS jobs, EXISTS (SELECT FROM cut) AS cut) r
LEFT JOIN picked p ON true
