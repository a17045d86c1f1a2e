"""queued -> parked: a job whose rate limit could not be checked, time after time."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

# However many assigners look, and however often, one failure counts in so many seconds.
COUNT = text("""
INSERT INTO rate_skips AS s (job_id, resource, skips, last_at)
SELECT u.job_id, u.resource, 1, clock_timestamp()
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:resources AS text[])) AS u (job_id, resource) ORDER BY u.job_id
ON CONFLICT (job_id) DO UPDATE SET resource = EXCLUDED.resource, skips = s.skips + 1, last_at = clock_timestamp()
    WHERE s.last_at <= clock_timestamp() - make_interval(secs => :pace)
RETURNING job_id, skips
""")
PARK = text("""
WITH moved AS (
    UPDATE jobs j SET state = 'parked', reason = 'its rate limit could not be checked: ' || f.error
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:errors AS text[])) AS f (job_id, error)
    WHERE j.id = f.job_id AND j.state = 'queued'
    RETURNING j.id, j.public_id, j.fence, j.reason
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'hold', 'queued', 'parked', fence, :actor, jsonb_build_object('reason', reason, 'skips', :skips)
    FROM moved
), forgotten AS (
    DELETE FROM rate_skips WHERE job_id = ANY (ARRAY(SELECT id FROM moved))
)
SELECT public_id FROM moved ORDER BY id
""")
FORGET = text("""
DELETE FROM rate_skips WHERE resource = :resource AND job_id = ANY (ARRAY(
    SELECT job_id FROM rate_skips WHERE resource = :resource ORDER BY job_id FOR UPDATE SKIP LOCKED))
""")

#: Bytes of an error that are kept with a job.
MAX_ERROR = 300


@dataclass(frozen=True)
class Skipped:
    """A job that could not start because the check of `resource` has failed with `error`."""

    job_id: int
    resource: str
    error: str


def skip(connection: Connection, skipped: Sequence[Skipped], *, most: int, pace: float, actor: str) -> list[str]:
    """Count a failed check for each of these queued jobs, which the caller holds locked, at most one in `pace` seconds;
    one that has `most` of them since a check has worked is parked until an operator releases it. Returns the public ids
    of these."""
    if not skipped:
        return []
    ids = {"job_ids": [each.job_id for each in skipped], "resources": [each.resource for each in skipped]}
    counted = connection.execute(COUNT, {**ids, "pace": pace})
    over = {row.job_id for row in counted if row.skips >= most}
    errors = {each.job_id: each.error[:MAX_ERROR] for each in skipped if each.job_id in over}
    if not errors:
        return []
    found = {"job_ids": list(errors), "errors": list(errors.values()), "skips": most, "actor": actor}
    return [str(row.public_id) for row in connection.execute(PARK, found)]


def forget_skips(connection: Connection, resource: str) -> None:
    """A check of this resource has worked: what failed before counts no more (A-20)."""
    connection.execute(FORGET, {"resource": resource})
