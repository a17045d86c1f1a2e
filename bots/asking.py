"""Options of `submit`, derived from the fields of JobRequest: a new field has an option without a change here.

The name, type, range, default and help of an option come from its field. `_SPELLINGS` holds what a model cannot say.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from bots import requests
from schema.errors import BadInput
from schema.limits import NAME, escaped
from schema.requests import GROUPS, JobRequest

F = TypeVar("F", bound=Callable[..., Any])

#: The field that is given as arguments, not as an option.
COMMAND = "command"
#: Heading of the options that belong to no group.
OTHERS = "Options"


@dataclass(frozen=True)
class Spelling:
    """What differs from the option that a field gets otherwise.

    `read` makes the field's value from the option's; it raises BadInput. `note` is added to the help.
    """

    option: str | None = None
    metavar: str | None = None
    type: "click.ParamType[Any] | None" = None
    multiple: bool = False
    read: Callable[[Any], Any] | None = None
    note: str | None = None


def _variables(given: Iterable[str]) -> dict[str, str]:
    return {name: values[-1] for name, values in requests.pairs([*given], option="--env").items()}


def _properties(given: Iterable[str]) -> dict[str, list[str]]:
    return requests.pairs([*given], option="--property")


def _amounts(given: Iterable[str]) -> dict[str, int]:
    found = {}
    for value in given:
        kind, _, amount = value.partition("=")
        if not (amount.isascii() and amount.isdigit() and len(amount) <= 15):
            raise BadInput("--resource", f"'{escaped(value, 60)}' is not KIND=AMOUNT, such as cpu_milli=500")
        found[kind] = int(amount)
    return found


_SPELLINGS: Mapping[str, Spelling] = {
    "env": Spelling(metavar="KEY=VALUE", type=click.STRING, multiple=True, read=_variables),
    "stdin": Spelling(
        "--stdin-file", "FILENAME", click.File("rb"), read=requests.read_text, note="- reads standard input"
    ),
    "properties": Spelling("--property", "KEY=VALUE", click.STRING, multiple=True, read=_properties),
    "resources": Spelling("--resource", "KIND=AMOUNT", click.STRING, multiple=True, read=_amounts),
    "locality_hint": Spelling("--locality", "HINT"),
    "timeout_seconds": Spelling("--timeout"),
    "queue_timeout_seconds": Spelling("--queue-timeout"),
    "deadline_seconds": Spelling("--deadline"),
    "locks": Spelling("--lock"),
    "preferred_hours": Spelling("--preferred-hour", "HOUR"),
    "preferred_zone": Spelling(metavar="ZONE"),
    "urgency": Spelling(metavar="POINTS"),
    "estimated_cost": Spelling(metavar="COST"),
}


class GroupedOption(click.Option):
    """An option that `--help` shows under a heading; its help text is complete, so click adds no range to it."""

    def __init__(self, *arguments: Any, group: str, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0], self.help or "")


class GroupedCommand(click.Command):
    """A command whose help shows its grouped options first, then the others as "Options"."""

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
    """The option that sets a field of a request."""
    return _spelling(field).option or "--" + field.replace("_", "-")


def parameter(field: str) -> str:
    """The name under which click hands the option's value on."""
    return option_name(field).removeprefix("--").replace("-", "_")


#: The fields that have an option, in the order of the help text.
FIELDS = tuple(field for fields in GROUPS.values() for field in fields if field != COMMAND)


def asking(command: F) -> F:
    """Add the options to a command."""
    for group, fields in reversed([*GROUPS.items()]):
        for field in reversed(fields):
            if field != COMMAND:
                command = _option(field, group)(command)
    return command


def asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the request that the options of the command line give. Raises BadInput."""
    return {
        field: read(value) if (read := _spelling(field).read) else list(value) if isinstance(value, tuple) else value
        for field in FIELDS
        if is_given(value := options[parameter(field)])
    }


def is_given(value: object) -> bool:
    """Whether an option with this value stands on the command line."""
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
    """A type without None, and everything that is known of its values."""
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
    """Values of a number; `is_open` leaves out the lowest one."""

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
    return found


def _metavar(field: str, kind: type, bounds: Iterable[Any]) -> str:
    if kind is float:
        return "SECONDS" if field.endswith("_seconds") else "NUMBER"
    if kind is int:
        return "N"
    is_name = any(getattr(each, "pattern", None) == f"^{NAME.pattern}$" for each in bounds)
    return "NAME" if is_name else "TEXT"
