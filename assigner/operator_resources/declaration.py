"""The form of a declaration: how operators list, show, set and remove a resource, by HTTP and by command.

A declaration names three things. The functions of `schema` do the work. The fields of the request model become options
of the command. The fields of the row model are described in `/openapi.json`. A declaration knows neither HTTP nor
click.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from schema import validation
from schema.accounting.quotas import Cooldown
from schema.postgres.connection import Connection
from schema.postgres.engine import Database

#: The unit of a span of time. A command takes such a value as 90, 15m, 12h or 30d.
SECONDS = "seconds"
#: Stands in a path for a key without a value.
ALL = "*"


class Request(BaseModel):
    """Base of requests that set something: strict types, no unknown fields, and a reason for the audit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class Row(BaseModel):
    """Base of the rows that operators see."""

    model_config = ConfigDict(from_attributes=True)


def given(default: Any = ..., *, unit: str, help: str, **bounds: Any) -> Any:
    """Declare a field with a unit, which its description in `/openapi.json` names."""
    return Field(default, description=f"{help} ({unit})", json_schema_extra={"unit": unit}, **bounds)


class By(TypedDict):
    """The actor and the reason of a change: the last arguments of each function of `schema` that makes one."""

    actor: str
    reason: str


@dataclass(frozen=True)
class Page:
    """Which rows a list returns, sorted by name.

    after: names up to this one are left out.
    limit: most rows to return.
    cooldown: what evictions do to maximums, as this gateway is configured.
    """

    after: str
    limit: int
    cooldown: Cooldown


@dataclass(frozen=True)
class Key:
    """One part of an item's name.

    metavar: name of the argument on the command line.
    option: the option that takes the value instead of an argument.
    default: the value if none is given.
    slashes: True if the value may hold a slash.
    instance: True if it names an instance, which has to be there before anything is set for it.
    """

    name: str
    metavar: str
    check: Callable[[str, str], object] = validation.check_name
    option: str | None = None
    default: str | None = None
    slashes: bool = False
    instance: bool = False


def check_scope(field: str, value: str) -> None:
    """Raise BadInput if the value of a key is neither a name nor `*`, which stands for all of them."""
    if value != ALL:
        validation.check_name(field, value)


def one_of(value: str) -> str | None:
    """Return the value of a key, None if it stands for all of them."""
    return None if value == ALL else value


Keys = Sequence[str]
#: Fields that the answer to a change holds beside the item's name.
Fields = Mapping[str, Any] | None
Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item", bound=BaseModel)


@dataclass(frozen=True)
class Setting(Generic[Body]):
    """One way to set an item.

    help: description of the route and of the command.
    apply_all: changes items, each named once, in one transaction and in a number of statements that does not grow with
        theirs; returns further fields of each answer, or None if there are none.
    apply: changes one item, where there is no `apply_all`; returns further fields of the answer.
    partial: fields that are not given keep their values.
    then: work that follows in transactions of its own, a batch each; returns further fields of the answer.
    claims: the declared names that the change concerns, by kind, if they are not just the item's own name.
    options: names of options that differ from the names of their fields.
    arguments: fields that are arguments of the command.
    switches: options without a value; each stands for a field with a value.
    exactly_one: options of which the command takes exactly one.
    preset: values that the command sends unless an option changes them.
    may_be_empty: True if a `partial` request without any field is valid.
    stops: what the command warns of if it sets a field to 0, because that stops jobs, by field.
    foreseen: fields for which the command asks for the effect first, to warn of a minimum that could not be had.
    """

    help: str
    model: type[Body]
    apply_all: Callable[[Connection, Sequence[tuple[Keys, Body]], By], Sequence[Fields] | None] | None = None
    apply: Callable[[Connection, Keys, Body, By], Fields] | None = None
    method: str = "PUT"
    partial: bool = False
    then: Callable[[Database, str], Mapping[str, Any]] | None = None
    claims: Callable[[Keys, Body], Mapping[str, Sequence[str]]] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    switches: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    exactly_one: Sequence[str] = ()
    preset: Mapping[str, Any] = field(default_factory=dict)
    may_be_empty: bool = False
    stops: Mapping[str, str] = field(default_factory=dict)
    foreseen: frozenset[str] = frozenset()

    def put(self, connection: Connection, wanted: Sequence[tuple[Keys, Body]], by: By) -> Sequence[Fields]:
        """Change these items, each named once; return further fields of each answer."""
        if self.apply_all is not None:
            return self.apply_all(connection, wanted, by) or [None] * len(wanted)
        assert self.apply is not None
        return [self.apply(connection, keys, body, by) for keys, body in wanted]


@dataclass(frozen=True)
class Removal:
    """How an item is removed. `printed`: the sentence that the command prints, with the names of keys in braces.
    `apply_all`, `apply`: as of `Setting`."""

    help: str
    printed: str
    apply_all: Callable[[Connection, Sequence[Keys], By], None] | None = None
    apply: Callable[[Connection, Keys, By], None] | None = None

    def remove(self, connection: Connection, names: Sequence[Keys], by: By) -> None:
        """Remove these items, each named once."""
        if self.apply_all is not None:
            self.apply_all(connection, names, by)
            return
        assert self.apply is not None
        for keys in names:
            self.apply(connection, keys, by)


@dataclass(frozen=True)
class Irremovable:
    """Why an item cannot be removed: a clause without a full stop."""

    reason: str


#: A heading, and the field shown below it or a function of the row.
Column = tuple[str, str | Callable[[Mapping[str, Any]], object]]


@dataclass(frozen=True)
class Resource(Generic[Item]):
    """A kind of item that operators set.

    name: what it is called in errors and in the audit, and the name of the command unless `command` is another one.
    plural: name in the route and in answers.
    help: help of the command.
    keys: the parts of an item's name; none = there is exactly one item.
    row: model of an item.
    rows: reads all items, or one page of them if they are `paged`.
    show: reads one item; None = it is searched among all.
    columns: the table that the command prints, with units in the headings.
    printed: makes the sentence that `set` prints, from the keys, the request and the answer.
    older: earlier ways to set an item, kept as routes; no command uses them.
    path: path of one item, if it is not the path of all items followed by the keys.
    section: section of the configuration file that can declare items; None = none.
    command: the words of the command, such as `limit class`; empty = there is none, because another resource's command
        sets the same.
    answers_as: name of the only item in an answer, where there are no keys.
    effect: makes a change, given as a function, in a savepoint that it rolls back, and returns what the change would do
        to whom; None = no route tells that.
    """

    name: str
    plural: str
    help: str
    keys: Sequence[Key]
    row: type[Item]
    rows: Callable[[Connection, Page], Iterable[Any]]
    columns: Sequence[Column]
    set: Setting[Any]
    printed: Callable[[Mapping[str, Any]], str]
    remove: Removal | Irremovable
    show: Callable[[Connection, Keys, Page], Any] | None = None
    older: Sequence[Setting[Any]] = ()
    path: str | None = None
    paged: bool = False
    section: str | None = None
    command: str | None = None
    answers_as: str = ""
    effect: Callable[[Connection, Page, Callable[[], object]], Sequence[Any]] | None = None

    @property
    def words(self) -> str:
        """The words of the command."""
        return self.name if self.command is None else self.command

    @property
    def of_instance(self) -> bool:
        """True if an item's name has that of an instance in it."""
        return any(key.instance for key in self.keys)

    @property
    def item_path(self) -> str:
        """The path of one item, below `/v1`, with its keys in braces."""
        return self.path or "/".join([f"/{self.plural}", *(f"{{{key.name}}}" for key in self.keys)])

    @property
    def field(self) -> str:
        """The field of an answer that holds the rows."""
        return self.plural.replace("-", "_")

    def named(self, keys: Keys) -> str:
        """Return the item's name for answers and sentences."""
        return "/".join("" if key == ALL else key for key in keys) or self.answers_as

    def claims(self, setting: Setting[Any] | None, keys: Keys, body: Any) -> Mapping[str, Sequence[str]]:
        """Return the names, by kind, that a change concerns and that the configuration may declare."""
        if self.section is None:
            return {}
        if setting is not None and setting.claims is not None:
            return setting.claims(keys, body)
        return {self.name: ["/".join(keys)]}
