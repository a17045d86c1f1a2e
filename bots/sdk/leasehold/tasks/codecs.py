"""JSON of values that are none, and back, by the annotations of a task: dates, decimals, enumerations, classes.

`codec_of` gives for an annotation what encodes its values, or None if they are JSON already. Decoding takes the same
annotation, so nothing of a class is stored but its values. What is encoded comes back equal and of the same type.
"""

import base64
import collections.abc
import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol
from uuid import UUID

_SCALARS = (str, int, float, bool, type(None))
_LISTS = frozenset(
    {list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection}
    | {collections.abc.Iterable}
)
_SETS = {set: set, frozenset: frozenset, collections.abc.Set: frozenset, collections.abc.MutableSet: set}
_DICTS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})


class Codec(Protocol):
    """Encodes and decodes the values of one annotation."""

    def encode(self, value: Any) -> Any:
        """Return JSON of a value. Raises ValueError, with the reason, for a value of another type."""

    def decode(self, found: Any) -> Any:
        """Return the value of which `encode` made this. Raises ValueError, KeyError or TypeError for anything else."""


def codec_of(annotation: Any) -> Codec | None:
    """Return the codec of an annotation; None if its values are JSON, or if nothing is known of its type."""
    try:
        return _codec_of(annotation)
    except TypeError:  # it cannot be hashed
        return _made(annotation)


def encode(codec: Codec | None, value: Any) -> Any:
    """Return JSON of a value, which is the value itself if its annotation has no codec."""
    return value if codec is None else codec.encode(value)


def decode(codec: Codec | None, found: Any) -> Any:
    """Return the value of which `encode` made this."""
    return found if codec is None else codec.decode(found)


@lru_cache(maxsize=1024)
def _codec_of(annotation: Any) -> Codec | None:
    return _made(annotation)


def _made(annotation: Any) -> Codec | None:
    if isinstance(annotation, typing.NewType):
        return codec_of(annotation.__supertype__)
    if hasattr(annotation, "__value__"):  # `type X = …`
        try:
            return codec_of(annotation.__value__)
        except RecursionError:  # it names itself, as a type of all JSON does
            return None
    origin, args = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is typing.Annotated:
        return codec_of(args[0])
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin in _LISTS:
        item = codec_of(args[0]) if args else None
        return None if item is None else Items(list, item)
    if origin in _SETS:
        return Items(_SETS[origin], codec_of(args[0]) if args else None)
    if origin is tuple:
        return Items(tuple, codec_of(args[0])) if args[1:] == (...,) else Places(args or None)
    if origin in _DICTS:
        return _dictionary(*(args or (Any, Any)))
    return _of_class(origin) if isinstance(origin, type) else None


def _of_class(found: type) -> Codec | None:
    if found in _PLAIN:
        return _PLAIN[found]
    if issubclass(found, enum.Enum):
        return Enumeration(found)
    if hasattr(found, "model_validate_json") and hasattr(found, "model_dump_json"):
        return Model(found)
    if dataclasses.is_dataclass(found):
        return _dataclass(found)
    if issubclass(found, tuple) and hasattr(found, "_fields"):
        return Fields(found, found._fields)
    if typing.is_typeddict(found):
        return Keys(found) if any(map(_has_codec, typing.get_type_hints(found).values())) else None
    return None


def _has_codec(annotation: Any) -> bool:
    try:
        return codec_of(annotation) is not None
    except RecursionError:
        # The type names itself here. Its other parts decide.
        return False


def _dataclass(cls: Any) -> "Fields":
    """Return the codec of a dataclass. One that computes something when it is made may not come back equal."""
    fields = dataclasses.fields(cls)
    # What does not count when two are compared is made anew, such as a lock or a cache.
    set_after = tuple(each.name for each in fields if not each.init and each.compare)
    may_change = bool(set_after) or hasattr(cls, "__post_init__") or not cls.__dataclass_params__.init
    return Fields(cls, tuple(each.name for each in fields if each.init), set_after, may_change)


def _refuse(value: Any, wanted: str) -> ValueError:
    return ValueError(f"is a '{type(value).__name__}', not a '{wanted}'")


@dataclass(frozen=True)
class Plain:
    """Values of one class that a text or a list stands for. An instance of a derived class comes back as one of it."""

    cls: type
    to_json: Callable[[Any], Any]
    of_json: Callable[[Any], Any]

    def encode(self, value: Any) -> Any:
        # A datetime is a date, too, whose time would be lost.
        if not isinstance(value, self.cls) or (self.cls is date and isinstance(value, datetime)):
            raise _refuse(value, self.cls.__name__)
        return self.to_json(value)

    def decode(self, found: Any) -> Any:
        return self.of_json(found)


_PLAIN: dict[type, Plain] = {
    each.cls: each
    for each in (
        Plain(datetime, datetime.isoformat, datetime.fromisoformat),
        Plain(date, date.isoformat, date.fromisoformat),
        Plain(time, time.isoformat, time.fromisoformat),
        Plain(timedelta, lambda it: [it.days, it.seconds, it.microseconds], lambda parts: timedelta(*parts)),
        Plain(UUID, str, UUID),
        Plain(Decimal, str, Decimal),
        Plain(bytes, lambda it: base64.b64encode(it).decode(), lambda text: base64.b64decode(text, validate=True)),
    )
}


@dataclass(frozen=True)
class Enumeration:
    """Members of an enumeration: by their values if these are texts or numbers by its class, else by their names."""

    cls: type[enum.Enum]

    def encode(self, value: Any) -> Any:
        if type(value) is not self.cls:
            raise _refuse(value, self.cls.__name__)
        return value.value if self._by_value else value.name

    def decode(self, found: Any) -> Any:
        return self.cls(found) if self._by_value else self.cls[found]

    @property
    def _by_value(self) -> bool:
        return issubclass(self.cls, str | int | enum.Flag)


@dataclass(frozen=True)
class Model:
    """Models of pydantic, which is not imported here."""

    cls: Any

    def encode(self, value: Any) -> Any:
        # Of a derived class more would be stored than comes back.
        if type(value) is not self.cls:
            raise _refuse(value, self.cls.__name__)
        found = value.model_dump(mode="json", by_alias=True, round_trip=True)
        try:
            again = self.decode(found)
        except ValueError as error:
            told = str(error).partition("\n")[0]
            raise ValueError(f"does not come back from the JSON of '{self.cls.__name__}': {told}") from None
        # A secret is dumped as asterisks, and a field may be left out of what is dumped.
        if again != value:
            raise ValueError(f"does not come back equal from the JSON of '{self.cls.__name__}': a field is kept back")
        return found

    def decode(self, found: Any) -> Any:
        # From text, as a strict model takes a date from a text of JSON alone.
        return self.cls.model_validate_json(json.dumps(found))


#: Stands for a field that is not set.
_MISSING = object()


@dataclass(frozen=True)
class Fields:
    """Instances of a dataclass or of a named tuple: an object of their fields.

    names: the fields with which an instance is made. set_after: those that are set afterwards. may_change: it computes
    when it is made, so that what comes back may be another value.
    """

    cls: type
    names: tuple[str, ...]
    set_after: tuple[str, ...] = ()
    may_change: bool = False

    @cached_property
    def _codecs(self) -> dict[str, Codec | None]:
        # Not before they are used: a class may have itself in a field.
        hints = typing.get_type_hints(self.cls)
        return {name: codec_of(hints.get(name, Any)) for name in (*self.names, *self.set_after)}

    def encode(self, value: Any) -> Any:
        if type(value) is not self.cls:
            raise _refuse(value, self.cls.__name__)
        found = {name: _inside(name, self._codecs[name], getattr(value, name)) for name in self.names}
        return self._checked(found, value) if self.may_change else found

    def _checked(self, found: dict[str, Any], value: Any) -> dict[str, Any]:
        """Return what makes an equal value of these fields. Raises ValueError if nothing does."""
        try:
            again = self.decode(found)
        except Exception as error:
            told = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(f"cannot be made of the fields of '{self.cls.__name__}' alone: {told}") from None
        for name in self.set_after:
            if hasattr(value, name) and getattr(value, name) != getattr(again, name, _MISSING):
                found[name] = _inside(name, self._codecs[name], getattr(value, name))
        for name in self.names:
            if _inside(name, self._codecs[name], getattr(again, name)) != found[name]:
                raise ValueError(f"does not come back equal: '{self.cls.__name__}' changes '{name}' when it is made")
        return found

    def decode(self, found: Any) -> Any:
        if unknown := found.keys() - self._codecs.keys():
            raise ValueError(f"'{self.cls.__name__}' has no field '{min(unknown)}'")
        values = {name: decode(self._codecs[name], each) for name, each in found.items()}
        made = self.cls(**{name: each for name, each in values.items() if name not in self.set_after})
        for name in self.set_after:
            if name in values:
                object.__setattr__(made, name, values[name])  # also of a frozen class
        return made


@dataclass(frozen=True)
class Keys:
    """Dictionaries of a TypedDict."""

    cls: type

    @cached_property
    def _codecs(self) -> dict[str, Codec | None]:
        return {name: codec_of(hint) for name, hint in typing.get_type_hints(self.cls).items()}

    def encode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, self.cls.__name__)
        return {name: _inside(str(name), self._codecs.get(name), each) for name, each in value.items()}

    def decode(self, found: Any) -> Any:
        return {name: decode(self._codecs.get(name), each) for name, each in found.items()}


@dataclass(frozen=True)
class Items:
    """Lists, sets and tuples of values of one annotation."""

    cls: type
    item: Codec | None

    def encode(self, value: Any) -> Any:
        others: dict[type, type] = {list: tuple, frozenset: set}
        if type(value) not in (self.cls, others.get(self.cls)):
            raise _refuse(value, self.cls.__name__)
        encoded = [_inside(str(place), self.item, each) for place, each in enumerate(value)]
        if not issubclass(self.cls, set | frozenset):
            return encoded
        for each in value if self.item is None else ():
            _check_key(each, f"{self.cls.__name__}[…]")
        # Equal sets are one text, by which `unique` knows them.
        return sorted(encoded, key=lambda each: json.dumps(each, sort_keys=True))

    def decode(self, found: Any) -> Any:
        return self.cls([decode(self.item, each) for each in found])


@dataclass(frozen=True)
class Places:
    """Tuples with an annotation for each item. of: None = of any number of plain values."""

    of: tuple[Any, ...] | None

    def encode(self, value: Any) -> Any:
        if type(value) is not tuple:
            raise _refuse(value, "tuple")
        codecs = self._codecs(value)
        return [_inside(str(place), codec, each) for place, (codec, each) in enumerate(zip(codecs, value, strict=True))]

    def decode(self, found: Any) -> Any:
        return tuple(decode(codec, each) for codec, each in zip(self._codecs(found), found, strict=True))

    def _codecs(self, value: Sequence[Any]) -> list[Codec | None]:
        if self.of is None:
            return [None] * len(value)
        if len(self.of) != len(value):
            raise ValueError(f"has {len(value)} items, not {len(self.of)}")
        return [codec_of(each) for each in self.of]


def _dictionary(key: Any, value: Any) -> Codec | None:
    values = codec_of(value)
    if key in (str, Any):
        return None if values is None else Objects(values)
    return Pairs(codec_of(key), values)


@dataclass(frozen=True)
class Objects:
    """Dictionaries whose keys are texts."""

    value: Codec

    def encode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, "dict")
        return {key: _inside(str(key), self.value, each) for key, each in value.items()}

    def decode(self, found: Any) -> Any:
        return {key: self.value.decode(each) for key, each in found.items()}


@dataclass(frozen=True)
class Pairs:
    """Dictionaries with other keys: a list of pairs in their order."""

    key: Codec | None
    value: Codec | None

    def encode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, "dict")
        for key in value if self.key is None else ():
            _check_key(key, "dict[…]")
        pairs = value.items()
        return [[_inside(f"key {key}", self.key, key), _inside(str(key), self.value, each)] for key, each in pairs]

    def decode(self, found: Any) -> Any:
        return {decode(self.key, key): decode(self.value, each) for key, each in found}


def _check_key(value: Any, of: str) -> None:
    """Refuse what would come back as something that cannot be hashed, or as another type."""
    if type(value) not in _SCALARS:
        raise ValueError(f"holds a '{type(value).__name__}', of which the annotation {of} does not tell")


def _union(members: tuple[Any, ...]) -> Codec | None:
    others = tuple(each for each in members if each is not type(None))
    if len(others) == 1:
        (only,) = others
        codec = codec_of(only)
        return None if codec is None else OrNone(codec)
    return OneOf(others) if any(codec_of(each) is not None for each in others) else None


@dataclass(frozen=True)
class OrNone:
    """Values of one annotation, and None."""

    codec: Codec

    def encode(self, value: Any) -> Any:
        return None if value is None else self.codec.encode(value)

    def decode(self, found: Any) -> Any:
        return None if found is None else self.codec.decode(found)


@dataclass(frozen=True)
class OneOf:
    """Values of one of several annotations, with the name of that one; plain JSON without a name."""

    members: tuple[Any, ...]

    @cached_property
    def _codecs(self) -> dict[str, Codec]:
        found = [(each, codec) for each in self.members if (codec := codec_of(each)) is not None]
        names = [getattr(each, "__qualname__", str(each)) if isinstance(each, type) else str(each) for each, _ in found]
        if len(set(names)) < len(names):
            names = [str(each) for each, _ in found]
        return {name: codec for name, (_, codec) in zip(names, found, strict=True)}

    def encode(self, value: Any) -> Any:
        if value is None:
            return None
        for name, codec in self._codecs.items():
            try:
                return {"type": name, "value": codec.encode(value)}
            except ValueError:
                continue
        if any(map(partial(_is_plain, value), self.members)):
            return {"value": value}
        raise _refuse(value, " | ".join(getattr(each, "__name__", str(each)) for each in self.members))

    def decode(self, found: Any) -> Any:
        if found is None:
            return None
        if not isinstance(found, dict):
            raise ValueError("does not tell which type of the union it has")
        return self._codecs[found["type"]].decode(found["value"]) if "type" in found else found["value"]


def _is_plain(value: Any, annotation: Any) -> bool:
    """Return whether the annotation takes this value, which is JSON."""
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal:
        return any(type(each) is type(value) and each == value for each in typing.get_args(annotation))
    return type(value) is origin or (type(value) is int and origin is float)


def _inside(place: str, codec: Codec | None, value: Any) -> Any:
    """Encode a part of a value. Raises ValueError with its place."""
    if codec is None:
        return value
    try:
        return codec.encode(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
