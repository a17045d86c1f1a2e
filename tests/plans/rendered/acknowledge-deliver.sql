-- schema/moves/acknowledge.py: DELIVER
UPDATE leases l SET delivered_at = clock_timestamp()
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.ended_at IS NULL AND l.state IS NOT DISTINCT FROM 'pending'
