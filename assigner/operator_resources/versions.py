"""Versions of the policy put into force: what operators set becomes as it was, by the resources' own functions.

What is in use of a limit is no part of a version, and stays. So do instances and their jobs. What cannot be as it was,
such as a class that is to go and that waiting jobs have, stays too, and is told.
"""

from collections.abc import Callable, Mapping
from typing import Any

from leasehold.errors import BadInput, Conflict, NotFound
from pydantic import ValidationError
from pydantic_core import to_json

from assigner.operator_resources.declaration import By, Removal, Resource
from assigner.operator_resources.registry import RESOURCES
from schema import declarations
from schema.fleet import success
from schema.fleet.success import SuccessSettings
from schema.policy import versions
from schema.policy.versions import Content, Version
from schema.postgres.connection import Connection

#: Error code for a version that is in force already.
IN_FORCE = "policy_in_force"
#: The resources by whose values waiting jobs have their priorities.
PRICED_BY = frozenset({"class", "service-level", "scheduling"})


def roll_back(connection: Connection, *, actor: str, reason: str) -> tuple[Version, list[str]]:
    """Put the version into force that was so before the present one was made, as `activate` does."""
    parent = versions.version(connection, versions.hold(connection)).parent
    if parent is None:
        raise Conflict(IN_FORCE, "policy: there was no version before the one in force")
    return activate(connection, parent, actor=actor, reason=reason)


def activate(connection: Connection, id: int, *, actor: str, reason: str) -> tuple[Version, list[str]]:
    """Put the version into force. Returns it, and what could not be as it was, each with the reason.

    Raises NotFound, and Conflict if it is in force already.
    """
    now = versions.hold(connection)
    wanted = versions.version(connection, id)
    if id == now:
        raise Conflict(IN_FORCE, f"policy: version {id} is in force already")
    assert wanted.content is not None
    kept = restore(connection, wanted.content, actor=actor, reason=f"policy {id}" + (f": {reason}" if reason else ""))
    versions.put_in_force(connection, wanted, actor=actor, reason=reason, kept=kept)
    return wanted, kept


def are_prices_changed(before: Content, after: Content) -> bool:
    """Return whether waiting jobs get other priorities by what differs."""
    return any(before["limits"].get(name) != after["limits"].get(name) for name in PRICED_BY)


def restore(connection: Connection, wanted: Content, *, actor: str, reason: str) -> list[str]:
    """Let everything that operators set be as in this content; return what stays otherwise, with the reasons."""
    by: By = {"actor": actor, "reason": reason[:500]}
    kept: list[str] = []

    def tried(resource: Resource[Any], name: str, act: Callable[[], object]) -> None:
        try:
            with connection.savepoint():
                act()
        except (BadInput, Conflict, NotFound) as error:
            kept.append(f"{resource.name} {name}".rstrip() + f": {error}")
        except ValidationError as error:
            kept.append(f"{resource.name} {name}".rstrip() + f": {error.errors()[0]['msg']}")

    now = versions.read(connection, {})["limits"]
    there = {each.name: (now[each.name], wanted["limits"][each.name]) for each in _deciding(wanted)}
    # What is removed may stand on what is removed later, and what is set on what was set before.
    for resource in reversed(_deciding(wanted)):
        present, target = there[resource.name]
        for name in sorted(present.keys() - target.keys()):
            tried(resource, name, lambda resource=resource, name=name: _remove(connection, resource, name, by))  # type: ignore[misc]
    for resource in _deciding(wanted):
        present, target = there[resource.name]
        for name in sorted(target):
            if present.get(name) != target[name]:
                terms = target[name]
                tried(resource, name, lambda r=resource, n=name, t=terms: _set(connection, r, n, t, by))  # type: ignore[misc]
    if (counted := wanted["settings"].get("success")) is not None:
        success.declare(connection, SuccessSettings.model_validate(counted), actor=actor)
    kinds = {*versions.read(connection, {})["declared"], *wanted["declared"]}
    for kind in kinds:
        declarations.replace(connection, kind, wanted["declared"].get(kind, ()))
    return kept


def _deciding(wanted: Content) -> list[Resource[Any]]:
    return [each for each in RESOURCES if each.name in wanted["limits"]]


def _keys(resource: Resource[Any], name: str) -> list[str]:
    return name.split("/", len(resource.keys) - 1) if resource.keys else []


def _set(connection: Connection, resource: Resource[Any], name: str, terms: Mapping[str, Any], by: By) -> None:
    body = resource.set.model.model_validate_json(to_json(terms))
    resource.set.apply(connection, _keys(resource, name), body, by)


def _remove(connection: Connection, resource: Resource[Any], name: str, by: By) -> None:
    if isinstance(resource.remove, Removal):
        resource.remove.apply(connection, _keys(resource, name), by)
    else:  # an instance stays, and only has no pool any more
        _set(connection, resource, name, {"pool": None}, by)
