-- Submit the requests that have a deduplication key: their keys in one order, then their jobs in the order of the
-- deduplication keys, so that two submits of the same ones do not wait for each other.
--
-- `lock_joined` has locked the jobs that are there already. `originals` are the requests as they were asked, of which a
-- key keeps the digest.
CREATE OR REPLACE FUNCTION submit_deduplicated(requests jsonb, originals jsonb, actor text)
RETURNS TABLE (n integer, job_id bigint, public_id uuid, created boolean, same boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    asked record;
    made record;
    claimed bigint[];
BEGIN
    -- Until a key's job is known, its row has minus the place of the request that has claimed the key, and any id.
    WITH mine AS (
        INSERT INTO submit_keys AS k (instance, key, request_hash, job_id, public_id)
        SELECT DISTINCT ON (i.id, r.value->>'key') i.id, r.value->>'key',
            sha256(convert_to(((originals->(r.ordinality - 1)::integer) - 'key')::text, 'UTF8')), -r.ordinality,
            gen_random_uuid()
        FROM jsonb_array_elements(requests) WITH ORDINALITY AS r
        CROSS JOIN LATERAL (
            SELECT id FROM instances WHERE name = coalesce(r.value->>'instance', 'default') OFFSET 0) i
        WHERE r.value->>'dedup_key' IS NOT NULL AND r.value->>'key' IS NOT NULL
        ORDER BY i.id, r.value->>'key', r.ordinality
        ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false
        RETURNING -k.job_id AS nth
    )
    SELECT coalesce(array_agg(m.nth), '{}') INTO claimed FROM mine m;
    FOR asked IN
        WITH given AS MATERIALIZED (
            SELECT r.ordinality AS nth, r.value AS request, i.id AS instance, r.value->>'key' AS key,
                intern_platform(normal_properties(coalesce(r.value->'properties', '{}'))) AS platform
            FROM jsonb_array_elements(requests) WITH ORDINALITY AS r
            CROSS JOIN LATERAL (
                SELECT id FROM instances WHERE name = coalesce(r.value->>'instance', 'default') OFFSET 0) i
            WHERE r.value->>'dedup_key' IS NOT NULL
                AND (r.value->>'key' IS NULL OR r.ordinality = ANY (claimed))
            ORDER BY r.ordinality
        ), numbered AS MATERIALIZED (
            -- The ids are in the order of the requests.
            SELECT g.*, (g.nth - 1)::integer AS n, nextval('jobs_id_seq') AS new_id FROM given g
        )
        SELECT * FROM numbered o ORDER BY o.instance, o.request->>'dedup_key', o.nth
    LOOP
        IF on_conflict(asked.request) = 'join' THEN
            SELECT * INTO made
            FROM submit_or_join(asked.request, asked.instance, asked.platform, actor, asked.new_id);
        ELSE
            BEGIN
                SELECT * INTO made
                FROM submit_or_join(asked.request, asked.instance, asked.platform, actor, asked.new_id);
            EXCEPTION WHEN SQLSTATE 'LH008' THEN
                RAISE EXCEPTION 'jobs.%.dedup_key: ''%'' %', asked.n,
                    regexp_replace(left(asked.request->>'dedup_key', 80), '[^ -~]', '?', 'g'), SQLERRM
                    USING ERRCODE = 'LH008', DETAIL = asked.n, HINT = SQLERRM;
            END;
        END IF;
        UPDATE submit_keys k SET job_id = made.job, public_id = made.answer
        WHERE k.instance = asked.instance AND k.key = asked.key;
        RETURN QUERY SELECT asked.n, made.job, made.answer, NOT made.joined, true;
    END LOOP;
    -- The other keys were known before, or are those of requests above; all of them have their jobs now.
    RETURN QUERY
        SELECT (r.ordinality - 1)::integer, k.job_id, k.public_id, false,
            k.request_hash = sha256(convert_to(((originals->(r.ordinality - 1)::integer) - 'key')::text, 'UTF8'))
        FROM jsonb_array_elements(requests) WITH ORDINALITY AS r
        CROSS JOIN LATERAL (
            SELECT id FROM instances WHERE name = coalesce(r.value->>'instance', 'default') OFFSET 0) i
        CROSS JOIN LATERAL (
            SELECT k.job_id, k.public_id, k.request_hash FROM submit_keys k
            WHERE k.instance = i.id AND k.key = r.value->>'key' OFFSET 0) k
        WHERE r.value->>'dedup_key' IS NOT NULL AND r.ordinality <> ALL (claimed);
    PERFORM wake('jobs');
END $$;
