-- True if the row of a job is consistent. Raises the error of the violated condition otherwise.
--
-- One function checks everything: PostgreSQL parses the stored form of a check constraint in every statement, which
-- costs in proportion to its length, but the body of a function once in a session. The error names the violated
-- condition.
CREATE OR REPLACE FUNCTION job_is_sound(state text, finished_at timestamptz, schedule_after timestamptz, fence bigint,
    result_fence bigint, priority integer, label text, locality_hint text, units integer, max_attempts integer,
    attempts integer, kills integer, evictions integer, dedup_key text, timeout_seconds double precision)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    broken text := CASE
        WHEN finished_at IS NULL AND state NOT IN
                ('blocked', 'queued', 'parked', 'deferred', 'leased', 'running', 'cancelling')
            OR finished_at IS NOT NULL AND state NOT IN ('succeeded', 'failed', 'cancelled', 'dead')
            THEN 'jobs_finished_at_iff_final'
        WHEN schedule_after IS NOT NULL AND state NOT IN ('queued', 'parked') THEN 'jobs_backoff_only_waiting'
        WHEN fence < 0 THEN 'jobs_fence_positive'
        WHEN result_fence <> fence THEN 'jobs_result_is_current'
        WHEN priority NOT BETWEEN -1000 AND 1000 THEN 'jobs_priority_range'
        WHEN octet_length(label) > 64 THEN 'jobs_label_bounded'
        WHEN octet_length(locality_hint) > 200 THEN 'jobs_locality_hint_bounded'
        WHEN units < 1 THEN 'jobs_units_positive'
        WHEN max_attempts < 1 THEN 'jobs_max_attempts_positive'
        WHEN attempts NOT BETWEEN 0 AND max_attempts THEN 'jobs_attempts_bounded'
        WHEN kills NOT BETWEEN 0 AND 100 THEN 'jobs_kills_bounded'
        WHEN evictions < 0 THEN 'jobs_evictions_positive'
        WHEN octet_length(dedup_key) NOT BETWEEN 1 AND 200 THEN 'jobs_dedup_key_bounded'
        WHEN NOT (timeout_seconds > 0 AND timeout_seconds <= 31536000) THEN 'jobs_timeout_finite'
    END;
BEGIN
    IF broken IS NULL THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'new row for relation "jobs" violates check constraint "%"', broken
        USING ERRCODE = 'check_violation', TABLE = 'jobs', CONSTRAINT = broken;
END $$;
