"""Lone: what one submit alone pays beside its rows; the functions that submit are those of the next one."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# PostgreSQL reads the stored form of each check anew in each statement, which costs what it is long; the body of a
# function it reads once in a session. Each condition keeps the name that it had. It knows the states of graphs and of
# overflow, which come with later parts of this release.
CHECKS = """
CREATE FUNCTION job_is_sound(state text, finished_at timestamptz, schedule_after timestamptz, fence bigint,
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
        WHEN kills NOT BETWEEN 0 AND 3 THEN 'jobs_kills_bounded'
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

ALTER TABLE jobs
    DROP CONSTRAINT jobs_state_known,
    DROP CONSTRAINT jobs_finished_at_iff_final,
    DROP CONSTRAINT jobs_backoff_only_waiting,
    DROP CONSTRAINT jobs_result_is_current,
    DROP CONSTRAINT jobs_priority_range,
    DROP CONSTRAINT jobs_label_bounded,
    DROP CONSTRAINT jobs_locality_hint_bounded,
    DROP CONSTRAINT jobs_units_positive,
    DROP CONSTRAINT jobs_max_attempts_positive,
    DROP CONSTRAINT jobs_attempts_bounded,
    DROP CONSTRAINT jobs_kills_bounded,
    DROP CONSTRAINT jobs_evictions_positive,
    DROP CONSTRAINT jobs_dedup_key_bounded,
    DROP CONSTRAINT jobs_fence_positive,
    DROP CONSTRAINT jobs_timeout_finite,
    ADD CONSTRAINT jobs_sound CHECK (job_is_sound(state, finished_at, schedule_after, fence, result_fence, priority,
        label, locality_hint, units, max_attempts, attempts, kills, evictions, dedup_key, timeout_seconds));
"""

# The digits that ids of one moment begin with: 48 bits of milliseconds and the version, 7.
PUBLIC_IDS = """
CREATE OR REPLACE FUNCTION public_id_prefix() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT lpad(to_hex((date_part('epoch', clock_timestamp()) * 1000)::bigint * 16 + 7), 13, '0')
$$;
"""

# A query costs several expressions, and PERFORM is one.
WAKE = """
CREATE OR REPLACE FUNCTION wake(topic text, keys text DEFAULT '') RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_lock(hashtext('leasehold.idle'), hashtext(topic)) THEN
        RETURN NOT pg_advisory_unlock(hashtext('leasehold.idle'), hashtext(topic));
    END IF;
    PERFORM pg_notify('leasehold_' || topic, CASE WHEN octet_length(keys) > 7900 THEN '' ELSE keys END);
    RETURN true;
END $$;
"""


def upgrade() -> None:
    for part in (CHECKS, PUBLIC_IDS, WAKE):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("restore a backup instead")
