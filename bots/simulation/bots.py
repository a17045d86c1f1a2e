"""Bots that call as agents do, at virtual times, and whose jobs end when the simulation says.

An agent has a call held until there is news for it, and makes another one when a job has begun or ended. The calls
that would bring no news, or be held, are left out: what changes a bot's leases wakes it by its id, so the call that
would have brought the news is known. So are the calls that would only renew a session: those of living bots do not
expire, and a bot that is lost gets its time to live then.
"""

import heapq
import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from leasehold.errors import Conflict, LeaseholdError

from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync, Work
from bots.sync import sessions
from bots.sync.call import Call, Due, HeldCall, NewCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.accounting.quotas import Cooldown
from schema.moves.grant import FetchedLease
from schema.moves.sessions import renew
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Row, Statement
from schema.timing import Timing

#: Seconds for which the session of a living bot lasts.
FOR_EVER = 3e9
#: The part of the time to acknowledge a lease within which the calls that do so are made with those of the next step.
ACKNOWLEDGED_WITHIN = 0.5
#: The most calls that are answered in one transaction.
TOGETHER = 500
_EXPIRIES = Statement("""
SELECT extract(epoch FROM expires_at)::double precision AS expiry FROM bots
WHERE id = ANY (CAST(:ids AS bigint[])) AND expires_at IS NOT NULL
""")
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
    """A lease on a simulated bot. report: what the bot tells of it; completed when its command is over.

    is_told: the report has nothing new. left_out: the last call has left it out.
    """

    fence: int
    ends_at: float
    seconds: float
    verdict: str
    report: LeaseReport
    is_told: bool = False
    left_out: bool = False

    def complete(self, outcome: Outcome) -> None:
        """Tell this outcome from now on."""
        self.is_told = False
        self.report = LeaseReport(job=self.report.job, fence=self.fence, state="completed", outcome=outcome)


@dataclass
class SimulatedBot:
    """One bot. call_at: when it calls next; infinite while its call is held. order: among calls of one instant."""

    opening: OpenSession
    order: int
    session: Session | None = None
    bot_id: int = 0
    seq: int = 0
    held_call: HeldCall | None = None
    call_at: float = 0.0
    status: str = "ok"
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Whether it has a session and goes on."""
        return self.session is not None

    def message(self, sync: float) -> Sync:
        """The next call. It lists leases that have news. If the bot holds none, the answer may be held for `sync`."""
        assert self.session is not None, "it lives"
        self.seq += 1
        reports = []
        for held in self.held.values():
            held.left_out = held.is_told
            if not held.is_told:
                reports.append(held.report)
                held.is_told = held.report.outcome is None
        return Sync(
            bot=self.opening.bot,
            epoch=self.session.epoch,
            secret=self.session.secret,
            seq=self.seq,
            status=self.status,  # type: ignore[arg-type]
            leases=reports,
            unlisted=len(self.held) - len(reports),
            wait=0.0 if self.held else sync,
        )


class SimulatedBots:
    """The bots of a simulated pool. `runs` says how each attempt goes; `chance` is its own.

    step: seconds between two stops of the clock. The start of a job is told at the next one, together with what other
        bots tell then, unless that is late for it. 0 = at once.
    """

    def __init__(
        self,
        database: Database,
        service: SyncService,
        *,
        timing: Timing,
        runs: Runs,
        chance: random.Random,
        step: float = 0.0,
    ) -> None:
        self._database, self._service, self._timing = database, service, timing
        self._starts_told_after = step if step <= timing.ack * ACKNOWLEDGED_WITHIN else 0.0
        self._runs, self._chance = runs, chance
        self.bots: dict[str, SimulatedBot] = {}
        self._by_id: dict[int, SimulatedBot] = {}
        #: Entries (time, order, name) of calls. One that is not the bot's `call_at` any more is left out.
        self._calls: list[tuple[float, int, str]] = []
        #: When the sessions of lost bots expire, earliest first.
        self._expiries: list[float] = []

    def open(self, *openings: OpenSession) -> None:
        """Open sessions for these bots, which may have had one before and lost it."""
        secrets = [opening.model_copy(update={"secret": self._secret()}) for opening in openings]
        self._let_expire(old for opening in openings if (old := self.bots.get(opening.bot)) is not None)
        answers = sessions.open_sessions(
            self._database, secrets, timing=self._timing.model_copy(update={"ttl": FOR_EVER})
        )
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
        for expiry in self._let_expire([bot]):
            heapq.heappush(self._expiries, expiry)
        self._end(bot)

    def _let_expire(self, bots: Iterable[SimulatedBot]) -> list[float]:
        """Let living sessions last as long as if their bots called now and never again; return when they expire."""
        last = [(bot.bot_id, bot.session.epoch) for bot in bots if bot.session is not None]
        if not last:
            return []

        def shorten(connection: Connection) -> list[float]:
            renew(connection, last, ttl=self._timing.ttl, below=2 * FOR_EVER / self._timing.ttl)
            ids = [bot_id for bot_id, _ in last]
            return [row.expiry for row in connection.execute(_EXPIRIES, {"ids": ids})]

        return self._database.run(shorten, urgent=True)

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
        return self._expiries[0] if self._expiries else math.inf

    @property
    def next_at(self) -> float:
        """The time of the next call, infinite if none is planned."""
        while self._calls and not self._is_valid(self._calls[0]):
            heapq.heappop(self._calls)
        return self._calls[0][0] if self._calls else math.inf

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
            if bot.lives:
                self._call(bot, now)

    def _due(self, now: float) -> list[SimulatedBot]:
        """The bots whose calls are due, in an order that no dictionary decides."""
        found: dict[str, SimulatedBot] = {}
        while self.next_at <= now:
            name = heapq.heappop(self._calls)[2]
            found[name] = self.bots[name]
        for bot in found.values():
            bot.call_at = math.inf
        return sorted(found.values(), key=lambda bot: bot.order)

    def _answer(self, due: list[SimulatedBot], now: float) -> None:
        calls: list[Call] = []
        for bot in due:
            for held in bot.held.values():
                if held.ends_at <= now and held.report.outcome is None:
                    held.complete(Outcome(verdict=held.verdict, seconds=held.seconds))  # type: ignore[arg-type]
            calls.append(bot.held_call or NewCall(bot.message(self._timing.sync), now))
            bot.held_call = None
        for bot, answer in zip(due, self._service.settle(calls), strict=True):
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
                self._obey(bot, answer, now)

    def _obey(self, bot: SimulatedBot, answer: Due, now: float) -> None:
        """Begin what is new, stop what shall stop, forget what is settled, and plan the next call."""
        wanted = {lease.public_id: lease for lease in answer.leases}
        for job, held in list(bot.held.items()):
            is_listed = job in wanted and wanted[job].fence == held.fence
            if not is_listed and not (held.left_out and answer.unlisted):
                del bot.held[job]
        is_news, is_begun = answer.drain != (bot.status == "draining"), False
        if is_news:
            bot.status = "draining" if answer.drain else "ok"
        for job, lease in wanted.items():
            held_now = bot.held.get(job)
            if held_now is None:
                held_now = bot.held[job] = self._begin(job, lease, now)
                is_begun = True
            if lease.state == "cancelling" and held_now.report.outcome is None:
                held_now.complete(Outcome(verdict="stopped"))
                is_news = True
        if is_news:
            self._call(bot, now)
        elif not bot.held:
            bot.call_at = math.inf  # its next call would be held until there is news
        elif is_begun:
            self._call(bot, min(now + self._starts_told_after, *(held.ends_at for held in bot.held.values())))
        else:
            self._call(bot, min(held.ends_at for held in bot.held.values()))

    def _begin(self, job: str, lease: Row | FetchedLease, now: float) -> Held:
        work = Work(
            job=job,
            fence=lease.fence,
            state=lease.state,  # type: ignore[arg-type]
            instance=lease.instance,
            attempt=lease.attempts,
            payload=None if lease.payload is None else json.loads(lease.payload),
        )
        run, timeout = self._runs(work, self._chance), lease.timeout_seconds
        seconds = run.seconds if timeout is None else min(run.seconds, timeout)
        verdict = run.verdict if seconds == run.seconds else "failed"
        return Held(
            lease.fence, now + seconds, seconds, verdict, LeaseReport(job=job, fence=lease.fence, state="active")
        )

    def _end(self, bot: SimulatedBot) -> None:
        bot.session, bot.held_call, bot.call_at = None, None, math.inf
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
    database: Database,
    *,
    timing: Timing,
    fetch: FetchSettings,
    cooldown: Cooldown,
    runs: Runs,
    seed: int,
    step: float = 0.0,
) -> SimulatedBots:
    """Make the bots of a simulated pool, none at first, with a sync service of their own."""
    service = SyncService(
        database,
        timing=timing.model_copy(update={"ttl": FOR_EVER}),
        fetch=fetch,
        now=clock.monotonic,
        cooldown=cooldown,
    )
    return SimulatedBots(database, service, timing=timing, runs=runs, chance=random.Random(f"{seed} bots"), step=step)
