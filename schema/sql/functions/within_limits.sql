-- Return requests as their jobs are to be stored under the ceilings. Raises LH004 for the first that breaks one.
--
-- `place` is `jobs` or `nodes` and begins the path of the field in an error. Requests with a known key, or that join a
-- job, are not refused. A time that the request itself gives is refused above its ceiling. A timeout that it does not
-- give is that of its service level or the default, cut at the ceiling, and so is that of a job that is requeued: it
-- has the timeout of the job that it is made from.
CREATE OR REPLACE FUNCTION within_limits(requests jsonb, place text, of_instance text DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    refused record;
BEGIN
    IF NOT EXISTS (SELECT FROM ceilings) THEN
        RETURN requests;
    END IF;
    SELECT format('%s.%s.%s', place, a.n, f.field) AS field,
            format('must be at most %s, a ceiling of the pool, of its instance or of its label', f.most) AS reason
        INTO refused
        FROM new_requests(requests, of_instance) a
        CROSS JOIN LATERAL ceiling_of(a.instance, a.request->>'label') c
        CROSS JOIN LATERAL (VALUES
            (1, 'timeout_seconds', c.max_timeout), (2, 'queue_timeout_seconds', c.max_queue_age)
        ) AS f (nth, field, most)
        WHERE (a.request->>f.field)::double precision > f.most AND NOT a.request ? 'from'
        ORDER BY a.n, f.nth LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '%: %', refused.field, refused.reason
            USING ERRCODE = 'LH004', COLUMN = refused.field, DETAIL = refused.reason;
    END IF;
    RETURN (
        SELECT jsonb_agg(r.value || jsonb_strip_nulls(jsonb_build_object(
                'timeout_seconds', CASE WHEN (r.value->>'timeout_seconds') IS NULL OR r.value ? 'from' THEN
                    least(coalesce((r.value->>'timeout_seconds')::double precision, l.timeout_seconds,
                        c.default_timeout), c.max_timeout) END,
                'queue_timeout_seconds', CASE WHEN r.value ? 'from' AND r.value->>'queue_timeout_seconds' IS NOT NULL
                    THEN least((r.value->>'queue_timeout_seconds')::double precision, c.max_queue_age) END))
            ORDER BY r.ordinality)
        FROM jsonb_array_elements(requests) WITH ORDINALITY r
        LEFT JOIN instances i ON i.name = coalesce(of_instance, r.value->>'instance', 'default')
        LEFT JOIN service_levels l ON l.name = r.value->'own'->>'level'
        CROSS JOIN LATERAL ceiling_of(i.id, r.value->>'label') c);
END $$;
