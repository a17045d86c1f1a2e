"""Options of `submit`, and the requests that are made of them or read from a file.

The options are derived from the fields of JobRequest, so that a new field has an option without a change
here. Name, type, range, default and help of an option come from its field. `_SPELLINGS` holds what differs.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import UnionType
from typing import IO, Any, TypeVar, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le
from leasehold import wire
from leasehold.errors import BadInput, check_each
from leasehold.wire import escaped
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bots.cli import times
from schema import validation
from schema.fields import misspelt, plain
from schema.requests import GROUPS, JobRequest, flat
from schema.validation import NAME

# Job requests from the command line or a file; all are checked before any is sent


Request = dict[str, Any]

_JOB = re.compile(r"^jobs\.(\d+)\.?")
#: The place in the list of an option that is given several times.
_IN_A_LIST = re.compile(r"\.\d+$")


def check(request: Request) -> Request:
    """Return `request` if a pool can take it. Raises BadInput with the field."""
    try:
        JobRequest.model_validate(flat(request)).normal()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(wire.escaped(str(part), 60) for part in first["loc"])
        known_as = validation.RENAMED.get(str(first["loc"][-1])) if first["type"] == "extra_forbidden" else None
        reason = known_as or _reason(first) + misspelt(JobRequest, first)
        raise BadInput(field, reason) from None
    return request


def read_lines(source: Iterable[bytes], *, name: str) -> list[Request]:
    """Read the requests in a file of JSON lines; skip blank lines. Raises BadInput with file and line of each."""
    lines = ((number, raw) for number, raw in enumerate(source, start=1) if raw.strip())
    found = check_each(lambda line: _read_line(line[1], f"{name}:{line[0]}"), lines)
    if not found:
        raise BadInput(name, "holds no job")
    return found


def _read_line(raw: bytes, place: str) -> Request:
    document = validation.parse_json(raw.removeprefix(codecs.BOM_UTF8), place)
    if not isinstance(document, dict):
        raise BadInput(place, "is not a JSON object: each line is the request of one job")
    try:
        return check(document)
    except BadInput as refused:
        raise BadInput(place, str(refused)) from None


def line_numbers(source: Iterable[bytes]) -> list[int]:
    """Return the line number of each job in a file."""
    return [number for number, raw in enumerate(source, start=1) if raw.strip()]


def place_in_file(refused: BadInput, numbers: Sequence[int], *, name: str) -> BadInput:
    """Turn the gateway's refusal into one that names file and line instead of the place in the request."""
    if not refused.others:
        return _in_file(refused, numbers, name=name)
    return refused.each(lambda each: _in_file(each, numbers, name=name))


def _in_file(refused: BadInput, numbers: Sequence[int], *, name: str) -> BadInput:
    found = _JOB.match(refused.field)
    if found is None or int(found[1]) >= len(numbers):
        return refused
    field = refused.field[found.end() :]
    where = f"{name}:{numbers[int(found[1])]}"
    return BadInput(where, f"{field}: {refused.reason}" if field else refused.reason)


def pairs(values: Sequence[str], *, option: str) -> dict[str, list[str]]:
    """Parse `KEY=VALUE` options; a key given twice has two values. Raises BadInput."""
    found: dict[str, list[str]] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise BadInput(option, f"'{wire.escaped(value, 80)}' is not KEY=VALUE")
        found.setdefault(key, []).append(text)
    return found


def read_text(source: IO[bytes]) -> str:
    """Read the file for a command's standard input. Raises BadInput if it is not text or too large."""
    raw = source.read(validation.MAX_PAYLOAD_BYTES + 1)
    if len(raw) > validation.MAX_PAYLOAD_BYTES:
        raise BadInput("--stdin-file", f"is longer than {validation.MAX_PAYLOAD_BYTES} bytes")
    try:
        return validation.check_text("--stdin-file", raw.decode(), validation.MAX_PAYLOAD_BYTES)
    except UnicodeDecodeError:
        raise BadInput("--stdin-file", "is not UTF-8 text") from None


def _reason(error: ErrorDetails) -> str:
    return "is missing" if error["type"] == "missing" else plain(error["msg"])


# Options of `submit`, derived from the fields of JobRequest


F = TypeVar("F", bound=Callable[..., Any])

#: The field that is given as arguments, not as an option.
COMMAND = "command"
#: Heading of the options that belong to no group.
OTHERS = "Options"


@dataclass(frozen=True)
class Spelling:
    """The differences of an option from the one that is derived from its field.

    read: makes the field's value from the option's value; raises BadInput. note: is added to the help.
    """

    option: str | None = None
    metavar: str | None = None
    type: "click.ParamType[Any] | None" = None
    multiple: bool = False
    read: Callable[[Any], Any] | None = None
    note: str | None = None


def _variables(given: Iterable[str]) -> dict[str, str]:
    return {name: values[-1] for name, values in pairs([*given], option="--env").items()}


def _properties(given: Iterable[str]) -> dict[str, list[str]]:
    return pairs([*given], option="--property")


def _preferred(given: Iterable[str]) -> dict[str, list[str]]:
    return pairs([*given], option="--prefer")


def amounts(given: Iterable[str]) -> dict[str, int]:
    """Parse the `KIND=AMOUNT` of `--resource`. Raises BadInput, also for a kind that is given twice."""
    found: dict[str, int] = {}
    for value in given:
        kind, _, amount = value.partition("=")
        if not (amount.isascii() and amount.isdigit() and len(amount) <= 15):
            raise BadInput("--resource", f"'{escaped(value, 60)}' is not KIND=AMOUNT, such as cpu_milli=500")
        if kind not in validation.RESOURCES:
            told = f"there is no '{escaped(kind, 60)}': take {', '.join(validation.RESOURCES)}"
            raise BadInput("--resource", told)
        if kind in found:
            raise BadInput("--resource", f"names '{escaped(kind, 60)}' twice")
        found[kind] = int(amount)
    return found


def metadata(given: Iterable[str]) -> dict[str, str]:
    """Parse the `KEY=VALUE` of `--meta`. Raises BadInput, also for a key that is given twice."""
    found = pairs([*given], option="--meta")
    for key, values in found.items():
        if len(values) > 1:
            raise BadInput("--meta", f"names '{escaped(key, 64)}' twice")
    return {key: values[0] for key, values in found.items()}


def retry_policy(given: Iterable[str]) -> dict[str, Any]:
    """Parse the `KEY=VALUE` of `--retry-policy`; names of exceptions and exit codes may be several. Raises BadInput."""
    found: dict[str, Any] = {}
    for key, values in pairs([*given], option="--retry-policy").items():
        try:
            if key == "exception":
                found["exceptions"] = values
            elif key == "exit_code":
                found["exit_codes"] = [int(value) for value in values]
            elif key in _RETRY:
                found[key] = float(values[-1])
            else:
                hint = wire.suggestion(key, (*_RETRY, "exception", "exit_code")) or f": take {RETRY}"
                raise BadInput("--retry-policy", f"there is no '{escaped(key, 60)}'{hint}")
        except ValueError:
            raise BadInput("--retry-policy", f"'{escaped(values[-1], 60)}' is not a number") from None
    return found


_RETRY = ("base", "factor", "cap", "jitter")
RETRY = "base, factor, cap, jitter, exception or exit_code"
#: What a time and a duration of a command may look like.
AT = f"{times.EXAMPLES}; without an offset: of this machine's zone"
IN = "such as 90m or 1h30m; a number alone is seconds"


def _duration(option: str) -> Spelling:
    return Spelling(option, "DURATION", click.STRING, read=partial(times.seconds, option=option), note=IN)


_SPELLINGS: Mapping[str, Spelling] = {
    "env": Spelling(metavar="KEY=VALUE", type=click.STRING, multiple=True, read=_variables),
    "stdin": Spelling("--stdin-file", "FILENAME", click.File("rb"), read=read_text, note="- reads standard input"),
    "properties": Spelling("--property", "KEY=VALUE", click.STRING, multiple=True, read=_properties),
    "preferred_properties": Spelling("--prefer", "KEY=VALUE", click.STRING, multiple=True, read=_preferred),
    "resources": Spelling("--resource", "KIND=AMOUNT", click.STRING, multiple=True, read=amounts),
    "metadata": Spelling("--meta", "KEY=VALUE", click.STRING, multiple=True, read=metadata),
    "locality_hint": Spelling("--locality", "HINT"),
    "timeout_seconds": Spelling("--timeout"),
    "queue_timeout_seconds": Spelling("--queue-timeout"),
    "deadline_seconds": Spelling("--deadline"),
    "locks": Spelling("--lock"),
    "preferred_hours": Spelling("--preferred-hour", "HOUR"),
    "preferred_zone": Spelling(metavar="ZONE"),
    "estimated_cost": Spelling(metavar="COST"),
    "retry": Spelling("--retry-policy", "KEY=VALUE", click.STRING, multiple=True, read=retry_policy, note=RETRY),
    "schedule_after": Spelling("--at", "TIME", click.STRING, read=partial(times.moment, option="--at"), note=AT),
    "delay": _duration("--in"),
    "on_conflict": Spelling(metavar="join|replace|refuse", type=click.Choice(["join", "replace", "refuse"])),
    "unique_for": _duration("--unique-for"),
    "debounce": _duration("--debounce"),
    "debounce_max": _duration("--debounce-max"),
}


class GroupedOption(click.Option):
    """An option that `--help` shows under a heading. Its help is complete, so click adds no range."""

    def __init__(self, *arguments: Any, group: str, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0], self.help or "")


class GroupedCommand(click.Command):
    """A command whose help shows the grouped options first, then the other options under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in (*GROUPS, OTHERS)}
        for each in self.get_params(ctx):
            if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
                sections[each.group if isinstance(each, GroupedOption) else OTHERS].append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _spelling(field: str) -> Spelling:
    return _SPELLINGS.get(field, Spelling())


def option_name(field: str) -> str:
    """Return the option that sets a field of a request."""
    return _spelling(field).option or "--" + field.replace("_", "-")


def parameter(field: str) -> str:
    """Return the parameter in which click passes the option's value."""
    return option_name(field).removeprefix("--").replace("-", "_")


#: The fields that have an option, in the order of the help text.
FIELDS = tuple(field for fields in GROUPS.values() for field in fields if field != COMMAND)


#: Fields whose names are no words of a sentence.
_NAMED = re.compile(rf"\b({'|'.join(field for field in FIELDS if '_' in field)})\b")


def asking(command: F) -> F:
    """Add the options of all fields to a command."""
    for group, fields in reversed([*GROUPS.items()]):
        for field in reversed(fields):
            if field != COMMAND:
                command = _option(field, group)(command)
    return command


def asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the request that are set by options. Raises BadInput."""
    return {
        field: read(value) if (read := _spelling(field).read) else list(value) if isinstance(value, tuple) else value
        for field in FIELDS
        if is_given(value := options[parameter(field)])
    }


def as_option(refused: BadInput) -> BadInput:
    """Return the refusal of a request's field as one of the option that sets it, also of fields that it names."""
    field = _IN_A_LIST.sub("", refused.field)
    if field not in FIELDS:
        return refused
    reason = _NAMED.sub(lambda found: option_name(found[0]), refused.reason)
    return BadInput(option_name(field), reason)


def is_given(value: object) -> bool:
    """Return True if an option with this value was given on the command line."""
    return value not in (None, ())


def _option(field: str, group: str) -> Callable[[F], F]:
    info, spelling = JobRequest.model_fields[field], _spelling(field)
    kind, bounds = _unwrapped(info)
    is_list = get_origin(kind) is list
    if is_list:
        kind, bounds = _unwrapped(get_args(kind)[0])
    values = _range(bounds)
    keywords: dict[str, Any] = {"metavar": spelling.metavar or _metavar(field, kind, bounds)}
    if kind is bool:
        keywords = {"is_flag": True, "default": None}
    elif spelling.type is not None:
        keywords["type"] = spelling.type
    elif kind is int:
        keywords["type"] = click.IntRange(values.low, values.high)
    elif kind is float and field.endswith("_seconds"):
        keywords |= {"type": times.Duration(values.low, values.high, min_open=values.is_open), "metavar": "DURATION"}
        spelling = replace(spelling, note=IN)
    elif kind is float:
        keywords["type"] = click.FloatRange(values.low, values.high, min_open=values.is_open)
    elif kind is not str:
        raise TypeError(f"{__file__}: field '{field}' of a job request needs a Spelling: its type is {kind}")
    is_repeated = is_list or spelling.multiple
    facts = [] if is_repeated or info.default in (None, "", False) else [f"default: {info.default}"]
    facts += [str(values)] if values.high is not None else []
    facts += ["repeatable"] if is_repeated else []
    facts += [spelling.note] if spelling.note else []
    return click.option(
        option_name(field),
        cls=GroupedOption,
        group=group,
        help=f"{info.description} [{'; '.join(facts)}]" if facts else info.description,
        multiple=is_repeated,
        **keywords,
    )


def _unwrapped(annotated: Any) -> tuple[Any, list[Any]]:
    """Return a type without None and annotations, and the constraints on its values."""
    bounds = []
    while True:
        if isinstance(annotated, FieldInfo):
            bounds += annotated.metadata
            annotated = annotated.annotation
        elif hasattr(annotated, "__metadata__"):
            for each in annotated.__metadata__:
                bounds += each.metadata if isinstance(each, FieldInfo) else [each]
            annotated = annotated.__origin__
        elif get_origin(annotated) in (Union, UnionType):
            (annotated,) = (each for each in get_args(annotated) if each is not type(None))
        else:
            return annotated, bounds


@dataclass(frozen=True)
class _Range:
    """The range of a number. With `is_open` the lowest value itself is excluded."""

    low: Any = None
    high: Any = None
    is_open: bool = False

    def __str__(self) -> str:
        high = int(self.high)
        return f"above {self.low:,}, at most {high:,}" if self.is_open else f"{self.low:,} to {high:,}"


def _range(bounds: Iterable[Any]) -> _Range:
    found = _Range()
    for bound in bounds:
        match bound:
            case Gt():
                found = replace(found, low=bound.gt, is_open=True)
            case Ge():
                found = replace(found, low=bound.ge)
            case Le():
                found = replace(found, high=bound.le)
            case _:
                pass  # a length or a pattern
    return found


def _metavar(field: str, kind: type, bounds: Iterable[Any]) -> str:
    if kind is float:
        return "SECONDS" if field.endswith("_seconds") else "NUMBER"
    if kind is int:
        return "N"
    is_name = any(getattr(each, "pattern", None) == f"^{NAME.pattern}$" for each in bounds)
    return "NAME" if is_name else "TEXT"
