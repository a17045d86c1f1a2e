"""One session of an agent, from its opening to its end: the calls, and what their answers ask for."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

import httpx
import structlog
from pydantic import ValidationError

from bots.agent.capacity import Sizing
from bots.agent.gateway_calls import GatewayCaller, Heartbeat, Unanswered
from bots.agent.launcher import Launcher
from bots.agent.leases import AgentLeases
from bots.agent.run import STUCK_AFTER, RunContext, StopReason
from bots.protocol import OutputReport, Session, Sync, SyncAnswer
from schema import clock
from schema.errors import BadInput, Conflict, LeaseholdError

# Sends what commands write while they run, between the syncs that report their ends.


_log = structlog.get_logger("leasehold.agent")


class OutputStreamer:
    """A thread that looks for new output every `interval` seconds. What fails here travels with the report of the
    lease's end."""

    def __init__(self, session: Session, leases: AgentLeases, caller: GatewayCaller, *, interval: float) -> None:
        self._session, self._leases, self._caller, self._interval = session, leases, caller, interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._stream, name="output", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Look no longer; returns when the thread is over, or after `patience` seconds if a call hangs, which then
        ends by its own timeout."""
        self._stopping.set()
        self._thread.join(patience)

    def _stream(self) -> None:
        while not clock.wait(self._stopping, self._interval):
            for key, output in self._leases.streams():
                if self._stopping.is_set():
                    return
                pending = output.pending()
                report = OutputReport(
                    bot=self._session.bot,
                    epoch=self._session.epoch,
                    secret=self._session.secret,
                    job=key.job,
                    fence=key.fence,
                    output=pending.chunks,
                )
                try:
                    self._caller.once("/v1/output", report.model_dump(mode="json"))
                except (LeaseholdError, RuntimeError, httpx.HTTPError) as error:
                    # RuntimeError: the shift is over and has closed the transport.
                    _log.debug("output could not be sent", job=key.job, reason=type(error).__name__)
                else:
                    output.sent(pending.end)


#: Seconds an idle call may be held: less than the 60 s that proxies commonly wait for an answer.
LONG_POLL = 50.0
#: Seconds after which the answer to an idle call was held back, and did not just bring nothing.
AT_ONCE = 1.0
#: Seconds a process gets to start before what has started is reported without it.
START_TOGETHER = 0.02
#: Seconds for the last call of a session.
FAREWELL = 5.0
#: Seconds for each step of leaving at once.
HURRIED = 1.0


class SessionEnd(Enum):
    """How a session ended."""

    LOST = "lost"  # the server does not know it any more: open another
    EXPIRED = "expired"  # our own clock says so, and the server has not been heard
    SUPERSEDED = "superseded"  # another agent with this name took over
    REFUSED = "refused"  # the gateway does not want us
    LEFT = "left"  # drained
    ABANDONED = "abandoned"  # told to leave at once


class SessionOver(Exception):
    """The session has ended, or will not begin."""

    def __init__(self, end: SessionEnd, detail: str = "") -> None:
        super().__init__(detail)
        self.end = end


class _CutShort(Exception):
    """A held call is not waited for any longer."""


@dataclass
class AgentCommands:
    """What the agent was told from outside; `bell` is rung at every change of anything."""

    waker: threading.Event = field(default_factory=threading.Event)
    #: Own monotonic clock; until then a drain lets work end by itself.
    drain_until: float | None = None
    at_once: bool = False


@dataclass(frozen=True)
class SessionSettings:
    """Seconds; see AgentSettings. `margin`: None = a tenth of the session's life; `sizing`: what decides how many units
    it offers, None = as many as when it began."""

    margin: float | None
    output_interval: float
    sizing: Sizing | None = None


class AgentSession:
    """Keeps one session. `work` returns only when nothing of it runs any more."""

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
        self._session, self._caller, self._wishes, self._tuning = session, caller, commands, tuning
        self._launcher: Launcher = place.launcher
        self._margin = session.expires_in / 10 if tuning.margin is None else tuning.margin
        if self._margin >= session.expires_in:
            raise BadInput("margin", f"{self._margin:g} s is not less than the {session.expires_in:g} s of a session")
        self._leases = AgentLeases(place, notify=commands.waker.set)
        self._heartbeat = Heartbeat(self._margin, on_lost=self._end_lost_session)
        self._grace = place.grace
        self._seq = 0
        self._drained = False
        self._last_status: str = ""
        self._idle_answers = 0
        self._in_doubt = False
        self._sync_in = session.sync_in
        self._give_up_at = math.inf
        #: Whether every run is known to be over, once `work` has returned.
        self.silent = False
        self._beat(opened_at, session.expires_in)

    def work(self) -> SessionEnd:
        """Serve until the session is over."""
        self._heartbeat.start()
        streamer = OutputStreamer(self._session, self._leases, self._caller, interval=self._tuning.output_interval)
        streamer.start()
        try:
            while not (self._draining and self._leases.empty):
                self._pause(self._sync())
            self._close_session()
            return SessionEnd.LEFT
        except SessionOver as over:
            return self._end(over)
        finally:
            self._heartbeat.stop()
            self._leases.stop(StopReason.LOST, grace=0.0)
            self.silent = self._leases.wait(2 * STUCK_AFTER)
            streamer.stop(HURRIED if self._wishes.at_once else FAREWELL)
            self._launcher.disarm()

    @property
    def undelivered(self) -> int:
        """Results of work that the server does not know, once `work` has returned; their jobs will run again."""
        return self._leases.undelivered

    @property
    def _draining(self) -> bool:
        return self._wishes.drain_until is not None

    def _sync(self) -> float:
        """One call and its consequences; returns when it was sent."""
        self._seq += 1
        idle = self._leases.empty and not self._draining
        held = LONG_POLL if idle and not self._in_doubt else 0.0
        self._last_status = "draining" if self._draining or self._drained else "ok"
        sync = self._message(self._last_status, wait=held)
        sent_at = clock.monotonic()
        if held:
            self._heartbeat.rest()
        try:
            answer = self._post(sync, check=lambda: self._check(cut_short=held > 0))
        except _CutShort:
            return sent_at
        except Unanswered:
            # Nothing runs that a late end of the session could harm: the next call, which is not held, has time.
            self._in_doubt = True
            self._beat(clock.monotonic(), self._session.expires_in)
            return sent_at
        self._in_doubt = False
        if not self._beat(sent_at, answer.expires_in):
            raise SessionOver(SessionEnd.EXPIRED, "the answer came after the session's end")
        waited = clock.monotonic() - sent_at
        self._idle_answers = self._idle_answers + 1 if held and not answer.leases and waited < AT_ONCE else 0
        self._drained, self._sync_in = answer.drain, answer.sync_in
        self._leases.settle(answer.leases, accept=not (self._draining or answer.drain))
        return sent_at

    def _pause(self, sent_at: float) -> None:
        """Wait until there is a reason to call again."""
        together: float | None = None
        while True:
            self._wishes.waker.clear()
            self._check()
            now = clock.monotonic()
            if self._draining and self._wishes.drain_until is not None and now >= self._wishes.drain_until:
                self._leases.stop(StopReason.RELEASED)
            if self._last_status != ("draining" if self._draining or self._drained else "ok"):
                return
            due = sent_at + self._sync_in
            if self._leases.empty:
                due = sent_at + self._idle_delay()
            elif self._leases.news:
                together = together or now + START_TOGETHER
                due = min(due, together) if self._leases.starting else now
            if self._draining and self._wishes.drain_until is not None and now < self._wishes.drain_until:
                due = min(due, self._wishes.drain_until)
            if now >= due:
                return
            clock.wait(self._wishes.waker, due - now)

    def _idle_delay(self) -> float:
        """Seconds from one idle call to the next. None, unless calls come back at once instead of being held."""
        if self._draining or self._idle_answers < 2:
            return 0.0
        return min(self._sync_in, 0.05 * 2.0 ** min(self._idle_answers, 10))

    def _check(self, *, cut_short: bool = False) -> None:
        if self._wishes.at_once:
            raise SessionOver(SessionEnd.ABANDONED, "told to leave at once")
        if self._heartbeat.lost:
            raise SessionOver(SessionEnd.EXPIRED, "the session's own deadline has passed")
        until = self._wishes.drain_until
        if until is not None and clock.monotonic() > until + self._grace + STUCK_AFTER + FAREWELL:
            raise SessionOver(SessionEnd.LEFT, "the gateway does not answer, and the time to drain is over")
        if cut_short and self._draining:
            raise _CutShort

    def _post(self, sync: Sync, *, check: Callable[[], None]) -> SyncAnswer:
        body = sync.model_dump(mode="json", exclude_none=True)
        try:
            return SyncAnswer.model_validate(self._caller.call("/v1/sync", body, check=check, held=sync.wait))
        except ValidationError:
            raise SessionOver(SessionEnd.REFUSED, "the gateway's answer to a sync cannot be understood") from None
        except Conflict as conflict:
            superseded = conflict.code == "session_superseded"
            raise SessionOver(SessionEnd.SUPERSEDED if superseded else SessionEnd.LOST, str(conflict)) from None
        except Unanswered:
            raise
        except LeaseholdError as refused:
            raise SessionOver(SessionEnd.REFUSED, str(refused)) from None

    def _message(self, status: str, *, wait: float = 0.0) -> Sync:
        return Sync.model_validate(
            {
                "bot": self._session.bot,
                "epoch": self._session.epoch,
                "secret": self._session.secret,
                "seq": self._seq,
                "status": status,
                "capacity": None if self._tuning.sizing is None else self._tuning.sizing.units(),
                "leases": self._leases.reports(),
                "wait": wait,
            }
        )

    def _beat(self, sent_at: float, expires_in: float) -> bool:
        """Put the deadline off, and behind it the guardian's alarm, which also rings when this process is stopped."""
        alive = self._heartbeat.beat(sent_at, expires_in=expires_in)
        if alive:
            try:
                self._launcher.arm(sent_at + expires_in - self._margin / 2)
            except OSError as error:
                _log.error("the guardian cannot be started", reason=error.strerror)
        return alive

    def _end_lost_session(self) -> None:
        self._leases.stop(StopReason.LOST, grace=min(self._grace, self._margin / 2))
        self._wishes.waker.set()

    def _end(self, over: SessionOver) -> SessionEnd:
        """Kill everything; then learn, where it is not known, whether the name is somebody else's now."""
        _log.warning("session over", bot=self._session.bot, epoch=self._session.epoch, reason=str(over))
        match over.end:
            case SessionEnd.ABANDONED:
                self._heartbeat.stop()
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
        """Close the session that we no longer trust: a newer one of our name must not be taken over."""
        try:
            self._seq += 1
            self._post(self._message("gone"), check=self._check_patience)
        except SessionOver as over:
            return over.end
        return SessionEnd.LOST

    def _close_session(self, *, silent: bool = True) -> None:
        """Report what has ended and close the session. If that fails, or unless all work is known to be over
        (`silent`), the session is left to expire."""
        bot, epoch = self._session.bot, self._session.epoch
        if not silent:
            _log.warning("the session is left to expire, because something still runs", bot=bot, epoch=epoch)
            if self._heartbeat.lost:
                # What was forgotten at the deadline would be missing in the report, and be given away at once.
                return
        self._seq += 1
        self._give_up_at = clock.monotonic() + FAREWELL
        try:
            answer = self._post(self._message("gone" if silent else "draining"), check=self._check_patience)
        except SessionOver as over:
            _log.warning("the session could not be closed", bot=bot, epoch=epoch, reason=str(over))
            return
        self._leases.settle(answer.leases, accept=False)
        if silent:
            _log.info("session closed", bot=bot, epoch=epoch)

    def _check_patience(self) -> None:
        if self._wishes.at_once and self._give_up_at < math.inf:
            self._give_up_at = min(self._give_up_at, clock.monotonic() + HURRIED)
        if clock.monotonic() > self._give_up_at:
            raise SessionOver(SessionEnd.LEFT, "the gateway does not answer")
        if self._give_up_at == math.inf and (self._wishes.at_once or self._draining):
            raise SessionOver(SessionEnd.ABANDONED if self._wishes.at_once else SessionEnd.LEFT, "asked to leave")
