"""Simulated bots that call the real functions, for tests of faults and scale."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import psycopg
from leasehold.errors import Conflict, NotReady

from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync, SyncAnswer, Work
from bots.sync import sessions
from bots.sync.call import HeldCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.postgres.engine import Database
from schema.postgres.failures import is_outage
from schema.timing import Timing
from tests.support.model import Execution, ExecutionLog
from tests.support.pool import synced

#: Part of its session's remaining time after which a bot kills its jobs, so that it does so before the server acts.
MARGIN = 0.8


@dataclass
class Held:
    """A job on a simulated bot; `outcome` is set when it has ended there."""

    fence: int
    execution: Execution
    finish_at: float
    verdict: str
    outcome: Outcome | None = None


@dataclass
class Behaviour:
    """Run time in seconds and verdict of each job on simulated bots."""

    seconds: Callable[[Work], float] = lambda _: 0.0
    verdict: Callable[[Work], str] = lambda _: "succeeded"


@dataclass
class SimulatedBot:
    """State of a simulated bot. Only its thread steps it; a test may set the flags."""

    name: str
    open: OpenSession
    session: Session | None = None
    seq: int = 0
    unanswered: Sync | None = None
    held: dict[str, Held] = field(default_factory=dict)
    deadline: float = 0.0
    next_sync: float = 0.0
    stopped: bool = False
    frozen: bool = False
    reopen: bool = True
    syncs: int = 0
    times_over: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Swarm:
    """Many simulated bots on a few threads, which call `sessions.open_session` and `SyncService`.

    pace: seconds between the syncs of a bot that has nothing to report.
    properties, instance: a function of the bot's number, or one value for all bots.
    Leaving the context stops the threads but not the sessions, and raises the first error of a thread.
    """

    def __init__(
        self,
        database: Database,
        timing: Timing,
        count: int,
        *,
        capacity: int = 1,
        properties: Mapping[str, str | list[str]] | Callable[[int], Mapping[str, str | list[str]]] | None = None,
        instance: str | Callable[[int], str | None] | None = None,
        behaviour: Behaviour | None = None,
        fetch: FetchSettings | None = None,
        pace: float = 0.05,
        threads: int = 4,
        prefix: str = "bot",
    ) -> None:
        self.database, self.timing, self.pace = database, timing, pace
        self.sync_service = SyncService(database, timing=timing, fetch=fetch or FetchSettings(), now=clock.monotonic)
        self.behaviour = behaviour or Behaviour()
        self.log = ExecutionLog()
        self.errors: list[BaseException] = []
        self.bots = [
            SimulatedBot(
                name := f"{prefix}-{number}",
                OpenSession(
                    bot=name,
                    capacity=capacity,
                    properties=dict(properties(number) if callable(properties) else properties or {}),
                    instance=instance(number) if callable(instance) else instance,
                ),
            )
            for number in range(count)
        ]
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(self.bots[part::threads],), name=f"swarm-{part}", daemon=True)
            for part in range(min(threads, count))
        ]

    def __enter__(self) -> "Swarm":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop stepping the bots; their sessions stay open and expire. Raises the first error of a thread."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for bot in self.bots:
            self._abandon(bot)
        if self.errors:
            raise self.errors[0]

    def __getitem__(self, name: str) -> SimulatedBot:
        return next(bot for bot in self.bots if bot.name == name)

    def kill(self, name: str) -> None:
        """Kill the bot with its jobs; it never calls again."""
        bot = self[name]
        with bot.lock:
            bot.stopped = True
            self._abandon(bot)

    def freeze(self, name: str) -> None:
        """Stop the bot and its jobs, as SIGSTOP would."""
        bot = self[name]
        with bot.lock:
            bot.frozen = True
            for held in bot.held.values():
                self.log.end(held.execution)

    def thaw(self, name: str) -> None:
        """Let a frozen bot go on. It checks its own deadline first."""
        bot = self[name]
        with bot.lock:
            bot.frozen = False
            if clock.monotonic() < bot.deadline:
                for job, held in bot.held.items():
                    if held.outcome is None:
                        held.execution = self.log.begin(job, held.fence, bot.name)

    def restart(self, name: str) -> None:
        """Kill the bot with its jobs, and let it open a new session at once."""
        bot = self[name]
        with bot.lock:
            self._abandon(bot)
            bot.session, bot.unanswered, bot.stopped, bot.frozen = None, None, False, False

    def drain(self, names: Iterable[str]) -> None:
        """Let these bots return their jobs and close their sessions in an orderly way."""
        for name in names:
            bot = self[name]
            with bot.lock:
                for held in bot.held.values():
                    self.log.end(held.execution)
                    held.outcome = held.outcome or Outcome(verdict="released")
                if bot.session is not None:
                    bot.unanswered = None
                    self._sync(bot, status="gone")
                self._abandon(bot)
                bot.session, bot.stopped = None, True

    def _run(self, bots: list[SimulatedBot]) -> None:
        while not self._stopping.is_set():
            for bot in bots:
                try:
                    with bot.lock:
                        if not (bot.stopped or bot.frozen):
                            self._step(bot)
                except NotReady:
                    continue  # the server is down; the same call is repeated later
                except psycopg.Error as error:
                    if not is_outage(error):
                        self.errors.append(error)
                        return
                except BaseException as error:
                    self.errors.append(error)
                    return
            clock.wait(self._stopping, 0.002)

    def _step(self, bot: SimulatedBot) -> None:
        now = clock.monotonic()
        if bot.session is not None and now >= bot.deadline:
            self._abandon(bot)
            bot.session = None
        if bot.session is None:
            self._open(bot)
            return
        for held in bot.held.values():
            if held.outcome is None and held.finish_at <= now:
                self.log.end(held.execution)
                held.outcome = Outcome(verdict=held.verdict, exit_code=0, seconds=now - held.execution.begin)
        if now >= bot.next_sync or any(held.outcome for held in bot.held.values()):
            self._sync(bot)

    def _open(self, bot: SimulatedBot) -> None:
        sent = clock.monotonic()
        bot.session = sessions.open_session(self.database, bot.open, timing=self.timing)
        bot.seq, bot.unanswered, bot.next_sync = 0, None, 0.0
        bot.deadline = sent + bot.session.expires_in * MARGIN

    def _sync(self, bot: SimulatedBot, *, status: str = "ok") -> None:
        if bot.unanswered is None:
            assert bot.session is not None
            bot.seq += 1
            bot.unanswered = Sync(
                bot=bot.name,
                epoch=bot.session.epoch,
                secret=bot.session.secret,
                seq=bot.seq,
                status=status,
                leases=[_report(job, held) for job, held in bot.held.items()],
            )
        sent = clock.monotonic()
        try:
            answer = synced(self.sync_service, bot.unanswered)
        except Conflict as conflict:
            self._over(bot, conflict)
            return
        assert not isinstance(answer, HeldCall), "a sync that does not wait is answered at once"
        bot.syncs += 1
        if status == "ok":
            self._obey(bot, SyncAnswer.model_validate_json(answer), sent=sent)
        bot.unanswered = None

    def _obey(self, bot: SimulatedBot, answer: SyncAnswer, *, sent: float) -> None:
        bot.deadline = sent + answer.expires_in * MARGIN
        bot.next_sync = sent + min(self.pace, answer.sync_in)
        wanted = {work.job: work for work in answer.leases}
        for job in list(bot.held):
            if job not in wanted or wanted[job].fence != bot.held[job].fence:
                self.log.end(bot.held.pop(job).execution)
        for job, work in wanted.items():
            held = bot.held.get(job)
            if held is None:
                execution = self.log.begin(job, work.fence, bot.name)
                finish_at = execution.begin + self.behaviour.seconds(work)
                held = bot.held[job] = Held(work.fence, execution, finish_at, self.behaviour.verdict(work))
            if work.state == "cancelling" and held.outcome is None:
                self.log.end(held.execution)
                held.outcome = Outcome(verdict="stopped")

    def _over(self, bot: SimulatedBot, conflict: Conflict) -> None:
        """Handle the end of the session. If a newer bot of the same name has replaced this one, it stops for good."""
        if conflict.code not in ("session_over", "session_superseded"):
            raise conflict
        self._abandon(bot)
        bot.session, bot.unanswered = None, None
        bot.times_over += 1
        bot.stopped = conflict.code == "session_superseded" or not bot.reopen

    def _abandon(self, bot: SimulatedBot) -> None:
        for held in bot.held.values():
            self.log.end(held.execution)
        bot.held.clear()


def _report(job: str, held: Held) -> LeaseReport:
    state = "active" if held.outcome is None else "completed"
    return LeaseReport(job=job, fence=held.fence, state=state, outcome=held.outcome)
