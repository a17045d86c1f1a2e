"""Simulated bots that call the real functions, for tests of faults and scale."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg
from leasehold.errors import Conflict, NotReady

from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync, SyncAnswer, Work
from bots.sync.call import HeldCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.postgres.engine import Database
from schema.postgres.failures import is_outage
from schema.timing import Timing
from tests.support.model import Execution, ExecutionLog
from tests.support.pool import open_session, synced

#: Part of its session's remaining time after which a bot kills its jobs, so that it does so before the server acts.
MARGIN = 0.8


@dataclass
class Held:
    """A job on a simulated bot; `outcome` is set when it has ended there."""

    fence: int
    execution: Execution
    finish_at: float
    outcome: Outcome | None = None


@dataclass
class SimulatedBot:
    """State of a simulated bot, which its thread steps."""

    name: str
    open: OpenSession
    session: Session | None = None
    seq: int = 0
    unanswered: Sync | None = None
    held: dict[str, Held] = field(default_factory=dict)
    deadline: float = 0.0
    next_sync: float = 0.0
    stopped: bool = False


class Swarm:
    """Many simulated bots on a few threads, which call `sessions.open_sessions` and `SyncService`.

    pace: seconds between the syncs of a bot that has nothing to report.
    seconds: run time of each job. properties: a function of the bot's number.
    Leaving the context stops the threads but not the sessions, and raises the first error of a thread.
    """

    def __init__(
        self,
        database: Database,
        timing: Timing,
        count: int,
        *,
        capacity: int = 1,
        properties: Callable[[int], dict[str, str | list[str]]] = lambda _: {},
        seconds: Callable[[Work], float] = lambda _: 0.0,
        fetch: FetchSettings | None = None,
        pace: float = 0.05,
        threads: int = 4,
        prefix: str = "bot",
    ) -> None:
        self.database, self.timing, self.pace = database, timing, pace
        self.sync_service = SyncService(database, timing=timing, fetch=fetch or FetchSettings(), now=clock.monotonic)
        self.seconds, self.log = seconds, ExecutionLog()
        self.errors: list[BaseException] = []
        self.bots = [
            SimulatedBot(
                name := f"{prefix}-{number}", OpenSession(bot=name, capacity=capacity, properties=properties(number))
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

    def _run(self, bots: list[SimulatedBot]) -> None:
        while not self._stopping.is_set():
            for bot in bots:
                try:
                    if not bot.stopped:
                        self._step(bot)
                except NotReady:
                    continue  # the server is down; the same call is repeated later
                except BaseException as error:
                    if not (isinstance(error, psycopg.Error) and is_outage(error)):
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
                held.outcome = Outcome(verdict="succeeded", exit_code=0, seconds=now - held.execution.begin)
        if now >= bot.next_sync or any(held.outcome for held in bot.held.values()):
            self._sync(bot)

    def _open(self, bot: SimulatedBot) -> None:
        sent = clock.monotonic()
        bot.session = open_session(self.database, bot.open, timing=self.timing)
        bot.seq, bot.unanswered, bot.next_sync = 0, None, 0.0
        bot.deadline = sent + bot.session.expires_in * MARGIN

    def _sync(self, bot: SimulatedBot) -> None:
        if bot.unanswered is None:
            assert bot.session is not None
            bot.seq += 1
            bot.unanswered = Sync(
                bot=bot.name,
                epoch=bot.session.epoch,
                secret=bot.session.secret,
                seq=bot.seq,
                leases=[_report(job, held) for job, held in bot.held.items()],
            )
        sent = clock.monotonic()
        try:
            answer = synced(self.sync_service, bot.unanswered)
        except Conflict as conflict:
            self._over(bot, conflict)
            return
        assert not isinstance(answer, HeldCall), "a sync that does not wait is answered at once"
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
                held = bot.held[job] = Held(work.fence, execution, execution.begin + self.seconds(work))
            if work.state == "cancelling" and held.outcome is None:
                self.log.end(held.execution)
                held.outcome = Outcome(verdict="stopped")

    def _over(self, bot: SimulatedBot, conflict: Conflict) -> None:
        """Handle the end of the session. If a newer bot of the same name has replaced this one, it stops for good."""
        if conflict.code not in ("session_over", "session_superseded"):
            raise conflict
        self._abandon(bot)
        bot.session, bot.unanswered = None, None
        bot.stopped = conflict.code == "session_superseded"

    def _abandon(self, bot: SimulatedBot) -> None:
        for held in bot.held.values():
            self.log.end(held.execution)
        bot.held.clear()


def _report(job: str, held: Held) -> LeaseReport:
    state = "active" if held.outcome is None else "completed"
    return LeaseReport(job=job, fence=held.fence, state=state, outcome=held.outcome)
