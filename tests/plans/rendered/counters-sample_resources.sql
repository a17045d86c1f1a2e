-- schema/accounting/counters.py: SAMPLE_RESOURCES
WITH declared AS MATERIALIZED (
    SELECT name, used, most FROM counters WHERE name LIKE 'bot:%' AND most > 0
), summed AS MATERIALIZED (
    SELECT v.kind, sum(v.used) AS busy, sum(v.most) AS available
    FROM declared d JOIN bots b ON b.id = CAST(split_part(d.name, ':', 2) AS bigint) AND b.status = 'ok' AND NOT b.draining AND NOT b.closing AND b.sync_seq > 0
    CROSS JOIN LATERAL (
        SELECT split_part(d.name, ':', 3) AS kind, d.used, d.most
        UNION ALL
        SELECT 'gpu_milli', 1000 * d.used, 0 WHERE split_part(d.name, ':', 3) = 'gpus') v
    WHERE v.kind <> 'gpu' GROUP BY 1
)
INSERT INTO usage (name, bucket, amount, rolled)
SELECT 'pool:' || k.kind || ':' || s.part, date_trunc('minute', clock_timestamp()), s.amount, true
FROM summed k CROSS JOIN LATERAL (VALUES ('busy', k.busy), ('available', k.available)) AS s (part, amount)
ON CONFLICT (name, bucket) DO NOTHING
