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
from typing import Literal

from leasehold.errors import Conflict, LeaseholdError

from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync, Work
from bots.sync import sessions
from bots.sync.call import Call, Due, HeldCall, NewCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.accounting.quotas import Cooldown
from schema.moves.acknowledge import Start, acknowledge, deliver
from schema.moves.grant import FetchedLease
from schema.moves.sessions import renew
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.fragments import newest_version
from schema.postgres.statements import Row, Statement
from schema.sql import NOT_OVER
from schema.states import LeaseState
from schema.timing import Timing

#: Seconds for which the session of a living bot lasts.
FOR_EVER = 3e9
#: The most calls that are answered in one transaction.
TOGETHER = 500
_EXPIRIES = Statement("""
SELECT extract(epoch FROM expires_at)::double precision AS expiry FROM bots
WHERE id = ANY (CAST(:ids AS bigint[])) AND expires_at IS NOT NULL
""")
# Of each bot its row, and those of its live leases that it has not been told of as they are.
_NEWS = Statement(f"""
SELECT b.id AS bot_id, b.epoch, b.draining, b.closing, b.held, l.job_id, l.fence, l.state, j.public_id, j.attempts,
    j.timeout_seconds, i.name AS instance, CAST(p.payload AS text) AS payload
FROM unnest(CAST(:ids AS bigint[])) AS w (id)
CROSS JOIN LATERAL {newest_version("bots", "id", "w.id", columns="id, epoch, draining, closing, held")} b
LEFT JOIN LATERAL (
    SELECT job_id, fence, state, instance FROM leases
    WHERE bot_id = b.id AND {NOT_OVER} AND (delivered_at IS NULL OR state = 'cancelling') OFFSET 0) l ON true
LEFT JOIN LATERAL (
    SELECT CAST(public_id AS text), attempts, timeout_seconds FROM jobs WHERE id = l.job_id OFFSET 0) j ON true
LEFT JOIN LATERAL (SELECT name FROM instances WHERE id = l.instance OFFSET 0) i ON true
LEFT JOIN LATERAL (SELECT payload FROM job_payloads WHERE job_id = l.job_id OFFSET 0) p ON true
ORDER BY l.job_id
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
    """A lease on a simulated bot. outcome: of its command, once that is over.

    is_told: the server knows that it has begun. left_out: the last call has left it out.
    """

    job: str
    fence: int
    ends_at: float
    seconds: float
    verdict: str
    is_told: bool
    left_out: bool = False
    outcome: Outcome | None = None

    def report(self) -> LeaseReport:
        """What the bot tells of it. A start is told once, an end until the answer lists the lease no more."""
        self.is_told = True
        state: Literal["active", "completed"] = "active" if self.outcome is None else "completed"
        return LeaseReport(job=self.job, fence=self.fence, state=state, outcome=self.outcome)


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

    @property
    def first_end(self) -> float:
        """When the first of its leases ends."""
        return min(held.ends_at for held in self.held.values())

    def gets_only_leases(self, rows: list[Row], now: float) -> bool:
        """Whether there is no other news for it than new leases. rows: those of `_NEWS`."""
        bot, session = rows[0], self.session
        if session is None or self.status != "ok" or self.call_at <= now:
            return False
        if bot.epoch != session.epoch or bot.draining or bot.closing or bot.held != len(self.held) + len(rows):
            return False
        return all(row.state == LeaseState.PENDING and row.public_id not in self.held for row in rows)

    def start_of(self, lease: Row | FetchedLease) -> Start:
        """The report that it runs this lease."""
        assert self.session is not None, "it lives"
        return Start(lease.job_id, lease.fence, self.bot_id, self.session.epoch, f"bot:{self.opening.bot}")

    def message(self, sync: float) -> Sync:
        """The next call. It lists leases that have news. If the bot holds none, the answer may be held for `sync`."""
        assert self.session is not None, "it lives"
        self.seq += 1
        reports = []
        for held in self.held.values():
            held.left_out = held.is_told and held.outcome is None
            if not held.left_out:
                reports.append(held.report())
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

    starts_apart: no call only begins jobs. Bots that have nothing but leases to hear of get these without a call, and
        all that have begun at an instant are acknowledged together: such calls would change nothing else.
    """

    def __init__(
        self,
        database: Database,
        service: SyncService,
        *,
        timing: Timing,
        runs: Runs,
        chance: random.Random,
        starts_apart: bool = False,
    ) -> None:
        self._database, self._service, self._timing = database, service, timing
        self._starts_apart = starts_apart
        #: What has begun and is not acknowledged yet.
        self._begun: list[Start] = []
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
        named = [] if news is None else [bot for bot in self._named(news) if bot.lives]
        if self._starts_apart and (named or self._begun):
            named = self._begin_apart(named, now)
        for bot in named:
            self._call(bot, now)
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

    def _begin_apart(self, named: list[SimulatedBot], now: float) -> list[SimulatedBot]:
        """Let new leases of these bots begin, and acknowledge all that have begun; return the bots with other news."""
        begun, self._begun = self._begun, []
        bots = {bot.bot_id: bot for bot in sorted(named, key=lambda bot: bot.order)}

        def work(connection: Connection) -> dict[int, list[Row]]:
            found: dict[int, list[Row]] = {}
            for row in connection.execute(_NEWS, {"ids": list(bots)}) if bots else ():
                found.setdefault(row.bot_id, []).append(row)
            new = {bot_id: rows for bot_id, rows in found.items() if bots[bot_id].gets_only_leases(rows, now)}
            told = [(row.job_id, row.fence) for rows in new.values() for row in rows]
            starts = [bots[bot_id].start_of(row) for bot_id, rows in new.items() for row in rows]
            deliver(connection, told)
            acknowledge(connection, [*begun, *starts], sync=self._timing.sync)
            return new

        new = self._database.run(work, urgent=True, kept_plans=True)
        for bot_id, rows in new.items():
            bot = bots[bot_id]
            bot.held_call = None
            for row in rows:
                bot.held[row.public_id] = self._begin(row.public_id, row, now)
            self._call(bot, bot.first_end)
        return [bot for bot_id, bot in bots.items() if bot_id not in new]

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
                if held.ends_at <= now and held.outcome is None:
                    held.outcome = Outcome(verdict=held.verdict, seconds=held.seconds)  # type: ignore[arg-type]
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
                if self._starts_apart:
                    self._begun.append(bot.start_of(lease))
            if lease.state == "cancelling" and held_now.outcome is None:
                held_now.outcome = Outcome(verdict="stopped")
                is_news = True
        if is_news:
            self._call(bot, now)
        elif not bot.held:
            bot.call_at = math.inf  # its next call would be held until there is news
        elif is_begun and not self._starts_apart:
            self._call(bot, now)
        else:
            self._call(bot, bot.first_end)

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
        return Held(job, lease.fence, now + seconds, seconds, verdict, is_told=self._starts_apart)

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
    """Make the bots of a simulated pool, none at first, with a sync service of their own.

    step: seconds between two stops of the clock; 0 = it stops at each event, and bots call whenever agents would.
    """
    service = SyncService(
        database,
        timing=timing.model_copy(update={"ttl": FOR_EVER}),
        fetch=fetch,
        now=clock.monotonic,
        cooldown=cooldown,
    )
    # Where every call fetches, one that only begins jobs may bring others.
    apart = step > 0 and not fetch.to_capacity
    return SimulatedBots(
        database, service, timing=timing, runs=runs, chance=random.Random(f"{seed} bots"), starts_apart=apart
    )
