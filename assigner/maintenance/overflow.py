"""Keeps the number of waiting jobs within its limit by deferring the newest jobs of the low level."""

from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from assigner import metrics
from assigner.maintenance.duties import move_possible
from assigner.maintenance.webhooks import DEFERRED, RETURNED, Webhooks
from schema.clock import Monotonic, Throttle
from schema.moves.waiting.overflow import defer, return_deferred
from schema.policy import queue_limits
from schema.policy.queue_limits import OverflowState
from schema.postgres import advisory
from schema.postgres.connection import Connection
from schema.postgres.engine import Database

#: The most jobs that one round moves.
LIMIT = 5000
#: Deferred jobs return while fewer jobs wait than this part of the limit.
AGAIN = 0.9
#: Seconds after which jobs are counted even if few were submitted, because other jobs come back from bots.
RECOUNT = 60.0
#: The most deferred jobs that one line of the log names, and that one delivery to a webhook does.
SHOWN, TOLD = 20, 500

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
                move_possible(self._database, partial(self._return, count=LIMIT))
            return
        is_due = seen.deferred or seen.newest >= self._enough or self._now() >= self._next
        if not (is_due and self._pace.try_begin()):
            return
        counted = move_possible(self._database, partial(self._balance, seen=seen, most=seen.most))
        if counted is not None:
            self._enough, self._next = seen.newest + seen.most - counted + 1, self._now() + RECOUNT

    def _balance(self, connection: Connection, *, seen: OverflowState, most: int, tries: bool) -> int | None:
        """Count what waits, and move what is too much or what there is room for. Returns the count; None if another
        process is at it, which would move as many once more. tries: as of `return_deferred`."""
        if not advisory.try_take_overflow(connection):
            self._pace.finished(0.0)
            return None
        began = self._now()
        counted = queue_limits.count_waiting(connection, most=most + LIMIT)
        self._pace.finished(self._now() - began)
        if counted > most:
            self._defer(connection, min(LIMIT, counted - most), normal=seen.normal, most=most)
        elif seen.deferred and counted < AGAIN * most:
            self._return(connection, min(LIMIT, int(AGAIN * most) - counted), tries=tries)
        return counted

    def _defer(self, connection: Connection, count: int, *, normal: int, most: int) -> None:
        names = defer(connection, count, normal=normal, most=most, actor=self._name)
        if names:
            self._moved(connection, "defer", DEFERRED, names, {"max_queue_size": most})
            named = {"most": most, "deferred": len(names), "jobs": names[:SHOWN]}
            connection.on_commit(lambda: log.warning("more jobs wait than may", **named))

    def _return(self, connection: Connection, count: int, *, tries: bool) -> None:
        names = return_deferred(connection, count, actor=self._name, tries=tries)
        self._moved(connection, "return", RETURNED, names, {})

    def _moved(
        self, connection: Connection, move: str, event: str, names: Sequence[str], more: Mapping[str, object]
    ) -> None:
        connection.on_commit(lambda: metrics.DEFERRED.labels(move=move).inc(len(names)))
        if self._webhooks is not None:
            for first in range(0, len(names), TOLD):
                self._webhooks.put(connection, event, {"jobs": names[first : first + TOLD], **more})
