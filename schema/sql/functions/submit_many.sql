-- Submit a list of jobs. The answer is an array for each column, in the order of the requests: a row for each request
-- would cost as much as writing a row.
--
-- `created` and `same` mean what they mean in `submit`; an array that is null is true for all requests. With `strict`,
-- a key that was used by a different request raises LH005, with the place of the first such request as its detail.
--
-- Requests that differ only in payload and key may be given as their payloads, with `keys` if any has one, and
-- `common`, which is all else that they say. If their jobs are plain and all keys are new, the rows are made of arrays,
-- without joins. Otherwise keys that were claimed are given back, and the requests are submitted like any others; their
-- keys stay locked, in the order in which they are locked then.
--
-- Look-ups are done once for each distinct value and not for each request. A session plans the statements once: a plan
-- for each call would cost a call of 1,000 requests a sixth more.
--
-- If another transaction is using a key, the insert of keys waits for it, and the last query sees what it has
-- committed. The row of a key is locked by an update that changes nothing, so that retention cannot delete it in
-- between. Where operators have set limits, `requests` are what is stored, and `originals` what was asked, of which a
-- key keeps the digest.
--
-- Platforms are made before instances, both before keys, and these before jobs, as when a session opens. Conditions
-- that count the rows of what comes first see to it.
--
-- Only an equal key or an equal new row makes one submit wait for another. Requests with deduplication keys are
-- submitted in a subtransaction, which `joining` says. If somebody else holds a job that one of them joins, all of them
-- are undone and submitted again, so that nobody waits for it with locks in hand. Where all requests have them, the
-- statement for the others is left out: it took a quarter of the time of one that joins a job.
CREATE OR REPLACE FUNCTION submit_many(requests jsonb, actor text, strict boolean DEFAULT false,
    joining boolean DEFAULT false, common jsonb DEFAULT NULL, keys jsonb DEFAULT '[]',
    OUT job_ids bigint[], OUT public_ids uuid[], OUT created boolean[], OUT same boolean[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    asked integer := jsonb_array_length(requests);
    malformed boolean;
    deduplicated integer;
    described boolean;
    limited boolean;
    originals jsonb := requests;
    has_origin boolean;
    has_preferred boolean;
    has_own boolean;
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
    alike record;
    keyed integer;
    claimed integer := 0;
BEGIN
    IF common IS NOT NULL THEN
        SELECT bool_or(jsonb_typeof(p->'command') IS DISTINCT FROM 'array') INTO malformed
            FROM jsonb_array_elements(requests) p;
        keyed := (SELECT count(k.key) FROM jsonb_array_elements_text(keys) k (key));
        -- The last four of these fields mean nothing for a job without constraints.
        SELECT q.* INTO alike FROM known_queue(common) q
            WHERE NOT malformed AND NOT EXISTS (SELECT FROM submit_checks) AND coalesce(common->>'label', '') = ''
                AND common - '{instance,properties,units,label,priority,locality_hint,timeout_seconds,max_attempts,
                    retry_failed,estimated_cost,estimated_seconds,deadline_seconds,own}'::text[] = '{}';
        IF FOUND THEN
            SELECT array_agg(nextval('jobs_id_seq')), array_agg(bulk_public_id(moment, seed, n))
                INTO job_ids, public_ids FROM generate_series(1, asked) n;
            IF keyed > 0 THEN
                INSERT INTO submit_keys AS k (instance, key, request_hash, job_id, public_id)
                SELECT DISTINCT ON (r.key) alike.instance, r.key,
                    sha256(convert_to((common || jsonb_build_object('payload', r.payload))::text, 'UTF8')), r.id,
                    r.public_id
                FROM ROWS FROM (unnest(job_ids), unnest(public_ids), jsonb_array_elements(requests),
                    jsonb_array_elements_text(keys)) WITH ORDINALITY AS r (id, public_id, payload, key, n)
                WHERE r.key IS NOT NULL ORDER BY r.key, r.n
                ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false;
                GET DIAGNOSTICS claimed = ROW_COUNT;
            END IF;
            IF claimed = keyed THEN
                INSERT INTO jobs ({JOB_COLUMNS})
                SELECT {JOB_COLUMNS} FROM (
                    SELECT f.*, j.id, j.public_id, alike.id AS queue, 0 AS cohort, alike.instance AS instance,
                           alike.platform AS platform, 'queued' AS state, NULL::timestamptz AS queue_deadline,
                           false AS constrained, f.priority AS rank, NULL::integer AS preferred,
                           NULL::timestamptz AS schedule_after, now() AS queued_at
                    FROM read_requests(jsonb_build_array(common)) f
                    CROSS JOIN unnest(job_ids, public_ids) AS j (id, public_id)
                ) new_jobs;
                INSERT INTO job_payloads (job_id, payload, submitted_by)
                SELECT r.id, r.payload, submit_many.actor
                FROM ROWS FROM (unnest(job_ids), jsonb_array_elements(requests)) AS r (id, payload);
                PERFORM wake('jobs');
                RETURN;
            END IF;
            DELETE FROM submit_keys k USING jsonb_array_elements_text(keys) AS r (key)
            WHERE k.instance = alike.instance AND k.key = r.key AND k.job_id = ANY (job_ids);
            job_ids := NULL;
            public_ids := NULL;
        END IF;
        requests := (
            SELECT jsonb_agg(common || jsonb_build_object('payload', r.payload, 'key', r.key) ORDER BY r.n)
            FROM ROWS FROM (jsonb_array_elements(requests), jsonb_array_elements_text(keys)) WITH ORDINALITY
                AS r (payload, key, n));
        originals := requests;
    END IF;
    IF asked = 1 AND NOT strict AND requests->0->>'dedup_key' IS NULL THEN
        SELECT ARRAY[a.job_id], ARRAY[a.public_id], ARRAY[a.created], ARRAY[a.same]
            INTO job_ids, public_ids, created, same FROM submit_alone(requests->0, actor) a;
        RETURN;
    END IF;
    SELECT bool_or(jsonb_typeof(r->'payload'->'command') IS DISTINCT FROM 'array'
                OR jsonb_typeof(coalesce(r->'properties', '{}')) <> 'object'),
            count(r->>'dedup_key'), bool_or(r ? 'metadata'), bool_or(r ? 'preferred_properties'),
            bool_or(r ? 'own'),
            bool_or(r ?| '{from,queue_timeout_seconds,prefer_seconds,schedule_after,delay}'), EXISTS (SELECT FROM submit_checks)
        INTO malformed, deduplicated, described, has_preferred, has_own, has_origin, limited
        FROM jsonb_array_elements(requests) r;
    IF malformed THEN
        IF EXISTS (SELECT FROM jsonb_array_elements(requests) r WHERE is_flat(r)) THEN
            SELECT s.* INTO job_ids, public_ids, created, same
            FROM submit_many(normal_requests(requests, 'jobs'), actor, strict) s;
            RETURN;
        END IF;
        RAISE EXCEPTION 'a request needs payload.command, an array, and its properties are an object'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF deduplicated > 0 THEN
        WHILE NOT joining LOOP
            BEGIN
                SELECT s.* INTO job_ids, public_ids, created, same FROM submit_many(requests, actor, strict, true) s;
                RETURN;
            EXCEPTION WHEN SQLSTATE 'LH006' THEN
                -- All locks were given back with what was written.
            END;
        END LOOP;
        PERFORM lock_joined(requests);
    END IF;
    IF limited OR deduplicated > 0 THEN
        PERFORM refuse_full_queues(requests);
        requests := within_limits(requests, 'jobs');
        has_origin := true;
    END IF;

    IF deduplicated < asked THEN
        nested_loops := current_setting('enable_nestloop');
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
            -- Ids are in the order of the requests. What jobs of a queue have in common stays text, which the joins
            -- below compare faster than jsonb. What few jobs need is taken from their request later.
            SELECT r.*, nextval('jobs_id_seq') AS id, bulk_public_id(moment, seed, r.n + 1) AS public_id,
                   r.starts_at + make_interval(secs => r.queue_timeout_seconds) AS queue_deadline,
                   nullif(r.starts_at, now()) AS schedule_after, r.starts_at AS queued_at,
                   CASE WHEN r.units <> 1 OR r.label <> '' OR r.terms <> '' OR r.preferred_properties <> ''
                           OR has_own AND requests->r.n ? 'own'
                       THEN jsonb_build_array(r.label, r.units, r.terms, r.preferred_properties,
                           r.prefer_seconds IS NOT NULL, CASE WHEN has_own THEN requests->r.n->'own' END)::text
                       ELSE '' END AS special
            FROM read_requests(requests) r
            WHERE r.dedup_key IS NULL
        ), alike AS MATERIALIZED (
            SELECT a.*, coalesce(s.value->>0, '') AS label, coalesce((s.value->>1)::integer, 1) AS units,
                coalesce(s.value->>2, '') AS terms, coalesce(s.value->>3, '') AS preferred_properties,
                coalesce((s.value->>4)::boolean, false) AS waits, s.value->5 AS own
            FROM (SELECT instance_name, properties, special, min(n) AS first FROM asked GROUP BY 1, 2, 3) a
            CROSS JOIN LATERAL (SELECT nullif(a.special, '')::jsonb AS value) s
        ), known_sets AS MATERIALIZED (
            -- A property set whose digest is known is in normal form already.
            SELECT properties, coalesce(id, intern_platform(normal)) AS id FROM (
                SELECT properties, id, CASE WHEN id IS NULL THEN normal_properties(properties::jsonb) END AS normal
                FROM (
                    SELECT g.properties, (SELECT p.id FROM platforms p
                        WHERE p.digest = sha256(convert_to(g.properties, 'UTF8'))) AS id
                    FROM (SELECT DISTINCT properties FROM alike) g OFFSET 0) given
                ORDER BY 3) sets
            OFFSET 0
        ), known_instances AS MATERIALIZED (
            SELECT k.name, k.id, coalesce((SELECT i.managed FROM instances i WHERE i.id = k.id), false) AS managed
            FROM (
                SELECT name, intern_instance(name) AS id
                FROM (SELECT DISTINCT instance_name AS name FROM alike WHERE (SELECT count(*) FROM known_sets) > 0
                      ORDER BY 1) names
                OFFSET 0) k
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
            LEFT JOIN known_terms t
                ON t.terms = CASE WHEN a.terms <> '' THEN a.terms WHEN i.managed THEN '{}' END::jsonb
            JOIN known_labels l ON l.label = a.label
            JOIN known_sets p ON p.properties = a.properties
            LEFT JOIN unnest(required_sets, preferred_sets, preferred_ids, preferring_ids)
                AS w (required, preferred, preferred_id, id)
                ON w.required = a.properties::jsonb AND w.preferred = nullif(a.preferred_properties, '')::jsonb
            CROSS JOIN LATERAL (SELECT w.preferred_id IS NOT NULL AND a.waits AS insists) f
        ), claimed AS (
            INSERT INTO submit_keys AS k (instance, key, request_hash, job_id, public_id)
            SELECT DISTINCT ON (p.id, a.key) p.id, a.key,
                sha256(convert_to(((originals->a.n) - 'key')::text, 'UTF8')), a.id, a.public_id
            FROM asked a JOIN known_instances p ON p.name = a.instance_name WHERE a.key IS NOT NULL
                AND (SELECT count(*) FROM placed) > 0
            ORDER BY p.id, a.key, a.n
            ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false
            RETURNING k.job_id
        ), known_queues AS MATERIALIZED (
            SELECT *, intern_queue(cohort, instance, platform, units, constraint_set, preferred, required) AS id FROM (
                SELECT DISTINCT cohort, instance, platform, units, constraint_set, preferred, required
                FROM placed WHERE (SELECT count(*) FROM claimed) >= 0 ORDER BY 1, 2, 3, 4, 5, 6, 7) kinds
        ), fresh AS NOT MATERIALIZED (
            SELECT * FROM asked a WHERE a.key IS NULL OR a.id IN (SELECT c.job_id FROM claimed c)
        ), queued AS MATERIALIZED (
            -- Of two unknown classes that of the first request is told. A repeat is answered also if its class is gone.
            SELECT p.*, (p.points).*, q.id AS queue
            FROM (
                SELECT a.*, points_of(CASE WHEN a.constraint_set IS NOT NULL AND a.own <> 'null'
                        AND (a.instance_name, a.properties, a.special)
                            IN (SELECT f.instance_name, f.properties, f.special FROM fresh f)
                        THEN a.own END) AS points
                FROM placed a ORDER BY a.first OFFSET 0) p
            JOIN known_queues q ON q.cohort = p.cohort AND q.instance = p.instance AND q.platform = p.platform
                AND q.units = p.units AND coalesce(q.constraint_set, 0) = coalesce(p.constraint_set, 0)
                AND coalesce(q.preferred, 0) = coalesce(p.preferred, 0)
                AND coalesce(q.required, 0) = coalesce(p.required, 0)
        ), new_jobs AS NOT MATERIALIZED (
            SELECT f.n, f.id, f.public_id, f.label, f.units, f.locality_hint, f.max_attempts, f.retry_failed,
                   f.dedup_key, f.queue_deadline, f.schedule_after, f.queued_at, f.prefer_seconds, f.starts_at,
                   q.queue, q.cohort, q.instance, q.platform, q.preferred, q.required, q.price, q.usual_seconds, q.starves_at,
                   coalesce(q.price, f.priority) AS priority, coalesce(q.price, f.priority) AS rank,
                   coalesce(f.timeout_seconds, q.level_timeout) AS timeout_seconds, 'queued' AS state,
                   q.constraint_set IS NOT NULL AS constrained
            FROM fresh f JOIN queued q USING (instance_name, properties, special)
        ), born AS (
            INSERT INTO jobs ({JOB_COLUMNS}) SELECT {JOB_COLUMNS} FROM new_jobs
        ), insisting AS (
            INSERT INTO preference_waits (job_id, seconds, until)
            SELECT j.id, j.prefer_seconds, j.starts_at + make_interval(secs => j.prefer_seconds)
            FROM new_jobs j WHERE has_preferred AND j.required IS NOT NULL
        ), termed AS (
            INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs, price, watch_at)
            SELECT j.id, w.* FROM new_jobs j
            CROSS JOIN LATERAL own_constraints(requests->j.n, j.price, j.usual_seconds, j.starves_at) w
            WHERE (SELECT count(*) FROM known_terms) > 0 AND j.constrained AND has_own_constraints(requests->j.n)
        ), kept AS (
            INSERT INTO job_payloads (job_id, payload, submitted_by, origin)
            SELECT f.id, f.payload, submit_many.actor, CASE WHEN has_origin THEN origin_of(requests->f.n) END
            FROM fresh f
        )
        -- In the order of `asked`, which is that of the requests.
        SELECT array_agg(f.n), array_agg(f.id), array_agg(f.public_id) INTO born_ns, born_ids, born_public
        FROM fresh f;
        IF described THEN
            INSERT INTO job_metadata (job_id, instance, key, value)
            SELECT u.id, i.id, m.key, m.value
            FROM jsonb_array_elements(requests) WITH ORDINALITY AS r
            JOIN unnest(born_ns, born_ids) AS u (n, id) ON u.n = r.ordinality - 1
            CROSS JOIN LATERAL (
                SELECT id FROM instances WHERE name = coalesce(r.value->>'instance', 'default') OFFSET 0) i
            CROSS JOIN LATERAL jsonb_each_text(r.value->'metadata') m
            WHERE r.value ? 'metadata';
        END IF;
        PERFORM set_config('enable_nestloop', nested_loops, true);
    END IF;
    IF born_ns IS NOT NULL THEN
        PERFORM wake('jobs');
        IF cardinality(born_ns) = asked THEN
            job_ids := born_ids;
            public_ids := born_public;
            RETURN;
        END IF;
    END IF;
    SELECT array_agg(a.job_id ORDER BY a.n), array_agg(a.public_id ORDER BY a.n), array_agg(a.created ORDER BY a.n),
            array_agg(a.same ORDER BY a.n)
        INTO job_ids, public_ids, created, same FROM (
            SELECT u.n, u.job_id, u.public_id, true AS created, true AS same
            FROM unnest(born_ns, born_ids, born_public) AS u (n, job_id, public_id)
            UNION ALL
            SELECT d.n, d.job_id, d.public_id, d.created, d.same
            FROM submit_deduplicated(requests, originals, actor) d WHERE deduplicated > 0
            UNION ALL
            SELECT (r.ordinality - 1)::integer, k.job_id, k.public_id, false,
                k.request_hash = sha256(convert_to((r.value - 'key')::text, 'UTF8'))
            FROM jsonb_array_elements(originals) WITH ORDINALITY AS r
            CROSS JOIN LATERAL (
                SELECT id FROM instances WHERE name = coalesce(r.value->>'instance', 'default') OFFSET 0) i
            CROSS JOIN LATERAL (
                SELECT k.job_id, k.public_id, k.request_hash FROM submit_keys k
                WHERE k.instance = i.id AND k.key = r.value->>'key' OFFSET 0) k
            WHERE r.value->>'dedup_key' IS NULL
                AND (r.ordinality - 1)::integer <> ALL (coalesce(born_ns, '{}'))) a;
    IF strict AND false = ANY (same) THEN
        RAISE EXCEPTION 'a key was used before for a different request'
            USING ERRCODE = 'LH005', DETAIL = array_position(same, false) - 1;
    END IF;
END $$;
