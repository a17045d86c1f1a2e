"""Limits on waiting jobs: of one label, of each instance, and of the whole pool.

The SQL function `refuse_full_queues` refuses a submit above the limit of its label or of its instance. Above the limit
of the pool, `max_queue_size` of the scheduling policy, upkeep defers jobs; the reads for that cost the same with a
million jobs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field

from schema import audit, declarations
from schema.fields import Label
from schema.policy.ceilings import instance_ids
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, READY
from schema.validation import MAX_LABEL, check_text

#: The largest limit of a label or an instance, in jobs. Each submit there counts up to it.
MAX_QUEUED = 100_000

_PUT = Statement("""
INSERT INTO queue_limits AS q (label, max_queued)
SELECT w.label, w.max_queued FROM unnest(CAST(:labels AS text[]), CAST(:mosts AS integer[])) AS w (label, max_queued)
ORDER BY w.label
ON CONFLICT (label, instance) DO UPDATE SET max_queued = EXCLUDED.max_queued WHERE q.max_queued <> EXCLUDED.max_queued
RETURNING label
""")
_REMOVE = Statement("DELETE FROM queue_limits WHERE label = ANY (CAST(:labels AS text[])) RETURNING label")
_LIST = Statement("SELECT label, max_queued FROM queue_limits WHERE label IS NOT NULL ORDER BY label")
_PUT_INSTANCES = Statement("""
INSERT INTO queue_limits AS q (instance, max_queued)
SELECT w.instance, w.max_queued
FROM unnest(CAST(:instances AS integer[]), CAST(:mosts AS integer[])) AS w (instance, max_queued) ORDER BY w.instance
ON CONFLICT (label, instance) DO UPDATE SET max_queued = EXCLUDED.max_queued WHERE q.max_queued <> EXCLUDED.max_queued
RETURNING instance
""")
_REMOVE_INSTANCES = Statement("""
DELETE FROM queue_limits q WHERE q.label IS NULL AND (q.instance = ANY (CAST(:instances AS integer[]))
    OR (q.instance IS NULL AND array_position(CAST(:instances AS integer[]), NULL) IS NOT NULL))
RETURNING q.instance
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


def set_queue_limits(connection: Connection, wanted: Mapping[str, int], *, actor: str, reason: str = "") -> None:
    """Let at most so many jobs with each of these labels wait. Jobs that wait already stay. Raises BadInput.

    It takes as many statements for many as for one, as all functions here do.
    """
    for label, most in wanted.items():
        check_label("label", label)
        if not 0 <= most <= MAX_QUEUED:
            raise BadInput("max_queued", f"must be between 0 and {MAX_QUEUED}")
    _put(connection, wanted, actor=actor, reason=reason)


def remove_queue_limits(connection: Connection, labels: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Let any number of jobs with these labels wait. Raises NotFound if one of them has no limit."""
    removed = _put(connection, dict.fromkeys(labels), actor=actor, reason=reason)
    for label in labels:
        if label not in removed:
            raise NotFound(f"queue-limit: label '{escaped(label, MAX_LABEL)}' has none")


def declare(connection: Connection, wanted: Sequence[QueueSettings], *, actor: str) -> None:
    """Set the limits that the configuration declares. Other labels keep their limits."""
    declarations.replace(connection, "queue-limit", (each.label for each in wanted))
    limits = {each.label: each.max_queued for each in sorted(wanted, key=lambda one: one.label)}
    _put(connection, limits, actor=actor, reason="configuration")


def _put(connection: Connection, wanted: Mapping[str, int | None], *, actor: str, reason: str) -> set[str]:
    """Set limits, or remove those that are None, and audit what that changes. Returns the labels of these."""
    found = set[str]()
    if gone := [label for label, most in wanted.items() if most is None]:
        found.update(connection.execute(_REMOVE, {"labels": gone}).scalars())
    if kept := {label: most for label, most in wanted.items() if most is not None}:
        values = {"labels": list(kept), "mosts": list(kept.values())}
        found.update(connection.execute(_PUT, values).scalars())
    changed = {f"label:{label}": most for label, most in wanted.items() if label in found}
    _note(connection, changed, actor=actor, reason=reason)
    return found


def _note(connection: Connection, changed: Mapping[str, int | None], *, actor: str, reason: str) -> None:
    noted = {subject: {"max_queued": most, "reason": reason} for subject, most in changed.items()}
    if noted:
        audit.write_all(connection, "queue.set", noted, actor=actor)


# Limits of instances


@dataclass(frozen=True)
class InstanceQueueLimit:
    """The number of queued and held jobs of an instance that may wait. No instance: of each without its own limit."""

    instance: str | None
    max_queued: int


def instance_queue_limits(connection: Connection) -> list[InstanceQueueLimit]:
    """The default limit, if there is one, and then the limits of instances by name."""
    return [InstanceQueueLimit(row.instance, row.max_queued) for row in connection.execute(_LIST_INSTANCES)]


def set_instance_queue_limits(
    connection: Connection, wanted: Mapping[str | None, int], *, actor: str, reason: str = ""
) -> None:
    """Let at most so many jobs of these instances wait; None sets the limit of each instance without its own.

    Jobs that wait already stay. Raises NotFound for an instance that does not exist.
    """
    ids = instance_ids(connection, wanted)
    values = {"instances": [ids[name] for name in wanted], "mosts": list(wanted.values())}
    found = set(connection.execute(_PUT_INSTANCES, values).scalars())
    changed = {_subject(name): most for name, most in wanted.items() if ids[name] in found}
    _note(connection, changed, actor=actor, reason=reason)


def remove_instance_queue_limits(
    connection: Connection, names: Sequence[str | None], *, actor: str, reason: str = ""
) -> None:
    """Remove the limits of instances, for which the default then holds; None removes the default. Raises NotFound."""
    ids = instance_ids(connection, names)
    found = set(connection.execute(_REMOVE_INSTANCES, {"instances": [ids[name] for name in names]}).scalars())
    for name in names:
        if ids[name] not in found:
            raise NotFound("instance-queue-limit: " + ("there is no default" if name is None else f"'{name}' has none"))
    _note(connection, dict.fromkeys(map(_subject, names)), actor=actor, reason=reason)


def _subject(instance: str | None) -> str:
    return "pool" if instance is None else f"instance:{instance}"


# The limit of the whole pool


# By the order of the index that has such jobs alone: `EXISTS` drops an order, and could read the whole table.
_ANY_DEFERRED = "(SELECT true FROM jobs WHERE state = 'deferred' ORDER BY queued_at LIMIT 1) IS NOT NULL"
#: The condition that jobs may have to be deferred or returned.
ANY_OVERFLOW = f"EXISTS (SELECT FROM scheduling WHERE max_queue_size IS NOT NULL) OR {_ANY_DEFERRED}"
# Unlike the sequence's column `last_value`, the function needs no right to read the sequence. NULL: no job yet.
OVERFLOW_STATE = Statement(f"""
SELECT s.max_queue_size, s.normal, {_ANY_DEFERRED} AS deferred,
    coalesce(pg_sequence_last_value('jobs_id_seq'), 0) AS newest
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
