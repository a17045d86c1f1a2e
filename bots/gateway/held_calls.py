"""Calls of bots that are held until there is news, and the sessions of these bots.

A bot whose call is held cannot sync. `HeldSessions` therefore looks for the news of such bots and renews their
sessions for as long as the bots are connected. Each takes one statement for many bots.
"""

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from bots.gateway.long_poll import LongPoll
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.workers import WorkerPool
from schema import clock
from schema.moves.sessions import HELD_RENEWED_BELOW, renew
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.fragments import newest_leases
from schema.postgres.statements import Statement

#: Rounds of renewals in the life of a session. A renewal skips a bot whose row is locked, so there must be several.
ROUNDS = 6
#: The most sessions renewed in one transaction.
CHUNK = 2000

_log = structlog.get_logger(__name__)

# News for bots whose calls are held: a lease that the bot does not know, a stop, a drain, or the end of its session.
# `held > 0` spares idle bots the reading of leases. The query finds late sessions too: those that should have been
# renewed, because less than `:late` seconds of them are left. `:draining`: the bots among `:ids` that know that they
# drain. `NOT IN` is a hash table in every plan. A join would be one only by the planner's guess of how many bots there
# are.
BOT_NEWS = Statement(f"""
SELECT id, epoch, draining, lively, is_late FROM (
    SELECT id, epoch, draining, status = 'gone' OR (held > 0 AND EXISTS (
        SELECT FROM {newest_leases("n.id", "n.held", columns="state, bot_epoch")} l
        WHERE state IN ('pending', 'cancelling') AND bot_epoch = n.epoch)) AS lively,
        coalesce(expires_at < now() + make_interval(secs => :late), false) AS is_late
    FROM bots n WHERE id = ANY (CAST(:ids AS bigint[])) OFFSET 0
) b
WHERE lively OR is_late OR draining = (id NOT IN (SELECT unnest(CAST(:draining AS bigint[]))))
    OR (id, epoch) NOT IN (SELECT * FROM unnest(CAST(:ids AS bigint[]), CAST(:epochs AS bigint[])))
""")


@dataclass(frozen=True)
class BotNews:
    """The query's result for one bot. `news`: its session is over, or a lease must start or stop."""

    epoch: int
    draining: bool
    news: bool


@dataclass(eq=False, slots=True)
class KnownState:
    """What the bot of a held call knows, and its session.

    expires: a monotonic time up to which the session surely lasts.
    """

    bot_id: int
    epoch: int
    draining: bool
    expires: float = 0.0

    def news(self, fact: BotNews) -> bool:
        """Return True if `fact` is news for the bot."""
        return fact.news or fact.epoch != self.epoch or fact.draining != self.draining


class NewestCalls:
    """The newest call of each session that may be held. Only the event loop's thread may use it.

    A bot that has news does not wait for the call that is held for it. It makes another one, which ends the first.
    """

    def __init__(self) -> None:
        self._polls: dict[Hashable, tuple[int, LongPoll]] = {}

    def __len__(self) -> int:
        """Return how many such calls are here."""
        return len(self._polls)

    def came(self, session: Hashable, number: int) -> None:
        """End the call of this session that is held, if a call with this number is later."""
        known = self._polls.get(session)
        if known is not None and known[0] < number:
            known[1].replace()

    @contextmanager
    def holding(self, session: Hashable, number: int, poll: LongPoll) -> Iterator[None]:
        """Let a call with a higher number end this one until the `with` block ends. session: a secret of its bot."""
        self.came(session, number)
        entry, known = (number, poll), self._polls.get(session)
        if known is None or known[0] <= number:
            self._polls[session] = entry
        try:
            yield
        finally:
            if self._polls.get(session) is entry:
                del self._polls[session]


class HeldSessions:
    """The bots whose calls are held. Only the event loop's thread may use it, except for `read_facts`.

    below: their sessions are renewed when less than this part of `ttl` seconds is left.
    """

    def __init__(
        self,
        database: Database,
        workers: WorkerPool,
        *,
        ttl: float,
        metrics: GatewayMetrics,
        below: float = HELD_RENEWED_BELOW,
    ) -> None:
        self._database, self._worker_pool, self._metrics = database, workers, metrics
        self._ttl, self._below = ttl, below
        self._held: dict[KnownState, None] = {}
        self._watcher: asyncio.Task[None] | None = None

    @contextmanager
    def renewing(self, told: KnownState) -> Iterator[None]:
        """Keep this bot's session alive until the `with` block ends."""
        self._held[told] = None
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            del self._held[told]

    def read_facts(self, connection: Connection, _: Sequence[str]) -> Mapping[str, BotNews]:
        """Read possible news for the bots whose calls are held.

        A session that is late counts as due from now on: a failover may have lost its renewal.
        """
        held = list(self._held)
        if not held:
            return {}
        ends = [told.expires for told in held]
        # Of two calls of one bot the first knows less.
        known = {told.bot_id: told for told in reversed(held)}
        parameters = {
            "ids": _array(known),
            "epochs": _array(told.epoch for told in known.values()),
            "draining": _array(told.bot_id for told in known.values() if told.draining),
            "late": self._ttl * (self._below - 1 / ROUNDS),
        }
        rows = connection.execute(BOT_NEWS, parameters).all()
        late = {row.id for row in rows if row.is_late}
        for told, end in zip(held, ends, strict=True):
            if told.bot_id in late and told.expires == end:  # not renewed meanwhile
                told.expires = 0.0
        return {str(row.id): BotNews(row.epoch, row.draining, row.lively) for row in rows}

    def close(self) -> None:
        """Stop renewing sessions."""
        if self._watcher is not None:
            self._watcher.cancel()

    def lasts(self, told: KnownState) -> bool:
        """Return whether this session surely lasts until its bot has called again."""
        return told.expires - clock.monotonic() > self._ttl / ROUNDS

    async def _keep(self) -> None:
        while self._held:
            await asyncio.sleep(self._ttl / ROUNDS)
            soon = clock.monotonic() + self._ttl * self._below
            due = [told for told in self._held if told.expires < soon]
            try:
                for start in range(0, len(due), CHUNK):
                    await self._renew(due[start : start + CHUNK])
            except Exception as error:
                _log.warning("sessions of waiting bots could not be renewed", kind=type(error).__name__)

    async def _renew(self, due: Sequence[KnownState]) -> None:
        sessions = {(told.bot_id, told.epoch) for told in due}

        def work(connection: Connection) -> set[tuple[int, int]]:
            return renew(connection, sessions, ttl=self._ttl, below=self._below)

        asked_at = clock.monotonic()
        renewed = await self._worker_pool.run_unbounded(lambda: self._database.run(work, urgent=True))
        self._metrics.renewals.inc(len(renewed))
        for told in due:
            if (told.bot_id, told.epoch) in renewed:
                told.expires = asked_at + self._ttl


def _array(numbers: Iterable[int]) -> str:
    """Write an array literal of PostgreSQL: for 10,000 numbers it is far cheaper than a list of parameters."""
    return "{" + ",".join(map(str, numbers)) + "}"
