-- Submit jobs. The one implementation, also for callers that enqueue inside their own transaction.
--
-- A request is flat, as in JSON lines, or nested, with its command in `payload`; flat ones are checked in full, by
-- `normal_requests`. Returns a row per request, `n` counted from 0. `created` is false if the key, or the
-- deduplication key, was known; `same` is false if the key was used by a different request.
--
-- Where operators have set limits, `requests` are from then on what is stored, and `originals` what was asked, of which
-- a key keeps the digest.
--
-- Lookups are done once for each distinct value and not for each request. A session plans the statements once: a
-- plan for each call would cost a call of 1,000 requests a sixth more. If another transaction is using a key, the
-- insert waits for it, and the last query sees what it committed. The key's row is locked by an update that changes
-- nothing, so that retention cannot delete its job in between. Platforms are locked before instances and both before
-- jobs, as when a session opens.
CREATE OR REPLACE FUNCTION submit(requests jsonb, actor text DEFAULT 'sql')
RETURNS TABLE (n integer, job_id bigint, public_id uuid, created boolean, same boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    malformed boolean;
    deduplicated integer;
    described integer;
    limited boolean;
    originals jsonb := '[]';
    given jsonb[];
    sets jsonb[];
    set_ids integer[];
    has_preferred boolean;
    required_sets jsonb[];
    preferred_sets jsonb[];
    preferred_ids integer[];
    preferring_ids integer[];
    moment text := left(public_id_prefix(), 12);
    seed text := gen_random_uuid();
    born_ns integer[];
    born_ids bigint[];
    born_public uuid[];
    nested_loops text;
BEGIN
    IF jsonb_array_length(requests) = 1 THEN
        RETURN QUERY SELECT 0, a.job_id, a.public_id, a.created, a.same FROM submit_alone(requests->0, actor) a;
        RETURN;
    END IF;
    SELECT bool_or(k.malformed), sum(k.deduplicated), sum(k.described), EXISTS (SELECT FROM submit_checks),
           bool_or(k.has_preferred), array_agg(k.given)
        INTO malformed, deduplicated, described, limited, has_preferred, given FROM (
            SELECT coalesce(r->'properties', '{}') AS given,
                bool_or(jsonb_typeof(r->'payload'->'command') IS DISTINCT FROM 'array'
                    OR jsonb_typeof(coalesce(r->'properties', '{}')) <> 'object') AS malformed,
                count(r->>'dedup_key') AS deduplicated, count(r->'metadata') AS described,
                bool_or(r ? 'preferred_properties') AS has_preferred
            FROM jsonb_array_elements(requests) r GROUP BY 1) k;
    IF malformed THEN
        IF EXISTS (SELECT FROM jsonb_array_elements(requests) r WHERE is_flat(r)) THEN
            RETURN QUERY SELECT s.* FROM submit(normal_requests(requests, 'jobs'), actor) s;
            RETURN;
        END IF;
        RAISE EXCEPTION 'a request needs payload.command, an array, and its properties are an object'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF limited OR deduplicated > 0 THEN
        PERFORM prepare_submit(requests);
        PERFORM refuse_full_queues(requests);
        originals := requests;
        requests := within_limits(requests, 'jobs');
        given := ARRAY(SELECT DISTINCT coalesce(r->'properties', '{}') FROM jsonb_array_elements(requests) r);
    END IF;

    nested_loops := current_setting('enable_nestloop');
    SELECT array_agg(known.given), array_agg(known.id) INTO sets, set_ids FROM (
        SELECT normal.given, intern_platform(normal.properties) AS id FROM (
            SELECT raw AS given, normal_properties(raw) AS properties FROM unnest(given) raw ORDER BY 2) normal
        OFFSET 0) known;
    IF has_preferred THEN
        SELECT array_agg(p.required), array_agg(p.preferred), array_agg(w.preferring), array_agg(w.platform)
            INTO required_sets, preferred_sets, preferred_ids, preferring_ids FROM (
                SELECT DISTINCT coalesce(r->'properties', '{}') AS required, r->'preferred_properties' AS preferred
                FROM jsonb_array_elements(requests) r WHERE r ? 'preferred_properties' ORDER BY 1, 2) p
                CROSS JOIN LATERAL intern_preferred(p.required, p.preferred) w;
    END IF;
    -- The planner cannot know how many requests there are; a nested loop over ten thousand would take half a
    -- minute.
    PERFORM set_config('enable_nestloop', 'off', true);
    WITH asked AS MATERIALIZED (
        -- Ids are in the order of the requests. Public ids have a counter behind their time (RFC 9562, 6.2, method 1),
        -- so that each enters its index right behind the one before. Their last 60 bits are those of a digest of a random
        -- seed: random bits for each would be read from the kernel one by one. What jobs of a queue have in common stays
        -- text, which the joins below compare faster than jsonb.
        SELECT (r.ordinality - 1)::integer AS n, nextval('jobs_id_seq') AS id,
               (moment || to_hex(28672 + (r.ordinality & 4095)) || '8'
                   || right(md5(seed || r.ordinality), 15))::uuid AS public_id,
               coalesce(r.instance, 'default') AS instance_name,
               coalesce(r.properties, '{}') AS properties, r.key, coalesce(r.priority, 0) AS priority,
               coalesce(r.units, 1) AS units, coalesce(r.label, '') AS label, r.locality_hint, r.timeout_seconds,
               now() + make_interval(secs => r.queue_timeout_seconds) AS queue_deadline,
               coalesce(r.max_attempts, 5) AS max_attempts, coalesce(r.retry_failed, false) AS retry_failed,
               coalesce(r.payload, '{}') AS payload, coalesce(r.terms, '') AS terms, r.request AS whole,
               coalesce(r.preferred_properties, '') AS preferred_properties,
               r.prefer_seconds, r.prefer_seconds IS NOT NULL AS waits,
               CASE WHEN r.request ?| '{from,queue_timeout_seconds,prefer_seconds,lowered}'
                   THEN origin_of(r.request) END AS origin,
               CASE WHEN r.key IS NOT NULL
                   THEN sha256(convert_to((coalesce(r.original, r.request) - 'key')::text, 'UTF8')) END AS request_hash
        FROM ROWS FROM (
            jsonb_array_elements(requests),
            jsonb_array_elements(originals),
            jsonb_to_recordset(requests) AS (
                instance text, properties text, key text, dedup_key text, priority integer, units integer,
                label text, locality_hint text, timeout_seconds double precision,
                queue_timeout_seconds double precision, max_attempts integer, retry_failed boolean, payload jsonb,
                terms text, preferred_properties text, prefer_seconds double precision)
        ) WITH ORDINALITY AS r (request, original, instance, properties, key, dedup_key, priority, units, label,
            locality_hint, timeout_seconds, queue_timeout_seconds, max_attempts, retry_failed, payload, terms,
            preferred_properties, prefer_seconds, ordinality)
        WHERE r.dedup_key IS NULL
    ), alike AS MATERIALIZED (
        SELECT DISTINCT instance_name, properties, label, units, terms, preferred_properties, waits FROM asked
    ), known_instances AS MATERIALIZED (
        SELECT k.name, k.id, coalesce(i.managed, false) AS managed FROM (
            SELECT name, intern_instance(name) AS id
            FROM (SELECT DISTINCT instance_name AS name FROM alike ORDER BY 1) names
            OFFSET 0) k
        LEFT JOIN instances i ON i.id = k.id
    ), known_terms AS MATERIALIZED (
        SELECT terms, intern_constraint_set(terms) AS id FROM (
            SELECT DISTINCT coalesce(nullif(a.terms, ''), '{}')::jsonb AS terms
            FROM alike a JOIN known_instances i ON i.name = a.instance_name
            WHERE a.terms <> '' OR i.managed ORDER BY 1) sets
    ), known_labels AS MATERIALIZED (
        SELECT label, cohort_of(label) AS cohort FROM (SELECT DISTINCT label FROM alike OFFSET 0) labels
    ), placed AS MATERIALIZED (
        SELECT a.*, i.id AS instance,
            CASE WHEN f.insists THEN w.preferred_id ELSE coalesce(w.id, p.id) END AS platform,
            l.cohort, t.id AS constraint_set, w.preferred_id AS preferred,
            CASE WHEN f.insists THEN w.id END AS required
        FROM alike a
        JOIN known_instances i ON i.name = a.instance_name
        LEFT JOIN known_terms t ON t.terms = CASE WHEN a.terms <> '' THEN a.terms WHEN i.managed THEN '{}' END::jsonb
        JOIN known_labels l ON l.label = a.label
        JOIN unnest(sets, set_ids) AS p (properties, id) ON p.properties = a.properties::jsonb
        LEFT JOIN unnest(required_sets, preferred_sets, preferred_ids, preferring_ids)
            AS w (required, preferred, preferred_id, id)
            ON w.required = a.properties::jsonb AND w.preferred = nullif(a.preferred_properties, '')::jsonb
        CROSS JOIN LATERAL (SELECT w.preferred_id IS NOT NULL AND a.waits AS insists) f
    ), known_queues AS MATERIALIZED (
        SELECT *, intern_queue(cohort, instance, platform, units, constraint_set, preferred, required) AS id FROM (
            SELECT DISTINCT cohort, instance, platform, units, constraint_set, preferred, required
            FROM placed ORDER BY 1, 2, 3, 4, 5, 6, 7) kinds
    ), queued AS MATERIALIZED (
        SELECT p.*, q.id AS queue
        FROM placed p
        JOIN known_queues q ON q.cohort = p.cohort AND q.instance = p.instance AND q.platform = p.platform
            AND q.units = p.units AND coalesce(q.constraint_set, 0) = coalesce(p.constraint_set, 0)
            AND coalesce(q.preferred, 0) = coalesce(p.preferred, 0)
            AND coalesce(q.required, 0) = coalesce(p.required, 0)
    ), numbered AS MATERIALIZED (
        -- Without what may be large and most jobs do not need here, because each row is copied.
        SELECT a.n, a.id, a.public_id, a.key, a.request_hash, a.label, a.priority, a.units, a.locality_hint,
            a.timeout_seconds, a.queue_deadline, a.max_attempts, a.retry_failed, q.instance, q.cohort, q.platform,
            q.constraint_set, q.preferred, q.required, q.queue,
            CASE WHEN q.required IS NOT NULL THEN a.prefer_seconds END AS prefer_seconds,
            CASE WHEN q.constraint_set IS NOT NULL THEN a.whole END AS whole,
            CASE WHEN q.constraint_set IS NOT NULL THEN rank_of(a.whole) ELSE a.priority END AS rank
        FROM asked a JOIN queued q USING (instance_name, properties, label, units, terms, preferred_properties, waits)
    ), claimed AS (
        INSERT INTO submit_keys AS k (instance, key, request_hash, job_id)
        SELECT DISTINCT ON (instance, key) instance, key, request_hash, id
        FROM numbered WHERE key IS NOT NULL ORDER BY instance, key, n
        ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false
        RETURNING k.job_id
    ), fresh AS NOT MATERIALIZED (
        SELECT * FROM numbered m WHERE m.key IS NULL OR m.id IN (SELECT c.job_id FROM claimed c)
    ), content AS NOT MATERIALIZED (
        SELECT * FROM asked a WHERE a.key IS NULL OR a.id IN (SELECT c.job_id FROM claimed c)
    ), born AS (
        INSERT INTO jobs (id, public_id, queue, cohort, instance, platform, label, priority, units, locality_hint,
                          timeout_seconds, queue_deadline, max_attempts, retry_failed, constrained, rank, preferred)
        SELECT f.id, f.public_id, f.queue, f.cohort, f.instance, f.platform, f.label, f.priority, f.units,
               f.locality_hint, f.timeout_seconds, f.queue_deadline, f.max_attempts, f.retry_failed,
               f.constraint_set IS NOT NULL, f.rank, f.preferred
        FROM fresh f
    ), insisting AS (
        INSERT INTO preference_waits (job_id, seconds, until)
        SELECT f.id, f.prefer_seconds, now() + make_interval(secs => f.prefer_seconds)
        FROM fresh f WHERE f.required IS NOT NULL
    ), termed AS (
        INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs)
        SELECT f.id, w.* FROM fresh f CROSS JOIN LATERAL own_constraints(f.whole) w
        WHERE f.constraint_set IS NOT NULL
    ), kept AS (
        INSERT INTO job_payloads (job_id, payload, submitted_by, origin)
        SELECT c.id, c.payload, submit.actor, c.origin FROM content c
    )
    SELECT array_agg(f.n), array_agg(f.id), array_agg(f.public_id) INTO born_ns, born_ids, born_public
    FROM fresh f;
    IF described > 0 THEN
        INSERT INTO job_metadata (job_id, instance, key, value)
        SELECT u.id, i.id, m.key, m.value
        FROM jsonb_array_elements(requests) WITH ORDINALITY AS r
        JOIN unnest(born_ns, born_ids) AS u (n, id) ON u.n = r.ordinality - 1
        JOIN instances i ON i.name = coalesce(r.value->>'instance', 'default')
        CROSS JOIN LATERAL jsonb_each_text(r.value->'metadata') m
        WHERE r.value ? 'metadata';
    END IF;
    PERFORM set_config('enable_nestloop', nested_loops, true);
    IF born_ns IS NOT NULL THEN
        PERFORM wake('jobs');
        RETURN QUERY SELECT u.n, u.id, u.public_id, true, true
            FROM unnest(born_ns, born_ids, born_public) AS u(n, id, public_id);
    END IF;
    IF deduplicated > 0 THEN
        RETURN QUERY SELECT d.n, d.job_id, d.public_id, d.created, d.same
            FROM submit_deduplicated(requests, originals, actor) d;
    END IF;
    IF coalesce(cardinality(born_ns), 0) + deduplicated < jsonb_array_length(requests) THEN
        RETURN QUERY SELECT (r.ordinality - 1)::integer, j.id, j.public_id, false,
                k.request_hash = sha256(convert_to((r.value - 'key')::text, 'UTF8'))
            FROM jsonb_array_elements(CASE WHEN originals = '[]' THEN requests ELSE originals END)
                WITH ORDINALITY AS r
            JOIN instances i ON i.name = coalesce(r.value->>'instance', 'default')
            CROSS JOIN LATERAL (
                SELECT k.job_id, k.request_hash FROM submit_keys k
                WHERE k.instance = i.id AND k.key = r.value->>'key' OFFSET 0) k
            CROSS JOIN LATERAL (SELECT j.id, j.public_id FROM jobs j WHERE j.id = k.job_id OFFSET 0) j
            WHERE r.value->>'dedup_key' IS NULL
                AND (r.ordinality - 1)::integer <> ALL (coalesce(born_ns, '{}'));
    END IF;
END $$;
