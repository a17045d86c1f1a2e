-- Raise LH001 if requests exceed the queue limit of their label or of their instance.
--
-- The error does not tell how many jobs others have submitted. Held jobs count, because a release puts them all into
-- the queue. Requests with a known key, or that join a job, add none. Each count reads its own index, up to the limit.
CREATE OR REPLACE FUNCTION refuse_full_queues(requests jsonb, of_instance text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE asked record; waiting integer;
BEGIN
    FOR asked IN
        WITH adding AS MATERIALIZED (
            SELECT a.instance_name, a.instance, a.request->>'label' AS label, CASE
                WHEN a.request->>'dedup_key' IS NOT NULL
                    THEN jsonb_build_array(a.instance_name, 'dedup', a.request->'dedup_key')
                WHEN a.request->>'key' IS NOT NULL THEN jsonb_build_array(a.instance_name, 'key', a.request->'key')
                ELSE to_jsonb(a.n) END AS job
            FROM new_requests(requests, of_instance) a
        )
        SELECT q.label, NULL AS instance_name, NULL::integer AS instance, q.max_queued,
            count(DISTINCT a.job) AS jobs
        FROM queue_limits q JOIN adding a ON a.label = q.label GROUP BY q.label, q.max_queued
        UNION ALL
        SELECT NULL, a.instance_name, a.instance, queue_limit_of(a.instance_name), count(DISTINCT a.job)
        FROM adding a WHERE queue_limit_of(a.instance_name) IS NOT NULL GROUP BY a.instance_name, a.instance
        ORDER BY label, instance_name
    LOOP
        IF asked.label IS NOT NULL THEN
            SELECT count(*) INTO waiting FROM (
                SELECT FROM jobs j WHERE j.label = asked.label AND j.state IN ('queued', 'parked') AND j.label <> ''
                LIMIT asked.max_queued + 1) w;
        ELSE
            SELECT count(*) INTO waiting FROM (
                SELECT FROM (SELECT id, constraint_set FROM queues WHERE instance = asked.instance OFFSET 0) k
                CROSS JOIN LATERAL (
                    SELECT FROM jobs j WHERE j.constrained = (k.constraint_set IS NOT NULL) AND j.queue = k.id
                        AND j.state = 'queued' AND j.schedule_after IS NULL AND j.units >= 1
                    ORDER BY j.queue LIMIT asked.max_queued + 1) r
                UNION ALL
                SELECT FROM jobs j
                WHERE j.instance = asked.instance AND j.state = 'queued' AND j.schedule_after IS NOT NULL
                UNION ALL
                SELECT FROM jobs j WHERE j.instance = asked.instance AND j.state = 'parked'
                LIMIT asked.max_queued + 1) w;
        END IF;
        IF waiting + asked.jobs > asked.max_queued THEN
            RAISE EXCEPTION '% ''%'' may have % queued jobs, held ones included: no room for % more',
                CASE WHEN asked.label IS NULL THEN 'instance' ELSE 'label' END,
                coalesce(asked.label, asked.instance_name), asked.max_queued, asked.jobs USING ERRCODE = 'LH001';
        END IF;
    END LOOP;
END $$;
