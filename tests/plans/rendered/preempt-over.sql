-- schema/moves/preempt.py: OVER
SELECT b.id FROM bots b WHERE b.id = ANY (ARRAY(
    SELECT v.bot_id FROM reservations v LEFT JOIN jobs j ON j.id = v.job_id
    CROSS JOIN LATERAL (
        SELECT h.status = 'ok' AND NOT h.draining AND NOT h.closing AS healthy FROM bots h WHERE h.id = v.bot_id OFFSET 0) h
    WHERE v.until < clock_timestamp() OR j.state IS DISTINCT FROM 'queued' OR NOT h.healthy LIMIT :limit))
ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED
