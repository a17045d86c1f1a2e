-- schema/moves/sessions.py: WORN_OUT
SELECT id FROM unnest(CAST(:job_ids AS bigint[])) AS j (id) WHERE (SELECT count(*) FROM job_events e
    WHERE e.job_id = j.id AND (e.move = 'forgive' OR e.move = 'requeue' AND e.details ? 'spared')) >= 10
