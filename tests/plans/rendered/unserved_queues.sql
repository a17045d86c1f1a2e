WITH RECURSIVE waiting AS (
    SELECT (SELECT queue FROM jobs WHERE NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 ORDER BY queue DESC LIMIT 1) AS queue
    UNION ALL
    SELECT (SELECT queue FROM jobs WHERE NOT constrained AND state = 'queued' AND schedule_after IS NULL AND units >= 1 AND queue < w.queue ORDER BY queue DESC LIMIT 1) FROM waiting w WHERE w.queue IS NOT NULL
), wanted AS MATERIALIZED (

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
)
SELECT w.queue FROM wanted w
WHERE NOT EXISTS (
    (SELECT b.id FROM (
        SELECT kind AS offered FROM kind_platforms WHERE platform = w.platform AND (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND true OFFSET 0) k
    CROSS JOIN LATERAL ((SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND capacity > 0 AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT 1)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND capacity > 0 AND kind = k.offered AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT 1)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND capacity > 0 AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT 1)) b LIMIT 1)
    UNION ALL
    (SELECT b.id FROM ((SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND capacity > 0 AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND capacity > 0 AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND capacity > 0 AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT ALL)) b
    WHERE NOT (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND EXISTS (SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (w.platform, b.kind) AND (o.platform, o.kind) <= (w.platform, b.kind) OFFSET 0) LIMIT 1) OFFSET 0)
LIMIT :limit
