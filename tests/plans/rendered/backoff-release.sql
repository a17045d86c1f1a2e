-- schema/moves/backoff.py: RELEASE
WITH RECURSIVE resting AS (
    (SELECT cohort, instance, platform FROM jobs WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM resting q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
), waiting AS MATERIALIZED (
    SELECT j.id FROM resting q
    JOIN (SELECT id AS instance, pool FROM instances) i ON i.instance = q.instance
    JOIN (SELECT c.id, c.cohort, c.instance, c.pool, r.room
          FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:rooms AS integer[])) AS r (bot_id, room)
          CROSS JOIN LATERAL (SELECT * FROM bots WHERE true AND id >= r.bot_id AND id <= r.bot_id ORDER BY id DESC LIMIT 1 ) c OFFSET 0) b ON b.cohort = q.cohort
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = b.id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id FROM jobs
        WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform
            AND state = 'queued' AND schedule_after IS NOT NULL AND constraint_set IS NULL AND considered <> 0 AND units <= b.room
        ORDER BY priority, queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
    ) j
    WHERE (b.instance IS NULL AND b.pool IS NULL OR b.instance = i.instance OR b.pool = i.pool)
    LIMIT :limit
)
UPDATE jobs j SET schedule_after = NULL, considered = 0, reason = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM waiting))
RETURNING j.id
