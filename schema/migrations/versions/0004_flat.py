"""Flat: costs stay as they are with many queues, kinds of bots and dead versions of rows; one submit alone is cheap."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# The live leases of a bot are its latest ones, so many: whoever knows the number need not look through the others.
# The index says in other words than its neighbours what is live, so that a lookup in these words can use it alone.
HELD = """
ALTER TABLE bots ADD COLUMN held integer NOT NULL DEFAULT 0;
UPDATE bots b SET held = l.leases
FROM (SELECT bot_id, count(*) AS leases FROM live GROUP BY bot_id) l WHERE l.bot_id = b.id;
ALTER TABLE bots ADD CONSTRAINT bots_held_positive CHECK (held >= 0);
DROP INDEX leases_live_of_bot;
CREATE INDEX leases_live_of_bot ON leases (bot_id, granted_at) WHERE state NOT IN ('completed', 'cancelled');
"""

# Each answer is a row of its own, which is deleted with the next call; a row that changes has too many versions.
ANSWERS = """
ALTER TABLE bot_answers DROP CONSTRAINT bot_answers_pkey,
    ADD CONSTRAINT bot_answers_pkey PRIMARY KEY (bot_id, epoch, sync_seq);
ALTER TABLE bot_answers RESET (fillfactor);
"""

# A bot's row is written at each of its calls: with most of the page left free its indexes stay as they are.
LAYOUT = "ALTER TABLE bots SET (fillfactor = 20)"

# Picks read the front of the line of a cohort, whatever its queues; by age they look into each urgency of a queue.
# Every job has a unit: the words keep the planner from this index where a single queue is meant.
FRONT = """
CREATE INDEX jobs_ready_order ON jobs (cohort, priority, queued_at, id)
    WHERE state = 'queued' AND schedule_after IS NULL AND units >= 1;
DROP INDEX jobs_ready_age;
"""

# Bots of one kind offer the same properties: what one of them offers is known of all.
KIND = "ALTER TABLE bots ADD COLUMN kind bigint GENERATED ALWAYS AS (hashtextextended(properties::text, 0)) STORED"

# One expression, which its callers take over; a call of a function in SQL costs more than all of it.
PUBLIC_IDS = """
CREATE OR REPLACE FUNCTION public_id_prefix() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT overlay(lpad(to_hex((date_part('epoch', clock_timestamp()) * 1000)::bigint), 12, '0')
        PLACING '-' FROM 9 FOR 0) || '-7'
$$;
"""

# Statements of a function in PL/pgSQL are planned once in a session, those of one in SQL at each call.
COHORT_OF = """
CREATE OR REPLACE FUNCTION cohort_of(label text) RETURNS integer LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF label = '' THEN
        RETURN 0;
    END IF;
    RETURN coalesce((SELECT c.id FROM cohorts c WHERE c.labels @> ARRAY[label] ORDER BY c.position, c.id LIMIT 1), 0);
END $$;
"""

# A request that comes alone has nothing to be shared with others: its rows are written one after the other. A digest
# that is known is that of a set in normal form, so that a set which has it needs not be brought there. The order of
# locks is as before.
SUBMIT = """
CREATE OR REPLACE FUNCTION submit(requests jsonb, actor text DEFAULT 'sql')
RETURNS TABLE (n integer, job_id bigint, public_id uuid, created boolean, same boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    alone jsonb := CASE WHEN requests->1 IS NULL THEN requests->0 END;
    malformed boolean;
    deduplicated integer;
    limited boolean;
    of_instance integer;
    of_platform integer;
    sets jsonb[];
    set_ids integer[];
    born_ns integer[];
    born_ids bigint[];
    born_public uuid[];
    nested_loops text;
BEGIN
    IF alone IS NULL THEN
        SELECT bool_or(jsonb_typeof(r->'payload'->'command') IS DISTINCT FROM 'array'
                       OR jsonb_typeof(coalesce(r->'properties', '{}')) <> 'object'),
               count(r->>'dedup_key'), EXISTS (SELECT FROM queue_limits)
            INTO malformed, deduplicated, limited
            FROM jsonb_array_elements(requests) r;
    ELSE
        malformed := jsonb_typeof(alone->'payload'->'command') IS DISTINCT FROM 'array'
            OR jsonb_typeof(coalesce(alone->'properties', '{}')) <> 'object';
        deduplicated := CASE WHEN alone->>'dedup_key' IS NULL THEN 0 ELSE 1 END;
        SELECT EXISTS (SELECT FROM queue_limits),
               (SELECT i.id FROM instances i WHERE i.name = coalesce(alone->>'instance', 'default')),
               (SELECT p.id FROM platforms p
                WHERE p.digest = sha256(convert_to(coalesce(alone->'properties', '{}')::text, 'UTF8')))
            INTO limited, of_instance, of_platform;
    END IF;
    IF malformed THEN
        RAISE EXCEPTION 'a request needs payload.command, an array, and its properties are an object'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF limited OR deduplicated > 0 THEN
        PERFORM prepare_submit(requests);
        PERFORM refuse_full_queues(requests);
    END IF;

    IF alone IS NULL THEN
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
    ELSIF deduplicated = 0 THEN
        IF of_platform IS NULL THEN
            of_platform := intern_platform(normal_properties(coalesce(alone->'properties', '{}')));
        END IF;
        IF of_instance IS NULL THEN
            of_instance := intern_instance(coalesce(alone->>'instance', 'default'));
        END IF;
        n := 0;
        job_id := nextval('jobs_id_seq');
        created := true;
        same := true;
        IF alone->>'key' IS NOT NULL THEN
            INSERT INTO submit_keys AS k (instance, key, request_hash, job_id)
            VALUES (of_instance, alone->>'key', sha256(convert_to((alone - 'key')::text, 'UTF8')), submit.job_id)
            ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false;
            created := FOUND;
        END IF;
        IF created THEN
            INSERT INTO jobs AS j (id, public_id, instance, platform, cohort, label, priority, units, locality_hint,
                              timeout_seconds, queue_deadline, max_attempts, retry_failed)
            VALUES (submit.job_id, overlay(gen_random_uuid()::text PLACING public_id_prefix() FROM 1 FOR 15)::uuid,
                of_instance, of_platform, cohort_of(coalesce(alone->>'label', '')), coalesce(alone->>'label', ''),
                coalesce((alone->>'priority')::integer, 0), coalesce((alone->>'units')::integer, 1),
                alone->>'locality_hint', (alone->>'timeout_seconds')::double precision,
                now() + make_interval(secs => (alone->>'queue_timeout_seconds')::double precision),
                coalesce((alone->>'max_attempts')::integer, 5), coalesce((alone->>'retry_failed')::boolean, false))
            RETURNING j.public_id INTO public_id;
            INSERT INTO job_payloads (job_id, payload) VALUES (submit.job_id, alone->'payload');
            INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
            VALUES (submit.job_id, 'submit', NULL, 'queued', 0, submit.actor,
                CASE WHEN alone ?| '{from,queue_timeout_seconds}' THEN origin_of(alone) END);
            PERFORM wake('jobs');
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
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
    for part in (FRONT, HELD, KIND, ANSWERS, LAYOUT, PUBLIC_IDS, COHORT_OF, SUBMIT):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("picks of the version before need what this removed; restore a backup instead")
