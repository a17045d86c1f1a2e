"""Options that choose jobs: by their ids, or by a filter, whose options are derived from the fields of JobFilter."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

import click
from leasehold.client import Client
from leasehold.errors import BadInput, NotFound
from leasehold.states import JobState
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from bots.cli import times
from bots.cli.caller import whole_ids
from schema.fields import plain
from schema.filters import JobFilter

F = TypeVar("F", bound=Callable[..., Any])

#: Field → its option, where the name of the field is another one.
_NAMES = {"metadata": "--meta", "properties": "--property"}
_METAVARS = {"metadata": "KEY=VALUE", "properties": "KEY=VALUE", "label": "TEXT"}


def option_name(field: str) -> str:
    """Return the option that sets a field of a filter."""
    return _NAMES.get(field) or "--" + field.replace("_", "-")


def _parameter(field: str) -> str:
    return f"filter_{field}"


def _with_zone(_: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Return a time with its offset; it may be written as for `submit --at`. Without a day it is the last one."""
    return None if given is None else times.moment(given, option=option.opts[0], is_past=True)


def _option(field: str, info: FieldInfo) -> Callable[[F], F]:
    values = str(info.annotation)
    keywords: dict[str, Any] = {"metavar": _METAVARS.get(field, "NAME")}
    if field == "state":
        keywords = {"type": click.Choice([state.value for state in JobState]), "metavar": "STATE"}
    elif "int" in values:
        keywords = {"type": click.INT, "metavar": "N"}
    elif datetime.__name__ in values:
        keywords = {"metavar": "TIME", "callback": _with_zone}
    elif info.annotation is bool:
        keywords = {"is_flag": True}
    is_list = values.startswith("list[")
    note = " [repeatable]" if is_list else ""
    if field == "state":
        note = f" [{', '.join(JobState)}; repeatable]"
    return click.option(
        option_name(field), _parameter(field), multiple=is_list, help=f"{info.description}{note}", **keywords
    )


def filter_options(command: F) -> F:
    """Add the options of all fields; the command receives the filter as `where`, with the given fields only."""

    @wraps(command)
    def with_filter(*args: Any, **options: Any) -> Any:
        return command(*args, where=_taken(options), **options)

    found: Any = with_filter
    for field, info in reversed(JobFilter.model_fields.items()):
        found = _option(field, info)(found)
    return found  # type: ignore[no-any-return]


def _taken(options: dict[str, Any]) -> dict[str, Any]:
    """Take the filter out of the options of a command. Raises BadInput that names the option."""
    given = {field: options.pop(_parameter(field)) for field in JobFilter.model_fields}
    return checked({name: value for name, value in given.items() if value not in (None, ()) and value is not False})


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filter in the form in which it is sent. Raises BadInput that names the option."""
    try:
        return JobFilter.model_validate(given).model_dump(mode="json", exclude_defaults=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadInput(option_name(str(first["loc"][0])), plain(first["msg"]).replace("input should", "must")) from None


@dataclass(frozen=True)
class Chosen:
    """Jobs by their ids, whole or in short, each once, or all that pass a filter."""

    ids: Sequence[str]
    where: Mapping[str, Any]

    def jobs(self, client: Client) -> Sequence[str] | Mapping[str, Any]:
        """What a call of the client takes."""
        return self.where or whole_ids(client, self.ids)

    def found(self, client: Client) -> list[str]:
        """Return the ids, or those of all jobs that pass the filter now, the oldest first.

        Raises NotFound if none does.
        """
        if not self.where:
            return whole_ids(client, self.ids)
        try:
            listed = client.list(limit=sys.maxsize, primary="true", **self.where)
        except BadInput as refused:
            if refused.field != "primary":
                raise
            listed = client.list(limit=sys.maxsize, **self.where)  # by a gateway that is older than this command
        if not listed.jobs:
            raise NotFound(f"--all: no job passes the filter {self.filter}")
        return [job["id"] for job in reversed(listed.jobs)]

    @property
    def filter(self) -> str:
        """The filter as it is given to a command."""
        words: list[str] = []
        for field, value in self.where.items():
            for each in value if isinstance(value, list) else [value]:
                words += [option_name(field)] if each is True else [option_name(field), str(each)]
        return shlex.join(words)


def choosing(command: F) -> F:
    """Add the ids, and `--all` with the options of a filter; the command receives them as `chosen`."""

    @click.argument("ids", metavar="[ID]…", nargs=-1)
    @click.option("--all", "every", is_flag=True, help="Every job that passes the filter of the other options.")
    @filter_options
    @wraps(command)
    def with_choice(*args: Any, ids: tuple[str, ...], every: bool, where: Mapping[str, Any], **options: Any) -> Any:
        return command(*args, chosen=_choice(ids, where, every=every), **options)

    return with_choice  # type: ignore[return-value]


def choice_parameters() -> list[click.Parameter]:
    """Make what `choosing` adds to a command, for one that takes it only when it is asked for."""
    return click.command(choosing(lambda: None)).params


def choice(ids: Sequence[str], options: Mapping[str, Any]) -> Chosen:
    """Return the jobs that these ids, or what was given for the rest of `choice_parameters`, choose."""
    return _choice(ids, _taken(dict(options)), every=options["every"])


def _choice(ids: Sequence[str], where: Mapping[str, Any], *, every: bool) -> Chosen:
    if bool(ids) == every or bool(where) != every:
        raise click.UsageError("give either ids, or --all with a filter such as --meta, --label or --instance")
    return Chosen(list(dict.fromkeys(ids)), where)
