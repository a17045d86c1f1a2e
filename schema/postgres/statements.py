"""Statements with values by name, and the rows that they return.

A `Statement` is what a module declares: SQL with `:name` for each value. Connections (`schema/postgres/connection.py`)
execute it.
"""

import collections
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")
#: The names are known only when a statement has answered, which a type checker cannot follow.
namedtuple_of: Any = collections.namedtuple

if TYPE_CHECKING:

    class Row(tuple[Any, ...]):
        """A row: a tuple whose values are also attributes, by the names of their columns."""

        def __getattr__(self, name: str) -> Any: ...

        def _asdict(self) -> dict[str, Any]: ...

else:
    Row = tuple

#: A name after one colon. Two colons are a cast, and `\:` stands for a colon.
_NAME = re.compile(r"(?<![:\w\\]):([^\W\d]\w*)")
#: How many statements, and lists of columns, are kept in the form in which they are used.
_KEPT = 2048


class Statement:
    """SQL with `:name` for each value; `\\:` stands for a colon before a name.

    text: as it was written. query: as the server takes it, with `$1` and so on. names: of the values, in that order.
    """

    __slots__ = ("names", "query", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.names, self.query = _numbered(text)

    def __repr__(self) -> str:
        return f"Statement({self.text!r})"


@lru_cache(_KEPT)
def _numbered(text: str) -> tuple[tuple[str, ...], bytes]:
    """The names of a statement in their order, and the statement with numbers in their place."""
    numbers: dict[str, int] = {}
    query = _NAME.sub(lambda found: f"${numbers.setdefault(found[1], len(numbers) + 1)}", text)
    return tuple(numbers), query.replace("\\:", ":").encode()


class Result(Generic[T]):
    """What a statement returned, all of it in memory. rowcount: how many rows it returned or changed."""

    __slots__ = ("_names", "_rows", "rowcount")

    def __init__(self, rows: Sequence[T], rowcount: int, names: Sequence[str] = ()) -> None:
        self._rows, self.rowcount, self._names = rows, rowcount, names

    def __iter__(self) -> Iterator[T]:
        return iter(self._rows)

    def all(self) -> list[T]:
        """All rows."""
        return list(self._rows)

    def first(self) -> T | None:
        """The first row, None if there is no row."""
        return self._rows[0] if self._rows else None

    def one(self) -> T:
        """The only row. Raises ValueError if there is another number of rows."""
        (row,) = self._rows
        return row

    def one_or_none(self) -> T | None:
        """The only row, None if there is none. Raises ValueError if there are several."""
        return self.one() if self._rows else None

    def scalars(self) -> "Result[Any]":
        """The first value of each row."""
        rows: Sequence[Any] = self._rows
        return Result([row[0] for row in rows], self.rowcount)

    def scalar_one(self) -> Any:
        """The first value of the only row. Raises ValueError if there is another number of rows."""
        return self.scalars().one()

    def scalar_one_or_none(self) -> Any:
        """The first value of the only row, None if there is none. Raises ValueError if there are several."""
        return self.scalars().one_or_none()

    def mappings(self) -> "Result[dict[str, Any]]":
        """The rows as dicts, by the names of their columns."""
        rows: Sequence[Any] = self._rows
        return Result([dict(zip(self._names, row, strict=True)) for row in rows], self.rowcount)


@lru_cache(_KEPT)
def row_maker(names: tuple[str, ...]) -> Callable[[Sequence[Any]], Row]:
    """A function that makes a row of values of these columns. A name that Python does not allow becomes its place."""
    # A row has as many values as it has names. `_make` would count them, which takes longer than making the row.
    return partial(tuple.__new__, namedtuple_of("Row", names, rename=True))
