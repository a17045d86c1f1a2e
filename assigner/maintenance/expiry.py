"""The expiry of sessions: a bot that has not called in time is lost, and its jobs are queued again."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import psycopg
import structlog

from assigner import metrics
from schema.accounting import rates
from schema.accounting.held_rows import SHORT_WAIT
from schema.clock import Monotonic
from schema.diagnostics.tracing import AttemptTracer
from schema.moves.sessions import expire, first_expired, first_expiry, follow_clock, held_jobs
from schema.moves.waiting.backoff import wake_all_queues
from schema.postgres import notify
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import HINDRANCES
from schema.tenancy import drains
from schema.timing import Timing

T = TypeVar("T")

#: The seconds, and the lives of a session, by more than which a clock was set back on purpose. Smaller steps pass by
#: themselves. A session that was renewed after the step ends sooner than that.
SET_BACK, SESSIONS = 300.0, 10
#: The most sessions that one transaction closes.
LIMIT = 500
#: The most seconds for which a round closes sessions: less than the pause after which upkeep gives all of them a grace.
EXPIRY = 3.0

log = structlog.get_logger()


class Expiry:
    """Closes expired sessions. actor: who closes them."""

    def __init__(
        self, database: Database, *, timing: Timing, actor: str, now: Monotonic, tracer: AttemptTracer | None = None
    ) -> None:
        self._database, self._timing, self._actor, self._now, self._tracer = database, timing, actor, now, tracer
        self._ticks = drains.UPKEEP_TICKS
        #: No session expires before this monotonic time.
        self._first_expiry = 0.0
        #: Where the last look for expired sessions ended: behind this bot; and among the leases of another bot, behind
        #: this job.
        self._after_bot = 0
        self._after_job_of = (0, 0)

    def run_once(self) -> None:
        """Close expired sessions, unless upkeep has paused: then bots have a session's time to come back.

        A look reads every bot. The next one comes when the first of those sessions expires, unless it has been renewed,
        but within `ttl`: nothing shorter begins. Where gateways have a shorter `ttl`, or the server's clock jumps
        ahead, a session may be closed up to `ttl` late.
        """
        ttl, began = self._timing.ttl, self._now()

        def look(connection: Connection) -> float | None:
            tick = drains.tick(connection, self._ticks[0], gap=ttl / 2, grace=ttl)
            if tick.back > (longest := max(SET_BACK, SESSIONS * ttl)):
                _follow_clock(connection, back=tick.back, longest=longest)
            return None if tick.in_grace or began < self._first_expiry else first_expiry(connection)

        try:
            left = self._database.run(look, urgent=True)
        except psycopg.errors.LockNotAvailable:
            self._ticks = self._ticks[::-1]  # somebody holds the tick; the other one may begin with a grace
            left = self._database.run(look, urgent=True)
        if left is not None:
            self._first_expiry = began + min(left, ttl)
            if left < 0:
                self._expire()
        metrics.observe_tick()

    def _expire(self) -> None:
        """Close expired sessions page by page, each page in its own transaction, for at most `EXPIRY` seconds.

        If somebody holds a row that a page needs, such as the quota of an instance whose job ends, or one is wrong, the
        sessions are closed one by one, and of one that cannot be closed the leases end one by one. A round goes on
        where the last one ended. Each transaction waits for a lock shortly, and once.
        """
        until, limit, left = self._now() + EXPIRY, LIMIT, 0
        while self._now() < until:
            try:
                bot_ids = self._expire_page(after=self._after_bot, limit=limit)
            except HINDRANCES:
                if limit > 1:
                    limit = 1
                    continue
                bot_ids = self._run(partial(first_expired, after=self._after_bot))
                left += len(bot_ids)
                if not all(self._end_singly(bot_id, until) for bot_id in bot_ids):
                    break
                is_last = not bot_ids
            else:
                is_last = len(bot_ids) < limit
                limit = min(2 * limit, LIMIT)
            self._after_bot = 0 if is_last else bot_ids[-1]
            if is_last:
                break
        if left:
            log.warning("expired sessions are left: rows that they need are held, or wrong", sessions=left)

    def _run(self, work: Callable[[Connection], T]) -> T:
        return self._database.run(work, urgent=True)

    def _expire_page(self, *, after: int, limit: int, job_id: int | None = None) -> list[int]:
        """Close sessions as `expire` does, in a transaction."""

        def page(connection: Connection) -> list[int]:
            connection.execute(SHORT_WAIT)
            bot_ids, ended = expire(connection, after=after, limit=limit, actor=self._actor, job_id=job_id)
            if self._tracer is not None:
                self._tracer.trace(connection, ended)
            return bot_ids

        bot_ids = self._run(page)
        metrics.observe_reaped("session", len(bot_ids))
        return bot_ids

    def _end_singly(self, bot_id: int, until: float) -> bool:
        """End the leases of an expired session one by one; return whether each was tried before `until`."""
        for job_id in self._run(partial(held_jobs, bot_id=bot_id)):
            if bot_id == self._after_job_of[0] and job_id <= self._after_job_of[1]:
                continue
            if self._now() >= until:
                return False
            with suppress(*HINDRANCES):
                self._expire_page(after=bot_id - 1, limit=1, job_id=job_id)
            self._after_job_of = bot_id, job_id
        self._after_job_of = (0, 0)
        return True


def _follow_clock(connection: Connection, *, back: float, longest: float) -> None:
    """The clock of the database was set back. What was to end by it would end that much later: sessions of bots that
    are lost meanwhile, rests of queues, and the wait for the next token of a rate. What was over by the old clock may
    be ahead of the new one too: a queue keeps the time of its last rest until a job of it starts."""
    follow_clock(connection, back=back, longest=longest)
    wake_all_queues(connection)
    rates.follow_clock(connection)
    notify.wake(connection, "jobs")
    connection.on_commit(partial(log.warning, "the clock of the database was set back", seconds=round(back)))
