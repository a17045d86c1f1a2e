-- Return what the submit event of a job records beside its state.
--
-- These are the job that it was made from, if any, its queue timeout and its earliest start, which the job's row forgets
-- once it started, how long it insists on a preferred bot, and the steps by which a submit rule made it less urgent.
CREATE OR REPLACE FUNCTION origin_of(request jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT nullif(jsonb_strip_nulls(jsonb_build_object(
        'from', request->'from', 'queue_timeout_seconds', request->'queue_timeout_seconds',
        'prefer_seconds', request->'prefer_seconds', 'lowered', request->'lowered',
        'schedule_after', request->'schedule_after', 'delay', request->'delay')), '{}')
$$;
