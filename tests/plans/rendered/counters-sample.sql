-- schema/accounting/counters.py: SAMPLE
INSERT INTO usage (name, bucket, amount, rolled)
SELECT s.name, date_trunc('minute', clock_timestamp()), s.units, true
FROM (SELECT sum(in_use) AS busy, sum(capacity) AS available FROM bots WHERE status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0) b
CROSS JOIN LATERAL (VALUES ('pool:busy', b.busy), ('pool:available', b.available)) AS s (name, units)
WHERE s.units IS NOT NULL AND EXISTS (
    SELECT FROM queues q WHERE (q.schedule_after IS NULL OR q.schedule_after <= now()) AND EXISTS (SELECT FROM jobs WHERE constrained = (q.constraint_set IS NOT NULL) AND queue = q.id AND state = 'queued' AND schedule_after IS NULL AND units >= 1 OFFSET 0))
ON CONFLICT (name, bucket) DO NOTHING
