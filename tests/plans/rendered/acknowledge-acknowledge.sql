-- schema/moves/acknowledge.py: ACKNOWLEDGE
WITH told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:bot_ids AS bigint[]),
                         CAST(:epochs AS bigint[]), CAST(:actors AS text[]))
        AS t (job_id, fence, bot_id, bot_epoch, actor)
), held AS MATERIALIZED (
    SELECT j.id, j.timeout_seconds FROM jobs j JOIN told t ON t.job_id = j.id AND t.fence = j.fence
    WHERE j.state = 'leased' ORDER BY j.id FOR NO KEY UPDATE OF j
), active AS (
    UPDATE leases l SET state = 'active', acknowledged_at = clock_timestamp(), acknowledged_by = t.actor,
        acknowledged_event = nextval('stored_events_id_seq'),
        due_at = CASE WHEN h.timeout_seconds IS NOT NULL
            THEN now() + make_interval(secs => h.timeout_seconds + :sync + (SELECT kill_grace + 6.0 FROM bots WHERE true AND id >= l.bot_id AND id <= l.bot_id ORDER BY id DESC LIMIT 1 )) END
    FROM told t JOIN held h ON h.id = t.job_id
    WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.bot_id = t.bot_id AND l.bot_epoch = t.bot_epoch
        AND l.ended_at IS NULL AND l.state IS NOT DISTINCT FROM 'pending'
    RETURNING l.job_id
)
UPDATE jobs j SET state = 'running', started_at = clock_timestamp(), queue_deadline = NULL
FROM active a WHERE j.id = a.job_id AND j.state = 'leased'
RETURNING j.id
