"""Loads and reloads `leasehold.toml`, with overrides from the environment, as one frozen object.

The models of settings are defined next to the code that they tune. This module turns a file into such an object. It
explains an error in one line: the place, the key, the reason, and what was probably meant.
"""

import codecs
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from leasehold.errors import BadInput
from leasehold.wire import escaped, meant, suggestion
from prometheus_client import Counter
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from assigner.config import keys
from schema.fields import plain
from schema.postgres.urls import without_password
from schema.validation import RENAMED

#: The largest configuration file, bytes. A larger one is taken for a mistake.
MAX_FILE_BYTES = 1024 * 1024
#: The most problems that one message names.
MAX_PROBLEMS = 20
#: Seconds for which a changed file must stay unchanged before it is read.
SETTLE = 0.2

log = structlog.get_logger()

RELOADS = Counter("leasehold_config_reloads_total", "Configurations that replaced an older one without a restart.")
RELOAD_FAILURES = Counter(
    "leasehold_config_reload_failures_total", "Changed configurations that were refused, so that the old one stayed."
)


class ConfigModel(BaseModel):
    """The whole configuration, one field per section. It is frozen and refuses unknown keys, NaN and Infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


C = TypeVar("C", bound=ConfigModel)


@dataclass(frozen=True)
class Source:
    """The origin of each value, so that an error can name the place."""

    name: str | None
    lines: Mapping[keys.KeyPath, int] = field(default_factory=dict)
    variables: Mapping[keys.KeyPath, str] = field(default_factory=dict)

    def place(self, path: keys.KeyPath) -> tuple[int, str]:
        """Sort key and message prefix of the place that set `path` or its nearest parent: a variable or a line."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.variables:
                return 0, f"{self.variables[path[:end]]}: "
            if path[:end] in self.lines:
                line = self.lines[path[:end]]
                return line, f"{self.name}:{line}: "
        return 0, f"{self.name}: " if self.name else ""

    def named(self, path: keys.KeyPath) -> str:
        """The key for a message: its place and its name."""
        return self.place(path)[1] + (keys.dotted(path) or "configuration")


class InvalidConfiguration(BadInput):
    """A configuration with mistakes: `problems` has where each is, and why, in the order of the file."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        (where, reason), *others = self.problems = list(problems)
        named = [f"; also {other}: {why}" for other, why in others[: MAX_PROBLEMS - 1]]
        left = len(others) - len(named)
        super().__init__(where, reason + "".join(named) + (f" (and {left} more)" if left else ""))


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A configuration with the origin of its values."""

    settings: C
    source: Source


def load(path: Path | None, sections: type[C], environ: Mapping[str, str]) -> C:
    """Load a configuration as `load_with_source` does, without the origin of its values."""
    return load_with_source(path, sections, environ).settings


def load_with_source(path: Path | None, sections: type[C], environ: Mapping[str, str]) -> Loaded[C]:
    """Load the file at `path` (None = all defaults), apply `LEASEHOLD_<SECTION>_<KEY>` from `environ`, and validate.

    Raises BadInput with one line that names, for each problem, the file and line (or the variable), the key and the
    reason. Values are strict: a string is never taken for a number. Secret values never appear in a message.
    """
    data, source = ({}, Source(None)) if path is None else _read(path)
    variables: dict[keys.KeyPath, str] = {}
    for name, key, value in keys.overrides(sections, environ):
        keys.put(data, key, value, variable=name)
        variables[key] = name
    source = Source(source.name, source.lines, variables)
    try:
        return Loaded(sections.model_validate_json(_as_json(data, source), strict=True), source)
    except ValidationError as error:
        raise _explained(error, sections, source) from None


def _read(path: Path) -> tuple[dict[str, Any], Source]:
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadInput(name, f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise BadInput(name, f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{name}:{line}", "is not UTF-8") from None
    try:
        return tomllib.loads(text), Source(name, keys.lines(text))
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = re.search(r" \(at line (\d+), column \d+\)$", message)
        line = int(found.group(1)) if found else text.count("\n") + 1
        reason = message[: found.start()] if found else re.sub(r" \(at end of document\)$", " at its end", message)
        raise BadInput(f"{name}:{line}", f"is not TOML: {escaped(reason)}") from None
    except RecursionError:
        raise BadInput(name, "is nested too deeply") from None


def _as_json(data: dict[str, Any], source: Source) -> str:
    """The data as JSON. From JSON, pydantic's strict mode accepts strings for enums and paths, but not for numbers."""

    def refuse(value: Any) -> Any:
        found = next((path for path, leaf in keys.leaves(data) if leaf is value), ())
        raise BadInput(source.place(found)[1] + keys.dotted(found), "must not be a date or a time")

    return json.dumps(data, default=refuse)


def _explained(error: ValidationError, sections: type[ConfigModel], source: Source) -> InvalidConfiguration:
    """Every problem, by place in the file."""
    everything = error.errors(include_url=False, include_context=False)
    placed = [
        (keys.known(sections, each["loc"], is_extra=each["type"] == "extra_forbidden"), each) for each in everything
    ]
    misspelt = {(*path[:-1], _meant(path, sections)) for path, each in placed if each["type"] == "extra_forbidden"}
    found = []
    for path, details in placed:
        if any(each["loc"][:-1][: len(details["loc"])] == details["loc"] for each in everything):
            continue  # only a consequence: pydantic also calls a list too short if its item is wrong
        if details["type"] == "missing" and path in misspelt:
            continue  # the misspelt key is named with this one
        order, place = source.place(_blamed(path, details, source))
        found.append((order, place + (keys.dotted(path) or "configuration"), _reason(details, path, sections)))
    found.sort(key=lambda each: each[0])
    return InvalidConfiguration([(where, reason) for _, where, reason in found])


def _meant(path: keys.KeyPath, sections: type[ConfigModel]) -> str | None:
    """The key that an unknown key was probably meant to be."""
    return meant(str(path[-1]), keys.fields(keys.annotation(sections, path[:-1])))


def _blamed(path: keys.KeyPath, details: ErrorDetails, source: Source) -> keys.KeyPath:
    """The path to blame for an error.

    pydantic reports a broken relation between keys for the whole section. Then it is the first key named in the message
    that the file or a variable has set.
    """
    if details["type"] == "value_error":
        for word in re.findall(r"[a-z_]+", details["msg"]):
            if (*path, word) in source.variables or (*path, word) in source.lines:
                return (*path, word)
    return path


def _reason(details: ErrorDetails, path: keys.KeyPath, sections: type[ConfigModel]) -> str:
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        siblings = keys.fields(keys.annotation(sections, path[:-1]))
        if path[-1] in RENAMED:
            return RENAMED[str(path[-1])]
        return "is not a setting" + suggestion(str(path[-1]), siblings)
    if kind == "missing":
        return "is missing"
    if len(path) == 1 and kind == "model_type" and isinstance(value, list):
        return f"is one section, [{path[0]}], and not a list of sections, [[{path[0]}]]"
    if len(path) == 1 and kind == "tuple_type" and isinstance(value, dict):
        return f"is a list of sections, [[{path[0]}]], and not one section, [{path[0]}]"
    message = plain(details["msg"])
    message = re.sub(r"^input should be", "must be", message)
    message = re.sub(r"^input should", "must", message)
    message = re.sub(r"^(field|list|tuple|string|value) (?=should)", "", message).replace("should", "must", 1)
    if kind == "value_error" or isinstance(value, dict | list) or keys.secret(keys.annotation(sections, path)):
        return message
    return f"{message}, not {escaped(json.dumps(value, ensure_ascii=False), 80)}"


def masked(settings: BaseModel) -> dict[str, Any]:
    """Every value as plain JSON types. A secret URL is shown without its password, any other secret as `***`."""

    def plain(value: Any) -> Any:
        match value:
            case SecretStr():
                secret = value.get_secret_value()
                return secret if secret == "embedded" else without_password(secret)
            case dict():
                return {key: plain(each) for key, each in value.items()}
            case list() | tuple() | set() | frozenset():
                return [plain(each) for each in value]
            case _:
                return to_jsonable_python(value)

    shown = plain(settings.model_dump())
    assert isinstance(shown, dict)
    return shown


def changed_keys(before: BaseModel, now: BaseModel) -> list[str]:
    """Return the names of the settings that differ, such as `timing.sync`, or of a list that has grown or shrunk."""

    def differing(one: Any, other: Any, path: keys.KeyPath) -> Iterator[keys.KeyPath]:
        match one, other:
            case dict(), dict():
                for key in dict.fromkeys([*one, *other]):
                    yield from differing(one.get(key), other.get(key), (*path, key))
            case (list() | tuple(), list() | tuple()) if len(one) == len(other):
                for number, pair in enumerate(zip(one, other, strict=True)):
                    yield from differing(*pair, (*path, number))
            case _ if one != other:
                yield path

    return [keys.dotted(path) for path in differing(before.model_dump(), now.model_dump(), ())]


def as_toml(values: Mapping[str, Any]) -> str:
    """The result of `masked` as TOML that could be loaded again. Unset keys become comments."""
    parts: list[str] = []
    for section, value in values.items():
        tables, header = (value, f"[[{section}]]") if isinstance(value, list) else ([value], f"[{section}]")
        for table in tables:
            body = [f"{k} = {_literal(v)}" if v is not None else f"# {k} is unset" for k, v in table.items()]
            parts.append("\n".join([header, *body]))
    return "\n\n".join(parts) + "\n"


def _literal(value: Any) -> str:
    match value:
        case dict():
            inner = ", ".join(f"{_key(k)} = {_literal(v)}" for k, v in value.items() if v is not None)
            return f"{{ {inner} }}" if inner else "{}"
        case list():
            return "[" + ", ".join(_literal(each) for each in value) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


class Reloader(Generic[C]):
    """Keeps one configuration current. A reload replaces the whole object or nothing.

    A loop calls `run_once`. It checks whether the file changed or `request` was called, and returns the seconds until
    the next check. A changed file is read once it has stopped changing, because editors write files in steps. Users of
    the configuration read `current` whenever they need a value.
    """

    def __init__(
        self, path: Path | None, sections: type[C], environ: Mapping[str, str], *, current: C, poll: float = 2.0
    ) -> None:
        self.current = current
        #: Why the file as it is now was refused; None if it was not.
        self.error: str | None = None
        self._path, self._sections, self._environ, self._poll = path, sections, dict(environ), poll
        self._seen = self._signature()
        self._requested = self._changed = False

    @property
    def file(self) -> str | None:
        """The absolute path of the file; None = defaults."""
        return None if self._path is None else str(self._path.absolute())

    def request(self) -> None:
        """Reload at the next `run_once` even if the file looks unchanged. Safe in a signal handler."""
        self._requested = True

    def run_once(self) -> float:
        before, self._seen = self._seen, self._signature()
        if self._seen != before:
            self._changed = True
            return min(self._poll, SETTLE)
        if not self._changed and not self._requested:
            return self._poll
        self._changed = self._requested = False
        try:
            self.current = load(self._path, self._sections, self._environ)
        except BadInput as error:
            RELOAD_FAILURES.inc()
            self.error = str(error)
            log.error("configuration refused, the old one stays", error=str(error))
        else:
            RELOADS.inc()
            self.error = None
            log.info("configuration reloaded", file=str(self._path))
        return self._poll

    def _signature(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
