"""The connection that a transaction's work gets: it hands statements to the driver, and calls what waits for COMMIT.

Most statements of the pool are `text` with values by name. For these, SQLAlchemy's execution costs as much processor
time as the driver's: of a statement with four columns and three rows 106 microseconds, 52 when the driver is called at
once. So `execute` calls the driver itself, in SQLAlchemy's transaction and with its errors and rows. Statements of any
other kind, and those that somebody listens to, are executed as usual.

The driver is given a statement in the server's own form, with `$1` and so on. Names in it would have to be replaced by
the driver, which remembers the result only for statements of up to 4,096 characters: a pick or a grant is longer.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import psycopg
from psycopg.pq import ExecStatus
from sqlalchemy import Connection, CursorResult, Executable, TextClause, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData
from sqlalchemy.types import NullType

#: SQLAlchemy's dialect of this driver, but with `$1` and so on for values.
_DIALECT = PGDialect_psycopg(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]


class DriverQuery(NamedTuple):
    """A statement as the driver takes it, and the names of its values in their order."""

    text: bytes
    names: tuple[str, ...]


class DriverResult(IteratorResult[Any]):
    """The rows of one statement, all of which are in memory. rowcount: how many rows it returned or changed."""

    rowcount: int


class WorkConnection(Connection):
    """A connection whose `execute` has a short way for `text` with values by name."""

    _waiting: tuple[Callable[[], None], ...] = ()
    #: How many waited when each savepoint was made.
    _begun: Mapping[str, int] = MappingProxyType({})

    def execute(
        self, statement: Executable, parameters: Any = None, *, execution_options: Any = None
    ) -> CursorResult[Any]:
        """Execute the statement, like the method of SQLAlchemy; the result of `text` has the methods of `Result`."""
        query = None
        if isinstance(statement, TextClause) and execution_options is None and isinstance(parameters, Mapping | None):
            query = _query(statement)
        if query is None or self.dispatch.before_cursor_execute or self.dispatch.after_cursor_execute:
            return super().execute(statement, parameters, execution_options=execution_options)
        return cast("CursorResult[Any]", self._execute_by_driver(query, parameters or {}))

    def _execute_by_driver(self, query: DriverQuery, values: Mapping[str, Any]) -> DriverResult:
        transaction = self._transaction
        if transaction is None:
            self._autobegin()
        elif not transaction.is_active:
            self._invalid_transaction()
        cursor: psycopg.Cursor[tuple[Any, ...]] | None = None
        try:
            driver = cast("psycopg.Connection[tuple[Any, ...]]", self.connection.driver_connection)
            cursor = psycopg.RawCursor(driver)
            cursor.execute(query.text, [values[name] for name in query.names])
            found = cursor.pgresult
            assert found is not None
            names = tuple(map(found.fname, range(found.nfields)))
            # A statement without columns has rows all the same, and some are written to be counted only.
            rows = cursor.fetchall() if found.status == ExecStatus.TUPLES_OK else []
        except BaseException as error:
            self._handle_dbapi_exception(error, query.text.decode(), cast(Any, values), cast(Any, cursor), None)
        result = DriverResult(_metadata(names), iter(rows))
        result.rowcount = cursor.rowcount
        return result

    def call_after_commit(self, work: Callable[[], None]) -> None:
        """Call `work` once this transaction has been committed."""
        self._waiting = (*self._waiting, work)

    def _commit_impl(self) -> None:
        super()._commit_impl()
        waiting, self._waiting, self._begun = self._waiting, (), {}
        for work in waiting:
            work()

    def _rollback_impl(self) -> None:
        self._waiting, self._begun = (), {}
        super()._rollback_impl()

    def _savepoint_impl(self, name: str | None = None) -> str:
        name = super()._savepoint_impl(name)
        self._begun = {**self._begun, name: len(self._waiting)}
        return name

    def _rollback_to_savepoint_impl(self, name: str) -> None:
        self._waiting = self._waiting[: self._begun.get(name, 0)]
        super()._rollback_to_savepoint_impl(name)


def on_commit(connection: Connection, work: Callable[[], None]) -> None:
    """Call `work` once the transaction of `connection` has been committed, and never if it or its savepoint is undone.

    For the log: what it tells has then happened, and a transaction that is repeated tells it once. If the answer to
    COMMIT is lost, `work` is not called, and a repeated transaction tells what it finds.
    """
    assert isinstance(connection, WorkConnection)
    connection.call_after_commit(work)


#: How many statements are kept as the driver takes them. Those of lists are put together by request.
KEPT = 2048


@lru_cache(KEPT)
def _query(statement: TextClause) -> DriverQuery | None:
    """Return the statement as the driver takes it; None if one of its values has a type, which SQLAlchemy converts."""
    if any(not isinstance(each.type, NullType) for each in statement._bindparams.values()):
        return None
    return _compiled(statement.text)


@lru_cache(KEPT)
def _compiled(statement: str) -> DriverQuery:
    compiled = text(statement).compile(dialect=_DIALECT)
    return DriverQuery(str(compiled).encode(), tuple(compiled.positiontup or ()))


@lru_cache(KEPT)
def _metadata(names: tuple[bytes | None, ...]) -> SimpleResultMetaData:
    return SimpleResultMetaData([(name or b"").decode() for name in names])
