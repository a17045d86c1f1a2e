"""Bots that call as agents do, at virtual times, and whose jobs end when the simulation says.

An idle agent has a call held until there is news for it. A busy one calls in its period, at once when a job has begun
or ended, and hears of news at its next call. The calls of a busy bot that would bring no news are left out: what
changes a bot's leases wakes it by its id, so the call that would have brought the news is known. The sessions of living
bots are renewed all together, as a gateway renews those of held calls.
"""

import heapq
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from leasehold.errors import Conflict, LeaseholdError

from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync, SyncAnswer, Work
from bots.sync import sessions
from bots.sync.call import Call, HeldCall, NewCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.accounting.quotas import Cooldown
from schema.moves.sessions import renew
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.timing import Timing

#: Parts of a session's time to live after which the sessions of living bots are renewed.
RENEWED_EVERY = 1 / 3
#: The most calls that are answered in one transaction, as in a gateway.
TOGETHER = 100
_EXPIRY = Statement("SELECT extract(epoch FROM expires_at)::double precision FROM bots WHERE id = :id")
_IDS = Statement("SELECT name, id FROM bots WHERE name = ANY (CAST(:names AS text[]))")
#: The errors after which a bot opens a new session.
OVER = frozenset({"session_over", "session_superseded"})


@dataclass(frozen=True)
class Run:
    """How an attempt will go: it takes `seconds`, and then its outcome is `verdict`."""

    seconds: float
    verdict: str = "succeeded"


#: Says how the attempt of a lease will go.
Runs = Callable[[Work, random.Random], Run]


@dataclass
class Held:
    """A lease on a simulated bot. outcome: set when its command is over, and not reported yet."""

    fence: int
    ends_at: float
    seconds: float
    verdict: str
    outcome: Outcome | None = None


@dataclass
class SimulatedBot:
    """One bot. call_at: when it calls next; infinite while its call is held. order: among calls of one instant."""

    opening: OpenSession
    order: int
    session: Session | None = None
    bot_id: int = 0
    seq: int = 0
    held_call: HeldCall | None = None
    called_at: float = 0.0
    call_at: float = 0.0
    status: str = "ok"
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Whether it has a session and goes on."""
        return self.session is not None

    def message(self, sync: float) -> Sync:
        """The next call: every lease that it holds, and how long the answer may be held if it holds none."""
        assert self.session is not None, "it lives"
        self.seq += 1
        return Sync(
            bot=self.opening.bot,
            epoch=self.session.epoch,
            secret=self.session.secret,
            seq=self.seq,
            status=self.status,  # type: ignore[arg-type]
            leases=[_report(job, held) for job, held in self.held.items()],
            wait=0.0 if self.held else sync,
        )


def _report(job: str, held: Held) -> LeaseReport:
    state = "active" if held.outcome is None else "completed"
    return LeaseReport(job=job, fence=held.fence, state=state, outcome=held.outcome)  # type: ignore[arg-type]


class SimulatedBots:
    """The bots of a simulated pool. `runs` says how each attempt goes; `chance` is its own."""

    def __init__(
        self, database: Database, service: SyncService, *, timing: Timing, runs: Runs, chance: random.Random
    ) -> None:
        self._database, self._service, self._timing = database, service, timing
        self._runs, self._chance = runs, chance
        self.bots: dict[str, SimulatedBot] = {}
        self._by_id: dict[int, SimulatedBot] = {}
        #: Entries (time, order, name) of calls. One that is not the bot's `call_at` any more is left out.
        self._calls: list[tuple[float, int, str]] = []
        self._renewed_at = -1.0
        #: When the sessions of lost bots expire, earliest first.
        self._expiries: list[float] = []

    def open(self, *openings: OpenSession) -> None:
        """Open sessions for these bots, which may have had one before and lost it."""
        secrets = [opening.model_copy(update={"secret": self._secret()}) for opening in openings]
        answers = sessions.open_sessions(self._database, secrets, timing=self._timing)
        ids = self._database.run(lambda connection: _ids(connection, [each.bot for each in openings]))
        for opening, answer in zip(openings, answers, strict=True):
            if isinstance(answer, LeaseholdError):
                raise answer
            old = self.bots.get(opening.bot)
            bot = SimulatedBot(opening, len(self.bots) if old is None else old.order, answer, ids[opening.bot])
            self.bots[opening.bot] = self._by_id[bot.bot_id] = bot
            self._call(bot, clock.monotonic())

    def kill(self, name: str) -> None:
        """Let the bot end without a word. Its session expires, and upkeep gives its jobs to others."""
        bot = self.bots[name]
        if bot.session is not None:
            # The calls that were left out would have renewed its session until now.
            last = [(bot.bot_id, bot.session.epoch)]
            self._database.run(lambda connection: renew(connection, last, ttl=self._timing.ttl), urgent=True)
            expiry = self._database.run(lambda c: c.execute(_EXPIRY, {"id": bot.bot_id}).scalar_one())
            heapq.heappush(self._expiries, expiry or 0.0)
        self._end(bot)

    def leave(self, name: str) -> None:
        """Let the bot close its session: it gives back what it runs."""
        bot = self.bots[name]
        if bot.lives:
            bot.status, bot.held_call = "gone", None
            bot.held.clear()
            self._call(bot, clock.monotonic())

    @property
    def living(self) -> list[str]:
        """The names of the bots that have a session."""
        return [name for name, bot in self.bots.items() if bot.lives]

    @property
    def expires_at(self) -> float:
        """When the next session of a lost bot expires, infinite if none does."""
        while self._expiries and self._expiries[0] < clock.monotonic():
            heapq.heappop(self._expiries)
        return self._expiries[0] if self._expiries else float("inf")

    @property
    def next_at(self) -> float:
        """The time of the next call, infinite if none is planned."""
        while self._calls and not self._is_valid(self._calls[0]):
            heapq.heappop(self._calls)
        return self._calls[0][0] if self._calls else float("inf")

    def keep_alive(self) -> None:
        """Renew the sessions of living bots, if that is due."""
        now = clock.monotonic()
        if now - self._renewed_at >= self._timing.ttl * RENEWED_EVERY:
            self._renewed_at = now
            living = [(bot.bot_id, bot.session.epoch) for bot in self.bots.values() if bot.session is not None]
            if living:
                self._database.run(lambda connection: renew(connection, living, ttl=self._timing.ttl), urgent=True)

    def step(self, news: Collection[str] | None) -> bool:
        """Make the calls that are due, and those that `news` brings: ids of bots, empty for all, None for no news.

        Returns whether any call was made.
        """
        now = clock.monotonic()
        if news is not None:
            self._hear(self._named(news), now)
        due = self._due(now)
        for start in range(0, len(due), TOGETHER):
            self._answer(due[start : start + TOGETHER], now)
        return bool(due)

    def _named(self, news: Collection[str]) -> Iterator[SimulatedBot]:
        if not news:
            yield from self.bots.values()
        for key in news:
            bot = self._by_id.get(int(key)) if key.isdecimal() else None
            if bot is not None:
                yield bot

    def _hear(self, named: Iterator[SimulatedBot], now: float) -> None:
        for bot in named:
            if not bot.lives:
                continue
            if bot.held_call is not None:
                self._call(bot, now)
            else:
                period = self._timing.sync
                passed = max(1, -(-(now - bot.called_at) // period))
                self._call(bot, min(bot.call_at, max(now, bot.called_at + passed * period)))

    def _due(self, now: float) -> list[SimulatedBot]:
        """The bots whose calls are due, in an order that no dictionary decides."""
        found: dict[str, SimulatedBot] = {}
        while self.next_at <= now:
            name = heapq.heappop(self._calls)[2]
            found[name] = self.bots[name]
        for bot in found.values():
            bot.call_at = float("inf")
        return sorted(found.values(), key=lambda bot: bot.order)

    def _answer(self, due: list[SimulatedBot], now: float) -> None:
        calls: list[Call] = []
        for bot in due:
            for held in bot.held.values():
                if held.outcome is None and held.ends_at <= now:
                    held.outcome = Outcome(verdict=held.verdict, seconds=held.seconds)  # type: ignore[arg-type]
            calls.append(bot.held_call or NewCall(bot.message(self._timing.sync), now))
            bot.held_call = None
        for bot, answer in zip(due, self._service.answer(calls), strict=True):
            bot.called_at = now
            if isinstance(answer, Conflict) and answer.code in OVER:
                self._end(bot)
                self.open(bot.opening)
            elif isinstance(answer, LeaseholdError):
                raise answer
            elif isinstance(answer, HeldCall):
                bot.held_call = answer
            elif bot.status == "gone":
                self._end(bot)
            else:
                self._obey(bot, SyncAnswer.model_validate_json(answer), now)

    def _obey(self, bot: SimulatedBot, answer: SyncAnswer, now: float) -> None:
        """Begin what is new, stop what shall stop, forget what is settled, and plan the next call."""
        wanted = {work.job: work for work in answer.leases}
        for job, held in list(bot.held.items()):
            if job not in wanted or wanted[job].fence != held.fence:
                del bot.held[job]
        is_news = answer.drain and bot.status == "ok"
        if answer.drain != (bot.status == "draining"):
            bot.status = "draining" if answer.drain else "ok"
        for job, work in wanted.items():
            held_now = bot.held.get(job)
            if held_now is None:
                run = self._runs(work, self._chance)
                seconds = run.seconds if work.timeout is None else min(run.seconds, work.timeout)
                verdict = run.verdict if seconds == run.seconds else "failed"
                held_now = bot.held[job] = Held(work.fence, now + seconds, seconds, verdict)
                is_news = True
            if work.state == "cancelling" and held_now.outcome is None:
                held_now.outcome = Outcome(verdict="stopped")
                is_news = True
        if is_news or not bot.held:
            self._call(bot, now)
        else:
            self._call(bot, min(held.ends_at for held in bot.held.values()))

    def _end(self, bot: SimulatedBot) -> None:
        bot.session, bot.held_call, bot.call_at = None, None, float("inf")
        bot.held.clear()

    def _call(self, bot: SimulatedBot, at: float) -> None:
        """Plan the next call of the bot, in place of the one that was planned."""
        bot.call_at = at
        heapq.heappush(self._calls, (at, bot.order, bot.opening.bot))

    def _is_valid(self, entry: tuple[float, int, str]) -> bool:
        at, _, name = entry
        return self.bots[name].call_at == at

    def _secret(self) -> str:
        return f"{self._chance.getrandbits(256):064x}"


def _ids(connection: Connection, names: list[str]) -> Mapping[str, int]:
    return {row.name: row.id for row in connection.execute(_IDS, {"names": names})}


def simulated_bots(
    database: Database, *, timing: Timing, fetch: FetchSettings, cooldown: Cooldown, runs: Runs, seed: int
) -> SimulatedBots:
    """Make the bots of a simulated pool, none at first, with a sync service of their own."""
    service = SyncService(database, timing=timing, fetch=fetch, now=clock.monotonic, cooldown=cooldown)
    return SimulatedBots(database, service, timing=timing, runs=runs, chance=random.Random(f"{seed} bots"))
