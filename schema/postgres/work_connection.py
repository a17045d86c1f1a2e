"""The connection that a transaction's work gets: it hands statements to the driver, and calls what waits for COMMIT.

Most statements of the pool are `text` with values by name. For these, SQLAlchemy's execution costs as much processor
time as the driver's: of a statement with four columns and three rows 106 microseconds, 52 when the driver is called at
once. So `execute` calls the driver itself, in SQLAlchemy's transaction and with its errors and rows. Statements of any
other kind, and those that somebody listens to, are executed as usual.

The driver is given a statement in the server's own form, with `$1` and so on. Names in it would have to be replaced by
the driver, which remembers the result only for statements of up to 4,096 characters: a pick or a grant is longer.

In a transaction with kept plans the driver's cursor is left out too, and statements without an answer wait for the next
one, BEGIN among them: what waits travels with it, and the last ones with COMMIT.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import psycopg
from psycopg.pq import ExecStatus
from sqlalchemy import Connection, CursorResult, Executable, TextClause, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData
from sqlalchemy.types import NullType

from schema.postgres.kept_statements import Answer, Message, PreparedStatements, SessionConnection, plain

#: SQLAlchemy's dialect of this driver, but with `$1` and so on for values.
_DIALECT = PGDialect_psycopg(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]


class DriverQuery(NamedTuple):
    """A statement as the driver takes it, and the names of its values in their order."""

    text: bytes
    names: tuple[str, ...]


class DriverResult(IteratorResult[Any]):
    """The rows of one statement, all of which are in memory. rowcount: how many rows it returned or changed."""

    rowcount: int


#: A transaction with kept plans begins with these. They are sent with the first statement that has an answer.
BEGIN_WITH_KEPT_PLANS = (
    plain(b"BEGIN ISOLATION LEVEL READ COMMITTED"),
    plain(b"SET LOCAL plan_cache_mode = force_generic_plan"),
)
COMMIT = plain(b"COMMIT")


class Later:
    """The answer to a statement that waits for the next one. `rows` sends it at once if it still waits."""

    def __init__(self, send: Callable[[], object]) -> None:
        self._send = send
        self.answer: Answer | None = None

    def rows(self) -> Sequence[tuple[Any, ...]]:
        """Return the rows of the statement."""
        if self.answer is None:
            self._send()
        assert self.answer is not None
        return self.answer.rows


class WorkConnection(Connection):
    """A connection whose `execute` has a short way for `text` with values by name."""

    _waiting: tuple[Callable[[], None], ...] = ()
    #: How many waited when each savepoint was made.
    _begun: Mapping[str, int] = MappingProxyType({})
    #: The prepared statements of the session, in a transaction with kept plans.
    _prepared: PreparedStatements | None = None
    #: Statements that are sent with the next one. Each has a `Later` that gets its answer, or None.
    _unsent: Sequence[tuple[Message, Later | None]] = ()

    def begin_with_kept_plans(self) -> None:
        """Let this transaction, which has executed nothing yet, use the plans that the server keeps."""
        driver = self.connection.driver_connection
        assert isinstance(driver, SessionConnection)
        self._prepared = PreparedStatements.of(driver)
        self._unsent = [(each, None) for each in BEGIN_WITH_KEPT_PLANS]

    def execute_later(self, statement: TextClause, values: Mapping[str, Any]) -> Later:
        """As the function of that name."""
        later = Later(self._send)
        query = _query(statement)
        if self._prepared is None or query is None:
            found = self.execute(statement, values)
            has_rows = isinstance(found, DriverResult) or found.returns_rows
            later.answer = Answer((), [tuple(row) for row in found.all()] if has_rows else [], found.rowcount)
        else:
            message = self._message(query, values)
            self._unsent = [*self._unsent, (message, later)]
        return later

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
        if self._prepared is not None:
            answer = self._send(self._message(query, values))
            result = DriverResult(_metadata(answer.names), iter(answer.rows))
            result.rowcount = answer.rowcount
            return result
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

    def _message(self, query: DriverQuery, values: Mapping[str, Any]) -> Message:
        assert self._prepared is not None
        try:
            return self._prepared.message(query.text, [values[name] for name in query.names])
        except BaseException as error:
            self._handle_dbapi_exception(error, query.text.decode(), cast(Any, values), None, None)

    def _send(self, *messages: Message) -> Answer:
        """Execute all that waits, and these statements, in one round trip; return the last answer."""
        assert self._prepared is not None
        unsent, self._unsent = self._unsent, ()
        try:
            answers = self._prepared.execute([*(each for each, _ in unsent), *messages])
        except BaseException as error:
            self._handle_dbapi_exception(error, messages[-1].text.decode() if messages else None, None, None, None)
        for (_, later), answer in zip(unsent, answers, strict=False):
            if later is not None:
                later.answer = answer
        return answers[-1]

    def _execute_context(self, *arguments: Any, **named: Any) -> CursorResult[Any]:
        """Execute a statement in SQLAlchemy's way, after what waits for it."""
        if self._unsent:
            self._send()
        return super()._execute_context(*arguments, **named)

    def call_after_commit(self, work: Callable[[], None]) -> None:
        """Call `work` once this transaction has been committed."""
        self._waiting = (*self._waiting, work)

    def _commit_impl(self) -> None:
        if self._prepared is not None:
            # Where nothing was executed, not even BEGIN was sent.
            if len(self._unsent) == len(BEGIN_WITH_KEPT_PLANS) and self._unsent[0][0] is BEGIN_WITH_KEPT_PLANS[0]:
                self._unsent = ()
            else:
                self._send(COMMIT)
            self._prepared = None
        super()._commit_impl()  # which sends nothing outside of a transaction
        waiting, self._waiting, self._begun = self._waiting, (), {}
        for work in waiting:
            work()

    def _rollback_impl(self) -> None:
        self._waiting, self._begun, self._unsent = (), {}, ()
        self._prepared = None
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


def execute_later(connection: Connection, statement: TextClause, values: Mapping[str, Any]) -> Later:
    """Execute a statement whose answer is not needed at once: before the next one, or with COMMIT.

    An error of it is raised then. In a transaction without kept plans it is executed at once.
    """
    assert isinstance(connection, WorkConnection)
    return connection.execute_later(statement, values)


# Any setting of the transaction may follow its work, as it counts at the commit.
_LAZILY = text("SET LOCAL synchronous_commit = off")


def commit_lazily(connection: Connection) -> None:
    """Let the commit of this transaction not wait for the disk. A server that crashes within a second may lose it.

    The log is flushed in order: whatever a later transaction has seen of this one is not lost if its own commit waits
    for the disk. A transaction that writes nothing does not wait.
    """
    execute_later(connection, _LAZILY, {})


def session_began(connection: Connection) -> float:
    """Return the monotonic time at which the session of this transaction began; negative infinity through a pooler.

    A crash of the server ends all sessions. So what an earlier transaction has seen since then was not lost, although
    some commits do not wait for the disk.
    """
    driver = connection.connection.driver_connection
    return driver.began if isinstance(driver, SessionConnection) else -math.inf


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
