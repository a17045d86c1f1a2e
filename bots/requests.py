"""Job requests from what a person or a file says. Everything is checked before anything is sent."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import IO, Any

from pydantic import Field, ValidationError

from bots.protocol import Name, Payload
from schema import limits
from schema.errors import BadInput

Request = dict[str, Any]

#: Longest execution timeout, seconds (a year), and most attempts that a job may ask for.
MAX_TIMEOUT, MAX_TRIES = 31_536_000.0, 100

_JOB = re.compile(r"^jobs\.(\d+)\.?")


class JobLine(Payload):
    """One job as a line of JSON, with the bounds that the pool has for every job."""

    instance: Name | None = None
    properties: dict[str, str | list[str]] = Field(default={})
    key: str | None = Field(default=None, min_length=1)
    priority: int = Field(default=0, ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)
    units: int = Field(default=1, ge=1, le=limits.MAX_UNITS)
    label: str = ""
    locality_hint: str | None = Field(default=None, min_length=1)
    timeout_seconds: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT)
    max_attempts: int = Field(default=limits.MAX_ATTEMPTS, ge=1, le=MAX_TRIES)
    retry_failed: bool = False


def check(request: Request) -> Request:
    """Return `request` if a pool can take it. Raises BadInput with the field."""
    try:
        JobLine.model_validate(request, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(limits.escaped(str(part), 60) for part in first["loc"])
        raise BadInput(field, _reason(first["type"], first["msg"])) from None
    limits.normal_properties("properties", request.get("properties", {}))
    for field, limit in (("label", limits.MAX_LABEL), ("key", 200), ("locality_hint", 200)):
        limits.check_text(field, request.get(field) or "", limit)
    for name, texts in (("command", request["command"]), ("env", [*request.get("env", {}).items()])):
        for each in texts:
            limits.check_text(name, each if isinstance(each, str) else "=".join(each), limits.MAX_PAYLOAD_BYTES)
    payload = {name: request[name] for name in ("command", "env", "stdin") if request.get(name)}
    size = len(json.dumps(payload, ensure_ascii=False).encode())
    if size > limits.MAX_PAYLOAD_BYTES:
        raise BadInput("command", f"with env and stdin is {size} bytes, at most {limits.MAX_PAYLOAD_BYTES} are allowed")
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
        case _:
            return message[:1].lower() + message[1:]
