-- schema/moves/backoff.py: PROMOTE
WITH retries AS MATERIALIZED (
    SELECT id FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND schedule_after <= now() ORDER BY schedule_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs j SET schedule_after = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM retries))
RETURNING j.constrained
