-- Join or replace the job that has the deduplication key of the request, or make a new one, with the id `new_id`.
--
-- The key is that of an unfinished job, or is kept by one that has succeeded (`kept_key`). Where the request asks for it,
-- a job that has not ended is replaced (`replace_held`), unless it has a bot while the key is kept for it: then it is
-- joined. If the request refuses a taken key this raises LH008, whose message is the reason.
--
-- A job that is joined becomes as urgent as the request, and starts as soon as the request may, if that is more or sooner.
-- The insert waits for another submit of an equal deduplication key, and for the end of the job that has it. The job
-- that is joined is locked: `lock_joined` has done so, or nobody else holds it. Otherwise this raises LH006, as
-- `submit_many` says. A job that ended meanwhile no longer has the key, so the next round makes a new one.
CREATE OR REPLACE FUNCTION submit_or_join(request jsonb, instance_id integer, platform_id integer, actor text,
    new_id bigint, OUT job bigint, OUT answer uuid, OUT joined boolean)
LANGUAGE plpgsql AS $$
DECLARE
    wanted_priority integer := coalesce((request->>'priority')::integer, 0);
    of_constraint_set integer;
    of_preferred integer;
    of_required integer;
    points record;
    wanted_start timestamptz := greatest(now(), (request->>'schedule_after')::timestamptz,
        now() + make_interval(secs => (request->>'delay')::double precision));
    of_key text := request->>'dedup_key';
    way text := on_conflict(request);
    kept_until timestamptz := now() + make_interval(secs => (request->>'unique_for')::double precision);
    kept record;
    held jobs;
    first_at timestamptz;
BEGIN
    IF request ? 'debounce' THEN
        request := request || jsonb_build_object('delay', request->'debounce');
        wanted_start := now() + make_interval(secs => (request->>'debounce')::double precision);
    END IF;
    IF request->'preferred_properties' IS NOT NULL THEN
        SELECT p.preferring, p.platform INTO of_preferred, platform_id
        FROM intern_preferred(coalesce(request->'properties', '{}'), request->'preferred_properties') p;
        IF of_preferred IS NOT NULL AND request->>'prefer_seconds' IS NOT NULL THEN
            of_required := platform_id;
            platform_id := of_preferred;
        END IF;
    END IF;
    IF request->'terms' IS NOT NULL OR (SELECT managed FROM instances WHERE id = instance_id) THEN
        of_constraint_set := intern_constraint_set(coalesce(request->'terms', '{}'));
    END IF;
    LOOP
        IF kept_until IS NOT NULL THEN
            -- The name of the job is not known yet; nobody sees it before it is.
            INSERT INTO unique_keys AS u (instance, dedup_key, job_id, public_id, until)
            VALUES (instance_id, of_key, new_id, gen_random_uuid(), kept_until)
            ON CONFLICT (instance, dedup_key) DO UPDATE SET until = u.until;
        END IF;
        SELECT k.* INTO kept FROM kept_key(instance_id, of_key) k WHERE k.job <> new_id;
        IF FOUND THEN
            IF way = 'refuse' THEN
                RAISE EXCEPTION 'is kept for job %, which has succeeded', kept.public_id USING ERRCODE = 'LH008';
            END IF;
            job := kept.job;
            answer := kept.public_id;
            joined := true;
            RETURN;
        END IF;
        SELECT p.* INTO points
        FROM points_of(CASE WHEN of_constraint_set IS NOT NULL THEN request->'own' END) p;
        INSERT INTO jobs AS j ({JOB_COLUMNS})
        SELECT {JOB_COLUMNS} FROM (
            SELECT new_id AS id, new_public_id(new_id) AS public_id, c.cohort, instance_id AS instance, r.label, r.units,
                   r.locality_hint, r.max_attempts, r.retry_failed, r.dedup_key,
                   coalesce(r.timeout_seconds, points.level_timeout) AS timeout_seconds,
                   coalesce(points.price, r.priority) AS priority, coalesce(points.price, r.priority) AS rank,
                   platform_id AS platform, of_preferred AS preferred, 'queued' AS state,
                   intern_queue(c.cohort, instance_id, platform_id, r.units, of_constraint_set, of_preferred,
                       of_required) AS queue,
                   r.starts_at + make_interval(secs => r.queue_timeout_seconds) AS queue_deadline,
                   nullif(r.starts_at, now()) AS schedule_after, r.starts_at AS queued_at,
                   of_constraint_set IS NOT NULL AS constrained
            FROM read_requests(jsonb_build_array(request)) r CROSS JOIN LATERAL (SELECT cohort_of(r.label) AS cohort) c
        ) new_job
        ON CONFLICT (instance, dedup_key)
            WHERE dedup_key IS NOT NULL AND state IN ('queued', 'parked', 'leased', 'running') DO NOTHING
        RETURNING j.id, j.public_id, false INTO job, answer, joined;
        IF FOUND THEN
            IF kept_until IS NOT NULL THEN
                UPDATE unique_keys SET job_id = job, public_id = answer, until = kept_until
                WHERE instance = instance_id AND dedup_key = of_key;
            ELSIF EXISTS (SELECT FROM kept_key(instance_id, of_key)) THEN
                RAISE EXCEPTION 'a job that keeps the key has succeeded meanwhile' USING ERRCODE = 'LH006';
            END IF;
            IF first_at IS NOT NULL THEN
                UPDATE jobs SET created_at = first_at WHERE id = job;
            END IF;
            IF of_constraint_set IS NOT NULL AND has_own_constraints(request) THEN
                INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs, price, watch_at)
                SELECT job, w.* FROM own_constraints(request, points.price, points.usual_seconds, points.starves_at) w;
            END IF;
            IF of_required IS NOT NULL THEN
                INSERT INTO preference_waits (job_id, seconds, until)
                VALUES (job, (request->>'prefer_seconds')::double precision,
                    wanted_start + make_interval(secs => (request->>'prefer_seconds')::double precision));
            END IF;
            IF request ? 'metadata' THEN
                INSERT INTO job_metadata (job_id, instance, key, value)
                SELECT job, instance_id, m.key, m.value FROM jsonb_each_text(request->'metadata') m;
            END IF;
            INSERT INTO job_payloads (job_id, payload, submitted_by, origin)
                VALUES (job, request->'payload', actor, origin_of(request));
            RETURN;
        END IF;
        IF kept_until IS NOT NULL THEN
            DELETE FROM unique_keys u
            WHERE u.instance = instance_id AND u.dedup_key = of_key AND u.job_id = new_id;
        END IF;
        IF way <> 'join' THEN
            SELECT j.* INTO held FROM jobs j
            WHERE j.instance = instance_id AND j.dedup_key = of_key
                AND j.state IN ('queued', 'parked', 'leased', 'running') FOR NO KEY UPDATE SKIP LOCKED;
            IF FOUND AND way = 'refuse' THEN
                RAISE EXCEPTION 'is that of job %, which is %', held.public_id, held.state USING ERRCODE = 'LH008';
            ELSIF FOUND AND NOT (held.state IN ('leased', 'running') AND EXISTS (
                    SELECT FROM unique_keys u WHERE u.instance = instance_id AND u.dedup_key = of_key
                        AND u.job_id = held.id AND u.until > now())) THEN
                IF request ? 'debounce' AND held.state IN ('queued', 'parked') THEN
                    first_at := held.created_at;
                    wanted_start := greatest(now(), least(wanted_start, first_at
                        + make_interval(secs => (request->>'debounce_max')::double precision)));
                    request := request || jsonb_build_object('delay', extract(epoch FROM wanted_start - now()));
                END IF;
                IF replace_held(request, held, (
                        SELECT intern_queue(c.cohort, instance_id, platform_id, r.units, of_constraint_set, of_preferred,
                            of_required)
                        FROM read_requests(jsonb_build_array(request)) r
                        CROSS JOIN LATERAL (SELECT cohort_of(r.label) AS cohort) c),
                        of_constraint_set IS NOT NULL, of_required IS NOT NULL, wanted_start, actor) THEN
                    INSERT INTO unique_keys AS u (instance, dedup_key, job_id, public_id, until)
                    SELECT instance_id, of_key, held.id, held.public_id, kept_until WHERE kept_until IS NOT NULL
                    ON CONFLICT (instance, dedup_key) DO UPDATE
                        SET job_id = EXCLUDED.job_id, public_id = EXCLUDED.public_id, until = EXCLUDED.until;
                    job := held.id;
                    answer := held.public_id;
                    joined := true;
                    RETURN;
                END IF;
                CONTINUE;
            END IF;
        END IF;
        WITH same AS MATERIALIZED (
            -- A job that has had a bot rests for a reason of its own, which nobody who joins it can know.
            SELECT j.id, j.state, j.fence, j.priority, j.queued_at, j.state IN ('queued', 'parked') AND j.fence = 0
                AND j.schedule_after = j.queued_at AND j.queued_at > wanted_start AS hastens FROM jobs j
            WHERE j.instance = instance_id AND j.dedup_key = of_key
                AND j.state IN ('queued', 'parked', 'leased', 'running') FOR NO KEY UPDATE SKIP LOCKED
        ), raised AS (
            UPDATE jobs j SET priority = least(s.priority, wanted_priority),
                rank = j.rank + least(s.priority, wanted_priority) - s.priority,
                queued_at = CASE WHEN s.hastens THEN wanted_start ELSE j.queued_at END,
                schedule_after = CASE WHEN s.hastens THEN nullif(wanted_start, now()) ELSE j.schedule_after END,
                queue_deadline = j.queue_deadline
                    - CASE WHEN s.hastens THEN s.queued_at - wanted_start ELSE interval '0' END
            FROM same s WHERE j.id = s.id AND (s.priority > wanted_priority OR s.hastens)
        ), noted AS (
            INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
            SELECT s.id, 'join', s.state, s.state, s.fence, actor,
                jsonb_build_object('priority', wanted_priority, 'priority_before', s.priority)
                    || CASE WHEN s.hastens THEN jsonb_build_object('starts_at', wanted_start,
                        'starts_at_before', s.queued_at) ELSE '{}' END
            FROM same s
        )
        INSERT INTO job_followers AS f (job_id, actor, priority)
        SELECT s.id, actor, wanted_priority FROM same s
        RETURNING f.job_id, f.public_id, true INTO job, answer, joined;
        IF FOUND THEN
            IF request ? 'metadata' THEN
                INSERT INTO submission_metadata (submission, job_id, instance, key, value)
                SELECT answer, job, instance_id, m.key, m.value FROM jsonb_each_text(request->'metadata') m;
            END IF;
            RETURN;
        END IF;
        IF EXISTS (SELECT FROM jobs j WHERE j.instance = instance_id AND j.dedup_key = of_key
                AND j.state IN ('queued', 'parked', 'leased', 'running')) THEN
            RAISE EXCEPTION 'somebody else holds the job to be joined' USING ERRCODE = 'LH006';
        END IF;
    END LOOP;
END $$;
