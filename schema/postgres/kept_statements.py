"""Statements of one session that are prepared when they are first executed, several of them in one round trip.

The driver prepares a statement when it has executed it five times, sends one after the other, and its cursor costs as
much processor time as a short statement. Transactions with kept plans execute few texts again and again. These are
sent through libpq as soon as they are known, and what needs no answer at once travels with the next one.
"""

import math
import select
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import psycopg
from psycopg import errors, pq
from psycopg.adapt import PyFormat, Transformer

from schema import clock
from schema.postgres.waits import WatchedConnection

#: The most statements that one session keeps prepared. The next transaction begins without them.
MOST = 300

_OK = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK})
_SYNC, _TUPLES, _BAD = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.TUPLES_OK, pq.ConnStatus.BAD
_STEP = pq.ExecStatus.COMMAND_OK
#: The SQLSTATE of a statement that the session has not prepared, or has lost.
_LOST = b"26000"


class SessionConnection(WatchedConnection):
    """A connection that is a session of the server, with the statements that it has prepared.

    began: the monotonic time at which the session began, at the latest.
    """

    statements: "PreparedStatements | None" = None
    began: float = -math.inf

    def rollback(self) -> None:
        """Roll back like the driver, which drops all prepared statements of the session if there was a transaction."""
        began = self.info.transaction_status is not pq.TransactionStatus.IDLE
        super().rollback()
        if began and self.statements is not None:
            self.statements.forget()


class Message(NamedTuple):
    """A statement with values in the form in which they are sent. `types`: their types, which a plan depends on."""

    text: bytes
    values: Sequence[Any]
    types: tuple[int, ...]
    formats: Sequence[int]


class Answer(NamedTuple):
    """The rows of a statement, the names of their columns, and how many it returned or changed."""

    names: tuple[bytes | None, ...]
    rows: list[tuple[Any, ...]]
    rowcount: int


def plain(text: bytes) -> Message:
    """A statement without values."""
    return Message(text, (), (), ())


class PreparedStatements:
    """The statements that one session has prepared. For one thread at a time."""

    def __init__(self, driver: SessionConnection) -> None:
        self._driver = driver
        self._transformer = Transformer(driver)
        self._names: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._serial = 0

    @classmethod
    def of(cls, driver: SessionConnection) -> "PreparedStatements":
        """Those of this session, which is in no transaction. If they are too many, they are prepared anew."""
        if driver.statements is None:
            driver.statements = cls(driver)
        elif len(driver.statements._names) >= MOST:
            driver.statements._drop()
        return driver.statements

    def message(self, text: bytes, values: Sequence[Any]) -> Message:
        """The statement with these values. Raises psycopg.Error for a value that cannot be sent."""
        transformer = self._transformer
        sent = transformer.dump_sequence(values, _formats(len(values)))
        return Message(text, sent, transformer.types or (), transformer.formats or ())

    def execute(self, messages: Sequence[Message]) -> list[Answer]:
        """Execute the statements, all in one round trip, and return their answers. Raises the first error of them."""
        driver = self._driver
        driver.waits_since = clock.monotonic()
        try:
            return self._execute(messages)
        finally:
            driver.waits_since = None

    def _execute(self, messages: Sequence[Message]) -> list[Answer]:
        if len(messages) == 1:
            (message,) = messages
            name = self._names.get((message.text, message.types))
            if name is not None:
                return [self._read(self._driver.pgconn.exec_prepared(name, message.values, message.formats))]
        return [self._read(result) for result in self._pipelined(messages)]

    def forget(self) -> None:
        """Drop all statements of the session after a rollback: what they were prepared for may be gone.

        The driver has forgotten its own ones.
        """
        if self._names:
            self._names.clear()
            with suppress(psycopg.Error), self._driver.waiting():  # if it is lost, its next statement fails
                self._driver.pgconn.exec_(b"DEALLOCATE ALL")

    def _drop(self) -> None:
        """Drop these statements, and not those that the driver has prepared."""
        dropped = b";".join(b"DEALLOCATE %b" % name for name in self._names.values())
        self._names.clear()
        with suppress(psycopg.Error), self._driver.waiting():  # as above
            self._driver.pgconn.exec_(dropped)

    def _pipelined(self, messages: Sequence[Message]) -> list[pq.abc.PGresult]:
        """Send all, then read the result of each. The server leaves out what follows an error."""
        pgconn = self._driver.pgconn
        pgconn.enter_pipeline_mode()
        is_read = False
        try:
            new: list[tuple[tuple[bytes, tuple[int, ...]], bytes] | None] = []
            coming = dict[tuple[bytes, tuple[int, ...]], bytes]()
            for message in messages:
                key = message.text, message.types
                name = self._names.get(key) or coming.get(key)
                if name is None and len(self._names) + len(coming) < MOST:
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
        finally:
            if is_read:
                pgconn.exit_pipeline_mode()
            else:
                pgconn.finish()  # nobody knows what of it has been executed
        for step, result in zip(new, results, strict=False):
            if step is not None and result.status == _STEP:
                self._names[step[0]] = step[1]
        for result in results:
            if result.status not in _OK:
                raise self._error(result)
        return [result for step, result in zip(new, results, strict=True) if step is None]

    def _results(self) -> list[pq.abc.PGresult]:
        """Read until the end of the pipeline. Waits for the socket: `get_result` would wait with Python's lock held."""
        pgconn, results, silent = self._driver.pgconn, list[pq.abc.PGresult](), 0
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

    def _wait(self, events: int) -> None:
        """Wait until the socket is ready, and take what has arrived."""
        poll = select.poll()
        poll.register(self._driver.pgconn.socket, events)
        poll.poll()
        self._driver.pgconn.consume_input()

    def _read(self, result: pq.abc.PGresult) -> Answer:
        status = result.status
        if status not in _OK:
            raise self._error(result)
        if status != _TUPLES:
            return Answer((), [], result.command_tuples or 0)
        names = tuple(map(result.fname, range(result.nfields)))
        count = result.ntuples
        if not count:
            return Answer(names, [], 0)
        self._transformer.set_pgresult(result)
        return Answer(names, self._transformer.load_rows(0, count, tuple), count)

    def _error(self, result: pq.abc.PGresult) -> psycopg.Error:
        state = result.error_field(pq.DiagnosticField.SQLSTATE)
        if state is None:
            return psycopg.OperationalError(self._driver.pgconn.get_error_message())
        if state == _LOST:
            self._names.clear()
        return errors.error_from_result(result)

    def _next_name(self) -> bytes:
        self._serial += 1
        return b"kept_%d" % self._serial


@lru_cache(64)
def _formats(count: int) -> list[PyFormat]:
    return [PyFormat.AUTO] * count
