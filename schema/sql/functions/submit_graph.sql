-- Submit a graph of jobs. The one implementation, also for callers in SQL.
--
-- Submits of one name to one instance take turns, so that each replaces the one before it. Platforms come before all
-- rows, as in `submit`. The jobs of a graph that was replaced are cancelled by the caller, or else by upkeep.
CREATE OR REPLACE FUNCTION submit_graph(request jsonb, actor text DEFAULT 'sql')
RETURNS TABLE (graph_id bigint, public_id uuid, created boolean, same boolean, replaced bigint)
LANGUAGE plpgsql SET search_path FROM CURRENT SET jit = off AS $$
#variable_conflict use_column
DECLARE
    job_name text := request->>'name';
    instance_name text := coalesce(request->>'instance', 'default');
    policy text := coalesce(request->>'on_phantom', 'warn');
    graph_priority integer := coalesce((request->>'priority')::integer, 0);
    of_instance integer;
    is_managed boolean;
    hash bytea := sha256(convert_to((request - 'key')::text, 'UTF8'));
    nos integer[];
    twice integer;
    parents integer[];
    children integer[];
    kinds text[];
    absent integer[];
    places integer[];
    depths integer[];
    sets jsonb[];
    set_ids integer[];
    required_sets jsonb[];
    preferred_sets jsonb[];
    preferred_ids integer[];
    preferring_ids integer[];
    made bigint;
    name_of_graph uuid;
    old bigint;
    nested_loops text := current_setting('enable_nestloop');
BEGIN
    IF job_name IS NULL OR jsonb_typeof(request->'nodes') IS DISTINCT FROM 'array'
        OR coalesce(policy NOT IN ('warn', 'reject', 'ignore'), true) OR request ? 'callback'
        OR EXISTS (SELECT FROM jsonb_array_elements(request->'nodes') n
                   WHERE jsonb_typeof(n->'node') IS DISTINCT FROM 'number'
                       OR jsonb_typeof(n->'payload'->'command') IS DISTINCT FROM 'array'
                       OR jsonb_typeof(coalesce(n->'properties', '{}')) <> 'object'
                       OR n ?| '{key,dedup_key,instance}') THEN
        IF jsonb_typeof(request->'nodes') = 'array'
                AND EXISTS (SELECT FROM jsonb_array_elements(request->'nodes') n WHERE is_flat(n)) THEN
            RETURN QUERY SELECT s.* FROM submit_graph(normal_graph(request), actor) s;
            RETURN;
        END IF;
        RAISE EXCEPTION 'a graph has a name and nodes, each with node, payload.command and no key of its own'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('leasehold.graphs'), hashtext(instance_name || '/' || job_name));
    RETURN QUERY SELECT g.id, g.public_id, false, g.request_hash = hash, NULL::bigint
        FROM graphs g JOIN instances i ON i.id = g.instance
        WHERE i.name = instance_name AND g.key = request->>'key';
    IF FOUND THEN
        RETURN;
    END IF;

    SELECT array_agg(n.node ORDER BY n.node), min(n.node) FILTER (WHERE n.jobs > 1) INTO nos, twice FROM (
        SELECT (n->>'node')::integer AS node, count(*) AS jobs
        FROM jsonb_array_elements(request->'nodes') n GROUP BY 1) n;
    IF twice IS NOT NULL THEN
        RAISE EXCEPTION 'Duplicate sheet_num % in job %', twice, job_name USING ERRCODE = 'LH002';
    END IF;
    PERFORM set_config('enable_nestloop', 'off', true);
    WITH asked AS MATERIALIZED (
        SELECT DISTINCT ON (child, parent) *
        FROM (SELECT (n->>'node')::integer AS child, coalesce(a->>'node', a #>> '{}')::integer AS parent,
                     coalesce(a->>'on_failure', request->>'on_failure', 'block') AS on_failure
              FROM jsonb_array_elements(request->'nodes') n, jsonb_array_elements(coalesce(n->'after', '[]')) a) e
        ORDER BY child, parent, on_failure
    ), known AS MATERIALIZED (
        SELECT p.place AS parent, c.place AS child, a.on_failure
        FROM asked a
        JOIN unnest(nos) WITH ORDINALITY AS p (node, place) ON p.node = a.parent
        JOIN unnest(nos) WITH ORDINALITY AS c (node, place) ON c.node = a.child
        ORDER BY p.place, c.place
    )
    SELECT coalesce(k.parents, '{}'), coalesce(k.children, '{}'), k.kinds, coalesce(m.absent, '{}')
    INTO parents, children, kinds, absent
    FROM (SELECT array_agg(parent::integer) AS parents, array_agg(child::integer) AS children,
                 array_agg(on_failure) AS kinds FROM known) k,
         (SELECT array_agg(DISTINCT parent ORDER BY parent) AS absent FROM asked WHERE parent <> ALL (nos)) m;
    IF policy = 'reject' AND absent <> '{}' THEN
        RAISE EXCEPTION 'Phantom dependencies in job %: %', job_name, array_to_string(absent[:20], ', ')
            || CASE WHEN cardinality(absent) > 20 THEN format(' and %s more', cardinality(absent) - 20) ELSE '' END
            USING ERRCODE = 'LH002';
    END IF;
    -- What a callback has become is told to no other node.
    SELECT (n->>'node')::integer INTO twice FROM jsonb_array_elements(request->'nodes') n
        WHERE n ? 'callback' AND array_position(nos, (n->>'node')::integer) = ANY (parents) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'node % is a callback: no node may depend on it', twice USING ERRCODE = 'LH002';
    END IF;
    SELECT o.places, o.depths INTO places, depths FROM ordered_graph(job_name, nos, parents, children) o;

    IF EXISTS (SELECT FROM submit_checks) THEN
        PERFORM refuse_full_queues(request->'nodes', instance_name);
        request := jsonb_set(request, '{nodes}', within_limits(request->'nodes', 'nodes', instance_name,
            graph_priority));
    END IF;
    SELECT array_agg(known.given), array_agg(known.id) INTO sets, set_ids FROM (
        SELECT normal.given, intern_platform(normal.properties) AS id FROM (
            SELECT raw.given, normal_properties(raw.given) AS properties FROM (
                SELECT DISTINCT coalesce(n->'properties', '{}') AS given
                FROM jsonb_array_elements(request->'nodes') n OFFSET 0) raw
            ORDER BY 2) normal
        OFFSET 0) known;
    SELECT array_agg(p.required), array_agg(p.preferred), array_agg(w.preferring), array_agg(w.platform)
        INTO required_sets, preferred_sets, preferred_ids, preferring_ids FROM (
            SELECT DISTINCT coalesce(n->'properties', '{}') AS required, n->'preferred_properties' AS preferred
            FROM jsonb_array_elements(request->'nodes') n WHERE n ? 'preferred_properties' ORDER BY 1, 2) p
            CROSS JOIN LATERAL intern_preferred(p.required, p.preferred) w;
    of_instance := intern_instance(instance_name);
    is_managed := (SELECT i.managed FROM instances i WHERE i.id = of_instance);
    UPDATE graphs g SET state = 'replaced'
        WHERE g.instance = of_instance AND g.name = job_name AND g.state = 'active' RETURNING g.id INTO old;
    INSERT INTO graphs AS g (instance, name, key, request_hash, priority, nodes, edges, ready, missing, actor)
        VALUES (of_instance, job_name, request->>'key', CASE WHEN request ? 'key' THEN hash END, graph_priority,
                cardinality(nos), cardinality(parents), 0,
                CASE WHEN policy = 'ignore' THEN '{}'::integer[] ELSE absent END, submit_graph.actor)
        ON CONFLICT (instance, key) DO NOTHING RETURNING g.id, g.public_id INTO made, name_of_graph;
    IF made IS NULL THEN
        RAISE EXCEPTION 'the key of graph % has been used meanwhile', job_name USING ERRCODE = 'serialization_failure';
    END IF;

    WITH moment AS MATERIALIZED (
        SELECT public_id_prefix() AS prefix
    ), placed AS MATERIALIZED (
        SELECT p.place, nextval('jobs_id_seq') AS new_id,
               (moment.prefix || substr(gen_random_uuid()::text, 16))::uuid AS public_id
        FROM moment CROSS JOIN unnest(places) AS p (place)
    ), edges AS MATERIALIZED (
        SELECT p.new_id AS parent, c.new_id AS child, e.on_failure
        FROM unnest(parents, children, kinds) AS e (parent, child, on_failure)
        JOIN placed p ON p.place = e.parent JOIN placed c ON c.place = e.child
    ), waiting AS MATERIALIZED (
        SELECT child, count(*)::integer AS deps FROM edges GROUP BY child
    ), asked AS MATERIALIZED (
        SELECT r.node, coalesce(r.properties, '{}') AS properties, coalesce(r.priority, graph_priority) AS priority,
               coalesce(r.units, 1) AS units, coalesce(r.label, '') AS label, r.locality_hint, r.timeout_seconds,
               r.queue_timeout_seconds, coalesce(r.max_attempts, 5) AS max_attempts,
               coalesce(r.retry_failed, false) AS retry_failed, r.payload, r.whole, r.preferred_properties,
               r.prefer_seconds,
               CASE WHEN is_managed OR r.terms IS NOT NULL OR coalesce((request->>'fair_share')::boolean, false)
                   THEN coalesce(r.terms, '{}') || jsonb_build_object('graph', made::text) END AS terms,
               r.callback, CASE WHEN policy <> 'ignore' AND absent <> '{}' THEN ARRAY(
                   SELECT DISTINCT d.node FROM (
                       SELECT coalesce(a->>'node', a #>> '{}')::integer AS node
                       FROM jsonb_array_elements(r.after) a) d
                   WHERE d.node = ANY (absent) ORDER BY d.node) END AS missing
        FROM ROWS FROM (
            jsonb_array_elements(request->'nodes'),
            jsonb_to_recordset(request->'nodes') AS (
                node integer, after jsonb, properties jsonb, priority integer, units integer, label text,
            locality_hint text, timeout_seconds double precision, queue_timeout_seconds double precision,
            max_attempts integer, retry_failed boolean, payload jsonb, terms jsonb, preferred_properties jsonb,
            prefer_seconds double precision, callback text)
        ) AS r (whole, node, after, properties, priority, units, label, locality_hint, timeout_seconds,
            queue_timeout_seconds, max_attempts, retry_failed, payload, terms, preferred_properties, prefer_seconds,
            callback)
    ), known_terms AS MATERIALIZED (
        SELECT terms, intern_constraint_set(terms) AS id
        FROM (SELECT DISTINCT terms FROM asked WHERE terms IS NOT NULL ORDER BY 1) sets
    ), known_labels AS MATERIALIZED (
        SELECT label, cohort_of(label) AS cohort FROM (SELECT DISTINCT label FROM asked OFFSET 0) labels
    ), sorted AS MATERIALIZED (
        SELECT a.*, CASE WHEN f.insists THEN w.preferred_id ELSE coalesce(w.id, s.id) END AS platform,
            l.cohort, t.id AS constraint_set,
            w.preferred_id AS preferred,
            CASE WHEN f.insists THEN w.id END AS required
        FROM asked a
        LEFT JOIN known_terms t ON t.terms = a.terms
        JOIN unnest(sets, set_ids) AS s (properties, id) ON s.properties = a.properties
        JOIN known_labels l ON l.label = a.label
        LEFT JOIN unnest(required_sets, preferred_sets, preferred_ids, preferring_ids)
            AS w (required, preferred, preferred_id, id)
            ON w.required = a.properties AND w.preferred = a.preferred_properties
        CROSS JOIN LATERAL (SELECT w.preferred_id IS NOT NULL AND a.prefer_seconds IS NOT NULL AS insists) f
    ), known_queues AS MATERIALIZED (
        SELECT *, intern_queue(cohort, of_instance, platform, units, constraint_set, preferred, required) AS id FROM (
            SELECT DISTINCT cohort, platform, units, constraint_set, preferred, required
            FROM sorted ORDER BY 1, 2, 3, 4, 5, 6) kinds
    ), fresh AS MATERIALIZED (
        SELECT a.*, p.new_id, p.public_id, q.id AS queue, depths[n.place] AS depth,
               coalesce(a.missing, '{}') AS absent_parents,
               coalesce(w.deps, 0) + coalesce(cardinality(a.missing), 0) AS pending,
               CASE WHEN w.deps IS NULL AND coalesce(a.missing, '{}') = '{}' THEN 'queued' ELSE 'blocked' END AS state,
               CASE WHEN a.constraint_set IS NOT NULL
                   THEN rank_of(a.whole || jsonb_build_object('priority', a.priority)) ELSE a.priority END AS rank
        FROM sorted a
        JOIN known_queues q ON q.cohort = a.cohort AND q.platform = a.platform AND q.units = a.units
            AND coalesce(q.constraint_set, 0) = coalesce(a.constraint_set, 0)
            AND coalesce(q.preferred, 0) = coalesce(a.preferred, 0)
            AND coalesce(q.required, 0) = coalesce(a.required, 0)
        JOIN unnest(nos) WITH ORDINALITY AS n (node, place) ON n.node = a.node
        JOIN placed p ON p.place = n.place
        LEFT JOIN waiting w ON w.child = p.new_id
    ), born AS (
        INSERT INTO jobs (id, public_id, queue, cohort, instance, platform, label, priority, units, state, locality_hint,
                          timeout_seconds, queue_deadline, max_attempts, retry_failed, constrained, rank, preferred)
        SELECT f.new_id, f.public_id, f.queue, f.cohort, of_instance, f.platform, f.label, f.priority, f.units, f.state,
               f.locality_hint, f.timeout_seconds,
               CASE WHEN f.state = 'queued' THEN now() + make_interval(secs => f.queue_timeout_seconds) END,
               f.max_attempts, f.retry_failed, f.constraint_set IS NOT NULL, f.rank, f.preferred
        FROM fresh f ORDER BY f.new_id
    ), insisting AS (
        INSERT INTO preference_waits (job_id, seconds, until)
        SELECT f.new_id, f.prefer_seconds, now() + make_interval(secs => f.prefer_seconds)
        FROM fresh f WHERE f.required IS NOT NULL ORDER BY f.new_id
    ), termed AS (
        INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs)
        SELECT f.new_id, w.estimate, w.seconds, w.deadline,
               coalesce(w.priority_inputs, '{}')
                   || jsonb_build_object('depth', f.depth, 'graph_priority', graph_priority)
        FROM fresh f CROSS JOIN LATERAL own_constraints(f.whole) w WHERE f.constraint_set IS NOT NULL ORDER BY f.new_id
    ), kept AS (
        INSERT INTO job_payloads (job_id, payload) SELECT f.new_id, f.payload FROM fresh f ORDER BY f.new_id
    ), noted AS (
        INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
        SELECT f.new_id, 'submit', NULL, f.state, 0, submit_graph.actor, jsonb_strip_nulls(jsonb_build_object(
            'graph', job_name, 'node', f.node, 'queue_timeout_seconds', f.queue_timeout_seconds,
            'prefer_seconds', f.prefer_seconds, 'lowered', f.whole->'lowered'))
        FROM fresh f ORDER BY f.new_id
    ), numbered AS (
        INSERT INTO graph_nodes (job_id, graph, node_no, depth, pending_deps, dead_ends, missing, queue_timeout_seconds,
            callback)
        SELECT f.new_id, made, f.node, f.depth, f.pending, cardinality(f.absent_parents), f.absent_parents,
               f.queue_timeout_seconds, f.callback
        FROM fresh f ORDER BY f.new_id
    ), linked AS (
        INSERT INTO graph_edges (parent, child, on_failure)
        SELECT e.parent, e.child, e.on_failure FROM edges e ORDER BY e.parent, e.child
    )
    UPDATE graphs g SET ready = (SELECT count(*) FROM fresh f WHERE f.state = 'queued') WHERE g.id = made;
    IF EXISTS (SELECT FROM jsonb_array_elements(request->'nodes') n WHERE n ? 'metadata') THEN
        INSERT INTO job_metadata (job_id, instance, key, value)
        SELECT g.job_id, of_instance, m.key, m.value
        FROM jsonb_array_elements(request->'nodes') r
        JOIN graph_nodes g ON g.graph = made AND g.node_no = (r->>'node')::integer
        CROSS JOIN LATERAL jsonb_each_text(r->'metadata') m
        WHERE r ? 'metadata';
    END IF;
    PERFORM set_config('enable_nestloop', nested_loops, true);
    PERFORM wake('jobs');
    RETURN QUERY SELECT made, name_of_graph, true, true, old;
END $$;
