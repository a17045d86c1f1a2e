"""queued -> parked: hold, and parked -> queued: release."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leasehold.states import JobState

from schema.moves import submissions
from schema.moves.submissions import Submission
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement


@dataclass(frozen=True)
class HoldResult:
    """What a hold or a release found. `state` is the job's state afterwards, None if there is no such job to see."""

    public_id: str
    state: str | None
    changed: bool


# A wait that others rely on, before a retry or because a lost bot may still run the job, stays with the parked job.
PARK = Statement("""
WITH found AS MATERIALIZED (
    SELECT id, state FROM jobs WHERE id = ANY (CAST(:ids AS bigint[]))
), moved AS (
    UPDATE jobs j SET state = 'parked', reason = 'held' || coalesce(': ' || CAST(:reason AS text), '')
    FROM found f WHERE j.id = f.id AND f.state = 'queued' AND j.state = 'queued'
    RETURNING j.id, j.state, j.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'hold', 'queued', 'parked', fence, :actor,
        CASE WHEN CAST(:reason AS text) IS NOT NULL THEN jsonb_build_object('reason', CAST(:reason AS text)) END
    FROM moved
)
SELECT f.id, coalesce(m.state, f.state) AS state, m.id IS NOT NULL AS changed
FROM found f LEFT JOIN moved m ON m.id = f.id
""")

# The time a job was held does not count towards its time in the queue, which begins with its earliest start. The
# cohorts may have changed meanwhile.
UNPARK = Statement("""
WITH found AS MATERIALIZED (
    SELECT j.id, j.state,
        coalesce(greatest(clock_timestamp() - greatest(e.at, j.queued_at), interval '0'), interval '0') AS held
    FROM jobs j LEFT JOIN LATERAL (
        SELECT at FROM stored_events
        WHERE job_id = j.id AND from_state = 'queued' AND to_state = 'parked' ORDER BY id DESC LIMIT 1
    ) e ON j.state = 'parked'
    WHERE j.id = ANY (CAST(:ids AS bigint[]))
), moved AS (
    UPDATE jobs j SET state = 'queued', reason = NULL, cohort = cohort_of(j.label),
        queue = queue_in_cohort(j.queue, cohort_of(j.label)),
        schedule_after = CASE WHEN j.schedule_after > now() THEN j.schedule_after END,
        queue_deadline = j.queue_deadline + f.held
    FROM found f WHERE j.id = f.id AND f.state = 'parked' AND j.state = 'parked'
    RETURNING j.id, j.state, j.fence, f.held
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'release', 'parked', 'queued', fence, :actor, jsonb_strip_nulls(jsonb_build_object(
        'held_seconds', round(extract(epoch FROM held), 3), 'reason', CAST(:reason AS text)))
    FROM moved
), told AS (
    SELECT wake('jobs') FROM moved HAVING count(*) > 0
)
SELECT f.id, coalesce(m.state, f.state) AS state, m.id IS NOT NULL AS changed, (SELECT count(*) FROM told) AS woken
FROM found f LEFT JOIN moved m ON m.id = f.id
""")


def park(
    connection: Connection,
    public_ids: Sequence[str],
    *,
    instances: Sequence[str] | None,
    reason: str | None,
    actor: str,
) -> list[HoldResult]:
    """Hold queued jobs aside until they are released; those in another state are left as they are.

    Only jobs of `instances` are seen, None means all. Who withdrew from a shared job cannot hold it for the others.
    Answers are in the order of `public_ids`, which must be UUIDs.
    """
    known = submissions.find_submissions(connection, public_ids, instances=instances)
    ids = submissions.wanted_job_ids(known.values())
    submissions.lock_jobs(connection, ids)
    rows = connection.execute(PARK, {"ids": ids, "reason": reason, "actor": actor})
    found = {row.id: (row.state, row.changed) for row in rows}
    return [_hold_result(public_id, known.get(public_id), found) for public_id in public_ids]


def unpark(
    connection: Connection,
    public_ids: Sequence[str],
    *,
    instances: Sequence[str] | None,
    reason: str | None,
    actor: str,
) -> list[HoldResult]:
    """Put held jobs back where they were in the queue: they keep their `queued_at`. As `park` otherwise."""
    known = submissions.find_submissions(connection, public_ids, instances=instances)
    found = release_held(connection, submissions.wanted_job_ids(known.values()), reason=reason, actor=actor)
    return [_hold_result(public_id, known.get(public_id), found) for public_id in public_ids]


def release_held(
    connection: Connection, ids: Sequence[int], *, reason: str | None, actor: str
) -> dict[int, tuple[str, bool]]:
    """Release those of the jobs that are held; returns for each its state afterwards and whether it was released."""
    submissions.lock_jobs(connection, ids)
    rows = connection.execute(UNPARK, {"ids": list(ids), "reason": reason, "actor": actor})
    return {row.id: (row.state, row.changed) for row in rows}


def _hold_result(public_id: str, submission: Submission | None, found: Mapping[int, tuple[str, bool]]) -> HoldResult:
    if submission is not None and submission.withdrawn:
        return HoldResult(public_id, JobState.CANCELLED, changed=False)
    state, changed = (None, False) if submission is None else found.get(submission.job_id, (None, False))
    return HoldResult(public_id, state, changed=changed)
