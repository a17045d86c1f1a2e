"""Many JSON documents as one parameter: a driver would quote each of them anew as an element of an array."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

#: JSON has no such character outside of strings, and inside them it is always escaped.
SEPARATOR = "\x1e"


def joined(documents: Iterable[Mapping[str, Any]]) -> str:
    """The value of the parameter of `array`; at least one document."""
    return SEPARATOR.join(map(json.dumps, documents))


def array(name: str) -> str:
    """The SQL expression that makes a jsonb array of parameter `name`."""
    return f"CAST(string_to_array(:{name}, chr({ord(SEPARATOR)})) AS jsonb[])"
