"""parked -> queued, and a new job in the place of one that failed, died or was cancelled: requeue."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leasehold.states import FINAL, JobState

from schema.moves import submissions
from schema.moves.graph_retry import retry_nodes
from schema.moves.submit_again import LOCK_AGAINST_RETENTION, copies, submit_again
from schema.moves.waiting.hold import release_held
from schema.postgres.connection import Connection

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
