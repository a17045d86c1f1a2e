-- Raise LH001 if requests exceed the queue limit of their label or of their instance.
--
-- What others have submitted and not committed does not count, so that nobody waits for them: submits at once may exceed
-- a limit by that much. The error does not tell how many jobs others have submitted. Held jobs count, because a release
-- puts them all into the queue. Requests with a known key, or that join a job, add none; they are looked at after the
-- count, so that a repeat whose first try is committed in between is not refused. Each count reads its own index, up to
-- the limit.
CREATE OR REPLACE FUNCTION refuse_full_queues(requests jsonb, of_instance text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    limited record;
    beyond record;
    waiting integer;
    labels text[];
    names text[];
    mosts integer[];
    waits integer[];
BEGIN
    FOR limited IN
        WITH asked AS MATERIALIZED (
            SELECT DISTINCT r->>'label' AS label, coalesce(of_instance, r->>'instance', 'default') AS instance_name
            FROM jsonb_array_elements(requests) r
        )
        SELECT q.label, NULL AS instance_name, NULL::integer AS instance, q.max_queued
        FROM queue_limits q WHERE q.label IN (SELECT a.label FROM asked a)
        UNION ALL
        SELECT NULL, a.name, (SELECT i.id FROM instances i WHERE i.name = a.name), queue_limit_of(a.name)
        FROM (SELECT DISTINCT instance_name AS name FROM asked) a
        WHERE queue_limit_of(a.name) IS NOT NULL
        ORDER BY label, instance_name
    LOOP
        IF limited.label IS NOT NULL THEN
            SELECT count(*) INTO waiting FROM (
                SELECT FROM jobs j WHERE j.label = limited.label AND j.state IN ('queued', 'parked') AND j.label <> ''
                LIMIT limited.max_queued + 1) w;
        ELSE
            SELECT count(*) INTO waiting FROM (
                SELECT FROM (SELECT id, constraint_set FROM queues WHERE instance = limited.instance OFFSET 0) k
                CROSS JOIN LATERAL (
                    SELECT FROM jobs j WHERE j.constrained = (k.constraint_set IS NOT NULL) AND j.queue = k.id
                        AND j.state = 'queued' AND j.schedule_after IS NULL AND j.units >= 1
                    ORDER BY j.queue LIMIT limited.max_queued + 1) r
                UNION ALL
                SELECT FROM jobs j
                WHERE j.instance = limited.instance AND j.state = 'queued' AND j.schedule_after IS NOT NULL
                UNION ALL
                SELECT FROM jobs j WHERE j.instance = limited.instance AND j.state = 'parked'
                LIMIT limited.max_queued + 1) w;
        END IF;
        labels := labels || limited.label;
        names := names || limited.instance_name;
        mosts := mosts || limited.max_queued;
        waits := waits || waiting;
    END LOOP;
    IF mosts IS NULL THEN
        RETURN;
    END IF;
    -- What makes one job together has one identity.
    WITH new AS MATERIALIZED (
        SELECT a.request->>'label' AS label, a.instance_name, a.replaced_label, CASE
                WHEN a.request->>'dedup_key' IS NOT NULL
                    THEN jsonb_build_array(a.instance_name, 'dedup', a.request->'dedup_key')
                WHEN a.request->>'key' IS NOT NULL THEN jsonb_build_array(a.instance_name, 'key', a.request->'key')
                ELSE to_jsonb(a.n) END AS identity
        FROM new_requests(requests, of_instance) a
    ), limits AS MATERIALIZED (
        SELECT * FROM unnest(labels, names, mosts, waits) WITH ORDINALITY AS l (label, instance_name, most, waiting, nth)
    ), added AS (
        SELECT l.nth, n.identity FROM limits l JOIN new n ON n.label = l.label
        WHERE n.replaced_label IS DISTINCT FROM n.label
        UNION ALL
        SELECT l.nth, n.identity FROM limits l JOIN new n ON n.instance_name = l.instance_name
        WHERE n.replaced_label IS NULL
    )
    SELECT l.label, l.instance_name, l.most, count(DISTINCT a.identity) AS adding INTO beyond
    FROM limits l JOIN added a ON a.nth = l.nth
    GROUP BY l.nth, l.label, l.instance_name, l.most, l.waiting
    HAVING l.waiting + count(DISTINCT a.identity) > l.most
    ORDER BY l.nth LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% ''%'' may have % queued jobs, held ones included: no room for % more',
            CASE WHEN beyond.label IS NULL THEN 'instance' ELSE 'label' END,
            coalesce(beyond.label, beyond.instance_name), beyond.most, beyond.adding USING ERRCODE = 'LH001';
    END IF;
END $$;
