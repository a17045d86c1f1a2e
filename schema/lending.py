"""A pool of connections that also lends them as they are, for statements that are shorter than a proxy's life."""

import queue
from collections import deque
from typing import Any, cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import QueuePool
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.pool.base import _ConnectionRecord
from sqlalchemy.util.queue import Empty, Full, QueueCommon

IDLE = TransactionStatus.IDLE


class _Stack(QueueCommon[ConnectionPoolEntry]):
    """The last one in is the first one out. The interpreter's own queue, of tokens, does the waiting."""

    def __init__(self, maxsize: int = 0, use_lifo: bool = True) -> None:
        assert use_lifo
        self.maxsize, self.use_lifo = maxsize, use_lifo
        self._entries: deque[ConnectionPoolEntry] = deque()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def qsize(self) -> int:
        return self._tokens.qsize()

    def put(self, item: ConnectionPoolEntry, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002
        if len(self._entries) >= self.maxsize:
            raise Full
        self._entries.append(item)
        self._tokens.put(None)

    def get(self, block: bool = True, timeout: float | None = None) -> ConnectionPoolEntry:
        try:
            self._tokens.get(block, timeout)
        except queue.Empty:
            raise Empty from None
        return self._entries.pop()


class LendingPool(QueuePool):
    """SQLAlchemy's pool, whose proxies cost a short statement as much again as its driver."""

    _queue_class = _Stack

    def lend(self) -> ConnectionPoolEntry:
        """One that is connected, outside a transaction; to be given back, whatever happens.

        Raises psycopg.Error, or sqlalchemy.exc.TimeoutError as any checkout.
        """
        entry = self._do_get()
        try:
            # Made anew if it was lost, or found to be older than an outage.
            cast(_ConnectionRecord, entry).get_connection()
        except BaseException:
            self._do_return_conn(entry)
            raise
        return entry

    def take_back(self, entry: ConnectionPoolEntry, driver: "psycopg.Connection[Any]") -> None:
        """A connection that is lost, or still in a transaction, is closed; the next borrower gets another instead."""
        if driver.pgconn.transaction_status != IDLE:
            entry.invalidate()
        self._do_return_conn(entry)
