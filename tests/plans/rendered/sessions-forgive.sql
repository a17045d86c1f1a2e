-- schema/moves/sessions.py: FORGIVE
WITH told AS MATERIALIZED (
    DELETE FROM lost_attempts WHERE bot_id = :bot_id AND session = :session RETURNING job_id, fence
), held AS MATERIALIZED (
    SELECT j.id, t.fence AS lost FROM jobs j JOIN told t ON t.job_id = j.id
    WHERE j.finished_at IS NULL
        AND (SELECT count(*) FROM job_events e
    WHERE e.job_id = j.id AND (e.move = 'forgive' OR e.move = 'requeue' AND e.details ? 'spared')) < 10
    ORDER BY j.id FOR NO KEY UPDATE OF j
), moved AS (
    UPDATE jobs j SET kills = greatest(j.kills - 1, 0), attempts = greatest(j.attempts - 1, 0) FROM held h
    WHERE j.id = h.id RETURNING j.id, j.state, j.fence, h.lost
), returned AS (
    UPDATE blames SET returned_at = clock_timestamp(), upheld_at = NULL
    WHERE bot_id = :bot_id AND job_id = ANY (ARRAY(SELECT job_id FROM told))
)
INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
SELECT id, 'forgive', state, state, fence, CAST(:actor AS text),
    jsonb_build_object('reason', 'its bot was only cut off', 'lost_fence', lost) FROM moved
