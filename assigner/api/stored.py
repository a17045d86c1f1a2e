"""Stored JSON as answers show it: where it has another form than it must, what is stored, under the word `unusable`.

Another version, or somebody with psql, may have written it. Then the rest of the answer is right, and whoever looks
sees what is wrong. `db doctor` names such values, too.
"""

import json
from typing import Annotated, Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator

UNUSABLE = "unusable"


def _properties(stored: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(stored)
    except ValidationError:
        return {UNUSABLE: [json.dumps(stored)]}


def _object(stored: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(stored)
    except ValidationError:
        return {UNUSABLE: stored}


def _payload(stored: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return a payload whose command is a list of words, because all who read one rely on that."""
    command = stored.get("command", []) if isinstance(stored, dict) else None
    if isinstance(command, list) and all(isinstance(word, str) for word in command):
        return check(stored)
    return {"command": [], UNUSABLE: stored}


Properties = Annotated[dict[str, list[str]], WrapValidator(_properties)]
Object = Annotated[dict[str, Any], WrapValidator(_object)]
Payload = Annotated[dict[str, Any], WrapValidator(_payload)]
