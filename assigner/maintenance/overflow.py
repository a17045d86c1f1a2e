"""Keeps the number of waiting jobs within its limit by deferring the newest jobs of the low level."""

from collections.abc import Callable, Mapping
from functools import partial

import structlog

from assigner import metrics
from assigner.maintenance.webhooks import DEFERRED, RETURNED, Webhooks
from schema.clock import Monotonic, Throttle
from schema.moves.waiting.hold import defer, return_deferred
from schema.policy import queue_limits
from schema.postgres.connection import Connection
from schema.postgres.engine import Database

#: The most jobs that one transaction moves, and the most such transactions in one round.
LIMIT, BATCHES = 500, 10
#: Deferred jobs return while fewer jobs wait than this part of the limit.
AGAIN = 0.9
#: Seconds after which jobs are counted even if few were submitted, because other jobs come back from bots.
RECOUNT = 60.0
#: The most deferred jobs named in one line of the log.
SHOWN = 20

log = structlog.get_logger()


class OverflowController:
    """Counts waiting jobs and moves them between `queued` and `deferred`.

    Jobs are counted only when they may have become too many: when as many jobs were submitted since the last count as
    the limit then still allowed, or after a minute. A `Throttle` makes slow counts rare.
    """

    def __init__(self, database: Database, *, name: str, now: Monotonic, webhooks: Webhooks | None = None) -> None:
        self._database, self._name, self._now, self._webhooks = database, name, now, webhooks
        self._pace = Throttle(now)
        self._enough = 0
        self._next = now()

    def run_once(self) -> None:
        """Defer the jobs above the limit, or return deferred jobs while there are fewer."""
        seen = self._database.run(queue_limits.overflow_state)
        if seen.most is None:
            if seen.deferred:
                self._return(BATCHES * LIMIT)
            return
        if (
            not seen.deferred and seen.newest < self._enough and self._now() < self._next
        ) or not self._pace.try_begin():
            return
        most, began = seen.most, self._now()
        counted = self._database.run(
            lambda connection: queue_limits.count_waiting(connection, most=most + BATCHES * LIMIT)
        )
        self._pace.finished(self._now() - began)
        self._enough, self._next = seen.newest + most - counted + 1, self._now() + RECOUNT
        if counted > most:
            self._defer(counted - most, normal=seen.normal, most=most)
        elif seen.deferred and counted < AGAIN * most:
            self._return(int(AGAIN * most) - counted)

    def _defer(self, count: int, *, normal: int, most: int) -> None:
        def batch(connection: Connection, limit: int) -> int:
            names = defer(connection, limit, normal=normal, most=most, actor=self._name)
            if names:
                log.warning("more jobs wait than may", most=most, deferred=len(names), jobs=names[:SHOWN])
                self._tell(connection, DEFERRED, {"jobs": names, "max_queue_size": most})
            return len(names)

        metrics.DEFERRED.labels(move="defer").inc(self._batches(batch, count))

    def _return(self, count: int) -> None:
        def batch(connection: Connection, limit: int) -> int:
            names = return_deferred(connection, limit, actor=self._name)
            if names:
                self._tell(connection, RETURNED, {"jobs": names})
            return len(names)

        metrics.DEFERRED.labels(move="return").inc(self._batches(batch, count))

    def _tell(self, connection: Connection, event: str, data: Mapping[str, object]) -> None:
        if self._webhooks is not None:
            self._webhooks.put(connection, event, data)

    def _batches(self, batch: Callable[..., int], count: int) -> int:
        done = 0
        for _ in range(BATCHES):
            limit = min(LIMIT, count - done)
            moved = self._database.run(partial(batch, limit=limit)) if limit > 0 else 0
            done += moved
            if moved < LIMIT:
                break
        return done
