"""A pool of connections that also lends them as they are, for statements that are shorter than a proxy's life."""

from typing import Any, cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy.pool import QueuePool
from sqlalchemy.pool.base import _ConnectionRecord


class Loan:
    """One connection until it is given back; whoever borrowed it must give it back, whatever happens."""

    __slots__ = ("_entry", "_pool", "driver")

    def __init__(self, pool: "LendingPool", entry: _ConnectionRecord, driver: "psycopg.Connection[Any]") -> None:
        self._pool, self._entry, self.driver = pool, entry, driver

    def give_back(self) -> None:
        """One that is lost, or still in a transaction, is closed; the next borrower gets a new one in its place."""
        if self.driver.pgconn.transaction_status != TransactionStatus.IDLE:
            self._entry.invalidate()
        self._pool.take_back(self._entry)


class LendingPool(QueuePool):
    """SQLAlchemy's pool, whose proxies cost a short statement as much again as its driver."""

    def lend(self) -> Loan:
        """A connection outside a transaction. Raises psycopg.Error, or sqlalchemy.exc.TimeoutError as any checkout."""
        entry = cast(_ConnectionRecord, self._do_get())
        try:
            # Made anew if it was lost, or found to be older than an outage.
            driver = entry.get_connection()
        except BaseException:
            self._do_return_conn(entry)
            raise
        return Loan(self, entry, cast("psycopg.Connection[Any]", driver))

    def take_back(self, entry: _ConnectionRecord) -> None:
        """For `Loan.give_back`."""
        self._do_return_conn(entry)
