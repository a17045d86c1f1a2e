"""Lone: one submit alone pays for its rows and little else."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# PostgreSQL reads the stored form of each check anew in each statement, which costs what it is long; the body of a
# function it reads once in a session. Each condition keeps the name that it had.
CHECKS = """
CREATE FUNCTION job_is_sound(state text, finished_at timestamptz, schedule_after timestamptz, fence bigint,
    result_fence bigint, priority integer, label text, locality_hint text, units integer, max_attempts integer,
    attempts integer, kills integer, evictions integer, dedup_key text, timeout_seconds double precision)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    broken text := CASE
        WHEN finished_at IS NULL AND state NOT IN ('queued', 'parked', 'leased', 'running', 'cancelling')
            OR finished_at IS NOT NULL AND state NOT IN ('succeeded', 'failed', 'cancelled', 'dead')
            THEN 'jobs_finished_at_iff_final'
        WHEN schedule_after IS NOT NULL AND state NOT IN ('queued', 'parked') THEN 'jobs_backoff_only_waiting'
        WHEN fence < 0 THEN 'jobs_fence_positive'
        WHEN result_fence <> fence THEN 'jobs_result_is_current'
        WHEN priority NOT BETWEEN -1000 AND 1000 THEN 'jobs_priority_range'
        WHEN octet_length(label) > 64 THEN 'jobs_label_bounded'
        WHEN octet_length(locality_hint) > 200 THEN 'jobs_locality_hint_bounded'
        WHEN units < 1 THEN 'jobs_units_positive'
        WHEN max_attempts < 1 THEN 'jobs_max_attempts_positive'
        WHEN attempts NOT BETWEEN 0 AND max_attempts THEN 'jobs_attempts_bounded'
        WHEN kills NOT BETWEEN 0 AND 3 THEN 'jobs_kills_bounded'
        WHEN evictions < 0 THEN 'jobs_evictions_positive'
        WHEN octet_length(dedup_key) NOT BETWEEN 1 AND 200 THEN 'jobs_dedup_key_bounded'
        WHEN NOT (timeout_seconds > 0 AND timeout_seconds <= 31536000) THEN 'jobs_timeout_finite'
    END;
BEGIN
    IF broken IS NULL THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'new row for relation "jobs" violates check constraint "%"', broken
        USING ERRCODE = 'check_violation', TABLE = 'jobs', CONSTRAINT = broken;
END $$;

ALTER TABLE jobs
    DROP CONSTRAINT jobs_state_known,
    DROP CONSTRAINT jobs_finished_at_iff_final,
    DROP CONSTRAINT jobs_backoff_only_waiting,
    DROP CONSTRAINT jobs_result_is_current,
    DROP CONSTRAINT jobs_priority_range,
    DROP CONSTRAINT jobs_label_bounded,
    DROP CONSTRAINT jobs_locality_hint_bounded,
    DROP CONSTRAINT jobs_units_positive,
    DROP CONSTRAINT jobs_max_attempts_positive,
    DROP CONSTRAINT jobs_attempts_bounded,
    DROP CONSTRAINT jobs_kills_bounded,
    DROP CONSTRAINT jobs_evictions_positive,
    DROP CONSTRAINT jobs_dedup_key_bounded,
    DROP CONSTRAINT jobs_fence_positive,
    DROP CONSTRAINT jobs_timeout_finite,
    ADD CONSTRAINT jobs_sound CHECK (job_is_sound(state, finished_at, schedule_after, fence, result_fence, priority,
        label, locality_hint, units, max_attempts, attempts, kills, evictions, dedup_key, timeout_seconds));
"""

# The digits that ids of one moment begin with: 48 bits of milliseconds and the version, 7.
PUBLIC_IDS = """
CREATE OR REPLACE FUNCTION public_id_prefix() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT lpad(to_hex((date_part('epoch', clock_timestamp()) * 1000)::bigint * 16 + 7), 13, '0')
$$;
"""

# A query costs several expressions, and PERFORM is one.
WAKE = """
CREATE OR REPLACE FUNCTION wake(topic text, keys text DEFAULT '') RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_lock(hashtext('leasehold.idle'), hashtext(topic)) THEN
        RETURN NOT pg_advisory_unlock(hashtext('leasehold.idle'), hashtext(topic));
    END IF;
    PERFORM pg_notify('leasehold_' || topic, CASE WHEN octet_length(keys) > 7900 THEN '' ELSE keys END);
    RETURN true;
END $$;
"""

# A request that comes alone has nothing to be shared with others: its rows are written one after the other. A digest
# that is known is that of a set in normal form, so that a set which has it needs not be brought there. The order of
# locks is that of the others. The caller's search path counts: setting one for each call costs as much as a row.
SUBMIT_ALONE = """
CREATE FUNCTION submit_alone(request jsonb, actor text,
    OUT job_id bigint, OUT public_id uuid, OUT created boolean, OUT same boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    woken boolean;
    of_instance integer;
    of_platform integer;
BEGIN
    IF jsonb_typeof(request->'payload'->'command') IS DISTINCT FROM 'array'
            OR jsonb_typeof(coalesce(request->'properties', '{}')) <> 'object' THEN
        RAISE EXCEPTION 'a request needs payload.command, an array, and its properties are an object'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF request->>'label' <> '' OR request->>'dedup_key' IS NOT NULL THEN
        IF request->>'dedup_key' IS NOT NULL
                OR EXISTS (SELECT FROM queue_limits q WHERE q.label = request->>'label') THEN
            PERFORM prepare_submit(jsonb_build_array(request));
            PERFORM refuse_full_queues(jsonb_build_array(request));
        END IF;
        IF request->>'dedup_key' IS NOT NULL THEN
            SELECT d.job_id, d.public_id, d.created, d.same INTO job_id, public_id, created, same
            FROM submit_deduplicated(jsonb_build_array(request), actor) d;
            RETURN;
        END IF;
    END IF;
    SELECT (SELECT i.id FROM instances i WHERE i.name = coalesce(request->>'instance', 'default')),
           (SELECT p.id FROM platforms p
            WHERE p.digest = sha256(convert_to(coalesce(request->'properties', '{}')::text, 'UTF8')))
        INTO of_instance, of_platform;
    IF of_platform IS NULL THEN
        of_platform := intern_platform(normal_properties(coalesce(request->'properties', '{}')));
    END IF;
    IF of_instance IS NULL THEN
        of_instance := intern_instance(coalesce(request->>'instance', 'default'));
    END IF;
    IF request->>'key' IS NOT NULL THEN
        INSERT INTO submit_keys AS k (instance, key, request_hash, job_id)
        VALUES (of_instance, request->>'key', sha256(convert_to((request - 'key')::text, 'UTF8')),
            nextval('jobs_id_seq'))
        ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false
        RETURNING k.job_id INTO job_id;
        IF NOT FOUND THEN
            SELECT j.id, j.public_id, false, k.request_hash = sha256(convert_to((request - 'key')::text, 'UTF8'))
                INTO job_id, public_id, created, same
            FROM submit_keys k JOIN jobs j ON j.id = k.job_id
            WHERE k.instance = of_instance AND k.key = request->>'key';
            RETURN;
        END IF;
    END IF;
    INSERT INTO jobs AS j (id, public_id, instance, platform, cohort, label, priority, units, locality_hint,
                      timeout_seconds, queue_deadline, max_attempts, retry_failed)
    VALUES (coalesce(submit_alone.job_id, nextval('jobs_id_seq')),
        (public_id_prefix() || substr(gen_random_uuid()::text, 16))::uuid,
        of_instance, of_platform,
        CASE WHEN request->>'label' <> '' THEN cohort_of(request->>'label') ELSE 0 END, coalesce(request->>'label', ''),
        coalesce((request->>'priority')::integer, 0), coalesce((request->>'units')::integer, 1),
        request->>'locality_hint', (request->>'timeout_seconds')::double precision,
        now() + make_interval(secs => (request->>'queue_timeout_seconds')::double precision),
        coalesce((request->>'max_attempts')::integer, 5), coalesce((request->>'retry_failed')::boolean, false))
    RETURNING j.id, j.public_id, true, true INTO job_id, public_id, created, same;
    INSERT INTO job_payloads (job_id, payload) VALUES (submit_alone.job_id, request->'payload');
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    VALUES (submit_alone.job_id, 'submit', NULL, 'queued', 0, submit_alone.actor,
        CASE WHEN request ?| '{from,queue_timeout_seconds}' THEN origin_of(request) END);
    woken := wake('jobs');
END $$;
"""

# As before, without the branches for a request that comes alone.
SUBMIT = """
CREATE OR REPLACE FUNCTION submit(requests jsonb, actor text DEFAULT 'sql')
RETURNS TABLE (n integer, job_id bigint, public_id uuid, created boolean, same boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    malformed boolean;
    deduplicated integer;
    limited boolean;
    sets jsonb[];
    set_ids integer[];
    born_ns integer[];
    born_ids bigint[];
    born_public uuid[];
    nested_loops text;
BEGIN
    IF jsonb_array_length(requests) = 1 THEN
        RETURN QUERY SELECT 0, a.job_id, a.public_id, a.created, a.same FROM submit_alone(requests->0, actor) a;
        RETURN;
    END IF;
    SELECT bool_or(jsonb_typeof(r->'payload'->'command') IS DISTINCT FROM 'array'
                   OR jsonb_typeof(coalesce(r->'properties', '{}')) <> 'object'),
           count(r->>'dedup_key'), EXISTS (SELECT FROM queue_limits)
        INTO malformed, deduplicated, limited
        FROM jsonb_array_elements(requests) r;
    IF malformed THEN
        RAISE EXCEPTION 'a request needs payload.command, an array, and its properties are an object'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF limited OR deduplicated > 0 THEN
        PERFORM prepare_submit(requests);
        PERFORM refuse_full_queues(requests);
    END IF;

    nested_loops := current_setting('enable_nestloop');
    SELECT array_agg(known.given), array_agg(known.id) INTO sets, set_ids FROM (
        SELECT normal.given, intern_platform(normal.properties) AS id FROM (
            SELECT raw.given, normal_properties(raw.given) AS properties FROM (
                SELECT DISTINCT coalesce(r->'properties', '{}') AS given FROM jsonb_array_elements(requests) r
                OFFSET 0) raw
            ORDER BY 2) normal
        OFFSET 0) known;
    -- The planner cannot know how many requests there are; a nested loop over ten thousand would take half a
    -- minute.
    PERFORM set_config('enable_nestloop', 'off', true);
    WITH asked AS MATERIALIZED (
        SELECT (r.ordinality - 1)::integer AS n, coalesce(r.instance, 'default') AS instance_name,
               coalesce(r.properties, '{}') AS properties, r.key, coalesce(r.priority, 0) AS priority,
               coalesce(r.units, 1) AS units, coalesce(r.label, '') AS label, r.locality_hint, r.timeout_seconds,
               now() + make_interval(secs => r.queue_timeout_seconds) AS queue_deadline,
               coalesce(r.max_attempts, 5) AS max_attempts, coalesce(r.retry_failed, false) AS retry_failed,
               coalesce(r.payload, '{}') AS payload,
               CASE WHEN r.request ?| '{from,queue_timeout_seconds}' THEN origin_of(r.request) END AS origin,
               CASE WHEN r.key IS NOT NULL
                   THEN sha256(convert_to((r.request - 'key')::text, 'UTF8')) END AS request_hash
        FROM ROWS FROM (
            jsonb_array_elements(requests),
            jsonb_to_recordset(requests) AS (
                instance text, properties jsonb, key text, dedup_key text, priority integer, units integer,
                label text, locality_hint text, timeout_seconds double precision,
                queue_timeout_seconds double precision, max_attempts integer, retry_failed boolean, payload jsonb)
        ) WITH ORDINALITY AS r (request, instance, properties, key, dedup_key, priority, units, label,
            locality_hint, timeout_seconds, queue_timeout_seconds, max_attempts, retry_failed, payload, ordinality)
        WHERE r.dedup_key IS NULL
    ), known_instances AS MATERIALIZED (
        SELECT name, intern_instance(name) AS id
        FROM (SELECT DISTINCT instance_name AS name FROM asked ORDER BY 1) names
    ), known_labels AS MATERIALIZED (
        SELECT label, cohort_of(label) AS cohort FROM (SELECT DISTINCT label FROM asked OFFSET 0) labels
    ), moment AS MATERIALIZED (
        SELECT public_id_prefix() AS prefix
    ), numbered AS MATERIALIZED (
        SELECT known.*, nextval('jobs_id_seq') AS new_id,
               (moment.prefix || substr(gen_random_uuid()::text, 16))::uuid AS public_id
        FROM moment CROSS JOIN (
            SELECT a.*, i.id AS instance, p.id AS platform, l.cohort
            FROM asked a
            JOIN known_instances i ON i.name = a.instance_name
            JOIN known_labels l ON l.label = a.label
            JOIN unnest(sets, set_ids) AS p (properties, id) ON p.properties = a.properties
            ORDER BY a.n) known
    ), claimed AS (
        INSERT INTO submit_keys AS k (instance, key, request_hash, job_id)
        SELECT DISTINCT ON (instance, key) instance, key, request_hash, new_id
        FROM numbered WHERE key IS NOT NULL ORDER BY instance, key, n
        ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false
        RETURNING k.job_id
    ), fresh AS MATERIALIZED (
        SELECT * FROM numbered m WHERE m.key IS NULL OR m.new_id IN (SELECT c.job_id FROM claimed c)
    ), born AS (
        INSERT INTO jobs (id, public_id, instance, platform, cohort, label, priority, units, locality_hint,
                          timeout_seconds, queue_deadline, max_attempts, retry_failed)
        SELECT f.new_id, f.public_id, f.instance, f.platform, f.cohort, f.label, f.priority, f.units,
               f.locality_hint, f.timeout_seconds, f.queue_deadline, f.max_attempts, f.retry_failed
        FROM fresh f
    ), kept AS (
        INSERT INTO job_payloads (job_id, payload) SELECT f.new_id, f.payload FROM fresh f
    ), noted AS (
        INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
        SELECT f.new_id, 'submit', NULL, 'queued', 0, submit.actor, f.origin FROM fresh f
    )
    SELECT array_agg(f.n), array_agg(f.new_id), array_agg(f.public_id) INTO born_ns, born_ids, born_public
    FROM fresh f;
    PERFORM set_config('enable_nestloop', nested_loops, true);
    IF born_ns IS NOT NULL THEN
        PERFORM wake('jobs');
        RETURN QUERY SELECT u.n, u.id, u.public_id, true, true
            FROM unnest(born_ns, born_ids, born_public) AS u(n, id, public_id);
    END IF;
    IF deduplicated > 0 THEN
        RETURN QUERY SELECT d.n, d.job_id, d.public_id, d.created, d.same
            FROM submit_deduplicated(requests, actor) d;
    END IF;
    IF coalesce(cardinality(born_ns), 0) + deduplicated < jsonb_array_length(requests) THEN
        RETURN QUERY SELECT (r.ordinality - 1)::integer, j.id, j.public_id, false,
                k.request_hash = sha256(convert_to((r.value - 'key')::text, 'UTF8'))
            FROM jsonb_array_elements(requests) WITH ORDINALITY AS r
            JOIN instances i ON i.name = coalesce(r.value->>'instance', 'default')
            JOIN submit_keys k ON k.instance = i.id AND k.key = r.value->>'key'
            JOIN jobs j ON j.id = k.job_id
            WHERE r.value->>'dedup_key' IS NULL
                AND (r.ordinality - 1)::integer <> ALL (coalesce(born_ns, '{}'));
    END IF;
END $$;
"""


def upgrade() -> None:
    for part in (CHECKS, PUBLIC_IDS, WAKE, SUBMIT_ALONE, SUBMIT):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("restore a backup instead")
