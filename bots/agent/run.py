"""One running command of a bot: its process tree, its output, what it left in files and how it ended.

One module because the thread that runs a lease does all of this in one loop: it reads what the supervisor and the
command write, decides when to stop the command, and makes the outcome. `Run` is the class that the agent uses.
"""

import base64
import contextlib
import errno
import json
import math
import os
import random
import select
import signal
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, assert_never

import structlog
from leasehold import wire
from leasehold.errors import BadInput, LeaseholdError
from pydantic import ValidationError

from bots.agent.guardian import kill
from bots.agent.isolation.containment import Containment, Site, unable_to_contain
from bots.agent.isolation.job_accounts import JobAccount
from bots.agent.job_files import (
    FILES,
    Checkpoint,
    FileNames,
    ProgressFile,
    read_result,
    read_usage,
    with_retries,
    write_new,
)
from bots.agent.launcher import Launcher, read_messages
from bots.agent.workspace import MARK, Workspace
from bots.protocol import MAX_REASON, Chunk, Message, Outcome
from schema import clock, validation
from schema.requests import Payload
from schema.timing import STUCK_AFTER

# Output of a command


#: Bytes in one chunk. A message takes 64 chunks, so the kept output of a job always fits into one message.
CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Pending:
    """Output that the gateway does not have yet: `chunks` from the first unsent byte to offset `end`."""

    chunks: list[Chunk]
    end: int


#: Bytes of the line that says how many bytes of output were left out.
_LONGEST_GAP = 64


class Output:
    """Keeps the first and the last bytes of output, `cap` together, and counts all. One thread writes; any may read.

    The first half can be sent at once. What follows it is known when the command has ended, for only then is it clear
    which bytes are the last: they come after a line that says how many were left out.
    """

    def __init__(self, cap: int = validation.MAX_OUTPUT_BYTES) -> None:
        self._cap, self._half = cap, cap // 2
        self._lock = threading.Lock()
        self._kept = bytearray()
        #: The newest bytes after the first half, up to twice as many as are kept.
        self._last = bytearray()
        self._written = 0
        self._sent = 0

    def write(self, data: bytes) -> None:
        """Add the next bytes from the command."""
        with self._lock:
            self._written += len(data)
            first = max(0, self._half - len(self._kept))
            self._kept += data[:first]
            self._last += data[first:]
            if len(self._last) > 2 * self._half:
                del self._last[: -self._half]

    def end(self) -> None:
        """Let what was written last follow the first half. The command writes nothing more."""
        with self._lock:
            if self._written > self._cap:
                # The line is at most so long.
                del self._last[: len(self._last) - (self._half - _LONGEST_GAP)]
                left_out = self._written - len(self._kept) - len(self._last)
                self._kept += f"\n[{left_out:,} bytes left out]\n".encode()
            self._kept += self._last
            self._last.clear()

    @property
    def written(self) -> int:
        """The number of bytes the command has written, including those beyond the cap."""
        return self._written

    @property
    def truncated(self) -> bool:
        """True if some bytes were not kept."""
        return self._written > self._cap

    @property
    def unsent(self) -> int:
        """The number of kept bytes that the gateway does not have."""
        with self._lock:
            return len(self._kept) - self._sent

    def pending(self) -> Pending:
        """Return the output to send next. It stays pending until `sent` is called."""
        with self._lock:
            end = len(self._kept)
            chunks = [
                Chunk(start=start, data=base64.b64encode(self._kept[start : min(start + CHUNK_BYTES, end)]).decode())
                for start in range(self._sent, end, CHUNK_BYTES)
            ]
            return Pending(chunks=chunks, end=end)

    def sent(self, end: int) -> None:
        """Record that the gateway has all output before offset `end`."""
        with self._lock:
            self._sent = max(self._sent, end)


# Messages of the supervisor and bytes of the output pipe


_READ_BYTES = 64 * 1024
#: The most reads after the end, because a process outside the tree may hold the pipe open and keep writing.
_LAST_READS = 32


@dataclass(frozen=True)
class Unable:
    """Why a command could not be started. `number`: the errno, if there is one."""

    number: int | None
    text: str


class SupervisorReader:
    """Reads the messages of one command's supervisor and the output of the command.

    control: the supervisor's control socket. pipe: the reading end of the output pipe. waker: any byte on it ends a
    `step`. The caller closes all three.
    """

    def __init__(self, control: socket.socket, pipe: int, *, waker: socket.socket, output: Output) -> None:
        self._control, self._pipe, self._waker, self._output = control, pipe, waker, output
        self._said = bytearray()
        self._piping = True
        #: The supervisor's process id, when it has said that it exists; from now on the command may run.
        self.supervisor: int | None = None
        self.ready_at: float | None = None
        #: The process id of the command itself.
        self.command: int | None = None
        #: When the supervisor started the command and saw its end, on the monotonic clock.
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.exit_code: int | None = None
        self.unable: Unable | None = None
        #: No process of the command is left, or the supervisor that could report it is gone.
        self.over = False
        #: The supervisor did not say that no process is left.
        self.lost = False
        #: The guardian's alarm rang.
        self.expired = False
        os.set_blocking(pipe, False)

    @property
    def ending(self) -> "Ending":
        """What was seen of the end of the command so far."""
        if self.started_at is None or self.ended_at is None:
            return Ending(self.exit_code)
        return Ending(self.exit_code, round(self.ended_at - self.started_at, 6))

    def step(self, seconds: float | None) -> None:
        """Wait at most `seconds` for messages or output, and read them."""
        sources: list[socket.socket | int] = [self._control, self._waker]
        if self._piping:
            sources.append(self._pipe)
        # Not select(), which cannot watch descriptors above 1023; a bot with hundreds of commands has such.
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        news = {
            descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0, math.ceil(seconds * 1000)))
        }
        ready = [source for source in sources if (source if isinstance(source, int) else source.fileno()) in news]
        if self._waker in ready:
            self._waker.recv(64)
        if self._pipe in ready:
            self._piping = self._read()
        if self._control in ready:
            self._listen()

    def finish(self) -> None:
        """Read what is still in the pipe, without waiting for a process that holds it open."""
        for _ in range(_LAST_READS):
            if not self._piping:
                return
            self._piping = self._read(stop_when_empty=True)

    def ask(self, command: bytes) -> None:
        """Ask the supervisor to end all processes (`T`, SIGTERM) or to kill them (`K`)."""
        with contextlib.suppress(OSError):
            self._control.send(command)
        if self.supervisor is not None:
            # The command may have stopped it.
            kill([self.supervisor], signal.SIGCONT)

    def give_up(self) -> None:
        """Kill a supervisor that does not answer."""
        if self.supervisor is not None:
            kill([self.supervisor], signal.SIGKILL)
        self.over = self.lost = True

    def _read(self, *, stop_when_empty: bool = False) -> bool:
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return not stop_when_empty
        self._output.write(data)
        return bool(data)

    def _listen(self) -> None:
        messages = read_messages(self._control, self._said)
        if messages is None:
            self.over = self.lost = True
            return
        for facts in messages:
            self._hear(facts)

    def _hear(self, facts: dict[str, object]) -> None:
        match facts:
            case {"ready": int(supervisor)}:
                self.ready_at, self.supervisor = clock.monotonic(), supervisor
            case {"started": int(command), "at": float(at)}:
                self.started_at, self.command = at, command
            case {"unable": str(text), "errno": int() | None as number}:
                self.unable, self.over = Unable(number=number, text=text), True
            case {"exit": int(code), "at": float(at)}:
                self.ended_at, self.exit_code = at, code
            case {"over": True, "expired": bool(expired)}:
                self.over, self.expired = True, expired
            case _:
                pass  # what a newer supervisor may add


class Ending(NamedTuple):
    """What was seen of the end of a command: its exit code, and its run time in seconds."""

    exit_code: int | None = None
    seconds: float | None = None


def describe_exit(code: int) -> str:
    """Describe an exit code other than 0."""
    if code > 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


#: The exit codes with which a shell tells that a command was not found or could not be executed, by errno.
EXIT_CODES = {
    errno.ENOENT: 127, errno.ENOTDIR: 127, errno.EACCES: 126, errno.EPERM: 126, errno.ENOEXEC: 126,
}  # fmt: skip


def inability(unable: Unable, program: str, account: JobAccount | None = None) -> str:
    """Say in one sentence why the command could not be started, with the command as the caller wrote it.

    account: under which it was to run, where that is not the agent's.
    """
    shown = wire.escaped(program)
    match unable.number:
        case errno.ENOENT | errno.ENOTDIR:
            return f"command not found: '{shown}' (or the interpreter it names)"
        case errno.EACCES | errno.EPERM if account is not None:
            return f"command not found, not executable or out of reach for the job's account {account.name}: '{shown}'"
        case errno.EACCES | errno.EPERM:
            return f"command is not executable: '{shown}'"
        case None:
            return f"command '{shown}' cannot be started: {wire.escaped(unable.text)}"
        case number:
            return f"command '{shown}' cannot be started: {os.strerror(number)}"


_log = structlog.get_logger("leasehold.agent")

#: Seconds within which the guardian must start a supervisor; then the agent replaces the guardian.
READY_AFTER = 10.0
SUPERVISOR_KILLED = "the process that supervised the command was killed"
_RESERVED = "LEASEHOLD_"
#: Variables below that prefix that the pool sets in a payload: of schedules and of callbacks. They give no rights.
_OF_THE_POOL = frozenset(
    {
        "LEASEHOLD_SCHEDULE",
        "LEASEHOLD_TICK",
        "LEASEHOLD_GRAPH",
        "LEASEHOLD_GRAPH_SUCCEEDED",
        "LEASEHOLD_GRAPH_FAILED",
        "LEASEHOLD_GRAPH_CANCELLED",
    }
)
Verdict = Literal["succeeded", "failed", "error", "stopped", "released"]


def invalid(error: ValueError) -> Outcome:
    """Return the outcome of an attempt whose payload no bot could run."""
    return Outcome(verdict="failed", reason=f"invalid payload: {wire.escaped(str(error), 400)}")


def complaining(outcome: Outcome, complaint: str) -> Outcome:
    """Add to the reason of an outcome that something which the command left is not kept."""
    reason = complaint if outcome.reason is None else f"{outcome.reason}; {complaint}"
    return outcome.model_copy(update={"reason": wire.printable(reason, MAX_REASON)})


def as_json(message: Message) -> bytes:
    """Return a message of a bot as JSON without defaults."""
    return message.model_dump_json(exclude_defaults=True).encode()


class StopReason(Enum):
    """Why a command is being stopped."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # the server asked for it
    RELEASED = "released"  # the agent leaves the pool
    LOST = "lost"  # the agent no longer has the lease, and reports nothing


class Assignment(NamedTuple):
    """One attempt to run.

    timeout: seconds of run time; None = unlimited. gpus: the numbers of the bot's GPUs that it is given; None if it
    takes none of a bot that counts its GPUs. checkpoint: JSON that an earlier attempt left; None if none did. units:
    those of the bot that it takes.
    """

    job: str
    fence: int
    attempt: int
    instance: str
    timeout: float | None
    payload: Mapping[str, Any] | None
    gpus: Sequence[int] | None = None
    checkpoint: str | None = None
    units: int = 1


@dataclass(frozen=True)
class RunContext:
    """What all commands of one agent share.

    grace: seconds between SIGTERM and SIGKILL. environment: the allowed variables of the agent's own environment.
    containment: the accounts, limits and sandbox of commands. chance: of the waits before retries.
    """

    workplace: Workspace
    launcher: Launcher
    grace: float
    environment: Mapping[str, str]
    containment: Containment = field(default_factory=Containment.none)
    chance: random.Random = field(default_factory=random.Random)


class AttemptRun(ABC):
    """One assignment that runs: what its thread, or the launcher of tasks, shares with those who stop and report it.

    notify: called when the command has started and when it has ended.
    """

    def __init__(self, assignment: Assignment, place: RunContext, *, notify: Callable[[], None]) -> None:
        self.assignment = assignment
        self.output = Output()
        self.checkpoint = Checkpoint(assignment.checkpoint)
        self.progress = ProgressFile()
        self.has_started = False
        #: The results of other nodes that a call takes, as JSON; how it ends without a start if they are not to be had.
        self.inputs: bytes | None = None
        self.refused: Outcome | None = None
        self.over = threading.Event()
        #: How the attempt ended, set before `over`; None if the lease was lost.
        self.outcome: Outcome | None = None
        #: The same as JSON, set before it. It is written when the attempt ends, so that the next report has less to do.
        self.outcome_json = b""
        self._place, self._notify = place, notify
        self._lock = threading.Lock()
        self._stop: StopReason | None = None
        self._kill_at: float | None = None
        #: Why the command was stopped; None if it ended by itself.
        self._cause: StopReason | None = None

    @abstractmethod
    def start(self) -> None:
        """Start, once an earlier run of the same job is over. Returns at once."""

    def start_late(self) -> None:
        """Start, or end with `refused`; heed who has wanted to stop it before."""
        self.start()
        if self.stopping:
            self._wake()

    @property
    def stopping(self) -> bool:
        """True if it has to end."""
        return self._stop is not None

    @abstractmethod
    def _wake(self) -> None:
        """Let those who run the command notice that it has to stop."""

    def stop(self, why: StopReason, *, grace: float | None = None) -> None:
        """End all processes of the command: SIGTERM, and SIGKILL after `grace` seconds (default: the agent's setting).

        The outcome reports the first reason, but LOST replaces any other. A further call can only shorten the grace.
        Returns at once.
        """
        with self._lock:
            if self._stop is None or why is StopReason.LOST:
                self._stop = why
            kill_at = clock.monotonic() + (self._place.grace if grace is None else grace)
            self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        self._wake()

    def _finish(self, outcome: Outcome | None) -> None:
        """Make the outcome known. No process of the attempt is left, or it cannot be killed."""
        self.output.end()
        if outcome is not None:
            attempt, chance = self.assignment.attempt, self._place.chance.random()
            stopped = self._stop is not None
            try:
                outcome = with_retries(
                    outcome, self.assignment.payload, stopped=stopped, attempt=attempt, chance=chance
                )
            except (TypeError, ValueError, ArithmeticError) as error:  # nobody has checked the payload of this job
                _log.warning("a retry policy is no use", job=self.assignment.job, error=type(error).__name__)
            # Before the outcome, by which the syncing thread sees that the attempt has ended.
            self.outcome_json = as_json(outcome)
        with self._lock:
            self.outcome = None if self._stop is StopReason.LOST else outcome
        self.over.set()
        self._notify()

    def _payload(self) -> Payload:
        """Check the payload. Raises ValueError if no bot could run it."""
        try:
            payload = Payload.model_validate(self.assignment.payload)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "payload"
            raise ValueError(f"{place}: {first['msg']}") from None
        texts = [*payload.command, *payload.env, *payload.env.values(), payload.stdin or ""]
        "".join(texts).encode()
        if any("\0" in text for text in texts[:-1]):
            raise ValueError("command or env holds a NUL character")
        if not payload.command[0]:
            raise ValueError("command.0: is empty")
        if any(not name or "=" in name for name in payload.env):
            raise ValueError("env: a name is empty or holds '='")
        return payload

    def _place_files(self, directory: str, files: FileNames, account: tuple[int, int] | None) -> None:
        """Write what the command is given in files. account: see `write_new`. Raises OSError."""
        self.checkpoint.place(f"{directory}/{files.checkpoint}", account)
        self.progress.place(f"{directory}/{files.progress}", account)
        if self.inputs is not None:
            write_new(f"{directory}/{files.inputs}", self.inputs, account)

    def _variables(self, payload: Payload, directory: str, files: FileNames) -> dict[str, str]:
        """Return what the command is told of its attempt and of its directory, and what its payload sets."""
        own = {
            name: value for name, value in payload.env.items() if name in _OF_THE_POOL or not name.startswith(_RESERVED)
        }
        return {
            "HOME": directory,
            "TMPDIR": f"{directory}/tmp",
            **own,
            "LEASEHOLD_JOB": self.assignment.job,
            "LEASEHOLD_FENCE": str(self.assignment.fence),
            "LEASEHOLD_ATTEMPT": str(self.assignment.attempt),
            "LEASEHOLD_INSTANCE": self.assignment.instance,
            "LEASEHOLD_USAGE": f"{directory}/{files.usage}",
            "LEASEHOLD_RESULT": f"{directory}/{files.result}",
            "LEASEHOLD_CHECKPOINT": f"{directory}/{files.checkpoint}",
            **({} if self.inputs is None else {"LEASEHOLD_INPUTS": f"{directory}/{files.inputs}"}),
            "LEASEHOLD_BOT": self._place.workplace.name,
            **self._gpus(),
            **({} if self.assignment.timeout is None else {"LEASEHOLD_TIMEOUT": f"{self.assignment.timeout:g}"}),
            MARK: directory,
        }

    def _gpus(self) -> dict[str, str]:
        """Tell the command which GPUs it is given. A process that honours CUDA_VISIBLE_DEVICES sees no others."""
        if self.assignment.gpus is None:
            return {}
        numbers = ",".join(map(str, self.assignment.gpus))
        return {"CUDA_VISIBLE_DEVICES": numbers, "LEASEHOLD_GPUS": numbers}

    def _with_files(self, outcome: Outcome, directory: Path, files: FileNames, owner: int | None) -> Outcome:
        """Add what the command left in its files: usage, result, and the reason if its last checkpoint is not kept.

        owner: the user id of the command, where it is not that of the agent.
        """
        outcome = self._with_usage(outcome, directory / files.usage, owner)
        if outcome.result is None:
            try:
                found = read_result(directory / files.result, owner=owner)
                outcome = outcome.model_copy(update={"result": found})
            except BadInput as error:
                outcome = complaining(outcome, f"no result is stored, because it {error.reason}")
        self.progress.look(last=True)
        return self._with_checkpoint(outcome)

    def _with_usage(self, outcome: Outcome, path: Path, owner: int | None) -> Outcome:
        """Add the usage that the command wrote to its outcome; invalid usage is logged and left out."""
        try:
            used = read_usage(path, owner=owner)
        except BadInput as error:
            _log.warning("what a command says it used is no use", job=self.assignment.job, reason=str(error))
            return outcome
        return outcome if used is None else outcome.model_copy(update={"usage": used})

    def _with_checkpoint(self, outcome: Outcome) -> Outcome:
        """Look at the checkpoint for the last time, unless no attempt can follow; add the reason if it is not kept."""
        if outcome.verdict == "succeeded":
            return outcome
        self.checkpoint.look(last=True)
        refusal = self.checkpoint.refusal
        if refusal is None:
            return outcome
        return complaining(outcome, f"its last checkpoint is not kept, because it {refusal}")

    def _stopped(self, cause: StopReason, ending: Ending) -> Outcome | None:
        match cause:
            case StopReason.TIMEOUT:
                return self._outcome("failed", ending, reason=f"timeout after {self.assignment.timeout:g} s")
            case StopReason.CANCELLED:
                return self._outcome("stopped", ending, reason=None)
            case StopReason.RELEASED:
                return self._outcome("released", ending, reason="the bot leaves")
            case StopReason.LOST:
                return None
            case _:
                assert_never(cause)

    def _ended(self, ending: Ending) -> Outcome:
        """Return the outcome of a command that ended by itself with an exit code."""
        assert ending.exit_code is not None
        if ending.exit_code == 0:
            return self._outcome("succeeded", ending, reason=None)
        return self._outcome("failed", ending, reason=describe_exit(ending.exit_code))

    def _outcome(self, verdict: Verdict, ending: Ending, *, reason: str | None) -> Outcome:
        return Outcome(
            verdict=verdict,
            exit_code=ending.exit_code,
            reason=reason,
            seconds=ending.seconds,
            output_bytes=self.output.written,
            output_truncated=self.output.truncated,
        )


class Run(AttemptRun):
    """Runs one assignment in a thread of its own, which first waits until `after` is over."""

    def __init__(
        self,
        assignment: Assignment,
        place: RunContext,
        *,
        notify: Callable[[], None],
        after: AttemptRun | None = None,
    ) -> None:
        super().__init__(assignment, place, notify=notify)
        self._after = after
        #: When a guardian that has started no supervisor is given up.
        self._patience = math.inf
        #: No process of this attempt can be left.
        self._silent = True
        self._site: Site | None = None
        self._waker_reader, self._waker = socket.socketpair()

    def start(self) -> None:
        threading.Thread(target=self._live, name=f"run-{self.assignment.job}", daemon=True).start()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _live(self) -> None:
        if self._after is not None:
            self._after.over.wait()
            self._after = None
        try:
            outcome = self._attempt()
        except Exception:
            _log.exception("a run failed inside the agent", job=self.assignment.job, fence=self.assignment.fence)
            outcome = Outcome(verdict="error", reason="the agent failed, see its log")
        self._waker_reader.close()
        self._waker.close()
        self._finish(outcome)
        # Afterwards, because it takes as long as the removal of all that the command left in shared memory.
        if self._site is not None and not self._place.containment.close(self._site, silent=self._silent):
            _log.warning("a cgroup cannot be removed", cgroup=self._site.privileges.cgroup)

    def _attempt(self) -> Outcome | None:
        try:
            payload = self._payload()
        except ValueError as error:
            return invalid(error)
        with self._lock:
            if self._stop is not None:
                return self._stopped(self._stop, Ending())
        if self.refused is not None:
            return self.refused
        try:
            self._site = site = self._place.containment.open(self._place.workplace)
        except (OSError, LeaseholdError) as error:
            return Outcome(verdict="error", reason=unable_to_contain(error))
        try:
            return self._execute(payload, site)
        except OSError as error:
            return Outcome(verdict="error", reason=f"the command cannot be started: {error.strerror or error}")
        finally:
            # Renamed at once and removed later: neither the time nor a failure of it reaches the outcome.
            self._place.workplace.discard(site.directory)

    def _environment(self, payload: Payload, site: Site) -> dict[str, str]:
        self._place_files(str(site.directory), FILES, site.privileges.account)
        own = self._variables(payload, str(site.directory), FILES)
        return {**self._place.environment, **site.environment, **own}

    def _execute(self, payload: Payload, site: Site) -> Outcome | None:
        directory = site.directory
        request = {
            "command": self._place.containment.command(payload.command, site),
            "env": self._environment(payload, site),
            "directory": str(directory),
            "privileges": site.privileges.to_json(),
        }
        text = json.dumps(request).encode() + b"\n"
        watch = self._launch(payload, directory, text)
        if watch.ready_at is None and watch.over and self._stop is None:
            # The guardian died before it started the supervisor, so nothing has run. The launcher replaces it.
            watch = self._launch(payload, directory, text)
        if watch.lost and watch.ready_at is not None:
            self._sweep(watch, site)
        outcome = self._verdict(watch, payload.command[0], site)
        return None if outcome is None else self._with_files(outcome, site.directory, FILES, site.owner)

    def _sweep(self, watch: SupervisorReader, site: Site) -> None:
        """Kill what a lost supervisor left, so that the end of the attempt is not reported before it."""
        left = self._place.launcher.sweep(
            site.directory,
            supervisor=watch.supervisor,
            command=watch.command if watch.ended_at is None else None,
            account=None if site.account is None or site.account.killer is None else site.account.user,
            seconds=STUCK_AFTER,
        )
        self._silent = not left
        if left:
            _log.error(
                "processes of an ended attempt cannot be killed",
                job=self.assignment.job,
                fence=self.assignment.fence,
                processes=left,
            )

    def _launch(self, payload: Payload, directory: Path, request: bytes) -> SupervisorReader:
        """Start the command and return when none of its processes is left. Raises OSError."""
        launcher = self._place.launcher
        with contextlib.ExitStack() as stack:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reader)
            with contextlib.ExitStack() as theirs:
                theirs.callback(os.close, writer)
                stdin = theirs.enter_context(tempfile.TemporaryFile(dir=directory / "tmp"))
                stdin.write((payload.stdin or "").encode())
                stdin.seek(0)
                control = stack.enter_context(launcher.launch(writer, stdin.fileno()))
            with contextlib.suppress(OSError):
                control.sendall(request)
            watch = SupervisorReader(control, reader, waker=self._waker_reader, output=self.output)
            guardian = launcher.pid
            self._patience = clock.monotonic() + READY_AFTER
            self._silent = False
            self._attend(watch)
            self._silent = not watch.lost
            if watch.ready_at is None and clock.monotonic() >= self._patience:
                launcher.replace(guardian)
            return watch

    def _attend(self, watch: SupervisorReader) -> None:
        asked = b""
        while not watch.over:
            watch.step(self._delay(watch, asked))
            if watch.ready_at is None and clock.monotonic() >= self._patience:
                watch.give_up()
            if watch.started_at is not None and not self.has_started:
                self.has_started = True
                self._notify()
            if watch.ended_at is None:
                self._cause = self._due(watch)
            elif self._kill_at is None:
                self._limit_leftovers()
            asked = self._press(watch, asked)
        watch.finish()

    def _due(self, watch: SupervisorReader) -> StopReason | None:
        """Return why the running command must stop, or None; starts the stop after a timeout."""
        if self._timeout_at(watch) <= clock.monotonic() and self._stop is None:
            self.stop(StopReason.TIMEOUT)
        return self._stop

    def _limit_leftovers(self) -> None:
        """Give background processes of an ended command the grace to end; the supervisor has sent them SIGTERM."""
        with self._lock:
            self._kill_at = clock.monotonic() + self._place.grace

    def _press(self, watch: SupervisorReader, asked: bytes) -> bytes:
        """Send SIGTERM, then SIGKILL, then give up; return the last step sent: nothing, `T` or `K`."""
        now = clock.monotonic()
        if self._kill_at is None or watch.over:
            return asked
        if watch.started_at is not None:
            if not asked and now < self._kill_at:
                watch.ask(b"T")
                return b"T"
            if asked != b"K" and now >= self._kill_at:
                watch.ask(b"K")
                return b"K"
        if now >= self._kill_at + STUCK_AFTER:
            _log.error("a process tree did not die", job=self.assignment.job, fence=self.assignment.fence)
            watch.give_up()
        return asked

    def _delay(self, watch: SupervisorReader, asked: bytes) -> float | None:
        """Return the seconds until this thread must act without a message; None = no such time."""
        instants = [] if watch.ended_at is not None or self._stop is not None else [self._timeout_at(watch)]
        if watch.ready_at is None:
            instants.append(self._patience)
        if self._kill_at is not None:
            if not asked and watch.started_at is not None:
                return 0.0
            insisted = asked == b"K" or watch.started_at is None
            instants.append(self._kill_at + (STUCK_AFTER if insisted else 0.0))
        left = min(instants, default=math.inf) - clock.monotonic()
        return None if left == math.inf else max(0.0, left)

    def _timeout_at(self, watch: SupervisorReader) -> float:
        if watch.ready_at is None or self.assignment.timeout is None:
            return math.inf
        # A command that stops its supervisor at once may run without the supervisor's word that it started.
        began = watch.ready_at + STUCK_AFTER if watch.started_at is None else watch.started_at
        return began + self.assignment.timeout

    def _could_not_start(self, unable: Unable, program: str, site: Site) -> Outcome:
        """Return the outcome of a command that did not start: a failure of the job if its program is missing."""
        reason = inability(unable, program, site.account)
        # In a sandbox, the program that was not found is that of the sandbox.
        code = None if site.privileges.wrapped or unable.number is None else EXIT_CODES.get(unable.number)
        if code is None:
            return Outcome(verdict="error", reason=reason)
        # As a shell would, so that `logs` shows it too.
        self.output.write(f"{reason}\n".encode())
        return self._outcome("failed", Ending(code), reason=wire.printable(reason, MAX_REASON))

    def _verdict(self, watch: SupervisorReader, program: str, site: Site) -> Outcome | None:
        if watch.expired:
            with self._lock:
                self._stop = StopReason.LOST
            return None
        if watch.unable is not None:
            return self._could_not_start(watch.unable, program, site)
        if self._cause is not None:
            return self._stopped(self._cause, watch.ending)
        if watch.exit_code is None:
            return Outcome(verdict="error", reason=SUPERVISOR_KILLED)
        return self._ended(watch.ending)
