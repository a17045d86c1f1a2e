"""Values that are no JSON, by the annotations of tasks: they come back equal, and what was stored before still does."""

import enum
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NewType, TypedDict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold.errors import BadInput
from leasehold.tasks.arguments import decode_call, decode_result, dedup_key, encode_call, encode_result
from leasehold.tasks.codecs import codec_of
from leasehold.wire import JsonSerialiser
from pydantic import BaseModel, Field, SecretStr

JSON = JsonSerialiser()
DAY = timedelta(hours=23)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
Metres = NewType("Metres", Decimal)


class Colour(enum.StrEnum):
    RED = "red"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Dates(TypedDict, total=False):
    begin: date
    name: str


def combined(inner: "st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]]") -> "st.SearchStrategy[Any]":
    """Annotations that hold others, each with a strategy for its values."""

    def container(found: tuple[Any, st.SearchStrategy[Any]]) -> "st.SearchStrategy[Any]":
        annotation, values = found
        cls: Any = make_dataclass("Made", [("one", annotation), ("rest", list[annotation])])
        return st.sampled_from(
            [
                (list[annotation], st.lists(values, max_size=3)),
                (Sequence[annotation], st.lists(values, max_size=3)),
                (tuple[annotation, ...], st.lists(values, max_size=3).map(tuple)),
                (tuple[int, annotation], st.tuples(st.integers(), values)),
                (dict[str, annotation], st.dictionaries(st.text("ab"), values, max_size=3)),
                (Mapping[date, annotation], st.dictionaries(st.dates(), values, max_size=3)),
                (annotation | None, st.none() | values),
                (int | annotation | Right, st.integers() | values | st.sampled_from(Right)),
                (cls, st.builds(cls, values, st.lists(values, max_size=2))),
            ]
        )

    return inner.flatmap(container)


LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (datetime, st.datetimes(timezones=st.none() | st.builds(timezone, st.timedeltas(-DAY, DAY)))),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas()),
    (UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False)),
    (Metres, st.decimals(allow_nan=False)),
    (bytes, st.binary()),
    (Colour, st.sampled_from(Colour)),
    (Right, st.sampled_from([*Right, Right.READ | Right.WRITE])),
    (set[date], st.sets(st.dates())),
    (frozenset[tuple[int, str]], st.frozensets(st.tuples(st.integers(), st.text("ab")))),
    (dict[int, bytes], st.dictionaries(st.integers(), st.binary())),
    (Dates, st.fixed_dictionaries({}, optional={"begin": st.dates(), "name": st.text("ab")})),
    (str, st.text("ab")),
]
ANNOTATED = st.recursive(st.sampled_from(LEAVES), combined, max_leaves=3).flatmap(
    lambda found: st.tuples(st.just(found[0]), found[1])
)


@given(ANNOTATED)
def test_a_value_comes_back_equal_and_of_its_type(annotated: tuple[Any, Any]) -> None:
    annotation, value = annotated

    def function(first: Any, *rest: Any, **named: Any) -> Any: ...

    function.__annotations__ = dict.fromkeys(("first", "rest", "named", "return"), annotation)
    stdin = encode_call(function, JSON, (value, value), {"other": value})
    assert decode_call(function, JSON, stdin) == ([value, value], {"other": value})
    stored = json.loads(json.dumps(encode_result(function, JSON, value)))
    found = decode_result(function, JSON, stored)
    assert (found, type(found)) == (value, type(value))


def lend(book: str, until: date | None = None, *, pages: list[int] | None = None, to: Colour = Colour.RED) -> set[int]:
    raise NotImplementedError


def test_what_is_json_is_stored_as_it_was_and_what_was_stored_before_is_read_as_it_was() -> None:
    assert encode_call(lend, JSON, ("b", None), {"pages": []}) == '{"args": ["b", null], "kwargs": {"pages": []}}'
    # A text for a date has been a text, and still is.
    old = encode_call(lend, JSON, ("b", "2026-01-02"), {"to": "red"})
    assert json.loads(old) == {"args": ["b", "2026-01-02"], "kwargs": {"to": "red"}}
    assert decode_call(lend, JSON, old) == (["b", "2026-01-02"], {"to": "red"})
    assert decode_result(lend, JSON, {"ok": [1, 2]}) == [1, 2]
    assert json.loads(encode_call(lend, JSON, ("b", date(2026, 1, 2)), {}))["typed"] == [1]


@dataclass
class Late:
    at: datetime


class Later(Late):
    """It has no fields of its own, and would come back as the other one."""


def tell(late: Late, when: "Nowhere", ids: set[Any], both: date | UUID, rows: dict[Any, date]) -> None:  # type: ignore[name-defined] # noqa: F821
    raise NotImplementedError


def note(late: Late, ids: set[Any], both: date | UUID, rows: list[date], plain: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "argument", "value", "reason"),
    [
        (note, "late", Later(NOON), "is a 'Later', not a 'Late'"),
        (note, "late", Late(date.max), "at: is a 'date', not a 'datetime'"),  # type: ignore[arg-type]
        (note, "ids", {(1, 2)}, "holds a 'tuple', of which the annotation set"),
        (note, "both", Decimal(1), r"is a 'Decimal', not a 'date \| UUID'"),
        (note, "rows", [date.max, NOON], "1: is a 'datetime', not a 'date'"),
        (note, "plain", Decimal(1), "a value of type 'Decimal' is not JSON; annotate what takes it"),
        (tell, "when", UUID(int=1), "a value of type 'UUID' is not JSON; .*; its annotation cannot be read: NameError"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_argument(
    function: Any, argument: str, value: Any, reason: str
) -> None:
    others = dict.fromkeys(set(function.__annotations__) - {argument, "return"}, None)
    with pytest.raises(BadInput, match=f"^{argument}: {reason}"):
        encode_call(function, JSON, (), {argument: value, **others})


def test_a_process_with_another_annotation_says_which_argument_it_cannot_read() -> None:
    def before(at: Late) -> None: ...
    def now(at: date) -> None: ...
    def plain(at: Any) -> None: ...

    stdin = encode_call(before, JSON, (Late(NOON),), {})
    for function in (now, plain):
        with pytest.raises(BadInput, match=r"^at: cannot be read by the annotation of this process: "):
            decode_call(function, JSON, stdin)
    codec: Any = codec_of(Late)
    with pytest.raises(ValueError, match="'Late' has no field 'by'"):
        codec.decode({"at": "2026-01-01", "by": 1})


@dataclass
class Price:
    """It computes when it is made."""

    euros: Decimal
    cents: Decimal = field(init=False)
    changed: int = field(init=False, default=0)
    days: list[date] = field(default_factory=list)
    lock: Any = field(init=False, compare=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.cents = 100 * self.euros


@dataclass
class Scaled:
    """It cannot be made again of what it is."""

    amount: int

    def __post_init__(self) -> None:
        self.amount *= 100


@dataclass
class Named:
    """It looks up what it is made of."""

    value: str

    def __post_init__(self) -> None:
        self.value = {"red": "#f00"}[self.value]


@dataclass
class Started:
    """It is made of more than what it keeps."""

    at: date
    shift: InitVar[int]

    def __post_init__(self, shift: int) -> None:
        self.at += timedelta(days=shift)


class Aliased(BaseModel):
    """It is dumped by another name than it is read by."""

    name: str = Field(validation_alias="title")


class Tree(TypedDict):
    """It names itself."""

    below: "list[Tree]"
    at: date


def test_a_class_that_computes_when_it_is_made_comes_back_equal_or_is_refused() -> None:
    def take(price: Price, scaled: Scaled, started: Started, aliased: Aliased, named: Named | None) -> Price: ...

    price = Price(Decimal("1.20"))
    for changed in (0, 5):
        price.changed = changed
        (found, *_), _ = decode_call(take, JSON, encode_call(take, JSON, (price, *[None] * 4), {}))
        assert found == price
    stored = json.loads(encode_call(take, JSON, (Price(Decimal(1)), *[None] * 4), {}))
    assert stored["args"][0] == {"euros": "1", "days": []}, "as it was stored before"
    # As where nothing is computed: a tuple comes back as the list that the annotation names.
    encode_call(take, JSON, (Price(Decimal(1), days=(date.min,)), *[None] * 4), {})  # type: ignore[arg-type]
    refused: list[tuple[str, Any, str]] = [
        ("scaled", Scaled(3), "does not come back equal: 'Scaled' changes 'amount' when it is made"),
        ("started", Started(date.min, 1), "cannot be made of the fields of 'Started' alone: .*'shift'"),
        ("named", Named("red"), "cannot be made of the fields of 'Named' alone: KeyError: '#f00'"),
        ("aliased", Aliased(title="x"), "does not come back from the JSON of 'Aliased': 1 validation error"),
    ]
    for name, value, reason in refused:
        others = dict.fromkeys({"price", "scaled", "started", "aliased", "named"} - {name}, None)
        with pytest.raises(BadInput, match=f"^{name}: {reason}") as told:
            encode_call(take, JSON, (), {name: value, **others})
        assert "\n" not in str(told.value)


def test_types_that_name_themselves_and_unions_with_plain_values_are_read() -> None:
    def take(tree: Tree, mixed: list[float | date], when: Literal["now"] | datetime) -> None: ...

    tree: Tree = {"below": [{"below": [], "at": date.min}], "at": date.max}
    given = [tree, [1, 1.5, date.max], "now"]
    assert decode_call(take, JSON, encode_call(take, JSON, tuple(given), {})) == (given, {})


class Login(BaseModel):
    """A model of which the JSON tells not all."""

    name: str
    password: SecretStr


def test_a_value_whose_json_keeps_something_back_is_refused() -> None:
    def log_in(login: Login) -> None: ...

    with pytest.raises(BadInput, match=r"^login: does not come back equal from the JSON of 'Login'"):
        encode_call(log_in, JSON, (Login(name="ada", password=SecretStr("hunter2")),), {})


@pytest.mark.parametrize(
    ("value", "typed", "field"),
    [
        ("abc", [0], "value"),
        ([1e300, 0, 0], ["wait"], "wait"),
        (1, [7], "stdin"),
        (1, [True], "stdin"),
        (1, [[]], "stdin"),
    ],
)
def test_what_nobody_could_have_encoded_is_refused_by_the_name_of_its_argument(
    value: object, typed: list[object], field: str
) -> None:
    def pay(value: Decimal, wait: timedelta) -> None: ...

    stdin = json.dumps({"args": [value], "kwargs": {"wait": value}, "typed": typed})
    with pytest.raises(BadInput, match=f"^{field}: "):
        decode_call(pay, JSON, stdin)


def test_a_union_says_what_it_cannot_tell() -> None:
    def when(at: date | int) -> None: ...

    with pytest.raises(BadInput, match=r"^at: .*: does not tell which type of the union it has"):
        decode_call(when, JSON, json.dumps({"args": ["2026-01-02"], "kwargs": {}, "typed": [0]}))


_NOTHING = object()


def order(what: str, count: int = 1, clock: Any = _NOTHING, *notes: str, at: int = 0, **more: int) -> None:
    raise NotImplementedError


#: Calls of `order` that are one, in each list.
ORDERS: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [
    [(("a",), {}), (("a", 1), {}), ((), {"what": "a", "at": 0}), (("a",), {"count": 1})],
    [(("a", 2), {}), (("a",), {"count": 2}), ((), {"count": 2, "what": "a", "at": 0})],
    [(("a",), {"at": 3}), (("a", 1), {"at": 3})],
    [(("a",), {"clock": 5}), (("a", 1, 5), {})],
    [(("a", 1, 5, "n"), {}), (("a", 1, 5, "n"), {"at": 0})],
    [(("a",), {"x": 1, "y": 2}), (("a",), {"y": 2, "x": 1, "count": 1})],
]


def test_arguments_are_equal_however_they_are_given() -> None:
    def key(args: tuple[Any, ...], named: dict[str, Any]) -> str:
        return dedup_key("order", True, order, JSON, args, named)

    keys = [{key(*call) for call in calls} for calls in ORDERS]
    assert [len(each) for each in keys] == [1] * len(ORDERS)
    assert len(set[str]().union(*keys)) == len(ORDERS)
