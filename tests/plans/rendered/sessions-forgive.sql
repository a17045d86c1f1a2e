-- schema/moves/sessions.py: FORGIVE
WITH told AS MATERIALIZED (
    DELETE FROM lost_attempts l
    USING unnest(CAST(:bot_ids AS bigint[]), CAST(:sessions AS bytea[]), CAST(:actors AS text[]))
        AS t (bot_id, session, actor)
    WHERE l.bot_id = t.bot_id AND l.session = t.session RETURNING l.job_id, l.fence, l.bot_id, t.actor
), held AS MATERIALIZED (
    SELECT j.id, t.lost, t.actors FROM jobs j
    JOIN (SELECT job_id, array_agg(fence ORDER BY fence) AS lost, array_agg(actor ORDER BY fence) AS actors
          FROM told GROUP BY job_id) t ON t.job_id = j.id
    WHERE j.finished_at IS NULL
    ORDER BY j.id FOR NO KEY UPDATE OF j
), spared AS MATERIALIZED (
    SELECT h.id, h.lost[1 : n.left_over] AS lost, h.actors[1 : n.left_over] AS actors FROM held h
    CROSS JOIN LATERAL (SELECT 10 - (SELECT count(*) FROM job_events e
    WHERE e.job_id = h.id AND (e.move = 'forgive' OR e.move = 'requeue' AND e.details ? 'spared')) AS left_over) n
    WHERE n.left_over > 0
), moved AS (
    UPDATE jobs j SET kills = greatest(j.kills - cardinality(s.lost), 0),
        attempts = greatest(j.attempts - cardinality(s.lost), 0)
    FROM spared s WHERE j.id = s.id RETURNING j.id, j.state, j.fence, s.lost, s.actors
), returned AS (
    UPDATE blames b SET returned_at = clock_timestamp(), upheld_at = NULL
    FROM told t WHERE b.bot_id = t.bot_id AND b.job_id = t.job_id
)
INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
SELECT m.id, 'forgive', m.state, m.state, m.fence, e.actor,
    jsonb_build_object('reason', 'its bot was only cut off', 'lost_fence', e.lost)
FROM moved m CROSS JOIN unnest(m.lost, m.actors) AS e (lost, actor)
