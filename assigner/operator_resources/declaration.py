"""The form of a declaration: what an operator may list, show, set and remove, for a route and a command alike.

A declaration names the functions of `schema` that do it, the model of the request, whose fields become the options of
the command, and the model of a row, whose fields are described in `/openapi.json`. It knows neither HTTP nor click.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from schema import validation
from schema.postgres.engine import Database

#: The unit of a number that is a time; a command takes it as 90, 15m, 12h or 30d.
SECONDS = "seconds"
#: What stands in a path for a key that is not given.
ALL = "*"


class Request(BaseModel):
    """What an operator sends to set something: strict, without unknown fields, with a reason for the audit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class Row(BaseModel):
    """What an operator sees of one thing."""

    model_config = ConfigDict(from_attributes=True)


def given(default: Any = ..., *, unit: str, says: str, **bounds: Any) -> Any:
    """A field of a request or a row that has a unit, which its description in `/openapi.json` names."""
    return Field(default, description=f"{says} ({unit})", json_schema_extra={"unit": unit}, **bounds)


class By(TypedDict):
    """Who does it, and why: the last arguments of every function of `schema` that changes something."""

    actor: str
    reason: str


@dataclass(frozen=True)
class Page:
    """Which rows are wanted: `limit` of them, by name, from the first after `after`. `cooldown`: the seconds for which
    an eviction counts against a quota, as this gateway is configured."""

    after: str
    limit: int
    cooldown: float


@dataclass(frozen=True)
class Key:
    """One part of the name of a thing. On the command line it is the argument `metavar`, or `option` if it has one;
    without a value it is `default`. `slashes`: its value may hold a slash."""

    name: str
    metavar: str
    check: Callable[[str, str], object] = validation.check_name
    option: str | None = None
    default: str | None = None
    slashes: bool = False


Keys = Sequence[str]
#: What a change tells beyond the name of the thing.
Told = Mapping[str, Any] | None
Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item", bound=BaseModel)


@dataclass(frozen=True)
class Setting(Generic[Body]):
    """One way to set a thing.

    says: for people, of the route and of the command.
    apply: does it, in one transaction.
    partial: what is not given stays as it is.
    then: what follows in transactions of its own, a batch each, and tells what it did.
    claims: which names of which kinds it changes, if that is more or less than the thing's own name.
    options: names of options, where they are not those of their fields.
    arguments: fields that are arguments of the command.
    switches: options without a value, each with the field and the value that it stands for.
    exactly_one: options of which the command needs one and takes no second.
    preset: what the command sends unless an option says otherwise.
    may_be_empty: a request that says nothing makes sense although all of it is `partial`.
    """

    says: str
    model: type[Body]
    apply: Callable[[Connection, Keys, Body, By], Told]
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


@dataclass(frozen=True)
class Removal:
    """How a thing is removed. `told`: a sentence for people with the names of the keys in braces."""

    says: str
    apply: Callable[[Connection, Keys, By], None]
    told: str


@dataclass(frozen=True)
class Irremovable:
    """Why a thing cannot be removed: a clause without a full stop."""

    reason: str


#: A heading, and the field that stands under it or a function of the row.
Column = tuple[str, str | Callable[[Mapping[str, Any]], object]]


@dataclass(frozen=True)
class Resource(Generic[Item]):
    """Something that operators set.

    name: of the command; plural: of the route, and in answers. says: the help of the command.
    keys: the parts of a thing's name; without any there is only one thing.
    row, rows: what a thing looks like, and all things, or those of one page if they are `paged`.
    show: one thing; unset = it is looked for among all.
    columns: what the command prints, with units in the headings.
    told: a sentence on what was set, from the keys, the request and the answer.
    older: ways to set it that were there before and that no command uses.
    path: of one thing, if it is not that of all with the keys behind it.
    place: what the configuration file calls it, if it can be declared there.
    answers_as: the name of the only thing in an answer, where there are no keys.
    """

    name: str
    plural: str
    says: str
    keys: Sequence[Key]
    row: type[Item]
    rows: Callable[[Connection, Page], Iterable[Any]]
    columns: Sequence[Column]
    set: Setting[Any]
    told: Callable[[Mapping[str, Any]], str]
    remove: Removal | Irremovable
    show: Callable[[Connection, Keys, Page], Any] | None = None
    older: Sequence[Setting[Any]] = ()
    path: str | None = None
    paged: bool = False
    place: str | None = None
    answers_as: str = ""

    @property
    def item_path(self) -> str:
        """The path of one thing, below `/v1`, with its keys in braces."""
        return self.path or "/".join([f"/{self.plural}", *(f"{{{key.name}}}" for key in self.keys)])

    @property
    def field(self) -> str:
        """What holds the rows in an answer."""
        return self.plural.replace("-", "_")

    def named(self, keys: Keys) -> str:
        """A thing as answers and sentences name it."""
        return "/".join("" if key == ALL else key for key in keys) or self.answers_as

    def claims(self, setting: Setting[Any] | None, keys: Keys, body: Any) -> Mapping[str, Sequence[str]]:
        """Which names of which kinds a change concerns, as the configuration may declare them."""
        if self.place is None:
            return {}
        if setting is not None and setting.claims is not None:
            return setting.claims(keys, body)
        return {self.name: ["/".join(keys)]}
