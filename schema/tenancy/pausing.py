"""Pause and resume labels, tasks, instances and schedules: queued jobs stay queued, running ones go on.

An instance is paused by its drain and a schedule by being disabled: `instance drain` and `schedule disable` do the
same.
"""

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped

from schema import audit
from schema.moves.waiting.pause import make_ready
from schema.policy import pauses, schedule_changes
from schema.policy.pauses import EVERYWHERE, KINDS, Kind
from schema.policy.queue_limits import check_label
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.tenancy import drains, instances
from schema.validation import check_name, check_text

#: The longest name of a task, in bytes.
MAX_TASK = 512
#: The most jobs that are made ready at once when a pause ends. Upkeep does the rest.
AT_ONCE = 5000


def check_kind(field: str, kind: str) -> None:
    """Raise BadInput for a kind of thing that cannot be paused."""
    if kind not in KINDS:
        raise BadInput(field, f"'{escaped(kind, 40)}' cannot be paused: name a {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def check_any(field: str, name: str) -> None:
    """Raise BadInput for a text that is the name of nothing that can be paused."""
    if not check_text(field, name, MAX_TASK):
        raise BadInput(field, "must not be empty")


def pause(connection: Connection, kind: Kind, name: str, *, instance: str, actor: str, reason: str = "") -> None:
    """Start no further job of this label, task, instance or schedule until it is resumed.

    instance: of a label or a task, only that of this instance, "" = of all; the instance of a schedule. Raises
    BadInput, and NotFound for an instance or a schedule that is not there.
    """
    _check(connection, kind, name, instance=instance)
    details = {"reason": reason}
    match kind:
        case "instance":
            drains.drain_instance(connection, name, draining=True, actor=actor, reason=reason)
        case "schedule":
            schedule_changes.enable_schedule(connection, instance, name, enabled=False, actor=actor, reason=reason)
        case "label" | "task":
            pauses.put(connection, kind, name, instance=instance, reason=reason, actor=actor)
            audit.write(connection, "pause.set", actor=actor, subject=_subject(kind, name, instance), details=details)
            wake(connection, "jobs")


def resume(connection: Connection, kind: Kind, name: str, *, instance: str, actor: str, reason: str = "") -> None:
    """Let jobs of this label, task, instance or schedule start again. Raises BadInput; NotFound if it is not paused."""
    _check(connection, kind, name, instance=instance)
    match kind:
        case "instance":
            was_paused = drains.drain_instance(connection, name, draining=False, actor=actor, reason=reason)
        case "schedule":
            was_paused = schedule_changes.enable_schedule(
                connection, instance, name, enabled=True, actor=actor, reason=reason
            )
        case "label" | "task":
            was_paused = pauses.remove(connection, kind, name, instance=instance) is not None
            of_label, of_task = (name, None) if kind == "label" else (None, name)
            make_ready(connection, label=of_label, task=of_task, limit=AT_ONCE)
            subject = _subject(kind, name, instance)
            audit.write(connection, "pause.rm", actor=actor, subject=subject, details={"reason": reason})
            wake(connection, "jobs")
    if not was_paused:
        raise NotFound(f"pause: {kind} '{escaped(name, 127)}' is not paused")


def _check(connection: Connection, kind: Kind, name: str, *, instance: str) -> None:
    check_kind("kind", kind)
    match kind:
        case "label":
            check_label("name", name)
        case "task":
            check_any("name", name)
        case "instance":
            check_name("name", name)
            if instance != EVERYWHERE:
                raise BadInput("instance", "is the name itself; it goes with a label, a task or a schedule")
        case "schedule":
            check_name("name", name)
            if instance == EVERYWHERE:
                raise BadInput("instance", "is missing: a schedule is one of an instance, such as --instance default")
    if instance != EVERYWHERE:
        instances.require(connection, instance, create=False, actor="")


def _subject(kind: Kind, name: str, instance: str) -> str:
    return f"{kind}:{name}" if instance == EVERYWHERE else f"{kind}:{instance}/{name}"
