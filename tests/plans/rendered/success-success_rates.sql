-- schema/fleet/success.py: SUCCESS_RATES
SELECT s.bot_id, s.label, ((s.successes + 2) / (s.successes + s.failures + 2)) AS rate FROM unnest(CAST(:bot_ids AS bigint[])) AS b (id)
CROSS JOIN LATERAL (SELECT * FROM bot_success WHERE bot_id = b.id OFFSET 0) s
WHERE s.label = ANY (CAST(:labels AS text[]))
