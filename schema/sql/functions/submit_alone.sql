-- Submit one job: what `submit_many` does, without the work of sharing look-ups among many.
--
-- For each call the server sets up each statement, each table in it and each expression again. Each costs half as much
-- as an index entry. So the first statement finds the queue of a job without a label, constraints and preferences. It
-- looks up the digest of the properties as given: a set whose digest is known is in normal form already. Fields that
-- few requests have are read only if `is_special` is true. `intern_queue` is called only if there is no such queue, or
-- if upkeep may be about to delete it; its comment says why no lock is needed otherwise.
--
-- Jobs without a label are in cohort 0. For a label, the table of jobs is locked before the cohort is read, because
-- whoever changes the cohorts locks it too. Locks are taken in the same order as in `submit_many`. Where operators have
-- set limits, `request` is what is stored and `original` what was asked; a key keeps the digest of `original`.
CREATE OR REPLACE FUNCTION submit_alone(request jsonb, actor text,
    OUT job_id bigint, OUT public_id uuid, OUT created boolean, OUT same boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    woken boolean;
    of_instance integer;
    of_constraint_set integer;
    of_cohort integer := 0;
    of_platform integer;
    of_preferred integer;
    of_required integer;
    of_queue integer;
    of_units integer;
    of_priority integer;
    of_timeout double precision;
    of_price integer;
    usual_seconds double precision;
    starves_at timestamptz;
    of_start timestamptz;
    of_deadline timestamptz;
    of_origin jsonb;
    is_managed boolean;
    is_special boolean;
    limited boolean;
    original jsonb;
BEGIN
    IF jsonb_typeof(request->'payload'->'command') IS DISTINCT FROM 'array'
            OR jsonb_typeof(coalesce(request->'properties', '{}')) <> 'object' THEN
        IF is_flat(request) THEN
            SELECT a.* INTO job_id, public_id, created, same
            FROM submit_alone(normal_requests(jsonb_build_array(request), 'jobs')->0, actor) a;
            RETURN;
        END IF;
        RAISE EXCEPTION 'a request needs payload.command, an array, and its properties are an object'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    job_id := nextval('jobs_id_seq');
    SELECT new_public_id(job_id), true, true, q.units, coalesce((request->>'priority')::integer, 0), q.instance,
            q.platform, q.id, EXISTS (SELECT FROM submit_checks),
            request->>'label' <> '' OR request ?| '{dedup_key,preferred_properties,terms,queue_timeout_seconds,metadata,
                prefer_seconds,from,lowered,schedule_after,delay}'
        INTO public_id, created, same, of_units, of_priority, of_instance, of_platform, of_queue, limited, is_special
        FROM known_queue(request) q;
    IF of_queue IS NULL THEN
        SELECT new_public_id(job_id), true, true, coalesce((request->>'units')::integer, 1),
                coalesce((request->>'priority')::integer, 0), i.id, i.managed, p.id, EXISTS (SELECT FROM submit_checks)
            INTO public_id, created, same, of_units, of_priority, of_instance, is_managed, of_platform, limited
            FROM (SELECT) one
            LEFT JOIN instances i ON i.name = coalesce(request->>'instance', 'default')
            LEFT JOIN platforms p ON p.digest = sha256(convert_to(coalesce(request->'properties', '{}')::text, 'UTF8'));
        is_special := true;
    END IF;
    IF limited OR is_special THEN
        IF limited THEN
            limited := EXISTS (SELECT FROM queue_limits q WHERE q.label IS NULL OR q.label = request->>'label'
                UNION ALL SELECT FROM ceilings UNION ALL SELECT FROM submit_rules);
        END IF;
        IF limited OR is_special THEN
            IF request->>'dedup_key' IS NOT NULL THEN
                SELECT s.job_ids[1], s.public_ids[1], coalesce(s.created[1], true), coalesce(s.same[1], true)
                    INTO job_id, public_id, created, same
                    FROM submit_many(jsonb_build_array(request), actor) s;
                RETURN;
            END IF;
            IF limited THEN
                PERFORM refuse_full_queues(jsonb_build_array(request));
                original := request;
                request := within_limits(jsonb_build_array(request), 'jobs')->0;
                of_priority := coalesce((request->>'priority')::integer, 0);
            END IF;
            IF request->'preferred_properties' IS NULL THEN
                IF of_platform IS NULL THEN
                    of_platform := intern_platform(normal_properties(coalesce(request->'properties', '{}')));
                END IF;
            ELSE
                SELECT p.preferring, p.platform INTO of_preferred, of_platform
                FROM intern_preferred(coalesce(request->'properties', '{}'), request->'preferred_properties') p;
                IF of_preferred IS NOT NULL AND request->>'prefer_seconds' IS NOT NULL THEN
                    of_required := of_platform;
                    of_platform := of_preferred;
                END IF;
            END IF;
            IF of_instance IS NULL THEN
                of_instance := intern_instance(coalesce(request->>'instance', 'default'));
            END IF;
            IF is_managed OR request->'terms' IS NOT NULL THEN
                of_constraint_set := intern_constraint_set(coalesce(request->'terms', '{}'));
            END IF;
            of_start := greatest(now(), (request->>'schedule_after')::timestamptz,
                now() + make_interval(secs => (request->>'delay')::double precision));
            of_deadline := of_start + make_interval(secs => (request->>'queue_timeout_seconds')::double precision);
            of_origin := CASE WHEN request ?| '{from,queue_timeout_seconds,prefer_seconds,lowered,schedule_after,delay}'
                THEN origin_of(request) END;
            IF request->>'label' <> '' OR of_constraint_set IS NOT NULL
                    OR request->'preferred_properties' IS NOT NULL THEN
                of_queue := NULL;
            END IF;
        END IF;
    END IF;
    IF request->>'key' IS NOT NULL THEN
        INSERT INTO submit_keys AS k (instance, key, request_hash, job_id, public_id)
        VALUES (of_instance, request->>'key',
            sha256(convert_to((coalesce(original, request) - 'key')::text, 'UTF8')), submit_alone.job_id,
            submit_alone.public_id)
        ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false;
        IF NOT FOUND THEN
            SELECT k.job_id, k.public_id, false,
                k.request_hash = sha256(convert_to((coalesce(original, request) - 'key')::text, 'UTF8'))
                INTO job_id, public_id, created, same
            FROM submit_keys k
            WHERE k.instance = of_instance AND k.key = request->>'key';
            RETURN;
        END IF;
    END IF;
    IF of_queue IS NULL THEN
        LOCK TABLE jobs IN ROW EXCLUSIVE MODE;
        of_cohort := cohort_of(coalesce(request->>'label', ''));
        of_queue := intern_queue(of_cohort, of_instance, of_platform, of_units, of_constraint_set, of_preferred,
            of_required);
        IF of_constraint_set IS NOT NULL THEN
            SELECT p.* INTO of_price, of_timeout, usual_seconds, starves_at FROM points_of(request->'own') p;
            of_priority := coalesce(of_price, of_priority);
        END IF;
    END IF;
    INSERT INTO jobs ({JOB_COLUMNS})
    SELECT {JOB_COLUMNS} FROM (
        SELECT submit_alone.job_id AS id, submit_alone.public_id AS public_id, of_queue AS queue, of_cohort AS cohort,
               of_instance AS instance, of_platform AS platform, coalesce(request->>'label', '') AS label,
               of_priority AS priority, of_units AS units, 'queued' AS state,
               request->>'locality_hint' AS locality_hint,
               coalesce((request->>'timeout_seconds')::double precision, of_timeout) AS timeout_seconds,
               of_deadline AS queue_deadline,
               coalesce((request->>'max_attempts')::integer, 5) AS max_attempts,
               coalesce((request->>'retry_failed')::boolean, false) AS retry_failed, NULL::text AS dedup_key,
               of_constraint_set IS NOT NULL AS constrained, of_priority AS rank,
               of_preferred AS preferred, nullif(of_start, now()) AS schedule_after,
               coalesce(of_start, now()) AS queued_at
    ) new_job;
    IF is_special THEN
        IF of_constraint_set IS NOT NULL AND has_own_constraints(request) THEN
            INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs, price, watch_at)
            SELECT submit_alone.job_id, w.* FROM own_constraints(request, of_price, usual_seconds, starves_at) w;
        END IF;
        IF of_required IS NOT NULL THEN
            INSERT INTO preference_waits (job_id, seconds, until)
            VALUES (submit_alone.job_id, (request->>'prefer_seconds')::double precision,
                of_start + make_interval(secs => (request->>'prefer_seconds')::double precision));
        END IF;
        IF request ? 'metadata' THEN
            INSERT INTO job_metadata (job_id, instance, key, value)
            SELECT submit_alone.job_id, of_instance, m.key, m.value FROM jsonb_each_text(request->'metadata') m;
        END IF;
    END IF;
    INSERT INTO job_payloads (job_id, payload, submitted_by, origin)
    VALUES (submit_alone.job_id, request->'payload', submit_alone.actor, of_origin);
    woken := wake('jobs');
END $$;
