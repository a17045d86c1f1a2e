"""queued -> parked: hold, and parked -> queued: release."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from leasehold.states import FINAL, JobState

from schema.moves import submissions
from schema.moves.graph_retry import retry_nodes
from schema.moves.submissions import Submission
from schema.moves.submit_again import LOCK_AGAINST_RETENTION, copies, submit_again
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import IN_FRONT, READY_CONSTRAINED, STILL_READY


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


# queued -> parked: a job whose rate limit could not be checked, time after time.


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


# queued -> deferred: more jobs wait than may, and deferred -> queued: there is room again.


#: Ranks that are looked at: of all cohorts, and of all queues with constraints.
MAX_RANKS = 2000
#: Names in one notification, whose payload is bounded.
NAMES = 200


def _low_ranks(name: str, column: str, ready: str) -> str:
    """A recursive CTE: each rank above `:normal` of each `column`, one step along the index for each."""
    step = (
        f"SELECT {column}, rank FROM jobs WHERE {ready} AND ({column}, rank) > ({{}}) ORDER BY {column}, rank LIMIT 1"
    )
    return f"""{name} AS (
    SELECT f.*, 1 AS steps FROM ({step.format("-1, '-infinity'")}) f
    UNION ALL
    SELECT f.*, z.steps + 1 FROM {name} z CROSS JOIN LATERAL (
        {step.format(f"z.{column}, greatest(z.rank, :normal)")}) f WHERE z.steps < {MAX_RANKS}
)"""


def _newest(name: str, column: str, ready: str) -> str:
    """The newest jobs of each of those ranks, from the end of its stretch of the index. A job that somebody may join
    stays."""
    return f"""
    SELECT n.* FROM {name} z CROSS JOIN LATERAL (
        SELECT id, queued_at FROM jobs
        WHERE {column} = z.{column} AND rank = z.rank AND {ready} AND dedup_key IS NULL
        ORDER BY {column} DESC, rank DESC, queued_at DESC, id DESC LIMIT :limit) n
    WHERE z.rank > :normal"""


# What somebody else has locked is left for the next time.
DEFER = Statement(f"""
WITH RECURSIVE {_low_ranks("plain", "cohort", IN_FRONT)}, {_low_ranks("constrained", "queue", READY_CONSTRAINED)},
newest AS MATERIALIZED (
    SELECT * FROM ({_newest("plain", "cohort", IN_FRONT)}
    UNION ALL {_newest("constrained", "queue", READY_CONSTRAINED)}) low
    ORDER BY queued_at DESC, id DESC LIMIT :limit
), held AS MATERIALIZED (
    SELECT id FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM newest)) AND {STILL_READY}
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs j SET state = 'deferred', reason = 'more jobs wait than may'
    FROM held h WHERE j.id = h.id AND j.state = 'queued' RETURNING j.id, j.public_id, j.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'defer', 'queued', 'deferred', fence, :actor, jsonb_build_object('may_wait', CAST(:most AS integer))
    FROM moved
), told AS (
    SELECT wake('deferred', string_agg(public_id::text, ',')) FROM (
        SELECT public_id, row_number() OVER (ORDER BY id) / {NAMES} AS part FROM moved) parts GROUP BY part
)
SELECT public_id, (SELECT count(*) FROM told) AS woken FROM moved ORDER BY id
""")

# They keep their place in the order. The cohorts may have changed meanwhile.
RETURN = Statement("""
WITH oldest AS MATERIALIZED (
    SELECT id FROM jobs WHERE state = 'deferred' ORDER BY queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs j SET state = 'queued', reason = NULL, cohort = cohort_of(j.label),
        queue = queue_in_cohort(j.queue, cohort_of(j.label))
    FROM oldest o WHERE j.id = o.id AND j.state = 'deferred' RETURNING j.id, j.public_id, j.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)
    SELECT id, 'return', 'deferred', 'queued', fence, :actor FROM moved
), told AS (
    SELECT wake('jobs') FROM moved HAVING count(*) > 0
)
SELECT public_id, (SELECT count(*) FROM told) AS woken FROM moved ORDER BY id
""")


def defer(connection: Connection, limit: int, *, normal: int, most: int, actor: str) -> list[str]:
    """Take up to `limit` of the newest jobs of the low level, whose effective priority is above `normal`, off the
    queue, because more than `most` wait; returns their public ids."""
    rows = connection.execute(DEFER, {"limit": limit, "normal": normal, "most": most, "actor": actor})
    return [str(row.public_id) for row in rows]


def return_deferred(connection: Connection, limit: int, *, actor: str) -> list[str]:
    """Put up to `limit` of the oldest deferred jobs back where they were in the queue; returns their public ids."""
    return [str(row.public_id) for row in connection.execute(RETURN, {"limit": limit, "actor": actor})]


# parked -> queued, and a new job in the place of one that failed, died or was cancelled: requeue.


#: Most jobs of one call: their payloads are handed on in one value, of which PostgreSQL takes 256 MB.
MAX_REQUEUED = 500
#: Final states in which the work was not done.
REQUEUEABLE = frozenset({JobState.FAILED, JobState.DEAD, JobState.CANCELLED})


@dataclass(frozen=True)
class Requeued:
    """What a requeue found. `state` is the job's state afterwards, None if there is no such job to see.

    `successor` is the job that is to be run now: the new one, or the job itself while it is not over. It is None for a
    job that succeeded. `changed` is false when nothing had to be done, or an earlier call with the same key did it.
    `left_out`: the job is over and was requeued before, as `successor`, and is not again. `why`: the job is a node
    that cannot run now, because of its graph.
    """

    public_id: str
    state: str | None
    successor: str | None
    changed: bool
    left_out: bool = False
    why: str | None = None


def requeue(
    connection: Connection,
    public_ids: Sequence[str],
    *,
    instances: Sequence[str] | None,
    ceiling: int | None,
    key: str | None,
    reason: str | None,
    actor: str,
    repeat: bool = True,
) -> list[Requeued]:
    """Release held jobs, and make a new job like each one that failed, died or was cancelled; it stays what it is.

    The new job of a node goes on with its graph (`graph_retry`). A node has none while one that it depends on has
    failed and does not run again. Only jobs of `instances` are seen, None means all. The same `key` (at most 150 bytes)
    makes no second job of the same one. Without `repeat`, jobs that were requeued before are left out. At most 500
    answers, in the order of `public_ids`, which must be UUIDs. Raises Forbidden if a new job would be more urgent than
    `ceiling` (None: any may be), QueueFull if a label or an instance has no room for its new jobs, Conflict
    `key_reused` if somebody submitted another job with the key that this one makes; nothing is changed then.
    """
    known = submissions.find_submissions(connection, public_ids, instances=instances)
    ids = sorted({submission.job_id for submission in known.values()})
    kept = {row.id: row for row in connection.execute(LOCK_AGAINST_RETENTION, {"ids": ids})}
    states = {
        name: JobState.CANCELLED if submission.withdrawn else JobState(kept[submission.job_id].state)
        for name, submission in known.items()
        if submission.job_id in kept
    }
    over = {name: known[name].job_id for name, state in states.items() if state in REQUEUEABLE}
    before = {} if repeat or not over else copies(connection, over, key=key)
    over = {name: job_id for name, job_id in over.items() if name not in before}
    # Submitting comes first: it waits for equal keys and equal new rows, which nobody waits for who has locked jobs.
    nodes = retry_nodes(connection, over, ceiling=ceiling, key=key, actor=actor) if over else {}
    again: dict[str, tuple[str | None, bool]] = {name: (node.job, node.made) for name, node in nodes.items()}
    others = {name: job_id for name, job_id in over.items() if name not in again}
    if others:
        made = submit_again(connection, others, ceiling=ceiling, key=key, actor=actor)
        again |= {name: (each.public_id, each.created) for name, each in made.items()}
    again |= {name: (copy, False) for name, copy in before.items()}
    waiting = submissions.wanted_job_ids(known[name] for name in states if name not in again)
    held = release_held(connection, waiting, reason=reason, actor=actor)

    answers = dict.fromkeys(public_ids, (None, None, False)) | {
        name: (states[name], *again[name], name in before) if name in again else _kept(name, *held[known[name].job_id])
        for name in states
    }
    why = {name: node.why for name, node in nodes.items()}
    return [replace(Requeued(public_id, *answers[public_id]), why=why.get(public_id)) for public_id in public_ids]


def _kept(name: str, state: str, released: bool) -> tuple[str, str | None, bool]:
    return state, None if state in FINAL else name, released
