"""The connection that a transaction's work gets: statements, savepoints, and what waits for COMMIT.

BEGIN is sent with the first statement. A statement whose answer is not needed at once (`execute_later`) is sent with
the next one, and the last ones with COMMIT: each round trip that is saved is saved while rows are locked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
from psycopg import pq

from schema.postgres.session import Message, Session
from schema.postgres.statements import Result, Row, Statement

_COMMIT = Message(b"COMMIT")
_GENERIC_PLANS = Message(b"SET LOCAL plan_cache_mode = force_generic_plan")
_SILENTLY = Message(b"SET LOCAL leasehold.wake = off")
# Any setting of the transaction may follow its work, as it counts at the commit.
_LAZILY = Statement("SET LOCAL synchronous_commit = off")
_NOW = Statement("SELECT now()")
_WAIT = Statement("""
SELECT set_config(:before, current_setting('lock_timeout'), true), set_config('lock_timeout', :wait, true)
""")
_WAIT_AS_BEFORE = Statement("SELECT set_config('lock_timeout', current_setting(:before), true)")
_IDLE, _FAILED = pq.TransactionStatus.IDLE, pq.TransactionStatus.INERROR
_NONE: Mapping[str, Any] = {}


class Later:
    """The answer to a statement that waits for the next one. `result` sends it at once if it still waits."""

    def __init__(self, send: Callable[[], object]) -> None:
        self._send = send
        self.answer: Result[Row] | None = None

    def result(self) -> Result[Row]:
        """Return what the statement returned."""
        if self.answer is None:
            self._send()
        assert self.answer is not None
        return self.answer


class Savepoint:
    """A point to which a transaction can be rolled back before it goes on."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo
        self.is_undone = False

    def rollback(self) -> None:
        """Undo what was done since the savepoint was made, which ends it."""
        self.is_undone = True
        self._undo()


class Connection:
    """A connection to the database, for one thread. Its first statement begins a transaction.

    All methods that execute something raise psycopg.Error.
    """

    def __init__(self, session: Session, *, kept_plans: bool = False, silent: bool = False) -> None:
        self.session = session
        session.forget_if_outdated()
        settings = (_GENERIC_PLANS,) * (kept_plans and session.is_own) + (_SILENTLY,) * silent
        self._begin = tuple((message, None) for message in (*session.begins, *settings))
        #: Statements that are sent with the next one. Each has a `Later` that gets its answer, or None.
        self._unsent: Sequence[tuple[Message, Later | None]] = self._begin
        self._waiting: list[Callable[[], None]] = []
        #: Savepoints that were made, and blocks of `waiting_for_locks` that are open.
        self._savepoints = self._lock_waits = 0

    def execute(self, statement: Statement, values: Mapping[str, Any] = _NONE) -> Result[Row]:
        """Execute a statement with these values and return its rows. Raises KeyError for a value that is missing."""
        return self.session.read(self._send(self._message(statement, values)))

    def execute_later(self, statement: Statement, values: Mapping[str, Any] = _NONE) -> Later:
        """Execute a statement whose answer is not needed at once: before the next one, or with COMMIT.

        An error of it is raised then. What the last one returns can be read after the commit: one round trip for both.
        """
        later = Later(self._send)
        self._unsent = [*self._unsent, (self._message(statement, values), later)]
        return later

    def execute_sql(self, sql: str) -> Result[Row]:
        """Execute one or several statements as they are, with colons and all, and return the rows of the last one."""
        if self._unsent:
            self._send()
        return self.session.read(self.session.execute_script(sql))

    def on_commit(self, work: Callable[[], None]) -> None:
        """Call `work` once this transaction has been committed, and never if it or its savepoint is undone.

        For the log: what it tells has then happened, and a transaction that is repeated tells it once. If the answer to
        COMMIT is lost, `work` is not called, and a repeated transaction tells what it finds.
        """
        self._waiting.append(work)

    def now(self) -> datetime:
        """The database's time at the beginning of this transaction."""
        found: datetime = self.execute(_NOW).scalar_one()
        return found

    def allow(self, seconds: float) -> None:
        """Wait up to `seconds` for each statement of this transaction. The caller has told the server the same."""
        self.session.allow(seconds)

    @contextmanager
    def waiting_for_locks(self, seconds: float) -> Iterator[None]:
        """Within the block wait for each lock at most so long, and after it as long as before.

        If the block raises, the caller rolls back the transaction or a savepoint around it, which does the same.
        """
        self._lock_waits += 1
        before = {"before": f"leasehold.lock_timeout_{self._lock_waits}"}
        self.execute_later(_WAIT, {**before, "wait": f"{seconds * 1000:.0f}ms"})
        try:
            yield
        finally:
            self._lock_waits -= 1
        self.execute_later(_WAIT_AS_BEFORE, before)

    @contextmanager
    def savepoint(self) -> Iterator[Savepoint]:
        """Make a savepoint, and roll back to it if the block raises."""
        self._savepoints += 1
        name = b"savepoint_%d" % self._savepoints
        self._send(Message(b"SAVEPOINT " + name))
        begun = len(self._waiting)

        def undo() -> None:
            self._unsent = ()
            del self._waiting[begun:]
            self._send(Message(b"ROLLBACK TO SAVEPOINT " + name))

        made = Savepoint(undo)
        try:
            yield made
            if not made.is_undone:
                self._send(Message(b"RELEASE SAVEPOINT " + name))
        except BaseException:
            if not made.is_undone and not self.session.closed:
                undo()
            raise

    def commit(self) -> None:
        """Commit what was executed, and call what waits for that. The next statement begins another transaction."""
        if self._unsent is not self._begin:  # otherwise nothing was executed, and not even BEGIN was sent
            if self.session.pgconn.transaction_status == _FAILED:
                raise psycopg.errors.InFailedSqlTransaction("a statement of the transaction has failed")
            self._send(_COMMIT)
        waiting = self._end()
        for work in waiting:
            work()

    def rollback(self) -> None:
        """Undo what was executed. The next statement begins another transaction."""
        self._end()
        if self.session.pgconn.transaction_status != _IDLE and not self.session.closed:
            with self.session.waiting():
                self.session.pgconn.exec_(b"ROLLBACK")

    def _end(self) -> Sequence[Callable[[], None]]:
        waiting, self._waiting, self._unsent = self._waiting, [], self._begin
        return waiting

    def _message(self, statement: Statement, values: Mapping[str, Any]) -> Message:
        return self.session.message(statement.query, [values[name] for name in statement.names])

    def _send(self, *messages: Message) -> Any:
        """Execute all that waits, and these statements, in one round trip; return the last result."""
        unsent, self._unsent = self._unsent, ()
        results = self.session.send([*(each for each, _ in unsent), *messages])
        for (_, later), result in zip(unsent, results, strict=False):
            if later is not None:
                later.answer = self.session.read(result)
        return results[-1]


def commit_lazily(connection: Connection) -> None:
    """Let the commit of this transaction not wait for the disk. A server that crashes within a second may lose it.

    The log is flushed in order: whatever a later transaction has seen of this one is not lost if its own commit waits
    for the disk. A transaction that writes nothing does not wait.
    """
    connection.execute_later(_LAZILY)
