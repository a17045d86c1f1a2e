-- Submit a graph of jobs in the form that `normal_graph` returns, in which gateways bring their graphs. The one
-- implementation; callers in SQL come by `submit_graph`.
--
-- Submits of one name to one instance take turns, so that each replaces the one before it. Rows of platforms are made
-- before all others, as in `submit_many`. The jobs of a graph that was replaced are cancelled by the caller, or else by
-- upkeep.
CREATE OR REPLACE FUNCTION submit_normal_graph(request jsonb, actor text)
RETURNS TABLE (graph_id bigint, public_id uuid, created boolean, same boolean, replaced bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    job_name text;
    instance_name text;
    policy text;
    graph_priority integer;
    of_instance integer;
    is_managed boolean;
    hash bytea;
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
    node_requests jsonb;
    nested_loops text := current_setting('enable_nestloop');
BEGIN
    job_name := request->>'name';
    instance_name := coalesce(request->>'instance', 'default');
    policy := coalesce(request->>'on_phantom', 'warn');
    graph_priority := coalesce((request->>'priority')::integer, 0);
    hash := sha256(convert_to((request - 'key')::text, 'UTF8'));
    IF jsonb_path_exists(request->'nodes', '$[*].*."leasehold.farm"') THEN
        RAISE EXCEPTION 'nodes: names ''leasehold.farm'', as only requests of the farm door do'
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
    node_requests := request->'nodes';
    SELECT array_agg(known.given), array_agg(known.id) INTO sets, set_ids FROM (
        SELECT normal.given, intern_platform(normal.properties) AS id FROM (
            SELECT raw.given, normal_properties(raw.given) AS properties FROM (
                SELECT as_text::jsonb AS given FROM (
                    -- As text, by which nodes find them: 1 and 1.0 are equal as jsonb.
                    SELECT DISTINCT coalesce(n->'properties', '{}')::text AS as_text
                    FROM jsonb_array_elements(request->'nodes') n) distinct_sets OFFSET 0) raw
            ORDER BY 2) normal
        OFFSET 0) known;
    SELECT array_agg(p.required), array_agg(p.preferred), array_agg(w.preferring), array_agg(w.platform)
        INTO required_sets, preferred_sets, preferred_ids, preferring_ids FROM (
            SELECT required::jsonb, preferred::jsonb FROM (
                SELECT DISTINCT coalesce(n->'properties', '{}')::text AS required,
                    (n->'preferred_properties')::text AS preferred
                FROM jsonb_array_elements(request->'nodes') n WHERE n ? 'preferred_properties') pairs ORDER BY 1, 2) p
            CROSS JOIN LATERAL intern_preferred(p.required, p.preferred) w;
    of_instance := intern_instance(instance_name);
    is_managed := (SELECT i.managed FROM instances i WHERE i.id = of_instance);
    UPDATE graphs g SET state = 'replaced'
        WHERE g.instance = of_instance AND g.name = job_name AND g.state = 'active' RETURNING g.id INTO old;
    INSERT INTO graphs AS g (instance, name, key, request_hash, priority, nodes, edges, ready, missing, actor)
        VALUES (of_instance, job_name, request->>'key', CASE WHEN request ? 'key' THEN hash END, graph_priority,
                cardinality(nos), cardinality(parents), 0,
                CASE WHEN policy = 'ignore' THEN '{}'::integer[] ELSE absent END, submit_normal_graph.actor)
        ON CONFLICT (instance, key) DO NOTHING RETURNING g.id, g.public_id INTO made, name_of_graph;
    IF made IS NULL THEN
        RAISE EXCEPTION 'the key of graph % has been used meanwhile', job_name USING ERRCODE = 'serialization_failure';
    END IF;

    WITH moment AS MATERIALIZED (
        SELECT public_id_prefix() AS prefix
    ), placed AS MATERIALIZED (
        SELECT p.place, nextval('jobs_id_seq') AS id,
               (moment.prefix || substr(gen_random_uuid()::text, 16))::uuid AS public_id
        FROM moment CROSS JOIN unnest(places) AS p (place)
    ), edges AS MATERIALIZED (
        SELECT p.id AS parent, c.id AS child, e.on_failure
        FROM unnest(parents, children, kinds) AS e (parent, child, on_failure)
        JOIN placed p ON p.place = e.parent JOIN placed c ON c.place = e.child
    ), waiting AS MATERIALIZED (
        SELECT child, count(*)::integer AS deps FROM edges GROUP BY child
    ), asked AS MATERIALIZED (
        SELECT r.*, w.whole, (w.whole->>'node')::integer AS node, w.whole->>'callback' AS callback,
               CASE WHEN is_managed OR r.terms <> '' OR coalesce((request->>'fair_share')::boolean, false)
                   THEN coalesce(r.terms::jsonb, '{}') || jsonb_build_object('graph', made::text) END AS own_terms,
               w.whole->>'own' AS own,
               CASE WHEN policy <> 'ignore' AND absent <> '{}' THEN ARRAY(
                   SELECT DISTINCT d.node FROM (
                       SELECT coalesce(a->>'node', a #>> '{}')::integer AS node
                       FROM jsonb_array_elements(w.whole->'after') a) d
                   WHERE d.node = ANY (absent) ORDER BY d.node) ELSE '{}' END AS missing
        FROM read_requests(node_requests, graph_priority) r
        CROSS JOIN LATERAL (SELECT node_requests->r.n AS whole OFFSET 0) w
    ), known_terms AS MATERIALIZED (
        SELECT terms, intern_constraint_set(terms) AS id
        FROM (SELECT DISTINCT own_terms AS terms FROM asked WHERE own_terms IS NOT NULL ORDER BY 1) sets
    ), known_points AS MATERIALIZED (
        SELECT o.own, p.* FROM (
            SELECT own FROM asked WHERE own_terms IS NOT NULL AND own IS NOT NULL GROUP BY own ORDER BY min(n)) o
        CROSS JOIN LATERAL points_of(o.own::jsonb) p
    ), known_labels AS MATERIALIZED (
        SELECT label, cohort_of(label) AS cohort FROM (SELECT DISTINCT label FROM asked OFFSET 0) labels
    ), sorted AS MATERIALIZED (
        SELECT a.*, CASE WHEN f.insists THEN w.preferred_id ELSE coalesce(w.id, s.id) END AS platform,
            l.cohort, t.id AS constraint_set,
            w.preferred_id AS preferred,
            CASE WHEN f.insists THEN w.id END AS required
        FROM asked a
        LEFT JOIN known_terms t ON t.terms = a.own_terms
        JOIN unnest(sets, set_ids) AS s (properties, id) ON s.properties::text = a.properties
        JOIN known_labels l ON l.label = a.label
        LEFT JOIN unnest(required_sets, preferred_sets, preferred_ids, preferring_ids)
            AS w (required, preferred, preferred_id, id)
            ON w.required::text = a.properties AND w.preferred::text = a.preferred_properties
        CROSS JOIN LATERAL (SELECT w.preferred_id IS NOT NULL AND a.prefer_seconds IS NOT NULL AS insists) f
    ), known_queues AS MATERIALIZED (
        SELECT *, intern_queue(cohort, of_instance, platform, units, constraint_set, preferred, required) AS id FROM (
            SELECT DISTINCT cohort, platform, units, constraint_set, preferred, required
            FROM sorted ORDER BY 1, 2, 3, 4, 5, 6) kinds
    ), new_jobs AS MATERIALIZED (
        SELECT p.id, p.public_id, q.id AS queue, of_instance AS instance, depths[n.place] AS depth, a.node, a.whole,
               a.callback, a.missing, a.payload, a.label, a.units, a.cohort, a.platform, a.preferred, a.required,
               a.locality_hint, a.max_attempts, a.retry_failed, a.dedup_key, a.queue_timeout_seconds, a.prefer_seconds,
               coalesce(a.timeout_seconds, o.level_timeout) AS timeout_seconds,
               coalesce(o.price, a.priority) AS priority, coalesce(o.price, a.priority) AS rank, o.price,
               o.usual_seconds, o.starves_at,
               coalesce(w.deps, 0) + cardinality(a.missing) AS pending, d.state,
               CASE WHEN d.state = 'queued' THEN a.starts_at + make_interval(secs => a.queue_timeout_seconds) END
                   AS queue_deadline,
               CASE WHEN d.state = 'queued' THEN nullif(a.starts_at, now()) END AS schedule_after,
               CASE WHEN d.state = 'queued' THEN a.starts_at ELSE now() END AS queued_at,
               a.constraint_set IS NOT NULL AS constrained
        FROM sorted a
        JOIN known_queues q ON q.cohort = a.cohort AND q.platform = a.platform AND q.units = a.units
            AND coalesce(q.constraint_set, 0) = coalesce(a.constraint_set, 0)
            AND coalesce(q.preferred, 0) = coalesce(a.preferred, 0)
            AND coalesce(q.required, 0) = coalesce(a.required, 0)
        JOIN unnest(nos) WITH ORDINALITY AS n (node, place) ON n.node = a.node
        JOIN placed p ON p.place = n.place
        LEFT JOIN waiting w ON w.child = p.id
        LEFT JOIN known_points o ON o.own = a.own AND a.constraint_set IS NOT NULL
        CROSS JOIN LATERAL (
            SELECT CASE WHEN w.deps IS NULL AND a.missing = '{}' THEN 'queued' ELSE 'blocked' END AS state) d
    ), born AS (
        INSERT INTO jobs ({JOB_COLUMNS}) SELECT {JOB_COLUMNS} FROM new_jobs ORDER BY id
    ), insisting AS (
        INSERT INTO preference_waits (job_id, seconds, until)
        SELECT j.id, j.prefer_seconds, j.queued_at + make_interval(secs => j.prefer_seconds)
        FROM new_jobs j WHERE j.required IS NOT NULL ORDER BY j.id
    ), termed AS (
        INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs, price, watch_at)
        SELECT j.id, w.estimate, w.seconds, w.deadline,
               coalesce(w.priority_inputs, '{}')
                   || jsonb_build_object('depth', j.depth, 'graph_priority', graph_priority), w.price, w.watch_at
        FROM new_jobs j CROSS JOIN LATERAL own_constraints(j.whole, j.price, j.usual_seconds, j.starves_at) w
        WHERE j.constrained ORDER BY j.id
    ), kept AS (
        INSERT INTO job_payloads (job_id, payload) SELECT j.id, j.payload FROM new_jobs j ORDER BY j.id
    ), noted AS (
        INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
        SELECT j.id, 'submit', NULL, j.state, 0, submit_normal_graph.actor, jsonb_strip_nulls(jsonb_build_object(
            'graph', job_name, 'node', j.node, 'queue_timeout_seconds', j.queue_timeout_seconds,
            'prefer_seconds', j.prefer_seconds, 'lowered', j.whole->'lowered',
            'schedule_after', j.whole->'schedule_after', 'delay', j.whole->'delay'))
        FROM new_jobs j ORDER BY j.id
    ), numbered AS (
        INSERT INTO graph_nodes (job_id, graph, node_no, depth, pending_deps, dead_ends, missing, queue_timeout_seconds,
            callback, schedule_after, delay)
        SELECT j.id, made, j.node, j.depth, j.pending, cardinality(j.missing), j.missing, j.queue_timeout_seconds,
               j.callback, (j.whole->>'schedule_after')::timestamptz, (j.whole->>'delay')::double precision
        FROM new_jobs j ORDER BY j.id
    ), linked AS (
        INSERT INTO graph_edges (parent, child, on_failure)
        SELECT e.parent, e.child, e.on_failure FROM edges e ORDER BY e.parent, e.child
    )
    UPDATE graphs g SET ready = (SELECT count(*) FROM new_jobs j WHERE j.state = 'queued') WHERE g.id = made;
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
