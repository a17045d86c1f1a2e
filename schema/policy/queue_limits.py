"""Limits on waiting jobs: of one label, of each instance, and of the whole pool.

The SQL function `refuse_full_queues` refuses a submit above the limit of its label or of its instance. Above the limit
of the pool, `max_queue_size` of the scheduling policy, upkeep defers jobs; the reads for that cost the same with a
million jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field

from schema import audit, declarations
from schema.fields import Label
from schema.policy.ceilings import instance_id
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, READY
from schema.validation import MAX_LABEL, check_text

#: The largest limit of a label or an instance, in jobs. Each submit there counts up to it.
MAX_QUEUED = 100_000

_PUT = Statement("""
INSERT INTO queue_limits AS q (label, max_queued) VALUES (:label, :max_queued)
ON CONFLICT (label, instance) DO UPDATE SET max_queued = EXCLUDED.max_queued WHERE q.max_queued <> EXCLUDED.max_queued
RETURNING label
""")
_REMOVE = Statement("DELETE FROM queue_limits WHERE label = :label RETURNING label")
_LIST = Statement("SELECT label, max_queued FROM queue_limits WHERE label IS NOT NULL ORDER BY label")
_PUT_INSTANCE = Statement("""
INSERT INTO queue_limits AS q (instance, max_queued) VALUES (:instance, :max_queued)
ON CONFLICT (label, instance) DO UPDATE SET max_queued = EXCLUDED.max_queued WHERE q.max_queued <> EXCLUDED.max_queued
RETURNING max_queued
""")
_REMOVE_INSTANCE = Statement("""
DELETE FROM queue_limits q WHERE q.label IS NULL AND q.instance IS NOT DISTINCT FROM CAST(:instance AS integer)
RETURNING q.max_queued
""")
_LIST_INSTANCES = Statement("""
SELECT i.name AS instance, q.max_queued FROM queue_limits q LEFT JOIN instances i ON i.id = q.instance
WHERE q.label IS NULL ORDER BY i.name NULLS FIRST
""")


class QueueSettings(BaseModel):
    """The limit that the configuration sets for the waiting jobs of one label.

    max_queued: number of queued and held jobs above which submits are refused; unset removes the limit. Doubling it
        doubles the backlog that callers may build up with this label, and the cost of a submit to a full queue.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    label: Label
    max_queued: int | None = Field(default=None, ge=0, le=MAX_QUEUED)


@dataclass(frozen=True)
class QueueLimit:
    """The number of queued and held jobs that may wait with this label."""

    label: str
    max_queued: int


def queue_limits(connection: Connection) -> list[QueueLimit]:
    """All limits, by label."""
    return [QueueLimit(row.label, row.max_queued) for row in connection.execute(_LIST)]


def check_label(field: str, label: str) -> str:
    """Return `label` if a job can have it; raise BadInput naming `field` otherwise."""
    if not check_text(field, label, MAX_LABEL):
        raise BadInput(field, "must not be empty")
    return label


def set_queue_limit(connection: Connection, label: str, *, max_queued: int, actor: str, reason: str = "") -> None:
    """Let at most `max_queued` jobs with this label wait. Jobs that wait already stay. Raises BadInput."""
    check_label("label", label)
    if not 0 <= max_queued <= MAX_QUEUED:
        raise BadInput("max_queued", f"must be between 0 and {MAX_QUEUED}")
    _put(connection, label, max_queued, actor=actor, reason=reason)


def remove_queue_limit(connection: Connection, label: str, *, actor: str, reason: str = "") -> None:
    """Let any number of jobs with this label wait. Raises NotFound if the label has no limit."""
    if not _put(connection, label, None, actor=actor, reason=reason):
        raise NotFound(f"queue-limit: label '{escaped(label, MAX_LABEL)}' has none")


def declare(connection: Connection, wanted: Sequence[QueueSettings], *, actor: str) -> None:
    """Set the limits that the configuration declares. Other labels keep their limits."""
    declarations.replace(connection, "queue-limit", (each.label for each in wanted))
    for each in sorted(wanted, key=lambda one: one.label):
        _put(connection, each.label, each.max_queued, actor=actor, reason="configuration")


def _put(connection: Connection, label: str, max_queued: int | None, *, actor: str, reason: str) -> bool:
    """Set or remove a limit, and audit it. False, and no audit row, if that changes nothing."""
    values = {"label": label, "max_queued": max_queued}
    if connection.execute(_REMOVE if max_queued is None else _PUT, values).one_or_none() is None:
        return False
    details = {"max_queued": max_queued, "reason": reason}
    audit.write(connection, "queue.set", actor=actor, subject=f"label:{label}", details=details)
    return True


# Limits of instances


@dataclass(frozen=True)
class InstanceQueueLimit:
    """The number of queued and held jobs of an instance that may wait. No instance: of each without its own limit."""

    instance: str | None
    max_queued: int


def instance_queue_limits(connection: Connection) -> list[InstanceQueueLimit]:
    """The default limit, if there is one, and then the limits of instances by name."""
    return [InstanceQueueLimit(row.instance, row.max_queued) for row in connection.execute(_LIST_INSTANCES)]


def set_instance_queue_limit(
    connection: Connection, instance: str | None, *, max_queued: int, actor: str, reason: str = ""
) -> None:
    """Let at most `max_queued` jobs of the instance wait; None sets the limit of each instance without its own.

    Jobs that wait already stay. Raises NotFound for an instance that does not exist.
    """
    of = None if instance is None else instance_id(connection, instance)
    values = {"instance": of, "max_queued": max_queued}
    if connection.execute(_PUT_INSTANCE, values).one_or_none() is not None:
        _note_instance(connection, instance, max_queued, actor=actor, reason=reason)


def remove_instance_queue_limit(connection: Connection, instance: str | None, *, actor: str, reason: str = "") -> None:
    """Remove the limit of an instance, for which the default then holds, or the default. Raises NotFound."""
    of = None if instance is None else instance_id(connection, instance)
    if connection.execute(_REMOVE_INSTANCE, {"instance": of}).one_or_none() is None:
        raise NotFound(
            "instance-queue-limit: " + ("there is no default" if instance is None else f"'{instance}' has none")
        )
    _note_instance(connection, instance, None, actor=actor, reason=reason)


def _note_instance(
    connection: Connection, instance: str | None, max_queued: int | None, *, actor: str, reason: str
) -> None:
    subject = "pool" if instance is None else f"instance:{instance}"
    audit.write(
        connection, "queue.set", actor=actor, subject=subject, details={"max_queued": max_queued, "reason": reason}
    )


# The limit of the whole pool


OVERFLOW_STATE = Statement("""
SELECT s.max_queue_size, s.normal, EXISTS (SELECT FROM jobs WHERE state = 'deferred') AS deferred,
    (SELECT last_value FROM jobs_id_seq) AS newest
FROM scheduling s
""")
# Each part reads its own index, up to the limit.
COUNT_WAITING = Statement("SELECT " + " + ".join(
    f"(SELECT count(*) FROM (SELECT FROM jobs WHERE {waiting} LIMIT :most) w)"
    for waiting in (READY, AT_REST)
))  # fmt: skip


@dataclass(frozen=True)
class OverflowState:
    """The pool's limit on waiting jobs, and what tells whether they must be counted.

    most: number of jobs that may wait, None = any number.
    normal: largest effective priority that is not of the low level.
    deferred: some jobs are deferred.
    newest: upper bound of all job ids.
    """

    most: int | None
    normal: int
    deferred: bool
    newest: int


def overflow_state(connection: Connection) -> OverflowState:
    """Read the pool's limit on waiting jobs, and what tells whether they must be counted."""
    row = connection.execute(OVERFLOW_STATE).one()
    return OverflowState(row.max_queue_size, row.normal, row.deferred, row.newest)


def count_waiting(connection: Connection, *, most: int) -> int:
    """Number of waiting jobs. Each kind of waiting job is counted up to `most` only."""
    return int(connection.execute(COUNT_WAITING, {"most": most}).scalar_one())
