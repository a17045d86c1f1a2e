"""What a trial of a version makes otherwise in the version in force, and what that is without the trial."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: The key of the settings that names a trial: the version that is tried, as `policy`, and where.
TRIAL = "canary"

Content = Mapping[str, Mapping[str, Any]]
Limits = Mapping[str, Mapping[str, Any]]
Kind = Literal["cohort", "instance"]

#: Where the name of an instance or cohort stands in the name of an item, by resource; None = it is the whole name.
#: Which bots and jobs a cohort has, and which pool an instance, is nothing to try: that would move them.
PLACES: Mapping[Kind, Mapping[str, int | None]] = {
    "cohort": {"quota": 0},
    "instance": {
        "account": None, "instance-queue-limit": None, "submit-rule": None, "quota": 1, "lock": 0,
        "ceiling": 0, "report-ceiling": 0, "owner-quota": 0, "project-quota": 0,
    },
}  # fmt: skip
_TRIAL = Statement("SELECT kind, tried, undo FROM policy_canaries WHERE id = :id")


def of(content: Content) -> Mapping[str, Any] | None:
    """Return the trial that a content has; None if it has none."""
    found: Mapping[str, Any] | None = content.get("settings", {}).get(TRIAL)
    return found


def without(content: Content) -> Content:
    """Return a content without the mark of its trial. The limits that the trial has changed stay."""
    settings = {name: terms for name, terms in content.get("settings", {}).items() if name != TRIAL}
    return {**content, "settings": settings}


def settled(connection: Connection, content: Content) -> Content:
    """Return a content as it is without its trial: limits that somebody else has changed since the trial did stay."""
    if (mark := of(content)) is None:
        return content
    trial, limits = connection.execute(_TRIAL, {"id": mark["id"]}).one(), content["limits"]
    undone = {
        resource: {
            item: trial.undo[resource][item]
            for item, terms in items.items()
            if limits.get(resource, {}).get(item) == terms
        }
        for resource, items in restricted(trial.kind, mark[trial.kind + "s"], trial.tried).items()
    }
    return with_limits(without(content), undone)


def restricted(kind: Kind, names: Collection[str], items: Limits) -> dict[str, dict[str, Any]]:
    """Return those of the limits that belong to these cohorts or instances."""
    return {
        resource: {item: terms for item, terms in found.items() if is_of(kind, resource, item, names)}
        for resource, found in items.items()
    }


def is_of(kind: Kind, resource: str, item: str, names: Collection[str]) -> bool:
    """Return whether a limit belongs to one of these. Names of instances and cohorts have no slash."""
    place = PLACES[kind][resource]
    first, _, rest = item.partition("/")
    return (item if place is None else rest if place else first) in names


def with_limits(content: Content, items: Limits) -> Content:
    """Return a content in which these limits are so; None = there is none."""
    limits = dict(content["limits"])
    for resource, found in items.items():
        now = {**limits.get(resource, {}), **found}
        limits[resource] = {name: terms for name, terms in now.items() if terms is not None}
    return {**content, "limits": limits}
