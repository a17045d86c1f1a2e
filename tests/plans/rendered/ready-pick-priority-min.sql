-- schema/picking/ready.py: PICK, order=priority, guard=min
WITH RECURSIVE waiting AS (
    SELECT (SELECT queue FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY queue DESC LIMIT 1) AS queue
    UNION ALL
    SELECT (SELECT queue FROM jobs WHERE state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < w.queue ORDER BY queue DESC LIMIT 1) FROM waiting w WHERE w.queue IS NOT NULL
), wanted AS MATERIALIZED (

    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM (
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()) each GROUP BY cohort, instance
    )
    SELECT k.id AS queue, w.cohort, w.instance, k.platform, k.units, k.looks, w.pool, w.headroom FROM (
        SELECT g.cohort, g.instance, g.members, i.pool, coalesce(q.min_quota - q.usage - coalesce(k.units, 0), 0) AS headroom
        FROM (SELECT k.cohort, k.instance, array_agg(k) AS members FROM queues k
              WHERE k.id = ANY (ARRAY(SELECT queue FROM waiting)) AND k.constraint_set IS NULL AND (k.schedule_after IS NULL OR k.schedule_after <= now())
              GROUP BY k.cohort, k.instance) g
        JOIN instances i ON i.id = g.instance AND NOT i.draining
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.members) AS k
    WHERE (w.headroom IS NULL OR k.units <= w.headroom)
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
    SELECT s.lane, h.* FROM lanes s CROSS JOIN LATERAL (
        SELECT id, rank, queued_at FROM jobs
        WHERE queue = s.queue  AND state = 'queued' AND schedule_after IS NULL AND units >= 1
        ORDER BY rank, queued_at, id LIMIT least(s.headroom / s.units * :reach, (SELECT heads FROM share))) h
), cut AS MATERIALIZED (
    SELECT rank, queued_at, id FROM (
        SELECT DISTINCT ON (h.lane) h.* FROM first_heads h
        JOIN (SELECT lane, count(*) AS heads FROM first_heads GROUP BY lane) f ON f.lane = h.lane
        WHERE f.heads >= (SELECT heads FROM share) AND f.heads < (SELECT jobs FROM room) * :reach
        ORDER BY h.lane, h.rank DESC, h.queued_at DESC, h.id DESC) last
    ORDER BY rank, queued_at, id LIMIT 1
), heads AS MATERIALIZED (
    SELECT id FROM first_heads
    WHERE coalesce((rank, queued_at, id) <= (SELECT rank, queued_at, id FROM cut), true)
    ORDER BY rank, queued_at, id LIMIT (SELECT jobs FROM room) * :reach
), picked AS MATERIALIZED (
    SELECT id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint FROM jobs
    WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
    ORDER BY rank, queued_at, id LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT r.heads, r.jobs, r.cut, p.*, p.queue = ANY (ARRAY(SELECT queue FROM served WHERE looks > 0)) AS tried FROM (
    SELECT (SELECT count(*) FROM heads) AS heads, (SELECT jobs FROM room) AS jobs, EXISTS (SELECT FROM cut) AS cut) r
LEFT JOIN picked p ON true
