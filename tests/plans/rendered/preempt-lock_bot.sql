-- schema/moves/preempt.py: LOCK_BOT
SELECT id FROM bots
WHERE id = :bot_id AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND NOT (kept_units > 0 AND (kept_for <> :instance OR kept_until <> now() + make_interval(secs => :patience + kill_grace))) FOR NO KEY UPDATE SKIP LOCKED
