"""Watches over the calls that are held: looks for news of their bots, and keeps their sessions alive.

A bot whose call is held cannot call, so the gateway renews its session on its behalf, for as long as the bot is
connected. Both cost a statement for many bots, whatever their number.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, text

from bots.crew import Crew
from bots.metrics import GatewayMetrics
from schema import moves
from schema.engine import Database
from schema.newest import latest_leases, newest

#: Rounds in the life of a session. One that was missed because its bot's row was locked has two more chances.
ROUNDS = 6
#: Sessions renewed in one transaction.
CHUNK = 2000

# What could be news to a bot whose call is held: a lease it does not know, a stop, a drain, the end of its session.
# A bot that holds no lease has none to look at, which spares a second look for nearly all.
BOT_NEWS = text(f"""
SELECT told.id, b.epoch, b.draining, b.lively
FROM unnest(CAST(:ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:draining AS boolean[]))
    AS told (id, epoch, draining)
LEFT JOIN LATERAL (
    SELECT epoch, draining, status = 'gone' OR (held > 0 AND EXISTS (
        SELECT FROM {latest_leases("n.id", "n.held", columns="state")} l
        WHERE state IN ('pending', 'cancelling'))) AS lively
    FROM {newest("bots", "id", "told.id")} n) b ON true
WHERE b.lively IS NOT FALSE OR b.epoch <> told.epoch OR b.draining IS DISTINCT FROM told.draining
""")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class BotFact:
    """What a look tells of one bot."""

    epoch: int
    draining: bool
    news: bool


@dataclass(eq=False, slots=True)
class Told:
    """What the bot of a held call knows. `draining` None = as the first look says."""

    bot_id: int
    epoch: int
    draining: bool | None

    def news(self, fact: BotFact | None) -> bool:
        """Whether this is news to the bot."""
        if fact is None:
            return True
        if self.draining is None:
            self.draining = fact.draining
        return fact.news or fact.epoch != self.epoch or fact.draining != self.draining


class Vigil:
    """Everything that is held. Belongs to the event loop's thread, except for `look`."""

    def __init__(self, database: Database, crew: Crew, *, ttl: float, metrics: GatewayMetrics) -> None:
        self._database, self._crew, self._ttl, self._metrics = database, crew, ttl, metrics
        self._held: dict[Told, None] = {}
        self._keeper: asyncio.Task[None] | None = None

    @contextmanager
    def over(self, told: Told) -> Iterator[None]:
        """Keep this bot's session alive until the block ends."""
        self._held[told] = None
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            del self._held[told]

    def look(self, connection: Connection, _: Sequence[str]) -> Mapping[str, BotFact | None]:
        """Facts of the bots whose calls are held that are, or may be, news to them; None of a bot that is no more."""
        held = list(self._held)
        parameters = {
            "ids": _array(str(told.bot_id) for told in held),
            "epochs": _array(str(told.epoch) for told in held),
            "draining": _array(_WORDS[told.draining] for told in held),
        }
        return {
            str(row.id): None if row.epoch is None else BotFact(row.epoch, row.draining, row.lively)
            for row in connection.execute(BOT_NEWS, parameters)
        }

    def close(self) -> None:
        """Renew nothing any more."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep(self) -> None:
        while self._held:
            await asyncio.sleep(self._ttl / ROUNDS)
            sessions = sorted({(told.bot_id, told.epoch) for told in self._held})
            try:
                for start in range(0, len(sessions), CHUNK):
                    await self._renew(sessions[start : start + CHUNK])
            except Exception as error:
                _log.warning("sessions of waiting bots could not be renewed", kind=type(error).__name__)

    async def _renew(self, sessions: Sequence[tuple[int, int]]) -> None:
        def work(connection: Connection) -> int:
            return moves.renew(connection, sessions, ttl=self._ttl)

        self._metrics.renewals.inc(await self._crew.insist(lambda: self._database.run(work, urgent=True)))


_WORDS = {None: "NULL", False: "f", True: "t"}


def _array(words: Iterator[str]) -> str:
    """An array as PostgreSQL reads it: for 10,000 numbers that is far cheaper than a list of parameters."""
    return "{" + ",".join(words) + "}"
