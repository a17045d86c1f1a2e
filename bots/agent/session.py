"""One session of an agent: its syncs, the stream of output, the deadline and the end."""

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, assert_never

import structlog
from leasehold.errors import BadInput, Conflict, LeaseholdError
from leasehold.transport import Record, TooLarge
from pydantic import ValidationError
from pydantic_core import to_json

from bots.agent.attempts.attempt import RunContext, StopReason
from bots.agent.capacity import TOGETHER, Sizing
from bots.agent.gateway_calls import GatewayCaller, Heartbeat, Unanswered
from bots.agent.inputs import InputReader
from bots.agent.launcher import Launcher
from bots.agent.leases import NO_NEW_WORK, AgentLeases
from bots.agent.task_launcher import TaskLauncher
from bots.protocol import MAX_LEASES, OutputReport, Session, Sync, SyncAnswer
from schema import clock
from schema.timing import STUCK_AFTER

_log = structlog.get_logger("leasehold.agent")
#: Seconds between two tries to start a thread of the session.
THREAD_AGAIN = 0.2


class OutputStreamer:
    """Sends new output, checkpoints and progress of running commands every `interval` seconds, in a thread of its own.

    What could not be sent here travels with the report of the lease's end.
    """

    def __init__(self, session: Session, leases: AgentLeases, caller: GatewayCaller, *, interval: float) -> None:
        self._session, self._leases, self._caller, self._interval = session, leases, caller, interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._stream, name="output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Stop the thread; wait up to `patience` seconds for a call that hangs, which ends by its own timeout."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(patience)

    def _stream(self) -> None:
        while not clock.wait(self._stopping, self._interval):
            for key, run in self._leases.streams():
                if self._stopping.is_set():
                    return
                pending, checkpoint = run.output.pending(self._leases.output_room), self._leases.unsent_checkpoint(run)
                progress = run.progress.unsent
                report = OutputReport(
                    bot=self._session.bot,
                    epoch=self._session.epoch,
                    secret=self._session.secret,
                    job=key.job,
                    fence=key.fence,
                    output=pending.chunks,
                    progress=progress,
                    **({} if checkpoint is None else checkpoint.fields),
                )
                try:
                    self._caller.once("/v1/output", report.model_dump(mode="json", exclude_defaults=True))
                except TooLarge:
                    self._leases.send_less()
                except (LeaseholdError, RuntimeError) as error:
                    # RuntimeError: the session is over and has closed the transport.
                    _log.debug("output could not be sent", job=key.job, reason=type(error).__name__)
                else:
                    run.output.sent(pending.end)
                    if checkpoint is not None:
                        run.checkpoint.sent(checkpoint.number)
                    if progress is not None:
                        run.progress.sent(progress)


#: Seconds for which the gateway may hold an idle call: less than the 60 s that proxies commonly wait for an answer.
LONG_POLL = 50.0
#: The part of the session's life for which it may hold the call of a bot that runs jobs, up to `timing.sync`. A call
#: without an answer is given up after a quarter of that life, so that another one is answered in time.
HELD_WHILE_BUSY = 1 / 6
#: An answer without news within fewer seconds means that the gateway does not hold calls.
AT_ONCE = 1.0
#: Seconds for which a report of started commands waits for others that are still starting.
START_TOGETHER = 0.02
#: This many started or ended commands are reported at once. Fewer wait for others that are still starting.
ENOUGH = 64
#: Seconds for which the same waits at a bot that holds leases in advance.
AHEAD_TOGETHER = 0.1
#: Seconds without news after which a bot that runs jobs makes a call that may be held, if the last one was not. A bot
#: of short jobs has other news by then. Doubled with each such call that the gateway does not hold.
QUIET = 0.1
#: Seconds allowed for the last call of a session.
FAREWELL = 5.0
#: Seconds allowed for each step of leaving at once.
HURRIED = 1.0


class SessionEnd(Enum):
    """How a session ended."""

    LOST = "lost"  # the server does not know the session any more; the agent opens another
    EXPIRED = "expired"  # the agent's own deadline passed without an answer of the server
    SUPERSEDED = "superseded"  # another agent with this name took over
    REFUSED = "refused"  # the gateway refused a call
    LEFT = "left"  # drained
    ABANDONED = "abandoned"  # asked to leave at once


class SessionOver(Exception):
    """The session has ended, or cannot be opened."""

    def __init__(self, end: SessionEnd, detail: str = "") -> None:
        super().__init__(detail)
        self.end = end


class _CutShort(Exception):
    """The agent does not wait for the answer of a call and makes another one: it drains, has news, or tells less."""


@dataclass
class AgentCommands:
    """Requests to the agent to drain or leave. `waker` is set after every change, here and in the leases."""

    waker: threading.Event = field(default_factory=threading.Event)
    #: End of a drain on the agent's monotonic clock; until then commands may end by themselves.
    drain_until: float | None = None
    at_once: bool = False


@dataclass(frozen=True)
class SessionSettings:
    """Settings of one session; see AgentSettings. Times are in seconds.

    margin: None = a tenth of the session's life. sizing: computes the capacity; None = it stays as it was opened.
    """

    margin: float | None
    output_interval: float
    sizing: Sizing | None = None


class AgentSession:
    """Keeps one session alive and runs its leases."""

    def __init__(
        self,
        session: Session,
        opened_at: float,
        *,
        caller: GatewayCaller,
        place: RunContext,
        tuning: SessionSettings,
        commands: AgentCommands,
    ) -> None:
        self._session, self._caller, self._commands, self._tuning = session, caller, commands, tuning
        self._launcher: Launcher = place.launcher
        self._margin = session.expires_in / 10 if tuning.margin is None else tuning.margin
        if self._margin >= session.expires_in:
            raise BadInput("margin", f"{self._margin:g} s is not less than the {session.expires_in:g} s of a session")
        self._leases = AgentLeases(place, notify=commands.waker.set, inputs=InputReader(session, caller.once))
        self._heartbeat = Heartbeat(self._margin, on_lost=self._end_lost_session)
        self._grace = place.grace
        self._seq = 0
        self._drained = False
        self._last_status: str = ""
        #: How many of the last calls might have been held, and were answered at once without news.
        self._unheld = 0
        #: The units that the server knows beyond those that run at once.
        self._ahead = 0
        #: How many ends of these are reported at once.
        self._together = 0
        self._told_capacity = 0
        self._in_doubt = False
        self._sync_in = session.sync_in
        self._give_up_at = math.inf
        #: True, once `work` has returned, if every run is known to be over.
        self.silent = False
        #: True, once `work` has returned, if the session was lost only because no gateway answered.
        self.cut_off = False
        self._beat(opened_at, session.expires_in)

    def work(self) -> SessionEnd:
        """Serve until the session is over, then stop every run; return how the session ended."""
        streamer = OutputStreamer(self._session, self._leases, self._caller, interval=self._tuning.output_interval)
        try:
            self._start(self._heartbeat.start)
            self._start(streamer.start)
            while not (self._draining and self._leases.empty):
                sent_at = self._sync()
                self._leases.watch(True)
                self._pause(sent_at)
                self._leases.watch(False)
            self._close_session()
            return SessionEnd.LEFT
        except SessionOver as over:
            return self._end(over)
        finally:
            self._heartbeat.stop()
            self._leases.stop(StopReason.LOST, grace=0.0)
            self.silent = self._leases.wait(2 * STUCK_AFTER)
            streamer.stop(HURRIED if self._commands.at_once else FAREWELL)
            self._launcher.disarm()

    def _start(self, start: Callable[[], None]) -> None:
        """Start a thread, later if there is none, as where something else forks without end. Raises SessionOver."""
        waits = False
        while True:
            try:
                return start()
            except RuntimeError as error:
                if not waits:
                    _log.warning("the session waits for a thread", bot=self._session.bot, reason=str(error))
            waits = True
            self._check()
            clock.sleep(THREAD_AGAIN)

    @property
    def undelivered(self) -> int:
        """After `work`: how many results the server does not know. Their jobs will run again."""
        return self._leases.undelivered

    @property
    def _draining(self) -> bool:
        return self._commands.drain_until is not None

    def _sync(self) -> float:
        """Make one sync and apply its answer; return when it was sent."""
        self._seq += 1
        idle, wait = self._leases.empty, self._wait()
        self._last_status = "draining" if self._draining or self._drained else "ok"
        sync = self._message(self._last_status, wait=wait)
        sent_at = clock.monotonic()
        if wait and idle:
            self._heartbeat.rest()
        self._leases.watch(wait > 0)
        try:
            # The deadline of a bot that runs jobs goes on. So its call is given up as early as one that is not held.
            answer = self._post(sync, check=partial(self._check, cut_short=wait > 0), held=wait if idle else 0.0)
        except _CutShort:
            return sent_at
        except Unanswered:
            # No command runs that could overlap with a run on another bot, so the next call gets a whole deadline.
            self._in_doubt = True
            self._beat(clock.monotonic(), self._session.expires_in)
            return sent_at
        self._in_doubt = False
        # The rest of the session counts from the request that was answered, however many came before it in vain.
        sent_at = self._caller.sent_at
        if not self._beat(sent_at, answer.expires_in):
            raise SessionOver(SessionEnd.EXPIRED, "the answer came after the session's end")
        waited = clock.monotonic() - sent_at
        self._drained, self._sync_in = answer.drain, answer.sync_in
        accept = not (self._draining or answer.drain)
        agreed = answer.unlisted == sync.get("unlisted", 0)
        has_new = self._leases.settle(answer.leases, accept=accept, keep_unlisted=agreed)
        self._unheld = self._unheld + 1 if not has_new and waited < min(AT_ONCE, wait / 2) else 0
        if not accept:
            self._leases.give_back(NO_NEW_WORK)
        return sent_at

    def _pause(self, sent_at: float) -> None:
        """Wait until there is a reason for the next sync."""
        together: float | None = None
        enough = min(self._together, math.ceil(len(self._leases) * TOGETHER)) or ENOUGH
        # Each task is news when it begins and when it ends.
        self._leases.enough = 2 * enough
        while True:
            self._commands.waker.clear()
            self._check()
            now = clock.monotonic()
            if self._draining and self._commands.drain_until is not None and now >= self._commands.drain_until:
                self._leases.begin()
                self._leases.stop(StopReason.RELEASED)
            if self._last_status != ("draining" if self._draining or self._drained else "ok"):
                return
            due = sent_at + self._sync_in
            if self._leases.empty:
                due = sent_at + self._quiet()
            elif (news := self._leases.news(brief=self._is_brief)).changed:
                together = together or now + (AHEAD_TOGETHER if self._ahead else START_TOGETHER)
                few = news.reported < enough
                due = min(due, together) if few and news.starting else now
            elif self._wait() > 0:
                due = min(due, sent_at + self._quiet())
            if self._draining and self._commands.drain_until is not None and now < self._commands.drain_until:
                due = min(due, self._commands.drain_until)
            if now >= due:
                return
            self._leases.begin()
            clock.wait(self._commands.waker, due - now)

    def _wait(self) -> float:
        """Return the seconds for which the gateway may hold the next call.

        The calls of a bot that runs jobs are held if it has no news but of starts, and reports all of its leases. While
        a call that it has given up may still be held, it has no other one held.
        """
        if self._draining or self._in_doubt:
            return 0.0
        if self._leases.empty:
            return LONG_POLL
        if self._caller.is_waiting or not self._leases.all_run:
            return 0.0
        if self._is_brief and self._leases.news().changed:
            return 0.0
        return min(LONG_POLL, self._sync_in, self._session.expires_in * HELD_WHILE_BUSY)

    def _quiet(self) -> float:
        """Return the seconds between two calls that may be held, if the gateway does not hold them."""
        if self._draining or (self._leases.empty and self._unheld < 2):
            return 0.0
        return min(self._sync_in, QUIET * 2.0 ** min(self._unheld, 10))

    def _check(self, *, cut_short: bool = False) -> None:
        if self._commands.at_once:
            raise SessionOver(SessionEnd.ABANDONED, "asked to leave at once")
        if self._heartbeat.lost:
            raise SessionOver(SessionEnd.EXPIRED, "the session's own deadline has passed")
        until = self._commands.drain_until
        if until is not None and clock.monotonic() > until + self._grace + STUCK_AFTER + FAREWELL:
            raise SessionOver(SessionEnd.LEFT, "the gateway does not answer, and the time to drain is over")
        if cut_short and (self._draining or self._leases.news().changed):
            raise _CutShort

    def _post(self, sync: Record, *, check: Callable[[], None], held: float = 0.0) -> SyncAnswer:
        """Make the call and return its answer. held: as of `GatewayCaller.call`. Raises SessionOver, and _CutShort if a
        proxy takes no call of its size."""
        try:
            return SyncAnswer.model_validate(self._told(sync, check, held))
        except ValidationError:
            raise SessionOver(SessionEnd.REFUSED, "the gateway's answer to a sync cannot be understood") from None
        except Conflict as conflict:
            superseded = conflict.code == "session_superseded"
            raise SessionOver(SessionEnd.SUPERSEDED if superseded else SessionEnd.LOST, str(conflict)) from None
        except TooLarge as refused:
            if self._leases.send_less():
                raise _CutShort from None
            raise SessionOver(SessionEnd.REFUSED, str(refused)) from None
        except Unanswered:
            raise
        except LeaseholdError as refused:
            raise SessionOver(SessionEnd.REFUSED, str(refused)) from None

    def _told(self, sync: Record, check: Callable[[], None], held: float) -> Record:
        """Make the call; once more without the last progress if the gateway is older than that."""

        def call(sync: Record) -> Record:
            return self._caller.call("/v1/sync", to_json(sync), check=check, held=held, meanwhile=self._leases.begin)

        try:
            return call(sync)
        except BadInput as refused:
            if not refused.field.endswith(".progress"):
                raise
        _log.info("the gateway is too old to be told the last progress with the end", bot=self._session.bot)
        self._leases.tells_progress = False
        for report in sync["leases"]:
            report.pop("progress", None)
        return call(sync)

    def _message(self, status: str, *, wait: float = 0.0) -> Record:
        """Return the message `Sync` without defaults."""
        fields: dict[str, Any] = {
            "bot": self._session.bot,
            "epoch": self._session.epoch,
            "secret": self._session.secret,
            "seq": self._seq,
            "status": status,
            "capacity": self._capacity(ahead=status == "ok" and not wait),
            "wait": wait,
        }
        body = Sync.model_validate(fields).model_dump(mode="json", exclude_defaults=True)
        reports, unlisted = self._leases.reports(brief=self._is_brief and not self._in_doubt)
        if reports:
            body["leases"] = reports
        if unlisted:
            body["unlisted"] = unlisted
        if self._ahead:
            body["ahead"] = True
        return body

    @property
    def _is_brief(self) -> bool:
        """True if the bot holds leases in advance and may leave some out of its reports."""
        return self._ahead > 0

    def _capacity(self, *, ahead: bool) -> int | None:
        """Return the units to announce, None = as before. ahead: more than run at once, if tasks are short."""
        sizing, launcher = self._tuning.sizing, self._launcher
        capacity = None if sizing is None else sizing.units()
        if not isinstance(launcher, TaskLauncher):
            return capacity
        if capacity is not None:
            # Leases that are on their way were granted for the capacity before.
            launcher.limit, self._told_capacity = max(capacity, self._told_capacity), capacity
        more = launcher.ahead if ahead else 0
        if capacity is None and more == self._ahead == 0:
            return None
        self._ahead, self._together = more, launcher.together if more else 0
        return min(MAX_LEASES, (launcher.limit if capacity is None else capacity) + more)

    def _beat(self, sent_at: float, expires_in: float) -> bool:
        """Move on the deadline and the guardian's later alarm, which rings even if this process is stopped."""
        alive = self._heartbeat.beat(sent_at, expires_in=expires_in)
        if alive:
            try:
                self._launcher.arm(sent_at + expires_in - self._margin / 2)
            except OSError as error:
                _log.error("the guardian cannot be started", reason=error.strerror)
        return alive

    def _end_lost_session(self) -> None:
        self._leases.stop(StopReason.LOST, grace=min(self._grace, self._margin / 2))
        self._commands.waker.set()

    def _end(self, over: SessionOver) -> SessionEnd:
        """Kill all commands; after an expiry, find out whether another agent has taken over the name."""
        _log.warning("session over", bot=self._session.bot, epoch=self._session.epoch, reason=str(over))
        # A machine that stood still noticed the deadline late. A job may have caused that.
        self.cut_off = self._caller.unanswered > 0 and self._heartbeat.late < self._margin / 2
        match over.end:
            case SessionEnd.ABANDONED:
                self._heartbeat.stop()
                self._leases.begin()
                self._leases.stop(StopReason.RELEASED, grace=0.0)
                self._close_session(silent=self._leases.wait(HURRIED))
            case SessionEnd.EXPIRED:
                self._end_lost_session()
                if not self._leases.wait(self._grace + STUCK_AFTER):
                    return SessionEnd.LOST
                return self._close_lost_session()
            case SessionEnd.LOST | SessionEnd.SUPERSEDED | SessionEnd.REFUSED | SessionEnd.LEFT:
                pass
            case _:
                assert_never(over.end)
        return over.end

    def _close_lost_session(self) -> SessionEnd:
        """Close the expired session, to learn whether a newer session of the same name exists.

        If it does, this agent must not open another one and take the name back.
        """
        try:
            self._last_post("gone")
        except SessionOver as over:
            return over.end
        return SessionEnd.LOST

    def _last_post(self, status: str) -> SyncAnswer:
        while True:
            self._seq += 1
            with suppress(_CutShort):
                return self._post(self._message(status), check=self._check_patience)

    def _close_session(self, *, silent: bool = True) -> None:
        """Report the attempts that ended and close the session.

        The session is left to expire if this fails, or if some command may still run (not `silent`).
        """
        bot, epoch = self._session.bot, self._session.epoch
        if not silent:
            _log.warning("the session is left to expire, because something still runs", bot=bot, epoch=epoch)
            if self._heartbeat.lost:
                # The leases forgotten at the deadline would be missing in the report, and their jobs would start
                # elsewhere at once.
                return
        self._give_up_at = clock.monotonic() + FAREWELL
        try:
            answer = self._last_post("gone" if silent else "draining")
        except SessionOver as over:
            _log.warning("the session could not be closed", bot=bot, epoch=epoch, reason=str(over))
            return
        self._leases.settle(answer.leases, accept=False)
        if silent:
            _log.info("session closed", bot=bot, epoch=epoch)

    def _check_patience(self) -> None:
        if self._commands.at_once and self._give_up_at < math.inf:
            self._give_up_at = min(self._give_up_at, clock.monotonic() + HURRIED)
        if clock.monotonic() > self._give_up_at:
            raise SessionOver(SessionEnd.LEFT, "the gateway does not answer")
        if self._give_up_at == math.inf and (self._commands.at_once or self._draining):
            raise SessionOver(SessionEnd.ABANDONED if self._commands.at_once else SessionEnd.LEFT, "asked to leave")
