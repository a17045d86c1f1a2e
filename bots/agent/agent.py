"""The agent: the reference bot, which runs commands on this machine and talks to a gateway by HTTP.

One module because the settings of a bot are what its agent is made of.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import FrameType
from typing import Annotated, Literal, Self

import structlog
from leasehold import wire
from leasehold.errors import BadInput, LeaseholdError
from leasehold.transport import Record, Transport
from leasehold.wire import PROPERTY, check_place
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from bots.agent.attempts.attempt import RunContext
from bots.agent.capacity import Sizing, raise_file_limit
from bots.agent.gateway_calls import GatewayCaller
from bots.agent.isolation import containment
from bots.agent.isolation.cgroups import Limits
from bots.agent.isolation.containment import Containment
from bots.agent.isolation.job_accounts import AGENT, DYNAMIC
from bots.agent.launcher import Launcher
from bots.agent.session import AgentCommands, AgentSession, SessionEnd, SessionOver, SessionSettings
from bots.agent.task_launcher import TaskLauncher
from bots.agent.warm_children import App, ChildLimits
from bots.agent.workspace import Workspace
from bots.protocol import (
    HOST,
    MAX_LEASES,
    MAX_TASK,
    MAX_TASKS,
    MAX_TASKS_BYTES,
    ONLY_TOLD,
    VERSION,
    OpenSession,
    Session,
)
from schema import clock, validation
from schema.fields import Label, Name, Supply
from schema.gc_tuning import infrequent_gc
from schema.timing import KILL_GRACE
from schema.validation import FARM, YEAR

_log = structlog.get_logger("leasehold.agent")

#: Timeout, in seconds, of the call that opens a session.
_OPENING = 10.0
#: This file exists wherever processes can be looked up.
_PROC = Path("/proc/self/stat")
#: Thresholds of the garbage collector: new objects between two collections, and how rarely older objects are included.
#: A bot of short tasks makes dozens of objects for each of hundreds of leases at a time, and hardly any are garbage.
GARBAGE = (20_000, 10, 10)


def legal_name(host: str, suffix: str = "") -> str:
    """Make a legal bot name of a host name and `-suffix`: lower case, other characters as `-`, at most 63."""
    tail = re.sub(r"[^a-z0-9._-]", "-", f"-{suffix}".lower()) if suffix else ""
    head = re.sub(r"[^a-z0-9._-]", "-", host.lower()).lstrip("._-") or "bot"
    return head[: 63 - len(tail)] + tail


def log_to_stderr() -> None:
    """Log to standard error, for a program that has not said how it logs.

    Errors have their stack but no values of variables, which may be a job's data or secret.
    """
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    form = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
    *usual, _ = structlog.get_config()["processors"]
    structlog.configure(processors=[*usual, form], logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class AgentSettings(BaseModel):
    """Settings of one bot. Times are in seconds.

    name: the bot's name in the pool; default this host's name. Of two agents with one name the newer one wins.
    name_suffix: appended to the default name, for several agents on one host.
    app: `MODULE:POOL`, whose tasks the bot runs in warm processes, and nothing else. It then offers the property `app`
        with the name of the app, exclusively. Its capacity is the number of tasks that may run at once; while they are
        short, it announces more and holds some leases in advance.
    max_calls, max_memory_mib, max_age: with an app, replace a process after so many calls, when it holds so many MiB or
        is so old; default never. Doubling a limit halves what starting processes costs.
    url: the gateway's address, read by the command that starts the agent. `Agent` takes the address as an argument.
    capacity: units of work that the bot holds at once, at most 10,000. Doubling it doubles the commands that may run
        at once. Each of them needs 8 open files under the hard limit RLIMIT_NOFILE.
    auto_capacity: derive the capacity from the machine, or from what its container leaves of it, instead of
        `capacity`: min(cores - 1, available memory / task_memory_mib, max_parallel), at least 1, and half of that while
        more than 70 % of the cores are busy.
    task_memory_mib: with auto_capacity, the memory that one unit needs. Doubling it halves the units that fit into
        memory.
    max_parallel: with auto_capacity, the highest capacity.
    priority: -1000 to 1000, lower = preferred by assigners; default 0.
    properties: what the bot offers; a job may require a part of it.
    exclusive: names of those properties that the bot keeps for jobs that ask for them: it runs only jobs that require
        or prefer each of these; default none.
    resources: the bot's cpu_milli, memory_mib, disk_mib and gpus. A resource that is not named is unlimited, but a job
        that takes whole GPUs runs only where gpus are named.
    instance: serve only this instance; default every instance.
    pool: serve the instances of this pool; not together with instance.
    labels: choose the bot's cohort: the first cohort that has all of these labels; default the default cohort.
    work_dir: holds the private directories of the commands; default `leasehold-<user id>` in the temporary directory.
    env_allow: variables of the agent's environment that commands inherit. HOME and TMPDIR always belong to the attempt.
        Variables of Leasehold itself, which may hold a token, are refused.
    job_user: the account of commands. `dynamic`: a user id that no account has, one for each running attempt. `agent`:
        that of the agent. Any other: the account of this name. Default: `dynamic` where the agent is root, otherwise
        `agent`. An agent that is not root cannot use another account.
    job_processes: the most processes and threads of one attempt; default 4096 for a dynamic account, otherwise no
        limit. For other accounts it needs a cgroup. Doubling it lets a command that forks without end take twice as
        much.
    job_memory_mib: MiB of memory of one attempt, by a cgroup; default no limit. Doubling it doubles what one attempt
        may take from the others.
    job_cpu_milli: thousandths of a core for one attempt, by a cgroup; default no limit. Doubling it doubles what one
        attempt may take from the others.
    cgroup: the cgroup (version 2) below which attempts have theirs; default `leasehold` at the root of the hierarchy.
    sandbox: `bubblewrap` lets commands see the machine's files read-only, and no other processes; default `none`.
    sandbox_network: with the sandbox, commands may use the network.
    sandbox_hide: with the sandbox, directories that are empty for commands, in addition to the data directory and
        work_dir.
    kill_grace: time between SIGTERM and SIGKILL. Doubling it doubles the longest delay of a cancellation.
    drain_seconds: time for which jobs may run on after SIGTERM. The agent then returns unfinished jobs to the pool.
    output_interval: time between two looks for new output. Doubling it halves the calls and doubles the delay of
        `logs -f`.
    margin: how long before the end of the session the agent kills its commands; default a tenth of the session's
        life. Doubling it makes overlapping runs less likely when this machine stalls, and shortens the outage of the
        gateway that the agent survives.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name | None = None
    name_suffix: Annotated[str, Field(pattern=r"^[a-z0-9._-]{0,32}$")] = ""
    app: str | None = None
    max_calls: int | None = Field(default=None, ge=1, le=1_000_000_000)
    max_memory_mib: int | None = Field(default=None, ge=1, le=1_000_000_000)
    max_age: float | None = Field(default=None, gt=0, le=YEAR)
    url: str | None = None
    capacity: int = Field(default=1, ge=1, le=MAX_LEASES)
    auto_capacity: bool = False
    task_memory_mib: int = Field(default=512, ge=1, le=1_000_000_000)
    max_parallel: int = Field(default=8, ge=1, le=MAX_LEASES)
    priority: int = Field(default=0, ge=validation.PRIORITY_MIN, le=validation.PRIORITY_MAX)
    properties: dict[str, str | list[str]] = {}
    exclusive: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), max_length=validation.MAX_PROPERTIES)
    resources: Supply = {}
    instance: Name | None = None
    pool: Name | None = None
    labels: tuple[Label, ...] = Field(default=(), max_length=64)
    work_dir: Path | None = None
    env_allow: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ")
    job_user: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}$")] | None = None
    job_processes: int | None = Field(default=None, ge=1, le=1_000_000)
    job_memory_mib: int | None = Field(default=None, ge=4, le=1_000_000_000)
    job_cpu_milli: int | None = Field(default=None, ge=10, le=100_000_000)
    cgroup: Path | None = None
    sandbox: Literal["none", "bubblewrap"] = "none"
    sandbox_network: bool = False
    sandbox_hide: tuple[Path, ...] = Field(default=(), max_length=64)
    kill_grace: float = Field(default=KILL_GRACE, ge=0, le=600)
    drain_seconds: float = Field(default=30.0, ge=0, le=86400)
    output_interval: float = Field(default=0.5, ge=0.05, le=60)
    margin: float | None = Field(default=None, gt=0, le=3600)

    @model_validator(mode="after")
    def _serves_an_instance_or_a_pool(self) -> Self:
        if self.instance is not None and self.pool is not None:
            raise ValueError("pool means nothing together with instance: a bot serves one of them")
        return self

    @field_validator("app")
    @classmethod
    def _names_a_pool(cls, app: str | None) -> str | None:
        if app is not None:
            try:
                check_place(app)
            except BadInput as refused:
                raise ValueError(refused.reason) from None
        return app

    @field_validator("exclusive")
    @classmethod
    def _offers_what_is_exclusive(cls, exclusive: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for name in exclusive:
            if name not in info.data.get("properties", {}):
                raise ValueError(f"'{wire.escaped(name, 60)}' is not one of the bot's properties")
        return exclusive

    @field_validator("env_allow")
    @classmethod
    def _keeps_its_own_variables(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name.startswith("LEASEHOLD_"):
                raise ValueError(f"'{wire.escaped(name, 60)}' is not for commands: it may hold a secret")
        return names

    @property
    def containment(self) -> Containment:
        """What these settings keep commands from. Raises BadInput if this machine or account does not allow it."""
        limits = Limits(memory_mib=self.job_memory_mib, processes=self.job_processes, cpu_milli=self.job_cpu_milli)
        boxed = self.sandbox == "bubblewrap"
        job_user = self.job_user
        if self.app is not None:
            job_user = job_user or AGENT
            if job_user == DYNAMIC:
                raise BadInput("job_user", "'dynamic' is not for an app, whose tasks share processes; name an account")
            if boxed:
                raise BadInput("sandbox", "is not for an app, whose processes reach the directories of all its tasks")
        elif unused := [each for each in ("max_calls", "max_memory_mib", "max_age") if getattr(self, each) is not None]:
            raise BadInput(unused[0], "means nothing without an app, whose processes it replaces")
        if not boxed and (self.sandbox_network or self.sandbox_hide):
            raise BadInput("sandbox", "sandbox_network and sandbox_hide mean nothing without 'bubblewrap'")
        return containment.build(
            job_user, limits=limits, cgroup=self.cgroup, boxed=boxed, network=self.sandbox_network,
            hidden=[*self.sandbox_hide, self.directory],
        )  # fmt: skip

    def offering(self, app: str) -> Self:
        """Return the settings with the property of this app, exclusively. Raises BadInput if they say another app."""
        if self.properties.get(PROPERTY, app) != app:
            raise BadInput("properties", f"'{PROPERTY}' is the name of the app, '{wire.escaped(app, 60)}'")
        exclusive = tuple(dict.fromkeys([*self.exclusive, PROPERTY]))
        return self.model_copy(update={"properties": {**self.properties, PROPERTY: app}, "exclusive": exclusive})

    @property
    def most(self) -> int:
        """The most units of work that the bot may hold at once."""
        return self.max_parallel if self.auto_capacity else self.capacity

    @property
    def bot(self) -> str:
        """The bot's name: the configured one, or one made from the host's name."""
        return self.name or legal_name(socket.gethostname(), self.name_suffix)

    @property
    def directory(self) -> Path:
        """The work directory: the configured one, or `leasehold-<user id>` in the temporary directory."""
        temporary = os.environ.get("TMPDIR", "/tmp")
        return self.work_dir or Path(temporary, f"leasehold-{os.getuid()}")


def _check_system() -> None:
    """Raise LeaseholdError on a system where the agent could not find every process of a command."""
    if sys.platform != "linux":
        raise LeaseholdError(f"a bot runs on Linux only, and this system is '{sys.platform}'")
    if not _PROC.is_file():
        raise LeaseholdError("a bot needs /proc, which is not mounted here")


def _digest(secret: str) -> str:
    """Identify a session without revealing its secret: the SHA-256 of the secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _told(tasks: Collection[str]) -> list[str] | None:
    """Return the tasks as a gateway takes them; None if they are too many or too long, so that it is told nothing."""
    told = sorted(tasks)
    fits = len(told) <= MAX_TASKS and all(0 < len(each) <= MAX_TASK for each in told)
    return told if fits and len(json.dumps(told)) <= MAX_TASKS_BYTES else None


@dataclass(frozen=True)
class _Opened:
    """An open session. `sent_at`: when the agent sent the request that was answered, on its own monotonic clock."""

    sent_at: float
    session: Session


class Agent:
    """One bot process. `run` returns its exit code; `drain` and `leave` may be called from any thread.

    adopt: no other part of this process starts processes, so the agent may kill all that it did not start; see Orphans.
    """

    def __init__(
        self, settings: AgentSettings, url: str, token: str, *, chance: Random | None = None, adopt: bool = False
    ) -> None:
        self._settings, self._url, self._token, self._adopt = settings, url, token, adopt
        self._chance = chance or Random()
        self._commands = AgentCommands()
        self._inbox: SimpleQueue[str] = SimpleQueue()
        self._code = 1
        #: Digest of an earlier session with this work directory, once no command of it runs any more.
        self._dead: str | None = None
        #: True if this process held that session and lost it only because no gateway answered.
        self._cut_off = False
        self._undelivered = 0
        #: The tasks that the gateway is told of; None = none are told.
        self._tasks: list[str] | None = None
        self._failure: BaseException | None = None

    def run(self) -> int:
        """Run the bot until a signal, `drain` or `leave` ends it; return the exit code.

        0 = drained; 1 = drained, but some results could not be delivered; 2 = the gateway refused the bot; 4 = another
        agent took over the name; 130 = left at once.

        The first SIGTERM or SIGINT drains, the second kills all commands at once. SIGHUP, when the terminal closes,
        only drains: a shell that ends sends it once more. It does nothing if it was ignored before, as by `nohup`.

        Raises BadInput if the settings cannot be used on this machine. Raises LeaseholdError if this is not Linux with
        /proc, or if processes of an earlier agent or session cannot be killed.
        """
        _check_system()
        if not structlog.is_configured():
            log_to_stderr()
        settings = self._settings
        open_files = raise_file_limit(settings.most, tasks=settings.app is not None)
        contained = settings.containment
        workplace = Workspace(settings.directory, settings.bot, open_to_others=contained.accounts.own)
        own = {name: os.environ[name] for name in settings.env_allow if name in os.environ}
        launcher = self._launcher(workplace, contained, own, open_files)
        try:
            contained.clear(workplace)
            self._clear(workplace)
            contained.check(workplace, runs_actions=FARM in settings.properties, path=own.get("PATH", os.defpath))
            _log.info(contained.reach(), bot=settings.bot)
            self._dead = workplace.predecessor()
            if isinstance(launcher, TaskLauncher):
                self._settings = settings.offering(launcher.open())
                self._tasks = _told(launcher.tasks)
                # Otherwise a call that the bot gives back would come again at once.
                launcher.gives_back_unknown = self._tasks is not None
            place = RunContext(
                workplace=workplace,
                launcher=launcher,
                grace=settings.kill_grace,
                environment=own,
                containment=contained,
            )
            with self._catching_signals(), infrequent_gc(*GARBAGE):
                self._serve_in_thread(place)
        finally:
            launcher.close()
            workplace.close()
            contained.close_all()
        if self._failure is not None:
            raise self._failure
        _log.info("stopped", bot=settings.bot, exit_code=self._code)
        return self._code

    def _launcher(
        self, workplace: Workspace, contained: Containment, environment: Mapping[str, str], open_files: int
    ) -> Launcher:
        settings = self._settings
        if settings.app is None:
            return Launcher(workplace.guard, open_files=open_files, adopt=self._adopt)
        limits = ChildLimits(settings.max_calls, settings.max_memory_mib, settings.max_age)
        app = App(settings.app, workplace, contained, environment, limits)
        return TaskLauncher(workplace.guard, app=app, most=settings.most, open_files=open_files, adopt=self._adopt)

    def drain(self) -> None:
        """Take no new work, wait up to `drain_seconds` for commands, return unfinished jobs, and leave."""
        self._inbox.put("drain")

    def leave(self) -> None:
        """Kill all commands and leave."""
        self._inbox.put("leave")

    def _serve_in_thread(self, place: RunContext) -> None:
        """Serve in a second thread; this thread only waits for requests to drain or leave."""
        thread = threading.Thread(target=self._serve, args=(place,), name="agent", daemon=True)
        thread.start()
        while (command := self._inbox.get()) != "done":
            if command == "leave" or (command == "signal" and self._commands.drain_until is not None):
                self._commands.at_once = True
            elif self._commands.drain_until is None:
                _log.info("draining", bot=self._settings.bot)
                self._commands.drain_until = clock.monotonic() + self._settings.drain_seconds
            self._commands.waker.set()
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
            capacity = settings.capacity if sizing is None else sizing.units()
            tuning = SessionSettings(settings.margin, settings.output_interval, sizing)
            try:
                opened = self._open(place.workplace, capacity)
            except SessionOver as over:
                if over.end is SessionEnd.REFUSED:
                    _log.error("refused by the gateway", bot=settings.bot, reason=str(over))
                return over.end
            session = opened.session
            _log.info("session open", bot=session.bot, epoch=session.epoch)
            # A call that hangs must leave room for another one before the session ends.
            transport = self._transport(max(0.5, session.expires_in / 4))
            caller = GatewayCaller(transport, self._commands.waker, self._chance)
            shift = AgentSession(
                session, opened.sent_at, caller=caller, place=place, tuning=tuning, commands=self._commands
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
            # No process of this session may live on into the next one, even if its runs reported their end.
            self._clear(place.workplace)
            self._dead = _digest(session.secret) if shift.silent else None
            self._cut_off = shift.silent and shift.cut_off

    def _clear(self, workplace: Workspace) -> None:
        killed = workplace.clear()
        if killed:
            _log.warning("killed what was left running", bot=self._settings.bot, processes=killed)

    def _open(self, workplace: Workspace, capacity: int) -> _Opened:
        """Open a session. Raises SessionOver if there will be none."""
        settings = self._settings
        request = OpenSession(
            bot=settings.bot,
            capacity=capacity,
            resources=settings.resources,
            priority=settings.priority,
            properties=settings.properties,
            exclusive=list(settings.exclusive),
            instance=settings.instance,
            pool=settings.pool,
            labels=list(settings.labels),
            secret=secrets.token_urlsafe(32),
            dead_session=self._dead,
            cut_off=self._cut_off,
            host=host if re.fullmatch(HOST, host := socket.gethostname()) else None,
            pid=os.getpid(),
            version=_version(),
            kill_grace=settings.kill_grace,
            tasks=self._tasks,
        )
        transport = self._transport(_OPENING)
        try:
            caller = GatewayCaller(transport, self._commands.waker, self._chance)
            body = request.model_dump(mode="json", exclude_defaults=True)
            session = Session.model_validate(self._ask_for_session(caller, body))
            # Remembered before the first sync, and so before the session has any command that a restart could clear.
            workplace.remember(_digest(session.secret))
            return _Opened(sent_at=caller.sent_at, session=session)
        except ValidationError:
            raise SessionOver(
                SessionEnd.REFUSED, "the answer to the opening of a session cannot be understood"
            ) from None
        except LeaseholdError as refused:
            raise SessionOver(SessionEnd.REFUSED, str(refused)) from None
        finally:
            transport.close()

    def _ask_for_session(self, caller: GatewayCaller, body: Record) -> Record:
        """Call with `body`; once more without ONLY_TOLD if the gateway is older than these fields."""
        try:
            return caller.call("/v1/sessions", body, check=self._check)
        except BadInput as refused:
            if refused.field not in ONLY_TOLD:
                raise
        _log.info("the gateway is too old to be told everything", bot=self._settings.bot, left_out=ONLY_TOLD)
        told = {name: value for name, value in body.items() if name not in ONLY_TOLD}
        return caller.call("/v1/sessions", told, check=self._check)

    def _transport(self, timeout: float) -> Transport:
        return Transport(self._url, self._token, chance=self._chance, timeout=timeout, patience=0.0)

    def _check(self) -> None:
        if self._commands.at_once:
            raise SessionOver(SessionEnd.ABANDONED, "asked to leave at once")
        if self._commands.drain_until is not None:
            raise SessionOver(SessionEnd.LEFT)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """Put SIGTERM, SIGINT, and SIGHUP unless it is ignored, into the inbox while the block runs.

        Does nothing outside the main thread, because Python allows signal handlers only there.

        The kernel may give a signal to any thread, above all while the process wakes up after SIGSTOP. A handler in
        Python runs in the main thread only, and not before that thread wakes up; nothing wakes it if another thread
        got the signal. The wakeup descriptor is written to at once, by whichever thread got the signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        reader, writer = socket.socketpair()
        writer.setblocking(False)

        def read() -> None:
            while number := reader.recv(1):
                if number[0] in numbers:
                    self._inbox.put("drain" if number[0] == signal.SIGHUP else "signal")

        thread = threading.Thread(target=read, name="signals", daemon=True)
        thread.start()
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, _nothing) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)
            writer.close()
            thread.join()
            reader.close()


def _version() -> str | None:
    """Return the version of this software; None for a tree that is not installed."""
    try:
        found = importlib.metadata.version("leasehold")
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if re.fullmatch(VERSION, found) else None


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the signal's number to the wakeup descriptor."""
