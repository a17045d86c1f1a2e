-- Return requests in the nested form that `submit` works on, so that flat ones have the same meaning as in JSON lines.
--
-- A flat request has `command` at its top, like a job over HTTP, and no `payload`. It is checked as `JobRequest` in
-- `schema/requests.py` is, and refused with the same words. `place` is `jobs` or `nodes` and begins the path of the
-- field in an error. The result equals that of `JobRequest.normal`, so that a key is stored with the same digest.
-- Nested requests are returned unchanged.
CREATE OR REPLACE FUNCTION normal_requests(requests jsonb, place text) RETURNS jsonb LANGUAGE plpgsql STABLE AS $$
DECLARE
    is_node boolean := place = 'nodes';
    -- Those that are named and exist. Listing them reads hundreds of files, so it is done once, and only if one is named.
    zones jsonb := CASE WHEN requests @? '$[*].preferred_zone' THEN (
        SELECT jsonb_agg(z.name) FROM pg_timezone_names z
        WHERE z.name IN (SELECT r.value->>'preferred_zone' FROM jsonb_array_elements(requests) r)
            AND z.name !~ '^(posix|right)') END;
    refused text;
    normal jsonb;
BEGIN
    SELECT format('%s.%s.%s%s', place, c.n, regexp_replace(left(c.key, 60), '[^ -~]', '?', 'g'), c.refused)
        INTO refused FROM (
            SELECT r.ordinality - 1 AS n, f.nth, g.key, CASE
                WHEN f.name IS NULL AND g.key = 'urgency' THEN ': is now `priority`, which is 100 - urgency'
                WHEN f.name IS NULL THEN ': there is no such field'
                WHEN f.kind = 'properties' AND jsonb_typeof(g.value) = 'object' AND g.value ? 'leasehold.farm' THEN
                    ': names ''leasehold.farm'', as only requests of the farm door do'
                WHEN f.name = 'dedup_key' AND g.value #>> '{}' LIKE 'a:%' THEN
                    ': begins with ''a:'', as only those of the farm door do'
                WHEN f.kind = 'zone' AND zones ? (g.value #>> '{}') THEN NULL
                WHEN NOT f.nullable OR jsonb_typeof(g.value) <> 'null' THEN
                    refusal(f.kind, f.at_least, f.at_most, g.value) END AS refused
            FROM jsonb_array_elements(requests) WITH ORDINALITY r
            CROSS JOIN LATERAL jsonb_each(CASE WHEN is_flat(r.value) THEN r.value ELSE '{}' END) g
            LEFT JOIN (VALUES
                (1, 'command', 'command', false, 1, 4096),
                (2, 'env', 'env', false, NULL, NULL),
                (3, 'stdin', 'text', true, NULL, 262144),
                (3, 'retry', 'retry', true, NULL, NULL),
                (3, 'max_lost', 'integer', true, 1, 100),
                (4, 'instance', 'name', true, NULL, NULL),
                (5, 'properties', 'properties', false, NULL, NULL),
                (6, 'key', 'text', true, 1, 200),
                (7, 'priority', 'integer', false, -1000, 1000),
                (8, 'units', 'integer', false, 1, 1000000),
                (9, 'label', 'text', false, NULL, 64),
                (10, 'locality_hint', 'text', true, 1, 200),
                (11, 'timeout_seconds', 'positive', true, NULL, 31536000),
                (12, 'queue_timeout_seconds', 'positive', true, NULL, 31536000),
                (13, 'dedup_key', 'text', true, 1, 200),
                (14, 'locks', 'locks', false, NULL, 16),
                (15, 'estimated_cost', 'number', true, 0, 1000000000000),
                (16, 'resource_class', 'name', true, NULL, NULL),
                (17, 'model', 'name', true, NULL, NULL),
                (18, 'graph_priority', 'integer', true, 1, 1000),
                (19, 'job_class', 'name', true, NULL, NULL),
                (20, 'user_priority', 'integer', true, 0, 10),
                (21, 'project', 'name', true, NULL, NULL),
                (22, 'owner', 'name', true, NULL, NULL),
                (23, 'service_level', 'name', true, NULL, NULL),
                (25, 'deadline_seconds', 'positive', true, NULL, 31536000),
                (26, 'estimated_seconds', 'positive', true, NULL, 31536000),
                (27, 'resources', 'resources', false, NULL, NULL),
                (28, 'batch_key', 'name', true, NULL, NULL),
                (29, 'preferred_hours', 'hours', false, NULL, 24),
                (30, 'preferred_zone', 'zone', false, NULL, NULL),
                (31, 'max_attempts', 'integer', false, 1, 100),
                (32, 'retry_failed', 'boolean', false, NULL, NULL),
                (33, 'preferred_properties', 'properties', false, NULL, NULL),
                (34, 'prefer_seconds', 'positive', true, NULL, 31536000),
                (35, 'metadata', 'metadata', false, NULL, 16),
                (36, 'schedule_after', 'time', true, NULL, NULL),
                (37, 'delay', 'number', true, 0, 31536000),
                (38, 'on_conflict', 'on_conflict', true, NULL, NULL),
                (39, 'unique_for', 'positive', true, NULL, 31536000),
                (40, 'debounce', 'positive', true, NULL, 31536000),
                (41, 'debounce_max', 'positive', true, NULL, 31536000),
                (42, 'node', 'integer', false, 0, 2147483647),
                (43, 'after', 'parents', false, NULL, 100000)
            ) AS f (nth, name, kind, nullable, at_least, at_most)
                ON f.name = g.key AND (is_node OR f.name NOT IN ('node', 'after'))
        ) c
        WHERE c.refused IS NOT NULL ORDER BY c.n, c.nth LIMIT 1;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
    END IF;

    WITH flat AS MATERIALIZED (
        SELECT r.n, r.request, r.is_flat, r.value AS f,
            jsonb_build_object('command', r.value->'command')
                || CASE WHEN r.value->'env' <> '{}' OR r.value->'metadata' ? 'traceparent' THEN
                    jsonb_build_object('env', jsonb_strip_nulls(
                        jsonb_build_object('TRACEPARENT', r.value->'metadata'->'traceparent'))
                        || coalesce(r.value->'env', '{}')) ELSE '{}' END
                || jsonb_strip_nulls(jsonb_build_object('stdin', r.value->'stdin', 'max_lost', r.value->'max_lost',
                    'retry', nullif(r.value->'retry', 'null') || coalesce((
                        SELECT jsonb_object_agg(t.key, t.value::text::double precision::text::numeric + 0.0)
                        FROM jsonb_each(nullif(r.value->'retry', 'null')) t WHERE jsonb_typeof(t.value) = 'number'),
                        '{}'))) AS payload,
            r.value->>'job_class' IS NOT NULL OR r.value->>'service_level' IS NOT NULL AS has_points,
            jsonb_strip_nulls(jsonb_build_object(
                'locks', (SELECT jsonb_agg(l.name ORDER BY l.name COLLATE "C") FROM (
                    SELECT DISTINCT name FROM jsonb_array_elements_text(r.value->'locks') AS name) l),
                'resource_class', r.value->'resource_class', 'model', r.value->'model',
                'graph_priority', r.value->'graph_priority', 'job_class', r.value->'job_class',
                'project', r.value->'project', 'owner', r.value->'owner',
                'resources', nullif(r.value->'resources', '{}'),
                -- With it, all jobs of one queue fit on the same bots.
                'units', CASE WHEN r.value->'resources' <> '{}' THEN nullif(r.value->'units', '1') END,
                'batch_key', r.value->'batch_key',
                'preferred_hours', (SELECT jsonb_agg(h.hour ORDER BY h.hour) FROM (
                    SELECT DISTINCT hour::integer
                    FROM jsonb_array_elements_text(r.value->'preferred_hours') AS hour) h),
                'preferred_zone', CASE WHEN r.value->'preferred_hours' <> '[]' THEN
                    coalesce(r.value->>'preferred_zone', 'UTC') END)) AS shared,
            -- With a fraction, because Python writes these numbers so and the digest covers the text.
            coalesce((SELECT jsonb_object_agg(t.key, t.value::double precision::text::numeric + 0.0)
                FROM jsonb_each_text(r.value) t
                WHERE t.value IS NOT NULL AND t.key IN ('timeout_seconds', 'queue_timeout_seconds', 'estimated_cost',
                    'deadline_seconds', 'estimated_seconds', 'prefer_seconds', 'delay', 'unique_for', 'debounce',
                    'debounce_max')), '{}') AS numbers
        FROM (
            SELECT e.ordinality - 1 AS n, e.value AS request, is_flat(e.value) AS is_flat,
                CASE WHEN is_flat(e.value) THEN e.value ELSE '{}' END AS value
            FROM jsonb_array_elements(requests) WITH ORDINALITY e) r
    ), priced AS MATERIALIZED (
        SELECT p.*, CASE
            WHEN p.f->>'service_level' IS NOT NULL THEN jsonb_build_object('level', p.f->'service_level')
                || CASE WHEN p.priority IS NOT NULL THEN '{"fixed": true}'::jsonb ELSE '{}' END
            WHEN p.priority IS NULL THEN jsonb_build_object('class', p.f->'job_class')
                || CASE WHEN p.f->>'project' IS NOT NULL THEN '{"project": true}'::jsonb ELSE '{}' END
                || CASE WHEN (p.f->>'user_priority')::integer > 0
                    THEN jsonb_build_object('user_priority', p.f->'user_priority') ELSE '{}' END
            END AS own
        FROM (
            SELECT flat.*, CASE
                WHEN f ? 'priority' OR NOT has_points THEN coalesce((f->>'priority')::integer, 0) END AS priority
            FROM flat) p
    ), built AS MATERIALIZED (
        SELECT n, CASE WHEN is_flat THEN
            jsonb_build_object(
                'properties', normal_properties(coalesce(f->'properties', '{}')),
                'units', coalesce(f->'units', '1'), 'label', coalesce(f->'label', '""'),
                'locality_hint', f->'locality_hint', 'timeout_seconds', numbers->'timeout_seconds',
                'max_attempts', coalesce(f->'max_attempts', '5'),
                'retry_failed', coalesce(f->'retry_failed', 'false'), 'payload', payload)
            || CASE WHEN NOT is_node THEN
                jsonb_build_object('instance', coalesce(f->>'instance', 'default'), 'key', f->'key')
                WHEN coalesce(f->'after', '[]') = '[]' THEN jsonb_build_object('node', f->'node')
                ELSE jsonb_build_object('node', f->'node', 'after', (
                    SELECT jsonb_agg(CASE WHEN a->>'on_failure' IS NULL THEN coalesce(a->'node', a) ELSE a END
                        ORDER BY nth)
                    FROM jsonb_array_elements(f->'after') WITH ORDINALITY AS e (a, nth))) END
            -- Newer fields are in it only if they are given, so that digests stored with keys still match.
            || numbers - 'timeout_seconds'
            || jsonb_strip_nulls(jsonb_build_object(
                'dedup_key', f->'dedup_key', 'on_conflict', f->'on_conflict', 'own', own, 'metadata', nullif(f->'metadata', '{}'),
                'schedule_after', to_char((f->>'schedule_after')::timestamptz AT TIME ZONE 'UTC',
                    'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
                'preferred_properties',
                CASE WHEN f->'preferred_properties' <> '{}' THEN normal_properties(f->'preferred_properties') END,
                'terms', CASE WHEN shared <> '{}' THEN shared
                    WHEN own IS NOT NULL OR numbers ?| '{deadline_seconds,estimated_seconds}'
                        THEN '{"own": true}'::jsonb END,
                'priority', CASE WHEN NOT is_node OR f ? 'priority' THEN priority END))
            ELSE request END AS request
        FROM priced
    )
    SELECT (SELECT format('%s.%s.%s', place, c.n, c.refused) FROM (
                SELECT n, CASE
                    WHEN is_node AND NOT f ? 'node' THEN 'node: field required'
                    WHEN is_node AND f->>'instance' IS NOT NULL THEN
                        'instance: belongs to the graph and not to one of its nodes'
                    WHEN is_node AND f->>'key' IS NOT NULL THEN 'key: belongs to the graph and not to one of its nodes'
                    WHEN is_node AND f->>'dedup_key' IS NOT NULL THEN
                        'dedup_key: belongs to the graph and not to one of its nodes'
                    WHEN f->>'schedule_after' IS NOT NULL AND f->>'delay' IS NOT NULL THEN
                        'delay: and schedule_after are two words for one thing: give one of them'
                    WHEN f->>'prefer_seconds' IS NOT NULL AND coalesce(f->'preferred_properties', '{}') = '{}' THEN
                        'prefer_seconds: means nothing without preferred_properties'
                    WHEN f->>'retry' IS NOT NULL AND coalesce(f->'retry_failed', 'false') = 'false' THEN
                        'retry: means nothing without retry_failed'
                    WHEN f->>'dedup_key' IS NULL
                        AND coalesce(f->>'on_conflict', f->>'unique_for', f->>'debounce') IS NOT NULL THEN (
                        SELECT format('%s: means nothing without dedup_key', w.name)
                        FROM unnest('{on_conflict,unique_for,debounce}'::text[]) WITH ORDINALITY w (name, nth)
                        WHERE f->>w.name IS NOT NULL ORDER BY w.nth LIMIT 1)
                    WHEN f->>'debounce_max' IS NOT NULL AND f->>'debounce' IS NULL THEN
                        'debounce_max: means nothing without debounce'
                    WHEN (f->>'debounce_max')::double precision < (f->>'debounce')::double precision THEN
                        'debounce_max: must be at least debounce'
                    WHEN f->>'debounce' IS NOT NULL AND f->>'on_conflict' <> 'replace' THEN
                        'debounce: replaces the job that waits: give on_conflict replace, or none'
                    WHEN f->>'debounce' IS NOT NULL AND (f->>'schedule_after' IS NOT NULL OR f->>'delay' IS NOT NULL) THEN
                        'debounce: says when the job starts, as schedule_after and delay do: give one of them'
                    WHEN f->>'model' IS NOT NULL AND f->>'resource_class' IS NULL THEN 'model: needs a resource_class'
                    WHEN f ? 'preferred_zone' AND coalesce(f->'preferred_hours', '[]') = '[]' THEN
                        'preferred_zone: means nothing without preferred_hours'
                    WHEN (SELECT count(DISTINCT l) > count(DISTINCT split_part(l, ':', 1))
                            FROM jsonb_array_elements_text(coalesce(f->'locks', '[]')) l) THEN
                        'locks: names a lock twice, with different slots'
                    WHEN f->>'user_priority' IS NOT NULL AND f->>'job_class' IS NULL THEN
                        'user_priority: raises a job that has a job_class'
                    WHEN f->>'dedup_key' IS NOT NULL AND has_points THEN
                        'dedup_key: goes with a priority, not with a job_class or a service_level'
                    WHEN octet_length(payload::text) > 262144 THEN format(
                        'command: with env and stdin is %s bytes, at most 262144 are allowed',
                        octet_length(payload::text)) END AS refused
                FROM flat WHERE is_flat) c
            WHERE c.refused IS NOT NULL ORDER BY c.n LIMIT 1),
        (SELECT jsonb_agg(request ORDER BY n) FROM built)
        INTO refused, normal;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN normal;
END $$;
