"""queued -> parked: skip, of jobs whose rate limit could not be checked, time after time."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# However many assigners look, and however often, one failure counts in so many seconds.
COUNT_SKIPS = Statement("""
INSERT INTO rate_skips AS s (job_id, resource, skips, last_at)
SELECT u.job_id, u.resource, 1, clock_timestamp()
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:resources AS text[])) AS u (job_id, resource) ORDER BY u.job_id
ON CONFLICT (job_id) DO UPDATE SET resource = EXCLUDED.resource, skips = s.skips + 1, last_at = clock_timestamp()
    WHERE s.last_at <= clock_timestamp() - make_interval(secs => :pace)
RETURNING job_id, skips
""")
PARK_SKIPPED = Statement("""
WITH moved AS (
    UPDATE jobs j SET state = 'parked', reason = 'its rate limit could not be checked: ' || f.error
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:errors AS text[])) AS f (job_id, error)
    WHERE j.id = f.job_id AND j.state = 'queued'
    RETURNING j.id, j.public_id, j.fence, j.reason
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'hold', 'queued', 'parked', fence, :actor, jsonb_build_object('reason', reason, 'skips', :skips)
    FROM moved
), forgotten AS (
    DELETE FROM rate_skips WHERE job_id = ANY (ARRAY(SELECT id FROM moved))
)
SELECT public_id FROM moved ORDER BY id
""")
DELETE_SKIPS = Statement("""
DELETE FROM rate_skips WHERE job_id = ANY (ARRAY(
    SELECT job_id FROM rate_skips WHERE resource = ANY (CAST(:resources AS text[]))
    ORDER BY job_id FOR UPDATE SKIP LOCKED))
""")

#: Bytes of an error that are kept with a job.
MAX_ERROR = 300


@dataclass(frozen=True)
class SkippedJob:
    """A job that could not start because the check of `resource` has failed with `error`."""

    job_id: int
    resource: str
    error: str


def skip(connection: Connection, skipped: Sequence[SkippedJob], *, most: int, pace: float, actor: str) -> list[str]:
    """Count a failed check for each of these queued jobs, which the caller holds locked, at most one in `pace` seconds;
    one that has `most` of them since a check has worked is parked until an operator releases it. Returns the public ids
    of these."""
    if not skipped:
        return []
    ids = {"job_ids": [each.job_id for each in skipped], "resources": [each.resource for each in skipped]}
    counted = connection.execute(COUNT_SKIPS, {**ids, "pace": pace})
    over = {row.job_id for row in counted if row.skips >= most}
    errors = {each.job_id: each.error[:MAX_ERROR] for each in skipped if each.job_id in over}
    if not errors:
        return []
    found = {"job_ids": list(errors), "errors": list(errors.values()), "skips": most, "actor": actor}
    return [str(row.public_id) for row in connection.execute(PARK_SKIPPED, found)]


def delete_skips(connection: Connection, resources: Collection[str]) -> None:
    """The checks of these resources have worked: what failed before counts no more."""
    if resources:
        connection.execute_later(DELETE_SKIPS, {"resources": sorted(resources)})
