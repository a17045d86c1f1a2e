"""Values on their way to PostgreSQL and back: whatever a list or a document holds arrives as it is."""

import json
import uuid
from enum import IntEnum
from typing import Any

import pytest
from sqlalchemy import text

from schema import documents
from schema.engine import Database

QUOTED = [
    "",
    " ",
    "it's",
    'say "so"',
    "back\\slash",
    "a,b",
    "{}",
    "{a}",
    "NULL",
    "null",
    "\n\t",
    "\x1e",
    "é中\U0001f600",
]
BIG = 2**63 - 1
DOCUMENTS: list[dict[str, Any]] = [
    {},
    {"reason": 'it\'s "so", \\ and {more}'},
    {"reason": "\x01\x1e\x1f\n\t\x7f"},
    {"\x1e": ["\x1e", "\\u001e", "\\\x1e"]},
    {"é": "中\U0001f600", "rtl": "\u202e"},
    {"deep": {"er": [{"still": [None, True, False, -1, 2**53, 0.5, 1e-9]}]}, "none": None},
    {"NULL": "NULL", "": ""},
]


class Size(IntEnum):
    SMALL = 1


def there_and_back(database: Database, values: Any, kind: str) -> Any:
    """What PostgreSQL makes of the values as an array of that kind."""
    query = text(f"SELECT CAST(:values AS {kind}[]) AS found")
    return database.run(lambda connection: connection.execute(query, {"values": values}).scalar_one())


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("bigint", [1, 2, 3]),
        ("bigint", [0, -1, -BIG - 1, BIG, 2**31, 2**31 - 1, -(2**31) - 1]),
        ("integer", [2**31 - 1, -(2**31)]),
        ("bigint", list(range(10_000))),
        ("bigint", []),
        ("bigint", [None]),
        ("bigint", [1, None, 2**40]),
        ("bigint", [None, -5]),
        ("numeric", [10**30, -(10**30)]),
        ("boolean", [True, False]),
        ("boolean", [None, True]),
        ("double precision", [0.5, -1.5, 1e300]),
        ("double precision", [1.0, None]),
        ("text", QUOTED),
        ("text", [None, "x", None]),
        ("text", []),
        ("bytea", [b"", b"\x00\xff\\\"',{}", None]),
        ("bytea", [None, None]),
        ("bytea", [bytes(range(256))] * 2),
        ("bigint", [[1, 2], [3, BIG]]),
        ("text", [["a,b", '"'], ["\\", ""]]),
    ],
)
def test_a_list_comes_back_as_it_went(database: Database, kind: str, values: list[Any]) -> None:
    assert there_and_back(database, values, kind) == values


@pytest.mark.parametrize(
    ("kind", "values", "found"),
    [
        ("boolean", [1, 0], [True, False]),
        ("double precision", [1, -(2**40)], [1.0, -(2.0**40)]),
        ("text", [1, -2], ["1", "-2"]),
        ("integer", [Size.SMALL, Size.SMALL], [1, 1]),
    ],
)
def test_integers_become_what_the_statement_says(
    database: Database, kind: str, values: list[Any], found: list[Any]
) -> None:
    assert there_and_back(database, values, kind) == found


def test_one_statement_takes_lists_of_all_kinds_one_after_the_other(database: Database) -> None:
    """A connection remembers how it sent a list before."""
    query = text("SELECT CAST(:values AS text[]) AS found")
    with database.engine.connect() as connection:
        for values in ([1, 2], ["a"], [], [None], [3, None], [2**40], [b"x".decode()], [1]):
            found = connection.execute(query, {"values": values}).scalar_one()
            assert found == [None if value is None else str(value) for value in values]


def test_a_number_that_is_too_large_is_refused_and_not_cut(database: Database) -> None:
    with pytest.raises(Exception, match="out of range"):
        there_and_back(database, [BIG + 1], "bigint")


def test_ids_come_as_the_text_that_they_are_shown_as(database: Database) -> None:
    ids = [uuid.UUID(int=5), uuid.uuid4()]
    query = text("SELECT CAST(:one AS uuid) AS one, CAST(:many AS uuid[]) AS many, CAST(NULL AS uuid) AS none")
    for values in (ids, [str(each).upper() for each in ids]):
        row = database.run(lambda c, v=values: c.execute(query, {"one": v[0], "many": v}).one())  # type: ignore[misc]
        assert (row.one, row.many, row.none) == (str(ids[0]), [str(each) for each in ids], None)


def test_a_list_finds_rows_without_a_cast_where_the_column_tells_its_type(database: Database) -> None:
    query = text("SELECT count(*) FROM generate_series(1, 5) n WHERE n = ANY (:ids)")
    assert database.run(lambda c: c.execute(query, {"ids": [2, 4, 9]}).scalar_one()) == 2


@pytest.mark.parametrize("some", [DOCUMENTS, DOCUMENTS[:1], DOCUMENTS * 200], ids=["all", "one", "many"])
def test_documents_arrive_one_by_one_as_they_were(database: Database, some: list[dict[str, Any]]) -> None:
    query = text(f"SELECT d FROM unnest({documents.array('some')}) WITH ORDINALITY AS t (d, nth) ORDER BY nth")
    found = database.run(lambda c: c.execute(query, {"some": documents.joined(iter(some))}).scalars().all())
    assert found == some


def test_no_document_can_pass_for_two(database: Database) -> None:
    query = text(f"SELECT cardinality({documents.array('some')})")
    hostile = [{"a": documents.SEPARATOR}, {documents.SEPARATOR: 1}, {"a": f'"}}{documents.SEPARATOR}{{"'}]
    sent = documents.joined(hostile)
    assert sent.count(documents.SEPARATOR) == len(hostile) - 1
    assert sorted(json.loads(one)["a"] for one in sent.split(documents.SEPARATOR) if '"a"' in one) == sorted(
        document["a"] for document in hostile if "a" in document
    )
    assert database.run(lambda c: c.execute(query, {"some": sent}).scalar_one()) == len(hostile)
