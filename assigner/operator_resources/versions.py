"""Versions of the policy put into force: what operators set becomes as it was, by the resources' own functions.

What is in use of a limit is no part of a version, and stays. So do instances and their jobs. What cannot be as it was,
such as a class that is to go and that waiting jobs have, stays too, and is told.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from leasehold.errors import BadInput, Conflict, NotFound
from leasehold.wire import escaped
from pydantic import ValidationError
from pydantic_core import to_json

from assigner.operator_resources.declaration import By, Removal, Resource
from assigner.operator_resources.registry import RESOURCES
from assigner.operator_resources.tenancy import COHORTS
from schema import declarations
from schema.fields import first_error
from schema.fleet import success
from schema.fleet.success import SuccessSettings
from schema.policy import canaries, trials, versions
from schema.policy.versions import Content, Made, Origin, Version
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.tenancy import lock_order

#: Error codes: no version was before the one in force; another one is in force; another one was when a draft was made;
#: a trial is running, or the version is a step of one.
IN_FORCE, OTHER, STALE, TRIAL = "policy_in_force", "other_policy_in_force", "stale_draft", "canary_running"
#: Raises Conflict if a version cannot be used by the process that is to put it into force.
Check = Callable[[Version], None]
#: Resources whose names have as many parts as keys: no part has a slash in it.
_WITHOUT_SLASH = frozenset({"quota", "lock"})
#: How often a draft is made anew because another version has come into force meanwhile.
MAX_TRIES = 5
_REFUSALS = (BadInput, Conflict, NotFound, ValidationError)


@dataclass(frozen=True)
class Activated:
    """A version is in force. id: its number, which is another one than was wanted if anything was `kept`: what could
    not be as it was, each with the reason."""

    id: int
    kept: Sequence[str] = ()


def roll_back(connection: Connection, *, of: int | None, actor: str, reason: str, check: Check) -> Activated:
    """Put the version into force that was so before the present one, as `activate` does.

    of: the version that the caller believes in force; None = whichever is. A caller who has not seen the answer may ask
    again, and gets it once more. Raises Conflict if another one is in force, or none was before. After a rollback the
    one before is that from which the version was made, so that further rollbacks go further back.
    """
    now, origin = versions.hold(connection), versions.origin(connection)
    if now is not None and of is not None and of != now:
        if of == origin.undid:
            return Activated(now, origin.kept)
        raise Conflict(OTHER, f"policy: version {of} is not in force, but version {now}")
    if origin.before is None:
        raise Conflict(IN_FORCE, "policy: there was no version before the one in force")
    if (trial := canaries.running(connection)) is not None:
        raise Conflict(
            TRIAL, f"policy: a canary of version {trial.policy} is running: `policy canary --stop` takes it back"
        )
    wanted = versions.version(connection, origin.before)
    return _put(connection, wanted, Origin(wanted.parent, undid=now), check, actor=actor, reason=reason)


def activate(
    connection: Connection, id: int, *, actor: str, reason: str, check: Check, stale: bool = False
) -> Activated:
    """Put the version into force; nothing happens if it is so already.

    stale: also a draft since which something was changed, which is then taken back.
    A trial that is running ends with it. check: called with the version; raises Conflict if it cannot be used here.
    Raises NotFound, and Conflict.
    """
    now, wanted = versions.hold(connection), versions.version(connection, id)
    if id == now:
        return Activated(id)
    refuse_trial(wanted)
    trial = canaries.running(connection)
    if not stale:
        refuse_stale(connection, wanted)
    before = now
    if trial is not None:
        before = trial.base
        canaries.end(connection, "activated" if id == trial.policy else "replaced", f"{actor} activated version {id}")
    return _put(connection, wanted, Origin(before), check, actor=actor, reason=reason)


def refuse_stale(connection: Connection, wanted: Version) -> None:
    """Raise Conflict if the version is a draft since which something was changed, which it would take back."""
    if versions.is_stale(connection, wanted):
        raise Conflict(
            STALE,
            f"policy: something was changed since draft {wanted.id} was made of version {wanted.parent}, and the draft "
            f"would take that back: see `policy diff {wanted.id}`, make the draft again, or give --stale (over HTTP "
            "stale=true)",
        )


def draft(
    database: Database,
    settings: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    actor: str,
    reason: str,
    check: Check = lambda _: None,
) -> Version:
    """Make a version that is not in force: the one in force, but for these sections and limits.

    Of `assigners` the entries that are not named stay, and of a limit the values. check: as of `activate`. Raises
    BadInput, and Conflict.
    """
    known = {each.name: each for each in RESOURCES if each.name in versions.DECIDING}
    if unknown := sorted(limits.keys() - known.keys()):
        raise BadInput("limits", f"there is no resource '{escaped(unknown[0], 60)}' that decides")
    if unknown := sorted(settings.keys() - versions.SECTIONS):
        raise BadInput("settings", f"there is no section '{escaped(unknown[0], 60)}' that decides")

    def changed(content: Content) -> Content:
        before = content["settings"]
        entries = {**before.get("assigners", {}), **settings.get("assigners", {})}
        found = {**content["limits"]}
        for resource, items in limits.items():
            present = found.get(resource, {})
            found[resource] = {**present, **{name: _terms(known[resource], name, present, items) for name in items}}
        return {**content, "settings": {**before, **settings, "assigners": entries}, "limits": found}

    return draft_by(database, changed, actor=actor, reason=reason, check=check)


def draft_by(
    database: Database,
    change: Callable[[Content], Content],
    *,
    actor: str,
    reason: str,
    check: Check = lambda _: None,
) -> Version:
    """Make a version that is not in force, of the one in force now without what a trial has changed.

    change: makes its content of that; called again if another version was put into force meanwhile. Raises Conflict if
    that happens `MAX_TRIES` times.
    """

    def store(connection: Connection, made: Made) -> Version | None:
        if (id := versions.draft(connection, made, actor=actor)) is None:
            return None
        found = versions.version(connection, id)
        check(found)
        return found

    for _ in range(MAX_TRIES):
        parent, before = database.run(versions.present)
        made = versions.make(change(before), parent=parent, before=before, actor=actor, reason=reason, drafted=True)
        if (found := database.run(partial(store, made=made))) is not None:
            return found
    raise Conflict(OTHER, f"policy: another version came into force {MAX_TRIES} times while the draft was made")


def _terms(
    resource: Resource[Any], name: str, present: Mapping[str, Any], items: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the values of a limit with those that are given. Raises BadInput if they are not what it may have."""
    parts, wanted = name.count("/") + bool(name), len(resource.keys)
    if parts < wanted or (parts > wanted and (wanted == 0 or resource.name in _WITHOUT_SLASH)):
        raise BadInput(f"limits.{resource.name}", f"'{escaped(name, 60)}' is not the name of one")
    terms = {**present.get(name, {}), **items[name]}
    try:
        resource.set.model.model_validate_json(to_json(terms))
    except ValidationError as error:
        field, said = first_error(error)
        where = ".".join(("limits", resource.name, name, *([field] if field else ())))
        raise BadInput(where, said) from None
    return terms


def refuse_trial(wanted: Version) -> None:
    """Raise Conflict if the version is a step of a trial. By itself it would be a trial without guards."""
    if wanted.content is not None and (trial := trials.of(wanted.content)) is not None:
        raise Conflict(
            TRIAL,
            f"policy: version {wanted.id} is a step of a canary: name version {trial['policy']}, which was tried, or "
            f"version {trial['base']}, which was in force before",
        )


def _put(
    connection: Connection, wanted: Version, origin: Origin, check: Check, *, actor: str, reason: str
) -> Activated:
    check(wanted)
    assert wanted.content is not None
    why = f"policy {wanted.id}" + (f": {reason}" if reason else "")
    kept = restore(connection, wanted.content, actor=actor, reason=why)
    put = versions.put_in_force(connection, wanted, replace(origin, kept=kept), actor=actor, reason=reason)
    return Activated(put, kept)


def restore(connection: Connection, wanted: Content, *, actor: str, reason: str) -> list[str]:
    """Let everything that operators set be as in this content; return what stays otherwise, with the reasons."""
    by: By = {"actor": actor, "reason": reason[:500]}
    kept: list[str] = []

    def tried(resource: str, names: Sequence[str], act: Callable[[Sequence[str]], object]) -> None:
        """Act in one savepoint, and if that is refused in one for each half: there may be many thousands of items."""
        if not names:
            return
        try:
            with connection.savepoint():
                act(names)
        except _REFUSALS as error:
            if len(names) > 1:
                for half in (names[: len(names) // 2], names[len(names) // 2 :]):
                    tried(resource, half, act)
                return
            said = first_error(error)[1] if isinstance(error, ValidationError) else error
            kept.append(f"{resource} {names[0]}".rstrip() + f": {said}")

    def set_all(resource: Resource[Any]) -> None:
        present, target = now[resource.name], wanted["limits"][resource.name]
        unlike = [name for name in sorted(target) if present.get(name) != target[name]]
        tried(resource.name, unlike, lambda names: _set(
            connection, resource, {name: target[name] for name in names}, by))  # fmt: skip

    now = versions.read(connection, {})["limits"]
    # Cohorts come first, because bots and jobs that move are locked before all else.
    resources = sorted(_deciding(wanted), key=lambda each: each is not COHORTS)
    for resource in resources[:1]:
        set_all(resource)
    lock_order.take(connection, now, {each.name: wanted["limits"][each.name] for each in resources})
    # What is removed may stand on what is removed later, and what is set on what was set before.
    for resource in reversed(resources):
        gone = sorted(now[resource.name].keys() - wanted["limits"][resource.name].keys())
        tried(resource.name, gone, partial(_remove, connection, resource, by=by))
    for resource in resources[1:]:
        set_all(resource)
    if (counted := wanted["settings"].get("success")) is not None:
        tried("success", [""], lambda _: success.declare(
            connection, SuccessSettings.model_validate(counted), actor=actor))  # fmt: skip
    kinds = {*versions.read(connection, {})["declared"], *wanted["declared"]}
    for kind in kinds:
        declarations.replace(connection, kind, wanted["declared"].get(kind, ()))
    return kept


def _deciding(wanted: Content) -> list[Resource[Any]]:
    return [each for each in RESOURCES if each.name in wanted["limits"]]


def _keys(resource: Resource[Any], name: str) -> list[str]:
    return name.split("/", len(resource.keys) - 1) if resource.keys else []


def _set(connection: Connection, resource: Resource[Any], wanted: Mapping[str, Mapping[str, Any]], by: By) -> None:
    """Set these items, by name, as these terms say."""
    model = resource.set.model
    found = [(_keys(resource, name), model.model_validate_json(to_json(terms))) for name, terms in wanted.items()]
    resource.set.put(connection, found, by)


def _remove(connection: Connection, resource: Resource[Any], names: Sequence[str], *, by: By) -> None:
    removal = resource.remove
    if not isinstance(removal, Removal):  # an instance stays, and only has no pool any more
        _set(connection, resource, {name: {"pool": None} for name in names}, by)
    else:
        removal.remove(connection, [_keys(resource, name) for name in names], by)
