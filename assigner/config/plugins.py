"""Plug-ins: entry points of installed packages, found by name, with one-line errors."""

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from leasehold.wire import escaped, suggestion


def load_entry_point(group: str, kind: str, *, noun: str, built_in: Iterable[str]) -> tuple[str, Any]:
    """Load the entry point `kind` of the group; returns its origin as text and the object.

    A class is instantiated without arguments. `noun` describes the plug-in in messages, with its article; `built_in`
    are the names offered without a plug-in. Raises ValueError if there is none, if several packages offer one, or if
    it cannot be loaded.
    """
    found = list(entry_points(group=group, name=kind))
    if not found:
        known = sorted({*built_in, *entry_points(group=group).names})
        listed = ", ".join(f"'{escaped(name, 80)}'" for name in known)
        raise ValueError(f"'{escaped(kind, 80)}' is not {noun}: there are {listed}{suggestion(kind, known)}")
    if len(found) > 1:
        raise ValueError(f"'{escaped(kind, 80)}' is offered by {len(found)} packages")
    place = f"'{escaped(kind, 80)}' ({escaped(found[0].value, 80)})"
    try:
        made = found[0].load()
        return place, made() if isinstance(made, type) else made
    except Exception as error:
        raise ValueError(f"{place} cannot be loaded: {type(error).__name__}: {escaped(str(error))}") from error
