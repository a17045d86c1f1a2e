"""parked -> queued, and a new job in the place of one that failed, died or was cancelled: requeue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.errors import Conflict, Forbidden
from schema.limits import escaped
from schema.moves import finding
from schema.moves.holding import release_held
from schema.moves.submitting import taken
from schema.states import FINAL, JobState

#: Most jobs of one call: their payloads are handed on in one value, of which PostgreSQL takes 256 MB.
MAX_REQUEUED = 500
#: With the name of the job it has to fit into the key of a submit.
MAX_REQUEUE_KEY_BYTES = 150
#: Final states in which the work was not done.
AGAIN = frozenset({JobState.FAILED, JobState.DEAD, JobState.CANCELLED})


@dataclass(frozen=True)
class Requeued:
    """What a requeue found. `state` is the job's state afterwards, None if there is no such job to see.

    `successor` is the job that is to be run now: the new one, or the job itself while it is not over. It is None for a
    job that succeeded. `changed` is false when nothing had to be done, or an earlier call with the same key did it.
    """

    public_id: str
    state: str | None
    successor: str | None
    changed: bool


# Weak enough not to get in the way of any move; retention passes over it, so that what is read next is all there.
KEEP = text("""
SELECT id, public_id, state, priority FROM jobs WHERE id = ANY (CAST(:ids AS bigint[])) ORDER BY id FOR KEY SHARE
""")

# Submitted like any other job, but it joins nobody: the new job has no deduplication key. Its time in the queue begins
# anew.
SUBMIT_AGAIN = text("""
WITH old AS MATERIALIZED (
    SELECT o.nth - 1 AS n, o.name, jsonb_build_object(
        'from', o.name, 'key', 'requeue:' || CAST(:key AS text) || ':' || o.name,
        'instance', i.name, 'properties', p.properties, 'payload', w.payload, 'label', j.label,
        'priority', j.priority, 'units', j.units, 'locality_hint', j.locality_hint,
        'timeout_seconds', j.timeout_seconds, 'max_attempts', j.max_attempts, 'retry_failed', j.retry_failed,
        'queue_timeout_seconds', e.queue_timeout_seconds
    ) || jsonb_strip_nulls(jsonb_build_object(
        'terms', g.terms, 'estimated_cost', t.estimate, 'estimated_seconds', t.seconds, 'own', t.priority_inputs
    )) AS request
    FROM unnest(CAST(:names AS uuid[]), CAST(:ids AS bigint[])) WITH ORDINALITY AS o (name, id, nth)
    JOIN jobs j ON j.id = o.id
    JOIN instances i ON i.id = j.instance
    JOIN platforms p ON p.id = j.platform
    JOIN job_payloads w ON w.job_id = j.id
    LEFT JOIN constraint_sets g ON g.id = j.constraint_set
    LEFT JOIN job_constraints t ON t.job_id = j.id
    LEFT JOIN LATERAL (
        SELECT details->'queue_timeout_seconds' AS queue_timeout_seconds FROM job_events
        WHERE job_id = j.id AND move = 'submit' ORDER BY id LIMIT 1) e ON true
)
SELECT o.name, s.public_id, s.created, s.same
FROM submit((SELECT jsonb_agg(request ORDER BY n) FROM old), :actor) s JOIN old o ON o.n = s.n
""")


def requeue(
    connection: Connection,
    public_ids: Sequence[str],
    *,
    instances: Sequence[str] | None,
    ceiling: int | None,
    key: str | None,
    reason: str | None,
    actor: str,
) -> list[Requeued]:
    """Release held jobs, and make a new job like each one that failed, died or was cancelled; it stays what it is.

    Only jobs of `instances` are seen, None means all. The same `key` (at most 150 bytes) makes no second job of the
    same one. At most 500 answers, in the order of `public_ids`, which must be UUIDs. Raises Forbidden if a new job
    would be more urgent than `ceiling` (None: any may be), QueueFull if a label has no room for its new jobs, Conflict
    `key_reused` if somebody submitted another job with the key that this one makes; nothing is changed then.
    """
    known = finding.find(connection, public_ids, instances=instances)
    ids = sorted({submission.job_id for submission in known.values()})
    kept = {row.id: row for row in connection.execute(KEEP, {"ids": ids})}
    states = {
        name: JobState.CANCELLED if submission.withdrawn else JobState(kept[submission.job_id].state)
        for name, submission in known.items()
        if submission.job_id in kept
    }
    over = {name: known[name].job_id for name, state in states.items() if state in AGAIN}
    _check_ceiling({name: kept[job_id].priority for name, job_id in over.items()}, ceiling)
    # Submitting comes first: it waits for limits of queues, which nobody waits for who has locked jobs.
    again = _submit_again(connection, over, key=key, actor=actor) if over else {}
    waiting = finding.wanted(known[name] for name in states if name not in over)
    held = release_held(connection, waiting, reason=reason, actor=actor)

    answers = dict.fromkeys(public_ids, (None, None, False)) | {
        name: (states[name], *again[name]) if name in over else _kept(name, *held[known[name].job_id])
        for name in states
    }
    return [Requeued(public_id, *answers[public_id]) for public_id in public_ids]


def _kept(name: str, state: str, released: bool) -> tuple[str, str | None, bool]:
    return state, None if state in FINAL else name, released


def _check_ceiling(priorities: Mapping[str, int], ceiling: int | None) -> None:
    for name, priority in priorities.items():
        if ceiling is not None and priority < ceiling:
            raise Forbidden(f"id: job '{name}' has the priority {priority}, this token may not exceed {ceiling}")


def _submit_again(
    connection: Connection, jobs: Mapping[str, int], *, key: str | None, actor: str
) -> dict[str, tuple[str, bool]]:
    values = {"names": list(jobs), "ids": list(jobs.values()), "key": key, "actor": actor}
    rows = taken(connection, SUBMIT_AGAIN, values)
    if not all(row.same for row in rows):
        raise Conflict("key_reused", f"key: what it makes of '{escaped(key or '', 80)}' was used for another job")
    return {str(row.name): (str(row.public_id), row.created) for row in rows}
