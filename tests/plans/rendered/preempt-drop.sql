-- schema/moves/preempt.py: DROP
WITH lost AS MATERIALIZED (
    SELECT id FROM bots
    WHERE id = ANY (CAST(:bot_ids AS bigint[])) AND (:all OR NOT (status = 'ok' AND NOT draining AND NOT closing))
), over AS MATERIALIZED (
    SELECT v.job_id FROM reservations v WHERE v.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND (
        v.bot_id IN (SELECT id FROM lost)
        OR v.until < clock_timestamp()
        OR NOT EXISTS (SELECT FROM jobs j WHERE j.id = v.job_id AND j.state = 'queued'))
), held AS MATERIALIZED (
    SELECT id, state, fence FROM jobs WHERE id = ANY (ARRAY(SELECT job_id FROM over))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM reservations v USING over o
    WHERE v.job_id = o.job_id AND v.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND (
        v.job_id IN (SELECT id FROM held) OR NOT EXISTS (SELECT FROM jobs j WHERE j.id = v.job_id))
    RETURNING v.job_id, v.bot_id, v.units, v.until
), less AS (
    UPDATE bots b SET reserved = b.reserved - s.units
    FROM (SELECT bot_id, sum(units) AS units FROM gone GROUP BY bot_id) s WHERE b.id = s.bot_id
), waiting AS MATERIALIZED (
    SELECT h.id, h.state, h.fence FROM held h JOIN gone g ON g.job_id = h.id WHERE h.state IN ('queued', 'parked')
), ready AS (
    UPDATE jobs j SET schedule_after = NULL, reason = CASE j.state WHEN 'parked' THEN j.reason END
    FROM gone g WHERE g.job_id = j.id AND j.schedule_after = g.until
        AND j.id = ANY (ARRAY(SELECT id FROM waiting))
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT w.id, 'unreserve', 'queued', 'queued', w.fence, :actor, jsonb_build_object('reason',
        CASE WHEN l.id IS NULL THEN 'the reservation is over' ELSE 'the bot takes no work any more' END)
    FROM waiting w JOIN gone g ON g.job_id = w.id LEFT JOIN lost l ON l.id = g.bot_id
    WHERE w.state = 'queued'
)
SELECT g.job_id, c.fence FROM gone g LEFT JOIN held h ON h.id = g.job_id
LEFT JOIN charges c ON c.job_id = g.job_id AND c.fence = h.fence + 1
