"""The pool of connections of a process, and the conversion of values on each of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.abc import DumperKey
from psycopg.adapt import PyFormat
from psycopg.pq import TransactionStatus
from psycopg.types.array import BaseListDumper, ListDumper
from psycopg.types.string import TextLoader

from schema import clock
from schema.clock import Monotonic
from schema.postgres.session import Session

#: Seconds to wait for a free connection.
LONGEST_WAIT = 10.0
#: Seconds after which a connection that was not needed is closed. Otherwise processes keep what a burst of work has
#: taken once, and a server that is full refuses others that need a single one.
LONGEST_IDLE = 20.0
_IDLE = TransactionStatus.IDLE


class NoFreeConnection(psycopg.OperationalError):
    """All connections of the process stayed in use for LONGEST_WAIT."""


class ConnectionPool:
    """Lends connections, the one that came back last first, and makes up to `size` of them by `connect`.

    One that nobody has needed for LONGEST_IDLE is closed when another one comes back.

    SQLAlchemy's pool was tried in its place. It wakes nobody when a connection could not be made, lends a place without
    a connection before a good connection, so that a full server refuses what need not connect, and waits by the wall
    clock. psycopg's makes connections in threads of its own, so that an outage is told late and without its cause.
    """

    def __init__(self, connect: Callable[[], Session], *, size: int, now: Monotonic = clock.monotonic) -> None:
        self.size, self._now = size, now
        #: How many connections there are, lent or not.
        self._open = 0
        self._connect = connect
        self._free: list[Session] = []
        self._generation = 0
        self._changed = threading.Condition(threading.Lock())

    @contextmanager
    def lend(self) -> Iterator[Session]:
        """Lend a connection that is in no transaction. One that comes back in a transaction is closed.

        Raises psycopg.Error if none can be made, NoFreeConnection if none is free in time.
        """
        session = self._take()
        try:
            yield session
        finally:
            session.patience = session.usual
            dropped = self._give_back(session) if session.pgconn.transaction_status == _IDLE else session
            if dropped is not None:
                self._drop(dropped)

    def _give_back(self, session: Session) -> Session | None:
        """Keep a connection for the next use; return the one that came back first, if it has been idle for long."""
        session.returned = self._now()
        with self._changed:
            self._free.append(session)
            self._changed.notify()
            is_idle = self._free[0].returned < session.returned - LONGEST_IDLE
            return self._free.pop(0) if is_idle else None

    def discard_all(self) -> None:
        """Replace every connection before its next use."""
        self._generation += 1

    def close(self) -> None:
        """Close every connection that is not lent. The pool may be used again afterwards."""
        with self._changed:
            free, self._free = self._free, []
        for session in free:
            self._drop(session)

    def _take(self) -> Session:
        while True:
            with self._changed:
                if not self._changed.wait_for(self._may_take, LONGEST_WAIT):
                    raise NoFreeConnection(f"no connection of the process was free within {LONGEST_WAIT:g} s")
                found = self._free.pop() if self._free else None
                if found is None:
                    self._open += 1
            if found is None:
                return self._make()
            if found.generation == self._generation and not found.closed:
                return found
            self._drop(found)

    def _may_take(self) -> bool:
        return bool(self._free) or self._open < self.size

    def _make(self) -> Session:
        generation = self._generation
        try:
            made = self._connect()
        except BaseException:
            self._gone()
            raise
        made.generation = generation
        return made

    def _drop(self, session: Session) -> None:
        session.close()
        self._gone()

    def _gone(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()


# Conversion of values, where the driver's general way does not fit


class FastListDumper(ListDumper):
    """Dumps a list of integers or of strings, or of them and None, as one text, which the statement casts; other lists
    as usual.

    The driver's way names a type that depends on the largest integer. A statement is prepared for the types of its
    values, so it would be prepared once for each combination of them.
    """

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:
        return self.cls if _is_fast(obj) else super().get_key(obj, format)

    def upgrade(self, obj: list[Any], format: PyFormat) -> BaseListDumper:
        return self if _is_fast(obj) else super().upgrade(obj, format)

    def dump(self, obj: list[Any]) -> Any:
        types = {*map(type, obj)}
        if self.sub_dumper is not None or types not in _FAST:
            return super().dump(obj)
        given = obj if len(types) == 1 else [each for each in obj if each is not None]
        if int in types:
            joined = "\0".join(map(str, given))
        else:
            joined = "\0".join(given)
            if joined.count("\0") >= len(given):
                raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
            joined = joined.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '"\0"')
            joined = f'"{joined}"'
        if given is not obj:
            texts = iter(joined.split("\0"))
            joined = "\0".join(["NULL" if each is None else next(texts) for each in obj])
        return b"{%s}" % joined.replace("\0", ",").encode()


#: The types of the elements of lists that are dumped as one text.
_FAST = ({int}, {str}, {int, type(None)}, {str, type(None)})


def _is_fast(values: list[Any]) -> bool:
    return {*map(type, values)} in _FAST


def register_adapters(connection: "psycopg.Connection[Any]") -> None:
    """Dump lists of integers and of strings without inspecting each, and load UUIDs as text."""
    connection.adapters.register_dumper(list, FastListDumper)
    connection.adapters.register_loader("uuid", TextLoader)
