"""The reference bot: runs commands on this machine for a pool, and speaks only HTTP to its gateway."""

import hashlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import FrameType
from typing import Annotated, Self

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bots.agent.capacity import Sizing, raise_file_limit
from bots.agent.gateway_calls import GatewayCaller
from bots.agent.launcher import Launcher
from bots.agent.run import RunContext
from bots.agent.session import AgentCommands, AgentSession, SessionEnd, SessionOver, SessionSettings
from bots.agent.workspace import Workspace
from bots.client.transport import Transport
from bots.protocol import MAX_LEASES, OpenSession, Session
from schema import clock, validation
from schema.errors import LeaseholdError
from schema.validation import Name, Supply

_log = structlog.get_logger("leasehold.agent")

#: Seconds for the call that opens a session.
_OPENING = 10.0
#: Is there wherever processes can be looked up.
_PROC = Path("/proc/self/stat")


def legal_name(host: str, suffix: str = "") -> str:
    """A host name (and `-suffix`) as a legal bot name: lower case, other characters as `-`, at most 63 long."""
    tail = re.sub(r"[^a-z0-9._-]", "-", f"-{suffix}".lower()) if suffix else ""
    head = re.sub(r"[^a-z0-9._-]", "-", host.lower()).lstrip("._-") or "bot"
    return head[: 63 - len(tail)] + tail


class AgentSettings(BaseModel):
    """One bot. Times are seconds.

    name: who it is to the pool; default this host's name. Two agents with one name: the newer one wins.
    name_suffix: appended to the default name, for several agents on one host.
    url: of the gateway; for whoever starts the agent, which takes it as an argument.
    capacity: units of work it holds at once, at most 10,000. Doubling it doubles the commands that may run side by
        side, for each of which 8 open files must be allowed (RLIMIT_NOFILE, hard).
    auto_capacity: offer instead of `capacity` what the machine has: min(cores - 1, available memory / task_memory_mib,
        max_parallel), 1 at least, and half of that while more than 70 % of its cores are at work.
    task_memory_mib: memory that one unit is reckoned to need then. Doubling it halves what memory leaves room for.
    max_parallel: the most that it offers then.
    priority: -1000 to 1000, lower = preferred by assigners; default 0.
    properties: what it offers; jobs require subsets of it.
    resources: what it has of cpu_milli, memory_mib, disk_mib and gpu_milli for jobs that ask for them; any amount of
        what is not named.
    instance: serve only this one; default every instance.
    pool: serve the instances of this pool; not together with instance.
    labels: decide its cohort, the first whose labels contain all of them; default none, which is the default cohort.
    work_dir: where its commands get their private directories; default `leasehold-<user id>` in the temporary
        directory.
    env_allow: variables of its own environment that commands see. HOME and TMPDIR are always the attempt's own.
    kill_grace: between SIGTERM and SIGKILL. Doubling it gives commands twice the time to end by themselves and delays
        the confirmation of a cancellation by as much.
    drain_seconds: for which work may go on after SIGTERM; what is left then is given back to the pool.
    output_interval: between two looks for new output. Doubling it halves the calls and doubles the delay of `logs -f`.
    margin: before the session expires at which it kills its own work; default a tenth of the session's life. Doubling
        it makes overlapping runs less likely when this machine stalls, and shortens the outage it survives.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name | None = None
    name_suffix: Annotated[str, Field(pattern=r"^[a-z0-9._-]{0,32}$")] = ""
    url: str | None = None
    capacity: int = Field(default=1, ge=1, le=MAX_LEASES)
    auto_capacity: bool = False
    task_memory_mib: int = Field(default=512, ge=1, le=1_000_000_000)
    max_parallel: int = Field(default=8, ge=1, le=MAX_LEASES)
    priority: int = Field(default=0, ge=validation.PRIORITY_MIN, le=validation.PRIORITY_MAX)
    properties: dict[str, str | list[str]] = {}
    resources: Supply = {}
    instance: Name | None = None
    pool: Name | None = None
    labels: tuple[validation.Label, ...] = Field(default=(), max_length=64)
    work_dir: Path | None = None
    env_allow: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ")
    kill_grace: float = Field(default=2.0, ge=0, le=600)
    drain_seconds: float = Field(default=30.0, ge=0, le=86400)
    output_interval: float = Field(default=0.5, ge=0.05, le=60)
    margin: float | None = Field(default=None, gt=0, le=3600)

    @model_validator(mode="after")
    def _serves_an_instance_or_a_pool(self) -> Self:
        if self.instance is not None and self.pool is not None:
            raise ValueError("pool means nothing together with instance: a bot serves one of them")
        return self

    @property
    def bot(self) -> str:
        """The name it goes by."""
        return self.name or legal_name(socket.gethostname(), self.name_suffix)

    @property
    def directory(self) -> Path:
        """The work directory it uses."""
        temporary = os.environ.get("TMPDIR", "/tmp")
        return self.work_dir or Path(temporary, f"leasehold-{os.getuid()}")


def _check_system() -> None:
    """Raise LeaseholdError where a command could leave processes behind that nobody finds."""
    if sys.platform != "linux":
        raise LeaseholdError(f"a bot runs on Linux only, and this system is '{sys.platform}'")
    if not _PROC.is_file():
        raise LeaseholdError("a bot needs /proc, which is not mounted here")


def _digest(secret: str) -> str:
    """What names a session without giving it away, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class _Opened:
    """A session, and when (own monotonic clock) the request was sent that opened it."""

    sent_at: float
    session: Session


class Agent:
    """One bot process. `run` returns its exit code; `drain` and `leave` may be called from any thread."""

    def __init__(self, settings: AgentSettings, url: str, token: str, *, chance: Random | None = None) -> None:
        self._settings, self._url, self._token = settings, url, token
        self._chance = chance or Random()
        self._wishes = AgentCommands()
        self._inbox: SimpleQueue[str] = SimpleQueue()
        self._code = 1
        #: A session of this workplace of which nothing runs any more.
        self._dead: str | None = None
        self._undelivered = 0
        self._failure: BaseException | None = None

    def run(self) -> int:
        """Work until told to leave. 0 = drained; 1 = drained, but results could not be delivered; 2 = the gateway
        refuses us; 4 = another agent has our name; 130 = left at once.

        The first SIGTERM or SIGINT drains, the second kills all work at once. Raises BadInput if the settings cannot
        be used on this machine, LeaseholdError if this is not Linux with /proc or if processes of an earlier agent or
        session cannot be killed.
        """
        _check_system()
        if not structlog.is_configured():
            structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
        settings = self._settings
        open_files = raise_file_limit(settings.max_parallel if settings.auto_capacity else settings.capacity)
        workplace = Workspace(settings.directory, settings.bot)
        launcher = Launcher(workplace.guard, open_files=open_files)
        try:
            self._clear(workplace)
            self._dead = workplace.predecessor()
            own = {name: os.environ[name] for name in settings.env_allow if name in os.environ}
            place = RunContext(workplace=workplace, launcher=launcher, grace=settings.kill_grace, environment=own)
            restore = self._catch_signals()
            try:
                self._serve_in_thread(place)
            finally:
                restore()
        finally:
            launcher.close()
            workplace.close()
        if self._failure is not None:
            raise self._failure
        return self._code

    def drain(self) -> None:
        """Take no new work, let what runs end (at most `drain_seconds`), then leave; what is left is given back."""
        self._inbox.put("drain")

    def leave(self) -> None:
        """Kill all work and leave."""
        self._inbox.put("leave")

    def _serve_in_thread(self, place: RunContext) -> None:
        """This thread only waits for wishes, so that a signal never finds it holding a lock."""
        thread = threading.Thread(target=self._serve, args=(place,), name="agent", daemon=True)
        thread.start()
        while (wish := self._inbox.get()) != "done":
            if wish == "leave" or (wish == "signal" and self._wishes.drain_until is not None):
                self._wishes.at_once = True
            elif self._wishes.drain_until is None:
                _log.info("draining", bot=self._settings.bot)
                self._wishes.drain_until = clock.monotonic() + self._settings.drain_seconds
            self._wishes.waker.set()
        thread.join()

    def _serve(self, place: RunContext) -> None:
        try:
            end = self._sessions_loop(place)
            self._code = {
                SessionEnd.LEFT: 0,
                SessionEnd.REFUSED: 2,
                SessionEnd.SUPERSEDED: 4,
                SessionEnd.ABANDONED: 130,
            }[end]
            if self._undelivered:
                _log.error(
                    "left with results that could not be delivered; their jobs will run again",
                    bot=self._settings.bot,
                    results=self._undelivered,
                )
                self._code = self._code or 1
        except BaseException as failure:
            self._failure = failure
        finally:
            self._inbox.put("done")

    def _sessions_loop(self, place: RunContext) -> SessionEnd:
        settings = self._settings
        while True:
            sizing = None
            if settings.auto_capacity:
                sizing = Sizing(task_memory_mib=settings.task_memory_mib, most=settings.max_parallel)
            tuning = SessionSettings(margin=settings.margin, output_interval=settings.output_interval, sizing=sizing)
            try:
                opened = self._open(place.workplace, settings.capacity if sizing is None else sizing.units())
            except SessionOver as over:
                if over.end is SessionEnd.REFUSED:
                    _log.error("refused by the gateway", bot=settings.bot, reason=str(over))
                return over.end
            session = opened.session
            _log.info("session open", bot=session.bot, epoch=session.epoch)
            # A call that hangs must leave room for another one before the session ends.
            transport = self._transport(max(0.5, session.expires_in / 4))
            caller = GatewayCaller(transport, self._wishes.waker, self._chance)
            shift = AgentSession(
                session, opened.sent_at, caller=caller, place=place, tuning=tuning, commands=self._wishes
            )
            try:
                end = shift.work()
            finally:
                transport.close()
            if end is SessionEnd.SUPERSEDED:
                _log.error("another agent with this name has taken over", bot=session.bot, epoch=session.epoch)
            self._undelivered = shift.undelivered
            if end is not SessionEnd.LOST:
                return end
            # Nothing of a session may outlive it into the next one, whatever its runs said of their end.
            self._clear(place.workplace)
            self._dead = _digest(session.secret) if shift.silent else None

    def _clear(self, workplace: Workspace) -> None:
        killed = workplace.clear()
        if killed:
            _log.warning("killed what was left running", bot=self._settings.bot, processes=killed)

    def _open(self, workplace: Workspace, capacity: int) -> _Opened:
        """Raises Over if there is to be no session."""
        settings = self._settings
        request = OpenSession(
            bot=settings.bot,
            capacity=capacity,
            resources=settings.resources,
            priority=settings.priority,
            properties=settings.properties,
            instance=settings.instance,
            pool=settings.pool,
            labels=list(settings.labels),
            secret=secrets.token_urlsafe(32),
            dead_session=self._dead,
        )
        transport = self._transport(_OPENING)
        try:
            caller = GatewayCaller(transport, self._wishes.waker, self._chance)
            body = request.model_dump(mode="json", exclude_none=True)
            sent_at = clock.monotonic()
            session = Session.model_validate(caller.call("/v1/sessions", body, check=self._check))
            # Before the first sync, and so before there is work whose end a restart could prove.
            workplace.remember(_digest(session.secret))
            return _Opened(sent_at=sent_at, session=session)
        except ValidationError:
            raise SessionOver(
                SessionEnd.REFUSED, "the answer to the opening of a session cannot be understood"
            ) from None
        except LeaseholdError as refused:
            raise SessionOver(SessionEnd.REFUSED, str(refused)) from None
        finally:
            transport.close()

    def _transport(self, timeout: float) -> Transport:
        return Transport(self._url, self._token, chance=self._chance, timeout=timeout, patience=0.0)

    def _check(self) -> None:
        if self._wishes.at_once:
            raise SessionOver(SessionEnd.ABANDONED, "told to leave at once")
        if self._wishes.drain_until is not None:
            raise SessionOver(SessionEnd.LEFT)

    def _catch_signals(self) -> Callable[[], None]:
        """SIGTERM and SIGINT become wishes; returns what undoes that. Only the main thread can do it."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def caught(_number: int, _frame: FrameType | None) -> None:
            self._inbox.put("signal")

        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, caught) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore
