-- schema/picking/constrained.py: LOCK_FIRST
SELECT jobs.id FROM unnest(CAST(:ids AS bigint[])) WITH ORDINALITY AS c (job, place)
JOIN jobs ON jobs.id = c.job AND state = 'queued' AND coalesce(schedule_after, '-infinity') = '-infinity'
ORDER BY c.place LIMIT :most FOR NO KEY UPDATE OF jobs SKIP LOCKED
