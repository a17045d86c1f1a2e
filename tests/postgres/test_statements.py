"""Names in statements, and the forms in which rows are asked for."""

from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.session import EARLIEST, LATEST, Session
from schema.postgres.statements import Result, Statement


@pytest.mark.parametrize(
    ("text", "query", "names"),
    [
        ("SELECT 1", "SELECT 1", ()),
        ("SELECT :a, :b", "SELECT $1, $2", ("a", "b")),
        ("SELECT :b, :a, :b", "SELECT $1, $2, $1", ("b", "a")),
        ("SELECT :a::int, '{}'::jsonb, 1::text", "SELECT $1::int, '{}'::jsonb, 1::text", ("a",)),
        (r"SELECT 'class\:build', '12\:30', :a", "SELECT 'class:build', '12:30', $1", ("a",)),
        ("SELECT array[1,2][1: 2], 'é', :größe", "SELECT array[1,2][1: 2], 'é', $1", ("größe",)),
    ],
)
def test_names_become_numbers_in_the_order_in_which_they_come(text: str, query: str, names: tuple[str, ...]) -> None:
    statement = Statement(text)
    assert (statement.query.decode(), statement.names, statement.text) == (query, names, text)


def test_rows_have_the_names_of_their_columns_whatever_these_are(database: Database) -> None:
    query = Statement('SELECT 1 AS count, 2 AS "class", 3, 4 AS n, 5 AS n, \'x\' AS "a b" WHERE :all')
    with database.connect() as connection:
        row = connection.execute(query, {"all": True}).one()
        assert (row.count, row.n, tuple(row)) == (1, 4, (1, 2, 3, 4, 5, "x"))
        assert connection.execute(query, {"all": True}).mappings().one()["class"] == 2
        assert connection.execute(query, {"all": False}).mappings().all() == []
        assert connection.execute(query, {"all": False}).first() is None


def test_one_row_is_asked_for_where_there_are_several_or_none() -> None:
    two: Result[tuple[int, ...]] = Result([(1,), (2,)], 2)
    none: Result[tuple[int, ...]] = Result([], 0)
    for ask in (two.one, two.one_or_none, two.scalar_one, two.scalar_one_or_none, none.one, none.scalar_one):
        with pytest.raises(ValueError, match="unpack"):
            ask()
    assert (none.one_or_none(), none.scalar_one_or_none(), two.first(), two.scalars().all()) == (
        None,
        None,
        (1,),
        [1, 2],
    )


def test_the_next_statement_after_a_commit_begins_another_transaction(database: Database) -> None:
    number = Statement("SELECT txid_current(), current_setting('plan_cache_mode')")
    with database.connect(kept_plans=True) as connection:
        first = connection.execute(number).one()
        connection.commit()
        second = connection.execute(number).one()
        connection.rollback()
    assert first[0] < second[0]
    assert (first[1], second[1]) == ("force_generic_plan", "force_generic_plan")


def test_a_commit_after_an_error_that_was_caught_is_an_error(database: Database) -> None:
    """The server would roll back and say nothing."""

    def work(connection: Connection) -> None:
        with pytest.raises(Exception, match="division by zero"):
            connection.execute(Statement("SELECT 1 / 0"))

    with pytest.raises(Exception, match="a statement of the transaction has failed"):
        database.run(work)


def test_a_table_that_was_changed_is_read_with_its_new_columns(pool_with_table: Database) -> None:
    query = Statement("SELECT * FROM changing")
    assert pool_with_table.run(lambda c: c.execute(query).one())._asdict() == {"a": 1}
    pool_with_table.run(lambda c: c.execute_sql("ALTER TABLE changing ADD COLUMN b int DEFAULT 2"), urgent=True)
    assert pool_with_table.run(lambda c: c.execute(query).one())._asdict() == {"a": 1, "b": 2}


@pytest.fixture
def pool_with_table(database: Database) -> Database:
    database.run(lambda c: c.execute_sql("CREATE TABLE changing AS SELECT 1 AS a"))
    return database


def test_a_wait_that_is_interrupted_closes_the_connection(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then what was executed."""

    def interrupted(_session: Session, _events: int) -> None:
        raise KeyboardInterrupt

    with database.connect() as connection:
        monkeypatch.setattr(Session, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.execute(Statement("SELECT pg_sleep(0.2), 'never seen before'"))
        monkeypatch.undo()
        assert connection.session.closed
    with ExitStack() as held:
        for _ in range(database.work.size):
            held.enter_context(database.connect())
    assert database.run(lambda c: c.execute(Statement("SELECT 1")).scalar_one()) == 1


def test_a_time_that_python_does_not_have_is_read_as_the_nearest_that_it_has(database: Database) -> None:
    """One such row would otherwise keep all that are read with it from being read."""
    times = "'-infinity', '4713-01-01 BC', '2026-03-01 12:00', '10000-01-01', 'infinity'"
    with database.connect() as connection:
        found = connection.execute(Statement(f"SELECT unnest(CAST(ARRAY[{times}] AS timestamptz[]))")).scalars().all()
        together = connection.execute(Statement(f"SELECT CAST(ARRAY[{times}] AS timestamptz[])")).scalar_one()
    assert found == together == [EARLIEST, EARLIEST, datetime(2026, 3, 1, 12, tzinfo=UTC), LATEST, LATEST]
