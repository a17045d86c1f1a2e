"""A session of the server, which executes several statements in one round trip and prepares each when it first comes.

A process executes few texts again and again. The driver prepares a statement when it has executed it five times, sends
one after the other, and its cursor costs as much processor time as a short statement. So statements are sent through
libpq, with the driver's conversion of values, and what needs no answer at once travels with the next one.
"""

import math
import select
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from secrets import token_hex
from typing import Any, NamedTuple, TypeAlias

import psycopg
from psycopg import errors, pq
from psycopg.abc import Buffer
from psycopg.adapt import PyFormat, Transformer
from psycopg.types.datetime import TimestamptzLoader

from schema import clock
from schema.postgres.statements import Result, Row, row_maker
from schema.postgres.waits import WatchedConnection

#: The most statements that one session keeps prepared. The next transaction begins without them.
MOST = 300

#: Seconds that a statement may take to end after its caller was interrupted.
CANCELLED_WITHIN = 5.0

_OK = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK})
_SYNC, _TUPLES, _BAD = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.TUPLES_OK, pq.ConnStatus.BAD
_STEP = pq.ExecStatus.COMMAND_OK
#: The session has not prepared a statement, or has lost it; a table has other columns than when it was prepared.
_OUTDATED = frozenset({b"26000", b"0A000"})
#: What is read of times before and after those that Python has, and of the infinite ones. A day within its bounds, so
#: that each of them can be told in any zone.
EARLIEST, LATEST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
#: What a plan depends on: the text of a statement, and the types of its values.
_Key: TypeAlias = tuple[bytes, tuple[int, ...] | None]


class Message(NamedTuple):
    """A statement with values in the form in which they are sent.

    types: of the values, which a plan depends on. once: its text hardly comes again, so it is not prepared.
    """

    text: bytes
    values: Sequence[Any] = ()
    types: tuple[int, ...] | None = None
    formats: Sequence[int] | None = None
    once: bool = False


BEGIN = Message(b"BEGIN ISOLATION LEVEL READ COMMITTED")


class BoundedTimeLoader(TimestamptzLoader):
    """Loads a time that Python does not have as the earliest or the latest one."""

    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else LATEST


class Session(WatchedConnection):
    """A connection in autocommit mode, with the statements that its session has prepared. For one thread at a time.

    is_own: false behind a pooler that may give each transaction another session of the server. Then nothing is
        prepared, and `begins` makes the settings of each transaction.
    begins: the statements that begin a transaction.
    settings: those that make the same settings for a statement that is executed alone.
    began: the monotonic time at which the session began, at the latest; negative infinity if it is not our own.
    generation: of the connections of its pool, all of which are replaced together. returned: when it was last given
    back to the pool, by the monotonic clock.
    """

    is_own = True
    begins: Sequence[Message] = (BEGIN,)
    settings: Sequence[Message] = ()
    began: float = -math.inf
    generation = 0
    returned = 0.0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._transformer = Transformer(self)
        self._names: dict[_Key, bytes] = {}
        # Other sessions have other names: behind a pooler that nobody has named, none is taken for another.
        self._prefix, self._serial = b"leasehold_%b_" % token_hex(4).encode(), 0
        self._is_outdated = False

    def message(self, text: bytes, values: Sequence[Any]) -> Message:
        """The statement with these values. Raises psycopg.Error for a value that cannot be sent."""
        transformer = self._transformer
        sent = transformer.dump_sequence(values, _formats(len(values)))
        return Message(text, sent, transformer.types, transformer.formats)

    def send(self, messages: Sequence[Message]) -> list[pq.abc.PGresult]:
        """Execute the statements, all in one round trip, and return their results. Raises the first error of them.

        Outside of a transaction they are one.
        """
        self.waits_since = clock.monotonic()
        try:
            if len(messages) == 1:
                (message,) = messages
                name = self._names.get((message.text, message.types))
                if name is not None:
                    return [self._checked(self.pgconn.exec_prepared(name, message.values, message.formats))]
            return self._pipelined(messages)
        finally:
            self.waits_since = None

    def execute_script(self, sql: str) -> pq.abc.PGresult:
        """Execute one or several statements without values, and return the result of the last one."""
        with self.waiting():
            return self._checked(self.pgconn.exec_(sql.encode()))

    def read(self, result: pq.abc.PGresult) -> Result[Row]:
        """The rows of a result. A time that Python does not have is the earliest or the latest one."""
        if result.status != _TUPLES:
            return Result((), result.command_tuples or 0)
        names = _names(tuple(map(result.fname, range(result.nfields))))
        count = result.ntuples
        if not count:
            return Result((), 0, names)
        self._transformer.set_pgresult(result)
        try:
            rows = self._transformer.load_rows(0, count, row_maker(names))
        except psycopg.DataError:
            # One such row would keep all that are read with it from being read. The driver's own loader is faster.
            self.adapters.register_loader("timestamptz", BoundedTimeLoader)
            self._transformer = Transformer(self)
            self._transformer.set_pgresult(result)
            rows = self._transformer.load_rows(0, count, row_maker(names))
        return Result(rows, count, names)

    def forget_if_outdated(self) -> None:
        """Drop the prepared statements, outside of a transaction, if they are too many or one was found to be lost."""
        if self.is_own and (self._is_outdated or len(self._names) >= MOST):
            self._names.clear()
            self._is_outdated = False
            with suppress(psycopg.Error), self.waiting():  # if it is lost, its next statement fails
                self.pgconn.exec_(b"DEALLOCATE ALL")

    def _pipelined(self, messages: Sequence[Message]) -> list[pq.abc.PGresult]:
        """Send all, then read the result of each. The server leaves out what follows an error."""
        pgconn = self.pgconn
        is_read = False
        try:
            pgconn.enter_pipeline_mode()
            new: list[tuple[_Key, bytes] | None] = []
            coming = dict[_Key, bytes]()
            for message in messages:
                key = message.text, message.types
                name = self._names.get(key) or coming.get(key)
                if name is None and self.is_own and not message.once and len(self._names) + len(coming) < MOST:
                    name = coming[key] = self._next_name()
                    pgconn.send_prepare(name, message.text, message.types)
                    new.append((key, name))
                if name is None:
                    pgconn.send_query_params(message.text, message.values, message.types, message.formats)
                else:
                    pgconn.send_query_prepared(name, message.values, message.formats)
                new.append(None)
            pgconn.pipeline_sync()
            results = self._results()
            is_read = True
        except (KeyboardInterrupt, SystemExit):
            with suppress(psycopg.Error):
                self.cancel_safe(timeout=CANCELLED_WITHIN)  # otherwise the server goes on
            raise
        finally:
            if is_read:
                pgconn.exit_pipeline_mode()
            else:
                pgconn.finish()  # nobody knows what of it has been executed
        for step, result in zip(new, results, strict=False):
            if step is not None and result.status == _STEP:
                self._names[step[0]] = step[1]
        for result in results:
            self._checked(result)
        return [result for step, result in zip(new, results, strict=True) if step is None]

    def _results(self) -> list[pq.abc.PGresult]:
        """Read until the end of the pipeline. Waits for the socket: `get_result` would wait with Python's lock held."""
        pgconn, results, silent = self.pgconn, list[pq.abc.PGresult](), 0
        while pgconn.flush():
            self._wait(select.POLLIN | select.POLLOUT)
        while True:
            while pgconn.is_busy():
                self._wait(select.POLLIN)
            result = pgconn.get_result()
            if result is None:
                silent += 1
                if silent > 1 or pgconn.status == _BAD:
                    raise psycopg.OperationalError(pgconn.get_error_message())
            elif result.status == _SYNC:
                return results
            else:
                silent = 0
                results.append(result)
                self.waits_since = clock.monotonic()  # each statement has its own time

    def _wait(self, events: int) -> None:
        """Wait until the socket is ready, and take what has arrived."""
        poll = select.poll()
        poll.register(self.pgconn.socket, events)
        poll.poll()
        self.pgconn.consume_input()

    def _checked(self, result: pq.abc.PGresult) -> pq.abc.PGresult:
        """The result, if it is none of an error; otherwise raises that."""
        if result.status in _OK:
            return result
        state = result.error_field(pq.DiagnosticField.SQLSTATE)
        if state is None:
            raise psycopg.OperationalError(self.pgconn.get_error_message())
        if state in _OUTDATED:
            self._is_outdated = True
        raise errors.error_from_result(result)

    def _next_name(self) -> bytes:
        self._serial += 1
        return b"%b%d" % (self._prefix, self._serial)


@lru_cache(64)
def _formats(count: int) -> list[PyFormat]:
    return [PyFormat.AUTO] * count


@lru_cache(2048)
def _names(names: tuple[bytes | None, ...]) -> tuple[str, ...]:
    return tuple((name or b"").decode() for name in names)
