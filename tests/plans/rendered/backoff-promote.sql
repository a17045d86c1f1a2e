-- schema/moves/backoff.py: PROMOTE
WITH retries AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE state = 'queued' AND schedule_after IS NOT NULL AND considered = 0 AND schedule_after <= now()
    ORDER BY schedule_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), rested AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE state = 'queued' AND schedule_after IS NOT NULL AND considered > 0 AND schedule_after <= now()
    ORDER BY schedule_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), due AS MATERIALIZED (
    SELECT id FROM retries UNION ALL SELECT id FROM rested
)
UPDATE jobs j SET schedule_after = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM due))
RETURNING j.constraint_set IS NOT NULL AS gated
