"""The arguments of one call of a task: as the standard input of its job, and back in the process that runs it."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from leasehold import wire
from leasehold.errors import BadInput
from leasehold.tasks.options import Unique
from leasehold.wire import Serialiser, check_json

#: The arguments of one call: by their places, or by their names.
Arguments = tuple[Any, ...] | Mapping[str, Any]

#: The most bytes of the standard input of a job, and so of the arguments of one call. The command itself needs some.
MAX_ARGUMENTS = 255 * 1024


def encode_call(
    signature: inspect.Signature, serialiser: Serialiser, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the standard input of the job that makes this call.

    Raises TypeError if the function cannot be called so, BadInput with the name of an argument that is no JSON.
    """
    signature.bind(*args, **kwargs)
    names = _positional(signature, len(args))
    positional = [_encoded(serialiser, name, value) for name, value in zip(names, args, strict=True)]
    named = {name: _encoded(serialiser, name, value) for name, value in kwargs.items()}
    stdin = json.dumps({"args": positional, "kwargs": named}, allow_nan=False)
    if len(stdin) > MAX_ARGUMENTS:
        given = [*zip(names, positional, strict=True), *named.items()]
        largest, _ = max(given, key=lambda each: len(json.dumps(each[1])))
        raise BadInput(largest, f"the arguments have {len(stdin)} bytes as JSON, at most {MAX_ARGUMENTS} are sent")
    return stdin


def decode_call(serialiser: Serialiser, stdin: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of which `encode_call` made this standard input. Raises BadInput."""
    try:
        document = json.loads(stdin)
        args, kwargs = document["args"], document["kwargs"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput("stdin", f"is no JSON object with args and kwargs: {error}") from None
    decode = serialiser.decode
    return [decode(each) for each in args], {name: decode(each) for name, each in kwargs.items()}


def dedup_key(task: str, unique: Unique, args: tuple[Any, ...], kwargs: Mapping[str, Any], stdin: str) -> str:
    """Return the key by which a call joins an unfinished one of its task that is equal in the sense of `unique`."""
    said = stdin if isinstance(unique, bool) else unique(*args, **kwargs)
    if not isinstance(said, str):
        raise BadInput("unique", f"returned a '{type(said).__name__}', not a text")
    plain = f"{task}:{said}"
    if unique is not True and len(plain.encode()) <= wire.MAX_DEDUP_KEY_BYTES:
        return plain
    return f"{task[:100]}:{hashlib.sha256(plain.encode()).hexdigest()}"


def _encoded(serialiser: Serialiser, name: str, value: Any) -> Any:
    try:
        found = serialiser.encode(value)
        check_json(found)
    except (TypeError, ValueError) as error:
        raise BadInput(name, str(error) or type(error).__name__) from None
    return found


def _positional(signature: inspect.Signature, count: int) -> list[str]:
    """Name the first `count` positional arguments of a call, such as `amount`, or `amounts.3` of `*amounts`."""
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{place}" for place in range(count - len(names))]
        else:
            names.append(parameter.name)
    return names[:count]
