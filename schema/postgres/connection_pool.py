"""The pool of connections, which lends them without proxies, and the conversion of values on each of them."""

from typing import Any, cast

import psycopg
from psycopg.abc import DumperKey
from psycopg.adapt import PyFormat
from psycopg.pq import TransactionStatus
from psycopg.types.array import BaseListDumper, ListDumper
from psycopg.types.string import TextLoader
from sqlalchemy import QueuePool
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.pool.base import _ConnectionRecord

IDLE = TransactionStatus.IDLE


class LendingPool(QueuePool):
    """SQLAlchemy's pool that can also lend connections without a proxy, which doubles a short statement's cost."""

    def lend(self) -> ConnectionPoolEntry:
        """A live connection outside a transaction. The caller must return it with `take_back`, also after an error.

        Raises psycopg.Error, or sqlalchemy.exc.TimeoutError as any checkout does.
        """
        entry = self._do_get()
        try:
            # Connects again if the connection was lost, or was invalidated by an outage.
            cast(_ConnectionRecord, entry).get_connection()
        except BaseException:
            self._do_return_conn(entry)
            raise
        return entry

    def take_back(self, entry: ConnectionPoolEntry, driver: "psycopg.Connection[Any]") -> None:
        """Return a borrowed connection. It is closed and replaced if it was lost or is still in a transaction."""
        if driver.pgconn.transaction_status != IDLE:
            entry.invalidate()
        self._do_return_conn(entry)

    def discard_all(self) -> None:
        """Replace every connection before its next use."""
        self._invalidate(cast(Any, None), _checkin=False)


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
