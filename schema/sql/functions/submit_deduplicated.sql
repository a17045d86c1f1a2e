-- Submit the requests that have a deduplication key, one by one.
--
-- `prepare_submit` has locked what other transactions could hold. `originals` are the requests as they were asked, of
-- which a key keeps the digest.
CREATE OR REPLACE FUNCTION submit_deduplicated(requests jsonb, originals jsonb, actor text)
RETURNS TABLE (n integer, job_id bigint, public_id uuid, created boolean, same boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    asked record;
    made record;
    known record;
BEGIN
    FOR asked IN
        SELECT (r.ordinality - 1)::integer AS n, r.value AS request, i.id AS instance, r.value->>'key' AS key,
            intern_platform(normal_properties(coalesce(r.value->'properties', '{}'))) AS platform,
            sha256(convert_to(((originals->(r.ordinality - 1)::integer) - 'key')::text, 'UTF8')) AS request_hash
        FROM jsonb_array_elements(requests) WITH ORDINALITY AS r
        JOIN instances i ON i.name = coalesce(r.value->>'instance', 'default')
        WHERE r.value->>'dedup_key' IS NOT NULL
        ORDER BY r.ordinality
    LOOP
        IF asked.key IS NOT NULL THEN
            INSERT INTO submit_keys AS k (instance, key, request_hash, job_id)
            VALUES (asked.instance, asked.key, asked.request_hash, 0)
            ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false;
            IF NOT FOUND THEN
                SELECT k.job_id, coalesce(k.follower, j.public_id) AS answer, k.request_hash INTO known
                FROM submit_keys k JOIN jobs j ON j.id = k.job_id
                WHERE k.instance = asked.instance AND k.key = asked.key;
                RETURN QUERY SELECT asked.n, known.job_id, known.answer, false,
                    known.request_hash = asked.request_hash;
                CONTINUE;
            END IF;
        END IF;
        SELECT * INTO made FROM submit_or_join(asked.request, asked.instance, asked.platform, actor);
        IF asked.key IS NOT NULL THEN
            UPDATE submit_keys k SET job_id = made.job, follower = CASE WHEN made.joined THEN made.answer END
            WHERE k.instance = asked.instance AND k.key = asked.key;
        END IF;
        RETURN QUERY SELECT asked.n, made.job, made.answer, NOT made.joined, true;
    END LOOP;
    PERFORM wake('jobs');
END $$;
