"""What the values of a job's row may be, each by itself.

One function for all of them: PostgreSQL reads the stored form of a check anew in each statement, and the body of a
function once in a session. A row that breaks a bound is refused under the bound's own name.
"""

from typing import Any

from sqlalchemy import Connection, event, text

from schema.columns import metadata

BOUNDED = (
    "priority, label, locality_hint, units, max_attempts, attempts, kills, evictions, dedup_key, fence, timeout_seconds"
)

JOB_WITHIN_BOUNDS = """
CREATE FUNCTION job_within_bounds(priority integer, label text, locality_hint text, units integer,
    max_attempts integer, attempts integer, kills integer, evictions integer, dedup_key text, fence bigint,
    timeout_seconds double precision)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    broken text := CASE
        WHEN priority NOT BETWEEN -1000 AND 1000 THEN 'jobs_priority_range'
        WHEN octet_length(label) > 64 THEN 'jobs_label_bounded'
        WHEN octet_length(locality_hint) > 200 THEN 'jobs_locality_hint_bounded'
        WHEN units < 1 THEN 'jobs_units_positive'
        WHEN max_attempts < 1 THEN 'jobs_max_attempts_positive'
        WHEN attempts NOT BETWEEN 0 AND max_attempts THEN 'jobs_attempts_bounded'
        WHEN kills NOT BETWEEN 0 AND 3 THEN 'jobs_kills_bounded'
        WHEN evictions < 0 THEN 'jobs_evictions_positive'
        WHEN octet_length(dedup_key) NOT BETWEEN 1 AND 200 THEN 'jobs_dedup_key_bounded'
        WHEN fence < 0 THEN 'jobs_fence_positive'
        WHEN NOT (timeout_seconds > 0 AND timeout_seconds <= 31536000) THEN 'jobs_timeout_finite'
    END;
BEGIN
    IF broken IS NULL THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'new row for relation "jobs" violates check constraint "%"', broken
        USING ERRCODE = 'check_violation', TABLE = 'jobs', CONSTRAINT = broken;
END $$;
"""


@event.listens_for(metadata, "before_create")
def _make(_: object, connection: Connection, **__: Any) -> None:
    connection.execute(text(JOB_WITHIN_BOUNDS))
