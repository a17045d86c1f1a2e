-- schema/picking/constrained.py: UNRECORDED_DEMAND
SELECT a.instance FROM accounts a JOIN instances i ON i.id = a.instance
WHERE a.demand_at < now() - interval '10 s' AND (
    EXISTS (SELECT FROM counters c WHERE c.name = 'instance:' || i.name || '\:jobs' AND c.used > 0)
    OR NOT i.draining AND EXISTS (
        SELECT FROM (SELECT q.*, i.pool FROM queues q WHERE q.instance = a.instance AND q.constraint_set IS NOT NULL) w
        WHERE EXISTS (SELECT FROM jobs WHERE constrained = (w.constraint_set IS NOT NULL) AND queue = w.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 OFFSET 0)
            AND EXISTS (
    (SELECT b.id FROM (
        SELECT kind AS offered FROM kind_platforms WHERE platform = w.platform AND (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND true OFFSET 0) k
    CROSS JOIN LATERAL ((SELECT * FROM bots WHERE status <> 'gone' AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT 1)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND kind = k.offered AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT 1)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND kind = k.offered AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT 1)) b LIMIT 1)
    UNION ALL
    (SELECT b.id FROM ((SELECT * FROM bots WHERE status <> 'gone' AND cohort = w.cohort AND instance IS NULL AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND cohort = w.cohort AND instance = w.instance AND pool IS NULL ORDER BY cohort, kind, instance, pool LIMIT ALL)
 UNION ALL (SELECT * FROM bots WHERE status <> 'gone' AND cohort = w.cohort AND instance IS NULL AND pool = w.pool ORDER BY cohort, kind, instance, pool LIMIT ALL)) b
    WHERE NOT (SELECT count(*) <= 1000 FROM (SELECT FROM kinds LIMIT 1001) n) AND EXISTS (SELECT FROM kind_platforms o WHERE o.platform = w.platform AND o.kind = b.kind OFFSET 0) LIMIT 1) OFFSET 0)))
