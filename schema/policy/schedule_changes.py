"""Changes of schedules: made, replaced, enabled, removed by a command, or declared by a source.

A schedule has one owner: a command, or the source that declares it, which is an app or the configuration. Only its
owner changes its terms, unless the change takes it over; nobody takes over what the configuration declares. Who may use
a schedule may enable, disable and run it, whoever owns it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal

import psycopg
from leasehold.errors import BadInput, Conflict, Forbidden
from leasehold.wire import escaped

from schema import audit
from schema.policy import new_instances, pauses
from schema.policy.schedules import FIELDS, TOPIC, ScheduleTerms, not_found, terms_of
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Row, Statement

#: The most schedules of one instance.
MAX_SCHEDULES = 1000
#: The source of what the configuration declares, and how the source of an app begins: `app:NAME`.
CONFIGURATION, APP = "config", "app:"
#: Most bytes of the name of an app.
MAX_APP = 200
#: The most refused schedules that one message names.
MAX_TOLD = 20
#: Stable words for programs in refusals: a source declares the schedule; others own schedules that a source applies.
DECLARED, OWNED = "declared", "schedule_owned"

_INTERN = Statement("SELECT intern_instance(:instance)")
_COUNT = Statement("SELECT count(*) FROM schedules WHERE instance = :instance")
_MAKE = Statement(f"""
INSERT INTO schedules (instance, name, {FIELDS}, next_tick, due_at, priority_ceiling, set_by, declared_by)
VALUES (:instance, :name, :cron, :zone, :catch_up, :catch_up_most, :catch_up_seconds, :overlap, :enabled,
    CAST(:request AS jsonb), :next_tick, :next_tick, :priority_ceiling, :actor, :source)
ON CONFLICT (instance, name) DO NOTHING RETURNING id
""")
_NOW = Statement("SELECT clock_timestamp()")
# A transaction that waited for the row may be older than the newest tick.
_HOLD = Statement(f"""
SELECT s.id, {FIELDS}, s.next_tick, s.priority_ceiling, s.declared_by,
    greatest(clock_timestamp(), s.last_tick) AS after
FROM schedules s JOIN instances i ON i.id = s.instance
WHERE i.name = :instance AND s.name = :name FOR NO KEY UPDATE OF s
""")
_CHANGE = Statement("""
UPDATE schedules SET cron = :cron, zone = :zone, catch_up = :catch_up, catch_up_most = :catch_up_most,
    catch_up_seconds = :catch_up_seconds, overlap = :overlap, enabled = :enabled, request = CAST(:request AS jsonb),
    next_tick = :next_tick, due_at = :next_tick, priority_ceiling = :priority_ceiling, set_by = :actor, failures = 0,
    declared_by = :source
WHERE id = :id
""")
_REMOVE = Statement("DELETE FROM schedules WHERE id = :id")
_RAN = Statement("UPDATE schedules SET last_job = :job, left_out = 0, left_out_since = NULL WHERE id = :id")
# One source at a time: two of them would lock their schedules in different orders.
_APPLY_IN_TURN = Statement("SELECT pg_advisory_xact_lock(hashtext('leasehold.schedules'))")
_DECLARED = Statement("""
SELECT i.name AS instance, s.name FROM schedules s JOIN instances i ON i.id = s.instance
WHERE s.declared_by = :source
    AND (CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))
ORDER BY i.name, s.name
""")


@dataclass(frozen=True)
class Author:
    """Who changes schedules.

    priority_ceiling: that of the token, which the jobs keep to. source: what declares them, `config` or `app:NAME`;
    None = a command. take_over: change those of other owners too.
    """

    actor: str
    priority_ceiling: int | None = None
    source: str | None = None
    take_over: bool = False


@dataclass(frozen=True)
class DeclaredSchedule:
    """A schedule as a source declares it.

    keeps_enabled: one that exists stays enabled or disabled as it is, whatever the terms say.
    """

    instance: str
    name: str
    terms: ScheduleTerms
    keeps_enabled: bool


#: `left`: the source declares it no longer, and it was not to be removed. `refused`: it has another owner.
Outcome = Literal["created", "changed", "unchanged", "removed", "left", "refused"]


@dataclass(frozen=True)
class AppliedSchedule:
    """What became of one schedule of a source. owner: the source of a refused one; None = a command."""

    instance: str
    name: str
    outcome: Outcome
    next_tick: datetime | None = None
    owner: str | None = None


def owner_in_words(source: str | None) -> str:
    """The owner of a schedule, such as `the app 'shop'`."""
    if source is None:
        return "a command"
    if source == CONFIGURATION:
        return "the configuration"
    return f"the app '{escaped(source.removeprefix(APP), MAX_APP)}'"


def put_schedule(connection: Connection, instance: str, name: str, terms: ScheduleTerms, *, author: Author) -> bool:
    """Make a schedule or replace it, and return whether it was made.

    Its next tick stays if expression, zone and `enabled` stay; else it is the first one from now on. Raises BadInput
    for an expression without ticks, Conflict `too_many_schedules`, Conflict `declared` for one that a source declares.
    """
    found = _held(connection, instance, name)
    if found is None:
        if _make(connection, instance, name, terms, author) is not None:
            return True
        found = _held_again(connection, instance, name)
    _refuse_declared(found, name, author)
    _replace(connection, found, instance, name, terms, author)
    return False


def read_now(connection: Connection) -> datetime:
    """The time by which a schedule that is set now has its next tick."""
    now: datetime = connection.execute(_NOW).scalar_one()
    return now


def enable_schedule(
    connection: Connection, instance: str, name: str, *, enabled: bool, actor: str, reason: str = ""
) -> bool:
    """Enable or disable a schedule, for a reason; returns whether it was not so already.

    What it missed while disabled is not made up for. Raises NotFound; Forbidden for a submitter who would enable what
    an operator has paused.
    """
    found = _held(connection, instance, name)
    if found is None:
        raise not_found(name)
    terms = terms_of(found)
    was_so = terms.enabled == enabled
    if was_so and (enabled or not reason):
        return False
    if not enabled:
        pauses.put(connection, "schedule", name, instance=instance, reason=reason, actor=actor)
    terms = replace(terms, enabled=enabled)
    author = Author(actor, found.priority_ceiling, found.declared_by)
    _store(connection, found, terms, author, next_tick=terms.next_tick(found.after))
    action = "schedule.enable" if enabled else "schedule.disable"
    _changed(connection, action, instance, name, terms, author, reason=reason)
    return not was_so


def _end_pause(connection: Connection, instance: str, name: str, author: Author) -> None:
    """Forget why a schedule was paused. Raises Forbidden for a submitter, if an operator has paused it."""
    pause = pauses.remove(connection, "schedule", name, instance=instance)
    if pause is not None and author.actor.startswith("submitter:") and pause.actor.startswith("operator:"):
        why = f": {pause.reason}" if pause.reason else ""
        raise Forbidden(f"schedule: an operator has paused '{pause.name}'{why}")


def remove_schedule(connection: Connection, instance: str, name: str, *, author: Author) -> None:
    """Remove a schedule; its jobs stay. Raises NotFound, Conflict `declared` for one that a source declares."""
    found = _held(connection, instance, name)
    if found is None:
        raise not_found(name)
    _refuse_declared(found, name, author)
    _remove(connection, found, instance, name, author)


def apply_schedules(
    connection: Connection,
    wanted: Sequence[DeclaredSchedule],
    *,
    instances: Sequence[str] | None,
    prune: bool,
    author: Author,
) -> list[AppliedSchedule]:
    """Make the schedules of the author's source those that it declares; tell what became of each.

    One that has another owner is `refused` and stays as it is, unless the author takes it over. prune: remove what the
    source has declared in these instances (None = all) and declares no longer; without it such a schedule is `left`.
    By instance and name. Raises BadInput with the place in the list, and Conflict as `put_schedule` does.
    """
    connection.execute(_APPLY_IN_TURN)
    named = {(each.instance, each.name): index for index, each in enumerate(wanted)}
    done = []
    for _, index in sorted(named.items()):
        try:
            done.append(_apply(connection, wanted[index], author))
        except BadInput as refused:
            raise BadInput(f"schedules.{index}.{refused.field}", refused.reason) from None
    where = {"source": author.source, "instances": None if instances is None else list(instances)}
    for row in connection.execute(_DECLARED, where).all():
        if (row.instance, row.name) in named:
            continue
        found = _held(connection, row.instance, row.name)
        if found is None or found.declared_by != author.source:
            continue  # a command has removed it or taken it over meanwhile
        if prune:
            _remove(connection, found, row.instance, row.name, author)
        done.append(AppliedSchedule(row.instance, row.name, "removed" if prune else "left", found.next_tick))
    return sorted(done, key=lambda each: (each.instance, each.name))


def refuse_owned(done: Sequence[AppliedSchedule], *, source: str) -> None:
    """Raise Conflict `schedule_owned`, which names the owners, if a schedule of this source was refused."""
    refused = [each for each in done if each.outcome == "refused"]
    if not refused:
        return
    told = ", ".join(f"{each.instance}/{each.name} ({owner_in_words(each.owner)})" for each in refused[:MAX_TOLD])
    more = f" and {len(refused) - MAX_TOLD} more" if len(refused) > MAX_TOLD else ""
    remedy = (
        "give yours other names, or remove those of the configuration from [[schedules]] there"
        if any(each.owner == CONFIGURATION for each in refused)
        else "take them over (--take-over, take_over), or give yours other names"
    )
    raise Conflict(OWNED, f"{owner_in_words(source)} declares schedules of other owners: {told}{more}; {remedy}")


def hold_request(connection: Connection, instance: str, name: str) -> tuple[int, Mapping[str, Any]]:
    """Lock a schedule for a run beside its ticks; return its id and its job. Raises NotFound."""
    found = _held(connection, instance, name)
    if found is None:
        raise not_found(name)
    return found.id, found.request


def note_run(connection: Connection, schedule_id: int, job_id: int) -> None:
    """Record a job that was submitted beside the ticks as the previous one."""
    connection.execute(_RAN, {"id": schedule_id, "job": job_id})


def _apply(connection: Connection, wanted: DeclaredSchedule, author: Author) -> AppliedSchedule:
    instance, name, terms = wanted.instance, wanted.name, wanted.terms
    found = _held(connection, instance, name)
    if found is None:
        following = _make(connection, instance, name, terms, author)
        if following is not None:
            return AppliedSchedule(instance, name, "created", following.next_tick)
        found = _held_again(connection, instance, name)
    owner = found.declared_by
    if owner != author.source and (owner == CONFIGURATION or not author.take_over):
        return AppliedSchedule(instance, name, "refused", found.next_tick, owner)
    if wanted.keeps_enabled:
        terms = replace(terms, enabled=found.enabled)
    changed = _replace(connection, found, instance, name, terms, author)
    if changed is None:
        return AppliedSchedule(instance, name, "unchanged", found.next_tick)
    return AppliedSchedule(instance, name, "changed", changed.next_tick)


def _refuse_declared(found: Row, name: str, author: Author) -> None:
    if found.declared_by is None or (author.take_over and found.declared_by != CONFIGURATION):
        return
    remedy = (
        "change [[schedules]] there"
        if found.declared_by == CONFIGURATION
        else "change it there and apply it again, or take it over (--take-over, take_over)"
    )
    raise Conflict(DECLARED, f"schedule '{name}' is declared by {owner_in_words(found.declared_by)}: {remedy}")


def _held(connection: Connection, instance: str, name: str) -> Row | None:
    return connection.execute(_HOLD, {"instance": instance, "name": name}).one_or_none()


def _held_again(connection: Connection, instance: str, name: str) -> Row:
    """Lock a schedule that another transaction has made meanwhile."""
    found = _held(connection, instance, name)
    if found is None:
        raise Conflict("changed_meanwhile", f"schedule '{name}' was made and removed meanwhile: try again")
    return found


@dataclass(frozen=True)
class _Stored:
    """A row that was written."""

    next_tick: datetime | None


def _make(connection: Connection, instance: str, name: str, terms: ScheduleTerms, author: Author) -> _Stored | None:
    """Insert a schedule. None if another transaction has inserted one of this name meanwhile."""
    try:
        where = {"instance": connection.execute(_INTERN, {"instance": instance}).scalar_one(), "name": name}
    except psycopg.Error as error:
        if new_instances.refused_instance(error) is not None:
            raise new_instances.refusal(instance) from None
        raise
    if connection.execute(_COUNT, where).scalar_one() >= MAX_SCHEDULES:
        raise Conflict("too_many_schedules", f"instance '{instance}' has {MAX_SCHEDULES} schedules already")
    following = terms.next_tick(connection.execute(_NOW).scalar_one())
    if connection.execute(_MAKE, where | _values(terms, author) | {"next_tick": following}).one_or_none() is None:
        return None
    _changed(connection, "schedule.set", instance, name, terms, author)
    return _Stored(following)


def _replace(
    connection: Connection, found: Row, instance: str, name: str, terms: ScheduleTerms, author: Author
) -> _Stored | None:
    """Give a locked schedule these terms and this owner. None if it has them already."""
    before = terms_of(found)
    owned = (found.priority_ceiling, found.declared_by) == (author.priority_ceiling, author.source)
    if before == terms and owned:
        return None
    same_ticks = (before.cron, before.zone, before.enabled) == (terms.cron, terms.zone, terms.enabled)
    stored = _Stored(found.next_tick if same_ticks else terms.next_tick(found.after))
    _store(connection, found, terms, author, next_tick=stored.next_tick)
    _changed(connection, "schedule.set", instance, name, terms, author)
    return stored


def _store(
    connection: Connection, found: Row, terms: ScheduleTerms, author: Author, *, next_tick: datetime | None
) -> None:
    connection.execute(_CHANGE, _values(terms, author) | {"id": found.id, "next_tick": next_tick})


def _remove(connection: Connection, found: Row, instance: str, name: str, author: Author) -> None:
    # Who has removed it might make it anew.
    _end_pause(connection, instance, name, author)
    connection.execute(_REMOVE, {"id": found.id})
    audit.write(connection, "schedule.rm", actor=author.actor, subject=f"{instance}/{name}")
    wake(connection, TOPIC)


def _values(terms: ScheduleTerms, author: Author) -> dict[str, Any]:
    given = asdict(terms) | {"request": json.dumps(dict(terms.request))}
    return given | {"priority_ceiling": author.priority_ceiling, "actor": author.actor, "source": author.source}


def _changed(
    connection: Connection,
    action: str,
    instance: str,
    name: str,
    terms: ScheduleTerms,
    author: Author,
    *,
    reason: str = "",
) -> None:
    """Audit the change, without the job, and wake the processes that look at schedules. What is enabled is not
    paused."""
    if terms.enabled:
        _end_pause(connection, instance, name, author)
    details = {key: value for key, value in asdict(terms).items() if key != "request"} | (
        {"reason": reason} if reason else {}
    )
    if author.source is not None:
        details["declared_by"] = author.source
    audit.write(connection, action, actor=author.actor, subject=f"{instance}/{name}", details=details)
    wake(connection, TOPIC)
