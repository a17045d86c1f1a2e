"""The commands of operator resources, made from their declarations: list, show, set and rm.

The options of `set` are the fields of the request; its model checks them before anything is sent.
"""

import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin
from urllib.parse import quote

import click
from leasehold.errors import BadInput
from leasehold.wire import MAX_LIST, escaped
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from assigner.cli.errors import usage
from assigner.cli.output import Caller, Calling, Record, reason_option
from assigner.operator_resources.declaration import ALL, SECONDS, Irremovable, Key, Keys, Resource, Setting
from schema.fields import plain
from schema.readable import FIGURES, Column, Group, plural, print_json, table, tell
from schema.validation import read_duration

if TYPE_CHECKING:
    from leasehold.client import Client

#: Longest time, in seconds, that a gateway may take for a change that reprices many waiting jobs.
LONG = 3600.0
#: Value of an option that removes a limit.
NONE = "none"

_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)")


#: A kind and a name in one word, and a rate in one word.
_KIND_AND_NAME = re.compile(r"(label|task|instance|schedule):(.+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|min|h)")


def _pause_apart(args: list[str]) -> list[str]:
    """Take `label:nightly` for `label nightly`."""
    found = _KIND_AND_NAME.fullmatch(args[0]) if args else None
    return args if found is None else [found[1], found[2], *args[1:]]


def _rate_as_option(args: list[str]) -> list[str]:
    """Take `5/s` or `300/min` for `--per-second 5`. Raises BadInput for another word behind the resource."""
    if len(args) < 2 or args[0].startswith("-") or args[1].startswith("-"):
        return args
    found = _RATE.fullmatch(args[1])
    if found is None:
        raise BadInput("RATE", f"'{escaped(args[1], 60)}' is not a rate, such as 5/s, 300/min or 9000/h")
    return [args[0], "--per-second", f"{float(found[1]) / {'s': 1, 'min': 60, 'h': 3600}[found[2]]:.12g}", *args[2:]]


#: Name of a resource → other ways to write the arguments of its commands, and of its `set` alone.
_SPELLINGS: Mapping[str, Callable[[list[str]], list[str]]] = {"pause": _pause_apart}
_SPELLINGS_OF_SET: Mapping[str, Callable[[list[str]], list[str]]] = {"rate": _rate_as_option}

#: Name of a resource → what the help of its `set` says of these.
_SPELT: Mapping[str, str] = {
    "pause": "`leasehold pause set label:nightly` is `label nightly`.",
    "rate": "`leasehold rate set api 5/s` is `--per-second 5`; `300/min` and `9000/h` are understood too.",
}


class Keyed(click.Command):
    """Command on one item, whose arguments may be written in other ways."""

    resource = ""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        spell = _SPELLINGS.get(self.resource)
        return super().parse_args(context, args if spell is None else spell(args))


class Command(Keyed):
    """Command that sets something: takes negative numbers as arguments and refuses other unknown options."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        spell = _SPELLINGS_OF_SET.get(self.resource)
        args = args if spell is None else spell(args)
        context.ignore_unknown_options = any(_NEGATIVE.fullmatch(each) for each in args)
        rest = super().parse_args(context, args)
        for name in (each.name for each in self.params if isinstance(each, click.Argument)):
            given = context.params.get(name or "")
            if isinstance(given, str) and given.startswith("-") and not _NEGATIVE.fullmatch(given):
                raise click.NoSuchOption(given, ctx=context)
        return rest


def group(resource: Resource[Any], calling: Calling) -> click.Group:
    """Make the group of commands of a resource."""
    made = Group(resource.words.rpartition(" ")[2], help=resource.help)
    for command in (
        list_command(resource, calling),
        show_command(resource, calling),
        set_command(resource, calling),
        remove_command(resource, calling),
    ):
        if isinstance(command, Keyed):
            command.resource = resource.name
        made.add_command(command)
    return made


def list_command(resource: Resource[Any], calling: Calling) -> click.Command:
    """Make `list`, which shows all items, or the only item of a resource without keys."""

    def command(caller: Caller, /) -> None:
        with caller.client() as gateway:
            if not resource.keys:
                _print_one(caller, resource, gateway.call("GET", f"/v1{resource.item_path}"))
                return
            found = list(_rows(gateway, resource))
        if caller.json:
            print_json(found)
        else:
            # On a narrow terminal the last columns leave first. What names an item stays.
            stay, number = max(1, len(resource.keys)), len(resource.columns)
            headings = [
                Column(title, max(0, number - nth) if nth >= stay else 0)
                for nth, (title, _) in enumerate(resource.columns)
            ]
            table(headings, [[_cell(row, value) for _, value in resource.columns] for row in found])

    return click.command("list", help=f"List them all. {resource.help}")(calling(command))


def show_command(resource: Resource[Any], calling: Calling) -> click.Command:
    """Make `show`, which shows one item."""

    def command(caller: Caller, /, **options: Any) -> None:
        keys = _keys(resource, options)
        with caller.client() as gateway:
            _print_one(caller, resource, gateway.call("GET", _path(resource, keys)))

    return click.command("show", cls=Keyed, help=f"Show one. {resource.help}")(_keyed(resource, calling(command)))


def set_command(resource: Resource[Any], calling: Calling) -> click.Command:
    """Make `set`, which sets one item."""
    setting = resource.set

    def command(caller: Caller, /, reason: str, create: bool = False, plan: bool = False, **options: Any) -> None:
        keys = _keys(resource, options)
        body = _body(setting, options)
        sent = body.model_dump(mode="json", exclude_unset=True) | ({"reason": reason} if reason else {})
        held = LONG if setting.then is not None else 0.0
        method, path = ("POST", f"{_path(resource, keys)}/effect") if plan else (setting.method, _path(resource, keys))
        with caller.client() as gateway:
            try:
                query = {"create": "true"} if create else None
                if not plan and setting.foreseen and sent.keys() & setting.foreseen:
                    _warn_of_effect(gateway.call("POST", f"{_path(resource, keys)}/effect", query=query, body=sent))
                answer = gateway.call(method, path, query=query, body=sent, held=held)
            except BadInput as refused:
                raise _as_asked(refused, setting) from None
        if plan:
            _print_effect(caller, answer)
            return
        shown = body.model_dump(mode="json", exclude={"reason"}, exclude_unset=setting.partial)
        done = _named(resource, keys) | shown | {key: value for key, value in answer.items() if key != "name"}
        if caller.json:
            print_json(done)
        else:
            click.echo(resource.printed(done) + _repriced(answer))
        for name, told in setting.stops.items():
            if sent.get(name) == 0:
                tell(f"warning: {told}")

    described = _optioned(setting, reason_option(calling(command)))
    if resource.of_instance:
        described = click.option("--create", is_flag=True, help="Make the instance if it is not there.")(described)
    if resource.effect is not None:
        told = "Change nothing; tell what would change for which instance."
        described = click.option("--plan", is_flag=True, help=told)(described)
    told = " ".join(filter(None, (setting.help, _SPELT.get(resource.name))))
    return click.command("set", cls=Command, help=told)(_keyed(resource, described))


def _print_effect(caller: Caller, answer: Record) -> None:
    """Print what a change would do, in the words of the console's preview."""
    if caller.json:
        print_json(answer)
        return
    found = answer["affected"]
    if found:
        rows = [[one["instance"], one["cohort"] or "", FIGURES[one["field"]], *_figures(one)] for one in found]
        table(["instance", "cohort", "what", "now", "then"], rows)
    more = f", and {answer['left_out']:,} figures more" if answer["left_out"] else ""
    number = len({one["instance"] for one in found})
    click.echo(f"{plural(number, 'instance')} would be affected{more}; nothing was changed")
    for one in found:
        if one["field"] == "over" and one["after"]:
            click.echo(f"{one['instance']} would start nothing until {one['after']:g} units are back")


def _warn_of_effect(answer: Record) -> None:
    """Warn of a minimum that the pool could not give now."""
    for one in answer["affected"]:
        if one["field"] == "capacity_gap" and one["after"]:
            tell(
                f"warning: {plural(one['after'], 'unit')} of the minimum of {one['instance']} cannot be given now: "
                f"cohort {one['cohort']} has too few healthy bots for its minimums"
            )


def _figures(one: Record) -> list[str]:
    """Return a figure now and then."""
    form = ".1%" if one["field"] == "share" else ",.15g"
    return ["none" if one[at] is None else f"{one[at]:{form}}" for at in ("before", "after")]


def remove_command(resource: Resource[Any], calling: Calling) -> click.Command:
    """Make `rm`. For an irremovable item the gateway refuses it with the reason."""

    def command(caller: Caller, /, reason: str, **options: Any) -> None:
        keys = _keys(resource, options)
        with caller.client() as gateway:
            gateway.call("DELETE", _path(resource, keys), query={"reason": reason} if reason else None)
        named = _named(resource, keys)
        if caller.json:
            print_json(named | {"removed": True})
        elif not isinstance(resource.remove, Irremovable):
            click.echo(resource.remove.printed.format(**{key: value or "all jobs" for key, value in named.items()}))

    removal = resource.remove
    description = f"Refused: {removal.reason}." if isinstance(removal, Irremovable) else removal.help
    return click.command("rm", cls=Keyed, help=description)(_keyed(resource, reason_option(calling(command))))


def _rows(gateway: "Client", resource: Resource[Any]) -> Iterator[Record]:
    """Read all rows, page by page."""
    last: Record | None = None
    while True:
        after = {"after": str(last[resource.keys[0].name])} if last is not None else {}
        page: list[Record] = gateway.call("GET", f"/v1/{resource.plural}", query=after or None)[resource.field]
        yield from page
        if not resource.paged or len(page) < MAX_LIST:
            return
        last = page[-1]


def _print_one(caller: Caller, resource: Resource[Any], row: Record) -> None:
    if caller.json:
        print_json(row)
    else:
        table(["setting", "value"], [(heading, _cell(row, value)) for heading, value in resource.columns])


def _cell(row: Mapping[str, Any], value: Any) -> object:
    return row[value] if isinstance(value, str) else value(row)


def _repriced(answer: Record) -> str:
    changed = answer.get("repriced")
    return "" if changed is None else f"; {plural(changed, 'waiting job')} changed"


def _keyed(resource: Resource[Any], command: Any) -> Any:
    """Add the arguments and options that name an item."""
    for key in reversed(resource.keys):
        if key.option is not None:
            option = click.option(key.option, key.name, default=key.default, show_default=True, metavar=key.metavar)
            command = option(command)
        else:
            command = click.argument(key.name, metavar=key.metavar, required=key.default is None)(command)
    return command


def _keys(resource: Resource[Any], options: dict[str, Any]) -> list[str]:
    """Take the keys of the item out of the options. Raises BadInput."""
    found = []
    for key in resource.keys:
        value = options.pop(key.name)
        found.append(str(key.default) if value is None else value)
        key.check(key.option or key.name, found[-1])
    return found


def _named(resource: Resource[Any], keys: Keys) -> Record:
    pairs = zip(resource.keys, keys, strict=True)
    return {key.name: None if value == ALL else value for key, value in pairs}


def _path(resource: Resource[Any], keys: Keys) -> str:
    named = {key.name: _quoted(key, value) for key, value in zip(resource.keys, keys, strict=True)}
    return "/v1" + resource.item_path.format(**named)


def _quoted(key: Key, value: str) -> str:
    """Quote a key for a path. Dots are quoted too, because `..` has a meaning in paths."""
    return quote(value, safe="/" if key.slashes else "").replace(".", "%2E")


class _Field:
    """A field of a request as an option or an argument of a command."""

    def __init__(self, name: str, info: FieldInfo, setting: Setting[Any]) -> None:
        self.name, self.info = name, info
        self.option = setting.options.get(name, f"--{name.replace('_', '-')}")
        self.is_argument = name in setting.arguments
        members = _members(info.annotation)
        self.nullable = type(None) in members
        kinds = [each for each in members if each is not type(None)]
        self.is_flag = kinds == [bool]
        self.is_map = get_origin(kinds[0]) is dict
        self.is_list = get_origin(kinds[0]) in (list, tuple)
        extra = info.json_schema_extra
        unit = extra.get("unit") if isinstance(extra, dict) else None
        self.is_duration = unit == SECONDS
        self.shape = "DURATION" if self.is_duration else _metavar(kinds[0])
        self.metavar = name.upper() if self.is_argument else self.shape
        self.asked = f"{name.upper()}" if self.is_argument else self.option

    def add(self, command: Any, *, partial: bool) -> Any:
        """Add the option or argument to a command."""
        if self.is_argument:
            # The option says the same for those who look for one.
            told = f"{_sentence(self.info.description or self.name)} The same as {self.metavar}."
            command = click.option(self.option, f"option_{self.name}", metavar=self.shape, help=told)(command)
            return click.argument(self.name, metavar=f"[{self.metavar}]", required=False)(command)
        default = "" if partial or self.info.is_required() or self.info.default in (None, {}, ()) else self.info.default
        shown = f" [{' '.join(map(str, default)) if isinstance(default, tuple) else default}]" if default != "" else ""
        return click.option(
            self.option,
            self.name,
            required=self.info.is_required() and not partial,
            multiple=self.is_list or self.is_map,
            metavar=self.metavar,
            help=_sentence(self.info.description or self.name, shown),
        )(command)

    def read(self, given: Any) -> Any:
        """Convert the given value for the request model."""
        if self.is_map:
            return self._map(given)
        if self.is_list:
            return list(given)
        if self.nullable and given == NONE:
            return None
        return read_duration(self.asked, given) if self.is_duration else given

    def _map(self, given: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in given:
            name, _, amount = each.partition("=")
            if not (amount.isascii() and amount.isdigit() and len(amount) <= 10):
                raise BadInput(self.asked, f"'{escaped(each, 80)}' is not {self.metavar}")
            if name in found:
                raise BadInput(self.asked, f"names '{escaped(name, 80)}' twice")
            found[name] = int(amount)
        return found


def _sentence(text: str, more: str = "") -> str:
    """Return a description as a sentence of `--help`, where `null` is the word of a request."""
    told = f"{text[:1].upper()}{text[1:].rstrip('.')}{more}."
    return told.replace("null = ", "none = ").replace("unset = ", "none = ")


def _members(annotation: Any) -> list[Any]:
    """Return the types of a field without their annotations."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for one in get_args(annotation) for each in _members(one)]
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    return [annotation]


def _metavar(kind: Any) -> str:
    if get_origin(kind) is dict:
        return "NAME=SLOTS"
    return {int: "N", float: "NUMBER"}.get(kind, "TEXT")


def _fields(setting: Setting[Any]) -> list[_Field]:
    switched = {field for field, _ in setting.switches.values()}
    found = [_Field(name, info, setting) for name, info in setting.model.model_fields.items() if name != "reason"]
    return [each for each in found if not (each.is_flag and each.name in switched)]


def _switch(option: str) -> str:
    return "switch_" + option.removeprefix("--").replace("-", "_")


def _optioned(setting: Setting[Any], command: Any) -> Any:
    """Add the options and arguments of the request."""
    for option, (field, value) in reversed(list(setting.switches.items())):
        description = setting.model.model_fields[field].description or field
        meant = description.partition("false = ")[2] if value is False else ""
        help_text = _sentence(meant or f"No {field.replace('_', ' ')}")
        command = click.option(option, _switch(option), is_flag=True, help=help_text)(command)
    for each in reversed(_fields(setting)):
        command = each.add(command, partial=setting.partial)
    return command


def _either(field: _Field, options: Mapping[str, Any]) -> Any:
    """Return the value of an argument, which may also be given by its option. Raises BadInput and UsageError."""
    values = [value for value in (options[field.name], options[f"option_{field.name}"]) if value is not None]
    if len(values) > 1:
        raise click.UsageError(f"give at most one of: {field.metavar}, {field.option}")
    if not values and field.info.is_required():
        raise BadInput(field.metavar, f"is missing: {usage(click.get_current_context())}")
    return values[0] if values else None


def _body(setting: Setting[Any], options: Mapping[str, Any]) -> BaseModel:
    """Make the request. Raises BadInput with the option, and UsageError for options that contradict each other."""
    fields = _fields(setting)
    options = {**options, **{each.name: _either(each, options) for each in fields if each.is_argument}}
    given = {each.name: each for each in fields if options[each.name] not in (None, ())}
    switched = [option for option in setting.switches if options[_switch(option)]]
    asked = [each.option for each in given.values()] + switched
    if setting.exactly_one and sum(option in setting.exactly_one for option in asked) != 1:
        raise click.UsageError(f"give exactly one of: {', '.join(setting.exactly_one)}")
    for option in switched:
        clash = given.get(setting.switches[option][0])
        if clash is not None:
            raise click.UsageError(f"give at most one of: {clash.option}, {option}")
    if setting.partial and not asked and not setting.may_be_empty:
        every = [each.option for each in fields] + list(setting.switches)
        raise click.UsageError(f"give at least one of: {', '.join(every)}")
    values = {each.name: each.read(options[each.name]) for each in given.values()}
    values = {**setting.preset, **values, **dict(setting.switches[option] for option in switched)}
    return _checked(setting.model, values, fields)


def _as_asked(refused: BadInput, setting: Setting[Any]) -> BadInput:
    """Return the gateway's refusal of a field as one of the option or argument that set it."""
    fields = _fields(setting)
    asked = {each.name: each.asked for each in fields}
    return BadInput(asked.get(refused.field, refused.field), _named_as_options(refused.reason, fields))


def _named_as_options(reason: str, fields: Sequence[_Field]) -> str:
    """Return a reason with the options of the fields that it names, of those whose names are no words."""
    for each in fields:
        if "_" in each.name:
            reason = re.sub(rf"\b{each.name}\b", each.asked, reason)
    return reason


def _checked(model: type[BaseModel], values: Mapping[str, Any], fields: Sequence[_Field]) -> BaseModel:
    try:
        return model.model_validate(values, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = next((each for each in fields if each.name in first["loc"][:1]), None)
        if found is None:
            raise _refusal_of_all(plain(first["msg"]), fields) from None
        raise _refusal(first["type"], first["msg"], first["input"], found) from None


def _refusal_of_all(said: str, fields: Sequence[_Field]) -> BadInput:
    """Turn a refusal of the whole request into an error that names the option or argument with which it begins."""
    name, _, reason = said.partition(": ")
    asked = {each.name: each.asked for each in fields}
    return BadInput(asked[name], reason) if name in asked else BadInput("request", _named_as_options(said, fields))


def _refusal(kind: str, said: str, given: object, field: _Field) -> BadInput:
    """Turn a validation error of the model into an error that names the option or argument."""
    numbers = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
    if kind in numbers:
        wanted = f"neither {numbers[kind]} nor '{NONE}'" if field.nullable else f"not {numbers[kind]}"
        return BadInput(field.asked, f"'{escaped(given, 40)}' is {wanted}")
    if kind == "string_pattern_mismatch":
        return BadInput(field.asked, f"'{escaped(given, 80)}' {plain(said)}")
    return BadInput(field.asked, plain(said).replace("input should", "must", 1))
