"""The keys of a configuration: which exist, their lines in the file, and the key that a variable sets."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import structlog
from leasehold.errors import BadInput
from leasehold.wire import escaped, suggestion
from pydantic import BaseModel, SecretStr

log = structlog.get_logger(__name__)

PREFIX = "LEASEHOLD_"
#: Variables with a meaning of their own, which override no key. Those of the second line are set for every job, and a
#: job may run `leasehold` itself.
RESERVED = frozenset({
    "DATA", "CONFIG", "URL", "TOKEN", "INSECURE", "EMBEDDED_USER", "PARENT",
    "JOB", "FENCE", "ATTEMPT", "INSTANCE", "BOT", "WORK",
})  # fmt: skip
RESERVED_PREFIX = "TEST_"

#: An address and port as Kubernetes and Docker put it into variables for each service that a container may call.
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")
#: The variables of a service, by the ends of their names, and their values.
_OF_SERVICES = tuple(
    (re.compile(name), re.compile(value))
    for name, value in (
        (r"(\w+_)?SERVICE_HOST", r"[0-9a-fA-F.:]+"),
        (r"(\w+_)?SERVICE_PORT(_\w+)?", r"\d+"),
        (r"(\w+_)?PORT(_\d+_(TCP|UDP|SCTP))?", _SERVICE_URL.pattern),
        (r"(\w+_)?PORT_\d+_(TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
        (r"(\w+_)?PORT_\d+_(TCP|UDP|SCTP)_PORT", r"\d+"),
        (r"(\w+_)?PORT_\d+_(TCP|UDP|SCTP)_ADDR", r"[0-9a-fA-F.:]+"),
    )
)

#: Keys and list indexes from the root of the file.
KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """`('assigners', 0, 'batch')` as people write it: `assigners[0].batch`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path).lstrip(".")


def members(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without None and without `Annotated`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [each for part in get_args(annotation) for each in members(part)]
    return [] if annotation is NoneType else [annotation]


def fields(annotation: Any) -> dict[str, Any]:
    """Name → annotation of every key that a table of this type may contain."""
    found: dict[str, Any] = {}
    for each in members(annotation):
        if isinstance(each, type) and issubclass(each, BaseModel):
            found |= {name: field.annotation for name, field in each.model_fields.items()}
    return found


def item(annotation: Any) -> Any:
    """The type of a list's elements; None if the annotation is no list."""
    for each in members(annotation):
        if get_origin(each) in (list, tuple, set, frozenset):
            return get_args(each)[0]
    return None


def _into(at: Any, step: str | int) -> Any:
    if isinstance(step, int):
        return item(at)
    values = [get_args(each)[1] for each in members(at) if get_origin(each) is dict]
    return fields(at).get(step, values[0] if values else None)


def annotation(root: Any, path: KeyPath) -> Any:
    """The annotation of the key at `path`; None if there is no such key."""
    at = root
    for step in path:
        at = _into(at, step)
    return at


def known(root: Any, location: KeyPath, *, is_extra: bool) -> KeyPath:
    """An error's location, without the names of union members that pydantic puts between the keys.

    `is_extra`: the error is about an unknown last key, which is kept.
    """
    at: Any = root
    path: KeyPath = ()
    for n, step in enumerate(location):
        inner = _into(at, step)
        if inner is not None or (is_extra and n == len(location) - 1):
            at, path = inner, (*path, step)
    return path


def secret(annotation: Any) -> bool:
    return SecretStr in members(annotation)


def _text(annotation: Any) -> bool:
    return any(
        each is SecretStr
        or get_origin(each) is Literal
        or (isinstance(each, type) and issubclass(each, str | Path | Enum))
        for each in members(annotation)
    )


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every path below `value` with its value, tables and lists before their contents."""
    if path:
        yield path, value
    pairs: Iterable[tuple[Any, Any]] = ()
    match value:
        case dict():
            pairs = value.items()
        case list():
            pairs = enumerate(value)
        case _:
            return
    for key, each in pairs:
        yield from leaves(each, (*path, key))


def lines(text: str) -> dict[KeyPath, int]:
    """Path → line number of every key in a file that tomllib accepts.

    A statement ends at the first line up to which tomllib can parse it. So strings and arrays over several lines need
    no scanner of their own. Elements of an array of tables are numbered in their order.
    """
    found: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    base: KeyPath = ()
    statement, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        if not statement:
            start = number
        statement += line + "\n"
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        if statement.lstrip().startswith("["):
            base = _header(parsed, counts, is_array=statement.lstrip().startswith("[["))
            for end in range(1, len(base) + 1):
                found.setdefault(base[:end], start)
        else:
            for path, _ in leaves(parsed):
                found.setdefault(base + path, start)
        statement = ""
    return found


def _header(parsed: dict[str, Any], counts: dict[KeyPath, int], *, is_array: bool) -> KeyPath:
    names, at = [], parsed
    while at:
        name, inner = next(iter(at.items()))
        names.append(name)
        at = inner[0] if isinstance(inner, list) else inner
    path: KeyPath = ()
    for n, name in enumerate(names):
        path = (*path, name)
        if is_array and n == len(names) - 1:
            counts[path] = counts.get(path, 0) + 1
        if path in counts:
            path = (*path, counts[path] - 1)
    return path


def overrides(root: type[BaseModel], environ: Mapping[str, str]) -> list[tuple[str, KeyPath, Any]]:
    """Variable, path and value of every override in `environ`, whole tables before their keys.

    Values are written as in the file, but text needs no quotes. Raises BadInput for a variable that names no key. Those
    that Kubernetes sets in each container for a service whose name begins with `leasehold` are passed over.
    """
    found = []
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in RESERVED or name.startswith(RESERVED_PREFIX):
            continue
        path = _resolve(root, name.lower())
        if not path and _is_of_service(name, environ[variable]):
            log.debug("a variable is passed over, because it tells of a service", variable=variable)
            continue
        if not path:
            known = [PREFIX + _variable(each) for each in _settable(root)] + [PREFIX + each for each in RESERVED]
            raise BadInput(variable, "is not a setting" + suggestion(variable, known))
        found.append((variable, path, _value(variable, environ[variable], annotation(root, path))))
    return found


def _is_of_service(name: str, value: str) -> bool:
    return any(names.fullmatch(name) and values.fullmatch(value) for names, values in _OF_SERVICES)


def _variable(path: KeyPath) -> str:
    return "_".join(str(each) for each in path).upper()


def _settable(at: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    if path:
        yield path
    for name, inner in fields(at).items():
        yield from _settable(inner, (*path, name))
    if item(at) is not None and fields(item(at)):
        yield from _settable(item(at), (*path, 0))


def _resolve(at: Any, rest: str) -> KeyPath | None:
    if not rest:
        return ()
    for name, inner in sorted(fields(at).items(), key=lambda each: -len(each[0])):
        if rest == name or rest.startswith(name + "_"):
            path = _resolve(inner, rest[len(name) + 1 :])
            if path is not None:
                return (name, *path)
    index = re.match(r"(\d{1,4})(?:_|$)", rest)
    if index and item(at) is not None:
        path = _resolve(item(at), rest[index.end() :])
        return None if path is None else (int(index.group(1)), *path)
    return None


def _value(variable: str, text: str, annotation: Any) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = {}
    if parsed.keys() == {"value"} and (isinstance(parsed["value"], str) or not _text(annotation)):
        return parsed["value"]
    if _text(annotation):
        return text
    if _SERVICE_URL.fullmatch(text):
        raise BadInput(
            variable,
            f"is '{escaped(text, 80)}', which Kubernetes sets in each pod for a Service of that name; give the pod"
            " `enableServiceLinks: false`, or the Service another name",
        )
    raise BadInput(variable, 'is not a TOML value, for example 5, true, "text" or [1, 2]')


def put(data: dict[str, Any], path: KeyPath, value: Any, *, variable: str) -> None:
    """Set `value` at `path` in `data`, creating tables on the way. Errors name `variable`."""
    at: Any = data  # a table or a list
    for n, step in enumerate(path):
        is_last = n == len(path) - 1
        empty: Any = value if is_last else ([{}] if isinstance(path[n + 1], int) else {})
        if isinstance(step, int):
            if not isinstance(at, list) or step > len(at):
                size = len(at) if isinstance(at, list) else 0
                raise BadInput(variable, f"there is no {dotted(path[: n + 1])}: the list has {size} entries")
            at.extend([{}] if step == len(at) else [])
        elif not isinstance(at, dict):
            raise BadInput(variable, f"{dotted(path[:n])} is not a table")
        if isinstance(at, dict) and not is_last:
            at.setdefault(step, empty)
        elif is_last:
            at[step] = empty
        at = at[step]
