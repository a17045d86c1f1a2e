-- schema/picking/preemption.py: OCCUPIED_BOTS
WITH want AS MATERIALIZED (
    SELECT CAST(:instance AS integer) AS instance, (SELECT pool FROM instances WHERE id = :instance) AS pool,
        CAST(:units AS integer) AS units
), able AS MATERIALIZED (
    SELECT b.id, b.name, b.capacity, b.held, b.capacity - b.in_use - b.reserved AS room
    FROM (SELECT bot_id FROM bot_platforms WHERE platform = :platform AND cohort = :cohort
          ORDER BY sample_key LIMIT :look) near
    JOIN bots b ON b.id = near.bot_id CROSS JOIN want w
    WHERE b.status = 'ok' AND NOT b.draining AND NOT b.closing AND (b.probation_until IS NULL OR b.in_use = 0) AND b.cohort = :cohort
        AND b.capacity >= w.units AND (b.instance IS NULL AND b.pool IS NULL OR b.instance = w.instance OR b.pool = w.pool)
), stopping AS MATERIALIZED (
    SELECT instance, sum(units) AS units FROM leases
    WHERE state = 'cancelling' AND cohort = :cohort GROUP BY instance
)
SELECT a.id, a.name AS bot, a.capacity,
    a.room + coalesce(sum(l.units) FILTER (WHERE l.state = 'cancelling') OVER (PARTITION BY a.id), 0) AS room,
    l.job_id, j.public_id, l.fence, l.instance, i.name AS instance_name,
    j.priority, l.units, j.queued_at, coalesce(j.started_at, l.granted_at) AS started_at, j.evictions,
    l.state = 'active' AND j.state = 'running' AND l.cohort = :cohort AS running,
    q.usage - q.min_quota - coalesce(s.units, 0) AS spare
FROM able a
LEFT JOIN LATERAL (SELECT * FROM leases WHERE bot_id = a.id AND state NOT IN ('completed', 'cancelled') ORDER BY granted_at DESC LIMIT greatest(a.held, 0)) l ON true
LEFT JOIN jobs j ON j.id = l.job_id
LEFT JOIN instances i ON i.id = l.instance
LEFT JOIN quotas q ON q.cohort = l.cohort AND q.instance = l.instance
LEFT JOIN stopping s ON s.instance = l.instance
ORDER BY a.id, l.job_id
