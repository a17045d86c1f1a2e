"""Speed: submits that do once what is the same for many requests, ids that come in order, results kept once."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# The result of an attempt is what its last event tells; a second copy cost an update of a row for every job.
RESULTS = "ALTER TABLE job_payloads DROP COLUMN result"

# A job and a lease are updated where they lie: with room left in their page both the log and the table stay smaller.
LAYOUT = """
ALTER TABLE jobs SET (fillfactor = 45);
ALTER TABLE leases SET (fillfactor = 45);
"""

# Whoever reads events reads those of one job.
EVENTS = """
ALTER TABLE job_events DROP CONSTRAINT job_events_pkey, ADD CONSTRAINT job_events_pkey PRIMARY KEY (job_id, id);
DROP INDEX job_events_of_job;
"""

# Answers are kept compressed now; a call whose answer is not there is answered anew when it is repeated.
ANSWERS = "UPDATE bot_answers SET answer = NULL"

# What ids of one moment begin with, so that they lie together in their index (RFC 9562, version 7): 48 bits of
# milliseconds; the others are random.
PUBLIC_IDS = """
CREATE FUNCTION public_id_prefix() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT left(hex, 8) || '-' || right(hex, 4) || '-7'
    FROM (SELECT lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') AS hex) moment
$$;
"""

# Requirement sets, instances and labels are looked up once for each that occurs, not for each request, and what only
# some requests need is done only if one of them needs it. The order of locks is as before.
SUBMIT = """
CREATE OR REPLACE FUNCTION submit(requests jsonb, actor text DEFAULT 'sql')
RETURNS TABLE (n integer, job_id bigint, public_id uuid, created boolean, same boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    malformed boolean;
    deduplicated integer;
    sets jsonb[];
    set_ids integer[];
    born_ns integer[];
    born_ids bigint[];
    born_public uuid[];
    nested_loops text := current_setting('enable_nestloop');
BEGIN
    SELECT bool_or(jsonb_typeof(r->'payload'->'command') IS DISTINCT FROM 'array'
                   OR jsonb_typeof(coalesce(r->'properties', '{}')) <> 'object'),
           count(r->>'dedup_key')
        INTO malformed, deduplicated
        FROM jsonb_array_elements(requests) r;
    IF malformed THEN
        RAISE EXCEPTION 'a request needs payload.command, an array, and its properties are an object'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF deduplicated > 0 OR EXISTS (SELECT FROM queue_limits) THEN
        PERFORM prepare_submit(requests);
        PERFORM refuse_full_queues(requests);
    END IF;
    SELECT array_agg(known.given), array_agg(known.id) INTO sets, set_ids FROM (
        SELECT normal.given, intern_platform(normal.properties) AS id FROM (
            SELECT raw.given, normal_properties(raw.given) AS properties FROM (
                SELECT DISTINCT coalesce(r->'properties', '{}') AS given FROM jsonb_array_elements(requests) r
                OFFSET 0) raw
            ORDER BY 2) normal
        OFFSET 0) known;
    -- The planner cannot know how many requests there are; a nested loop over ten thousand would take half a minute.
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
                instance text, properties jsonb, key text, dedup_key text, priority integer, units integer, label text,
                locality_hint text, timeout_seconds double precision, queue_timeout_seconds double precision,
                max_attempts integer, retry_failed boolean, payload jsonb)
        ) WITH ORDINALITY AS r (request, instance, properties, key, dedup_key, priority, units, label, locality_hint,
            timeout_seconds, queue_timeout_seconds, max_attempts, retry_failed, payload, ordinality)
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
               overlay(gen_random_uuid()::text PLACING moment.prefix FROM 1 FOR 15)::uuid AS public_id
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
        SELECT f.new_id, f.public_id, f.instance, f.platform, f.cohort, f.label, f.priority, f.units, f.locality_hint,
               f.timeout_seconds, f.queue_deadline, f.max_attempts, f.retry_failed
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
    for part in (RESULTS, LAYOUT, EVENTS, ANSWERS, PUBLIC_IDS, SUBMIT):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("a copy of each result would have to be made again; restore a backup instead")
