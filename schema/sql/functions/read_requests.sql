-- Return the fields of requests, a row for each request, with the defaults of fields that it does not give. `n` counts
-- from 0.
--
-- `base_priority` is the priority of requests without one. `starts_at` is the earliest start of a job that is queued now. Sets of properties and constraints stay text, by which
-- submits join requests, because texts are compared faster than jsonb.
CREATE OR REPLACE FUNCTION read_requests(requests jsonb, base_priority integer DEFAULT 0)
RETURNS TABLE (n integer, instance_name text, properties text, key text, dedup_key text, priority integer,
    units integer, label text, locality_hint text, timeout_seconds double precision,
    queue_timeout_seconds double precision, max_attempts integer, retry_failed boolean, payload jsonb, terms text,
    preferred_properties text, prefer_seconds double precision, starts_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT (r.ordinality - 1)::integer, coalesce(r.instance, 'default'), coalesce(r.properties, '{}'), r.key,
        r.dedup_key, coalesce(r.priority, base_priority), coalesce(r.units, 1), coalesce(r.label, ''), r.locality_hint,
        r.timeout_seconds, r.queue_timeout_seconds, coalesce(r.max_attempts, 5), coalesce(r.retry_failed, false),
        r.payload, r.terms, r.preferred_properties, r.prefer_seconds,
        greatest(now(), r.schedule_after, now() + make_interval(secs => r.delay))
    FROM ROWS FROM (
        jsonb_to_recordset(requests) AS (
            instance text, properties text, key text, dedup_key text, priority integer, units integer, label text,
            locality_hint text, timeout_seconds double precision, queue_timeout_seconds double precision,
            max_attempts integer, retry_failed boolean, payload jsonb, terms text, preferred_properties text,
            prefer_seconds double precision, schedule_after timestamptz, delay double precision)
    ) WITH ORDINALITY AS r
$$;
