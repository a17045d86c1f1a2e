-- Replace the job that has the deduplication key of a request, and that the caller has locked. Returns whether it took
-- the request over; otherwise its key is free, and a new job has to be made.
--
-- A job that waits takes everything from the request. It keeps its id, its age and its attempts, and if it is held it
-- stays so. What a bot was told of the earlier work goes, such as recorded steps. A job that would come into another
-- queue is cancelled instead: a pick that has read it in its old queue must not lease it, and it looks for the state
-- only. A job that a bot has goes on without its key. A job that others have joined is theirs too, which raises LH008.
CREATE OR REPLACE FUNCTION replace_held(request jsonb, held jobs, of_queue integer, of_constrained boolean,
    is_insisting boolean, wanted_start timestamptz, actor text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    -- What a pause has set aside has no start of its own.
    held_until timestamptz := nullif(held.schedule_after, timestamptz '9999-01-01 00:00:00+00');
    queues_at timestamptz;
    starts_at timestamptz;
    asked record;
    points record;
BEGIN
    IF held.abandoned_at IS NOT NULL
            OR EXISTS (SELECT FROM job_followers f WHERE f.job_id = held.id AND f.cancelled_at IS NULL) THEN
        RAISE EXCEPTION 'is that of job %, which several submissions share: it cannot be replaced', held.public_id
            USING ERRCODE = 'LH008';
    END IF;
    IF held.state IN ('leased', 'running') THEN
        UPDATE jobs SET dedup_key = NULL WHERE id = held.id;
        INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
        VALUES (held.id, 'pass_key', held.state, held.state, held.fence, replace_held.actor,
            jsonb_build_object('dedup_key', held.dedup_key));
        RETURN false;
    END IF;
    IF held.queue <> of_queue AND held.state = 'queued' THEN
        UPDATE jobs SET state = 'cancelled', finished_at = clock_timestamp(), schedule_after = NULL,
            reason = 'replaced by a submit with its deduplication key' WHERE id = held.id;
        INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
        VALUES (held.id, 'cancel', held.state, 'cancelled', held.fence, replace_held.actor, '{"replaced": true}');
        PERFORM wake('done', held.public_id::text);
        RETURN false;
    END IF;
    SELECT r.*, q.cohort, q.platform, q.preferred INTO asked
    FROM read_requests(jsonb_build_array(request)) r CROSS JOIN queues q WHERE q.id = of_queue;
    SELECT p.* INTO points FROM points_of(CASE WHEN of_constrained THEN request->'own' END) p;
    asked.priority := coalesce(points.price, asked.priority);
    -- As when it is rescheduled: what may start at once keeps its age, and a wait after an attempt stays.
    queues_at := CASE WHEN wanted_start > now() THEN wanted_start ELSE least(held.queued_at, now()) END;
    starts_at := nullif(greatest(wanted_start, CASE WHEN held.fence > 0 THEN held_until END), now());
    UPDATE jobs SET queue = of_queue, cohort = asked.cohort, platform = asked.platform, preferred = asked.preferred,
        units = asked.units, label = asked.label, priority = asked.priority,
        rank = asked.priority, constrained = of_constrained, locality_hint = asked.locality_hint,
        timeout_seconds = coalesce(asked.timeout_seconds, points.level_timeout),
        max_attempts = greatest(asked.max_attempts, attempts + 1), retry_failed = asked.retry_failed,
        queued_at = queues_at, schedule_after = starts_at,
        queue_deadline = queues_at + make_interval(secs => asked.queue_timeout_seconds)
    WHERE id = held.id;
    UPDATE job_payloads SET payload = request->'payload', origin = origin_of(request) WHERE job_id = held.id;
    DELETE FROM job_constraints WHERE job_id = held.id;
    IF of_constrained AND has_own_constraints(request) THEN
        INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs, price, watch_at)
        SELECT held.id, w.* FROM own_constraints(request, points.price, points.usual_seconds, points.starves_at) w;
    END IF;
    DELETE FROM preference_waits WHERE job_id = held.id;
    IF is_insisting THEN
        INSERT INTO preference_waits (job_id, seconds, until)
        VALUES (held.id, asked.prefer_seconds, queues_at + make_interval(secs => asked.prefer_seconds));
    END IF;
    DELETE FROM job_metadata WHERE job_id = held.id;
    INSERT INTO job_metadata (job_id, instance, key, value)
    SELECT held.id, held.instance, m.key, m.value FROM jsonb_each_text(coalesce(request->'metadata', '{}')) m;
    DELETE FROM job_checkpoints WHERE job_id = held.id;
    DELETE FROM job_progress WHERE job_id = held.id;
    DELETE FROM rate_skips WHERE job_id = held.id;
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    VALUES (held.id, 'replace', held.state, held.state, held.fence, replace_held.actor,
        jsonb_strip_nulls(jsonb_build_object('priority', asked.priority, 'priority_before', held.priority,
            'starts_at', starts_at, 'starts_at_before', held_until)));
    RETURN true;
END $$;
