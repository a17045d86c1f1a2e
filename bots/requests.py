"""Job requests from what a person or a file says. Everything is checked before anything is sent."""

import re
from collections.abc import Iterable, Sequence
from typing import IO, Any

from pydantic import ValidationError

from schema import limits
from schema.errors import BadInput
from schema.requests import JobRequest, flat

Request = dict[str, Any]

_JOB = re.compile(r"^jobs\.(\d+)\.?")


def check(request: Request) -> Request:
    """Return `request` if a pool can take it. Raises BadInput with the field."""
    try:
        JobRequest.model_validate(flat(request)).normal()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(limits.escaped(str(part), 60) for part in first["loc"])
        raise BadInput(field, _reason(first["type"], first["msg"])) from None
    return request


def read_lines(source: Iterable[bytes], *, name: str) -> list[Request]:
    """The requests of a file of JSON lines; blank lines are skipped. Raises BadInput with file and line."""
    found: list[Request] = []
    for number, raw in enumerate(source, start=1):
        if raw.strip():
            document = limits.parse_json(raw, f"{name}:{number}")
            if not isinstance(document, dict):
                raise BadInput(f"{name}:{number}", "is not a JSON object")
            try:
                found.append(check(document))
            except BadInput as refused:
                raise BadInput(f"{name}:{number}", str(refused)) from None
    if not found:
        raise BadInput(name, "holds no job")
    return found


def line_numbers(source: Iterable[bytes]) -> list[int]:
    """For each job of a file the number of its line."""
    return [number for number, raw in enumerate(source, start=1) if raw.strip()]


def place_in_file(refused: BadInput, numbers: Sequence[int], *, name: str) -> BadInput:
    """What the gateway refused, told by file and line instead of by the place in the request."""
    found = _JOB.match(refused.field)
    if found is None or int(found[1]) >= len(numbers):
        return refused
    field = refused.field[found.end() :]
    where = f"{name}:{numbers[int(found[1])]}"
    return BadInput(where, f"{field}: {refused.reason}" if field else refused.reason)


def pairs(values: Sequence[str], *, option: str) -> dict[str, list[str]]:
    """`KEY=VALUE` options; a key given twice has two values. Raises BadInput."""
    found: dict[str, list[str]] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise BadInput(option, f"'{limits.escaped(value, 80)}' is not KEY=VALUE")
        found.setdefault(key, []).append(text)
    return found


def read_text(source: IO[bytes]) -> str:
    """A file that is given to a command as its input. Raises BadInput if it is not text or too large."""
    raw = source.read(limits.MAX_PAYLOAD_BYTES + 1)
    if len(raw) > limits.MAX_PAYLOAD_BYTES:
        raise BadInput("--stdin-file", f"is longer than {limits.MAX_PAYLOAD_BYTES} bytes")
    try:
        return limits.check_text("--stdin-file", raw.decode(), limits.MAX_PAYLOAD_BYTES)
    except UnicodeDecodeError:
        raise BadInput("--stdin-file", "is not UTF-8 text") from None


def _reason(kind: str, message: str) -> str:
    match kind:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not a field of a job"
        case "value_error":
            return message.removeprefix("Value error, ")
        case _:
            return message[:1].lower() + message[1:]
