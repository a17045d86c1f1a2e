"""Python values as JSON: which values are stored and come back as they were, and how others are made such values."""

import math
from typing import Any, Protocol

from leasehold.wire import MAX_JSON_DEPTH

_PLAIN = (bool, int, type(None))


class Serialiser(Protocol):
    """Makes JSON values of arguments and results of tasks, and the other way round.

    A pool uses the same one where tasks are deferred and where they run.
    """

    def encode(self, value: Any) -> Any:
        """Return `value` as a JSON value. Raises TypeError or ValueError, with the reason, if it cannot be one."""

    def decode(self, found: Any) -> Any:
        """Return the value of which `encode` made this JSON value."""


class JsonSerialiser:
    """Takes JSON values as they are and refuses all others. A tuple comes back as a list."""

    def encode(self, value: Any) -> Any:
        return value

    def decode(self, found: Any) -> Any:
        return found


def check_json(value: Any, *, depth: int = 0) -> None:
    """Raise ValueError, with the reason, unless the value is JSON that the pool's database can hold."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a number of JSON")
    elif not isinstance(value, (list, tuple, dict, int)):
        raise ValueError(f"a value of type '{type(value).__name__}' is not JSON; see the serialiser of the pool")
    elif depth == MAX_JSON_DEPTH:
        raise ValueError(f"is nested more than {MAX_JSON_DEPTH} levels deep")
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"a key of type '{type(key).__name__}' would come back as a text")
            _check_text(key)
            check_json(each, depth=depth + 1)
    elif not isinstance(value, int):
        for each in value:
            check_json(each, depth=depth + 1)


def _check_text(text: str) -> None:
    """Refuse what a text of PostgreSQL cannot hold."""
    if "\0" in text:
        raise ValueError("holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair") from None
