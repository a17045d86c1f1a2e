-- Submit one job: what `submit_all` does, without the work of sharing lookups among many.
--
-- Its rows are written one after the other. Each statement, each table in it, each field that it takes from the
-- request and each condition cost as much as half an index entry, because the server sets them up for each call. So the
-- first statement finds the queue of a job without a label and without constraints; what most requests do not have is
-- looked at only if `is_special` says so. `intern_queue` is asked only if there is no such queue, or if it may be about
-- to go. Jobs without a label are in cohort 0; with a label, the table of jobs is locked first, as whoever changes the
-- cohorts does. A property set whose digest is known is in normal form already. Locks are taken in the same order as in
-- `submit_all`. Where operators have set limits, `original` is what was asked, and `request` what is stored.
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
    of_rank double precision;
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
                prefer_seconds,from,lowered}'
        INTO public_id, created, same, of_units, of_priority, of_instance, of_platform, of_queue, limited, is_special
        FROM known_queue(request) q;
    IF limited OR is_special OR of_queue IS NULL THEN
        IF of_queue IS NULL THEN
            SELECT new_public_id(job_id), true, true, coalesce((request->>'units')::integer, 1),
                    coalesce((request->>'priority')::integer, 0), i.id, i.managed, p.id,
                    EXISTS (SELECT FROM submit_checks)
                INTO public_id, created, same, of_units, of_priority, of_instance, is_managed, of_platform, limited
                FROM (SELECT) one
                LEFT JOIN instances i ON i.name = coalesce(request->>'instance', 'default')
                LEFT JOIN platforms p
                    ON p.digest = sha256(convert_to(coalesce(request->'properties', '{}')::text, 'UTF8'));
            is_special := true;
        END IF;
        IF limited THEN
            limited := EXISTS (SELECT FROM queue_limits q WHERE q.label IS NULL OR q.label = request->>'label'
                UNION ALL SELECT FROM ceilings UNION ALL SELECT FROM submit_rules);
        END IF;
        IF limited OR is_special THEN
            IF request->>'dedup_key' IS NOT NULL THEN
                SELECT s.job_ids[1], s.public_ids[1], coalesce(s.created[1], true), coalesce(s.same[1], true)
                    INTO job_id, public_id, created, same
                    FROM submit_all(jsonb_build_array(request), actor) s;
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
                of_rank := rank_of(request);
            END IF;
            of_deadline := now() + make_interval(secs => (request->>'queue_timeout_seconds')::double precision);
            of_origin := CASE WHEN request ?| '{from,queue_timeout_seconds,prefer_seconds,lowered}'
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
    END IF;
    INSERT INTO jobs (id, public_id, queue, cohort, instance, platform, label, priority, units, locality_hint,
                      timeout_seconds, queue_deadline, max_attempts, retry_failed, constrained, rank, preferred)
    VALUES (submit_alone.job_id, submit_alone.public_id, of_queue, of_cohort, of_instance, of_platform,
        coalesce(request->>'label', ''), of_priority, of_units, request->>'locality_hint',
        (request->>'timeout_seconds')::double precision, of_deadline, coalesce((request->>'max_attempts')::integer, 5),
        coalesce((request->>'retry_failed')::boolean, false), of_constraint_set IS NOT NULL,
        coalesce(of_rank, of_priority), of_preferred);
    IF is_special THEN
        IF of_constraint_set IS NOT NULL AND has_own_constraints(request) THEN
            INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs)
            SELECT submit_alone.job_id, w.* FROM own_constraints(request) w;
        END IF;
        IF of_required IS NOT NULL THEN
            INSERT INTO preference_waits (job_id, seconds, until)
            VALUES (submit_alone.job_id, (request->>'prefer_seconds')::double precision,
                now() + make_interval(secs => (request->>'prefer_seconds')::double precision));
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
