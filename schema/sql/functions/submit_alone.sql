-- Submit one job: what `submit` does, without the work of sharing lookups among many.
--
-- Its rows are written one after the other. The insert looks up the cohort and the queue, because whoever changes the
-- cohorts locks the table of jobs first. A property set whose digest is known is in normal form already. Locks are
-- taken in the same order as in `submit`. Where operators have set limits, `original` is what was asked, and `request`
-- what is stored. The function runs with the caller's search path, because setting one for
-- each call costs as much as writing a row.
CREATE OR REPLACE FUNCTION submit_alone(request jsonb, actor text,
    OUT job_id bigint, OUT public_id uuid, OUT created boolean, OUT same boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    woken boolean;
    of_instance integer;
    of_constraint_set integer;
    of_platform integer;
    of_preferred integer;
    of_required integer;
    of_units integer;
    is_managed boolean;
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
    SELECT i.id, i.managed, (SELECT p.id FROM platforms p
            WHERE p.digest = sha256(convert_to(coalesce(request->'properties', '{}')::text, 'UTF8'))),
            EXISTS (SELECT FROM submit_checks)
        INTO of_instance, is_managed, of_platform, limited
        FROM (SELECT) one LEFT JOIN instances i ON i.name = coalesce(request->>'instance', 'default');
    IF limited THEN
        limited := EXISTS (SELECT FROM queue_limits q WHERE q.label IS NULL OR q.label = request->>'label'
            UNION ALL SELECT FROM ceilings UNION ALL SELECT FROM submit_rules);
    END IF;
    IF limited OR request->>'dedup_key' IS NOT NULL THEN
        PERFORM prepare_submit(jsonb_build_array(request));
        PERFORM refuse_full_queues(jsonb_build_array(request));
        original := request;
        request := within_limits(jsonb_build_array(request), 'jobs')->0;
        IF request->>'dedup_key' IS NOT NULL THEN
            SELECT d.job_id, d.public_id, d.created, d.same INTO job_id, public_id, created, same
            FROM submit_deduplicated(jsonb_build_array(request), jsonb_build_array(original), actor) d;
            RETURN;
        END IF;
    END IF;
    of_units := coalesce((request->>'units')::integer, 1);
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
    IF request->>'key' IS NOT NULL THEN
        INSERT INTO submit_keys AS k (instance, key, request_hash, job_id)
        VALUES (of_instance, request->>'key',
            sha256(convert_to((coalesce(original, request) - 'key')::text, 'UTF8')), nextval('jobs_id_seq'))
        ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false
        RETURNING k.job_id INTO job_id;
        IF NOT FOUND THEN
            SELECT j.id, j.public_id, false,
                k.request_hash = sha256(convert_to((coalesce(original, request) - 'key')::text, 'UTF8'))
                INTO job_id, public_id, created, same
            FROM submit_keys k JOIN jobs j ON j.id = k.job_id
            WHERE k.instance = of_instance AND k.key = request->>'key';
            RETURN;
        END IF;
    END IF;
    INSERT INTO jobs AS j (id, public_id, queue, cohort, instance, platform, label, priority, units, locality_hint,
                      timeout_seconds, queue_deadline, max_attempts, retry_failed, constrained, rank, preferred)
    VALUES (coalesce(submit_alone.job_id, nextval('jobs_id_seq')),
        (public_id_prefix() || substr(gen_random_uuid()::text, 16))::uuid,
        intern_queue(CASE WHEN request->>'label' <> '' THEN cohort_of(request->>'label') ELSE 0 END,
            of_instance, of_platform, of_units, of_constraint_set, of_preferred, of_required),
        CASE WHEN request->>'label' <> '' THEN cohort_of(request->>'label') ELSE 0 END, of_instance,
        of_platform, coalesce(request->>'label', ''), coalesce((request->>'priority')::integer, 0), of_units,
        request->>'locality_hint', (request->>'timeout_seconds')::double precision,
        now() + make_interval(secs => (request->>'queue_timeout_seconds')::double precision),
        coalesce((request->>'max_attempts')::integer, 5), coalesce((request->>'retry_failed')::boolean, false),
        of_constraint_set IS NOT NULL,
        CASE WHEN of_constraint_set IS NOT NULL THEN rank_of(request)
            ELSE coalesce((request->>'priority')::integer, 0) END, of_preferred)
    RETURNING j.id, j.public_id, true, true INTO job_id, public_id, created, same;
    IF of_constraint_set IS NOT NULL THEN
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
    INSERT INTO job_payloads (job_id, payload, submitted_by, origin)
    VALUES (submit_alone.job_id, request->'payload', submit_alone.actor,
        CASE WHEN request ?| '{from,queue_timeout_seconds,prefer_seconds,lowered}' THEN origin_of(request) END);
    woken := wake('jobs');
END $$;
