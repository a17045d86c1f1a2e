"""The pool of connections of a process, and the conversion of values on each of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import psycopg
from psycopg.abc import DumperKey
from psycopg.adapt import PyFormat
from psycopg.pq import TransactionStatus
from psycopg.types.array import BaseListDumper, ListDumper
from psycopg.types.string import TextLoader
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import TimeoutError
from sqlalchemy.pool import Pool, PoolProxiedConnection, QueuePool

from schema.postgres.session import Session

#: Seconds to wait for a free connection.
LONGEST_WAIT = 10.0
_IDLE = TransactionStatus.IDLE


class NoFreeConnection(psycopg.OperationalError):
    """All connections of the process stayed in use for LONGEST_WAIT."""


class ConnectionPool:
    """Lends connections, the one that came back last first, and makes up to `size` of them by `connect`."""

    def __init__(self, connect: Callable[[], Session], *, size: int) -> None:
        self.size = size
        self._connect = connect
        self._generation = 0
        # Whether a connection is good is known where it comes back, without asking the server.
        make = cast(Callable[[], DBAPIConnection], self._make)
        self._pool: Pool = QueuePool(
            make, pool_size=size, max_overflow=0, timeout=LONGEST_WAIT, use_lifo=True, reset_on_return=None
        )

    @contextmanager
    def lend(self) -> Iterator[Session]:
        """Lend a connection that is in no transaction. One that comes back in a transaction is closed.

        Raises psycopg.Error if none can be made, NoFreeConnection if none is free in time.
        """
        entry, session = self._take()
        try:
            yield session
        finally:
            session.patience = session.usual
            if session.pgconn.transaction_status == _IDLE and session.generation == self._generation:
                entry.close()
            else:
                entry.invalidate()

    def discard_all(self) -> None:
        """Replace every connection before its next use."""
        self._generation += 1

    def close(self) -> None:
        """Close every connection, one that is lent when it comes back. The pool may be used again afterwards."""
        self.discard_all()
        self._pool.dispose()
        self._pool = self._pool.recreate()

    def _take(self) -> tuple[PoolProxiedConnection, Session]:
        while True:
            try:
                entry = self._pool.connect()
            except TimeoutError:
                raise NoFreeConnection(f"no connection of the process was free within {LONGEST_WAIT:g} s") from None
            session = cast(Session, entry.dbapi_connection)
            if session.generation == self._generation and not session.closed:
                return entry, session
            entry.invalidate()  # the next one from this place is new

    def _make(self) -> Session:
        generation = self._generation
        made = self._connect()
        made.generation = generation
        return made


# Conversion of values, where the driver's general way costs more than the statement


class FastListDumper(ListDumper):
    """Dumps a list of integers or of strings as one text, which the statement casts; other lists as usual."""

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:
        return self.cls if _is_fast(obj) else super().get_key(obj, format)

    def upgrade(self, obj: list[Any], format: PyFormat) -> BaseListDumper:
        return self if _is_fast(obj) else super().upgrade(obj, format)

    def dump(self, obj: list[Any]) -> Any:
        if self.sub_dumper is not None or not _is_fast(obj):
            return super().dump(obj)
        if type(obj[0]) is int:
            return b"{%s}" % ",".join(map(str, obj)).encode()
        joined = "\0".join(obj)
        if joined.count("\0") >= len(obj):
            raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        return b'{"%s"}' % joined.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","').encode()


def _is_fast(values: list[Any]) -> bool:
    return set(map(type, values)) in ({int}, {str})


def register_adapters(connection: "psycopg.Connection[Any]") -> None:
    """Dump lists of integers and of strings without inspecting each, and load UUIDs as text."""
    connection.adapters.register_dumper(list, FastListDumper)
    connection.adapters.register_loader("uuid", TextLoader)
