WITH want AS MATERIALIZED (
    SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
        (SELECT pool FROM instances WHERE id = :instance) AS pool, CAST(:platform AS integer) AS platform,
        CAST(:units AS integer) AS units
), able AS MATERIALIZED (
    SELECT b.id, b.name, b.capacity, b.held, b.capacity - b.in_use - b.kept_units AS room
    FROM want w CROSS JOIN LATERAL (
    (SELECT b.* FROM (
        SELECT kind AS offered FROM kind_platforms WHERE platform = w.platform AND (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND true OFFSET 0) k
    CROSS JOIN LATERAL ((SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND (probation_until IS NULL OR in_use = 0) AND NOT (kept_units > 0 AND (kept_for <> :instance OR kept_until <> now() + make_interval(secs => :patience + kill_grace))) AND (CAST(:queue_deadline AS timestamptz) IS NULL OR CAST(:queue_deadline AS timestamptz) > clock_timestamp() + make_interval(secs => :sync + kill_grace + 6.0)) AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT :look)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND (probation_until IS NULL OR in_use = 0) AND NOT (kept_units > 0 AND (kept_for <> :instance OR kept_until <> now() + make_interval(secs => :patience + kill_grace))) AND (CAST(:queue_deadline AS timestamptz) IS NULL OR CAST(:queue_deadline AS timestamptz) > clock_timestamp() + make_interval(secs => :sync + kill_grace + 6.0)) AND kind = k.offered AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT :look)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND (probation_until IS NULL OR in_use = 0) AND NOT (kept_units > 0 AND (kept_for <> :instance OR kept_until <> now() + make_interval(secs => :patience + kill_grace))) AND (CAST(:queue_deadline AS timestamptz) IS NULL OR CAST(:queue_deadline AS timestamptz) > clock_timestamp() + make_interval(secs => :sync + kill_grace + 6.0)) AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT :look)) b LIMIT :look)
    UNION ALL
    (SELECT b.* FROM ((SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND (probation_until IS NULL OR in_use = 0) AND NOT (kept_units > 0 AND (kept_for <> :instance OR kept_until <> now() + make_interval(secs => :patience + kill_grace))) AND (CAST(:queue_deadline AS timestamptz) IS NULL OR CAST(:queue_deadline AS timestamptz) > clock_timestamp() + make_interval(secs => :sync + kill_grace + 6.0)) AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND (probation_until IS NULL OR in_use = 0) AND NOT (kept_units > 0 AND (kept_for <> :instance OR kept_until <> now() + make_interval(secs => :patience + kill_grace))) AND (CAST(:queue_deadline AS timestamptz) IS NULL OR CAST(:queue_deadline AS timestamptz) > clock_timestamp() + make_interval(secs => :sync + kill_grace + 6.0)) AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND (probation_until IS NULL OR in_use = 0) AND NOT (kept_units > 0 AND (kept_for <> :instance OR kept_until <> now() + make_interval(secs => :patience + kill_grace))) AND (CAST(:queue_deadline AS timestamptz) IS NULL OR CAST(:queue_deadline AS timestamptz) > clock_timestamp() + make_interval(secs => :sync + kill_grace + 6.0)) AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT ALL)) b
    WHERE NOT (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND EXISTS (SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (w.platform, b.kind) AND (o.platform, o.kind) <= (w.platform, b.kind) OFFSET 0) LIMIT :look) LIMIT :look) b
    WHERE b.capacity >= w.units
), stopping AS MATERIALIZED (
    SELECT cohort, instance, sum(units) AS units FROM leases WHERE state = 'cancelling' GROUP BY cohort, instance
)
SELECT a.id, a.name AS bot, a.capacity,
    a.room + coalesce(sum(l.units) FILTER (WHERE l.state = 'cancelling') OVER (PARTITION BY a.id), 0) AS room,
    l.job_id, j.public_id, l.fence, l.cohort, l.instance, i.name AS instance_name,
    j.priority, l.units, j.queued_at, coalesce(j.started_at, l.granted_at) AS started_at, j.evictions,
    l.state = 'active' AND j.state = 'running' AS running,
    q.usage - q.min_quota - coalesce(s.units, 0) AS spare
FROM able a
LEFT JOIN LATERAL (SELECT * FROM leases WHERE bot_id = a.id AND state NOT IN ('completed', 'cancelled') ORDER BY granted_at DESC LIMIT greatest(a.held, 0)) l ON true
LEFT JOIN jobs j ON j.id = l.job_id
LEFT JOIN instances i ON i.id = l.instance
LEFT JOIN quotas q ON q.cohort = l.cohort AND q.instance = l.instance
LEFT JOIN stopping s ON s.cohort = l.cohort AND s.instance = l.instance
ORDER BY a.id, l.job_id
