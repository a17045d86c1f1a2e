-- Raise LH001 if requests exceed the queue limit of their label.
--
-- The error does not tell how many jobs others have submitted. Held jobs count, because a release puts them all into
-- the queue. Requests with a known key, or that join a job, add none.
CREATE OR REPLACE FUNCTION refuse_full_queues(requests jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE asked record; waiting integer;
BEGIN
    FOR asked IN
        WITH limited AS MATERIALIZED (
            SELECT q.label, q.max_queued, r.ordinality, r.value->>'key' AS key, r.value->>'dedup_key' AS dedup_key,
                coalesce(r.value->>'instance', 'default') AS name
            FROM queue_limits q
            JOIN jsonb_array_elements(requests) WITH ORDINALITY r ON r.value->>'label' = q.label
        ), adding AS MATERIALIZED (
            SELECT l.* FROM limited l LEFT JOIN instances i ON i.name = l.name
            WHERE (SELECT true FROM submit_keys k WHERE k.instance = i.id AND k.key = l.key) IS NULL
                AND (SELECT true FROM jobs s WHERE s.instance = i.id AND s.dedup_key = l.dedup_key
                     AND s.dedup_key IS NOT NULL AND s.state IN ('queued', 'parked', 'leased', 'running')) IS NULL
        )
        SELECT a.label, a.max_queued, count(DISTINCT CASE
            WHEN a.dedup_key IS NOT NULL THEN jsonb_build_array(a.name, 'dedup', a.dedup_key)
            WHEN a.key IS NOT NULL THEN jsonb_build_array(a.name, 'key', a.key)
            ELSE to_jsonb(a.ordinality) END) AS jobs
        FROM adding a GROUP BY a.label, a.max_queued ORDER BY a.label
    LOOP
        SELECT count(*) INTO waiting FROM (
            SELECT FROM jobs j WHERE j.label = asked.label AND j.state IN ('queued', 'parked') AND j.label <> ''
            LIMIT asked.max_queued + 1) w;
        IF waiting + asked.jobs > asked.max_queued THEN
            RAISE EXCEPTION 'label ''%'' may have % queued jobs, held ones included: no room for % more',
                asked.label, asked.max_queued, asked.jobs USING ERRCODE = 'LH001';
        END IF;
    END LOOP;
END $$;
