"""Warm child processes, which have imported an app: one child, and the run of one task, as the agent sees them.

A child is started by the guardian and has a supervisor, like a command. So it dies with the agent's lease alarm, and a
later agent finds it by its mark. Its standard input is a socket over which it talks with the agent, and a second socket
brings its calls; `leasehold/runtime/task_child.py` describes the messages. One module because a child and its runs
know each other.

A child that serves `def` may be handed several calls. It takes one at a time from the second socket, which keeps the
others. The agent has both ends of that socket, so it can take back those which the child has not taken: when the child
ends, or when the call before them takes longer than expected. A call is with the child or with the agent, never both.
"""

import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from leasehold import wire
from leasehold.errors import BadInput
from leasehold.runtime.call_messages import CallEnd, call_message, read_call, read_end, receive
from leasehold.wire import COMMAND, NO_RESULT

from bots.agent.attempts.attempt import Assignment, AttemptRun, RunContext, StopReason
from bots.agent.attempts.endings import (
    SUPERVISOR_KILLED,
    Ending,
    Unable,
    complaining,
    describe_exit,
    inability,
    invalid,
)
from bots.agent.guardian import descendants, kill, process_tree
from bots.agent.isolation.containment import Containment, Site
from bots.agent.job_files import FileNames, numbered
from bots.agent.launcher import read_messages
from bots.agent.workspace import MARK, Workspace
from bots.protocol import MAX_TASK, MAX_USED, Outcome
from schema import clock, validation
from schema.requests import Payload
from schema.timing import STUCK_AFTER
from schema.validation import check_json

_log = structlog.get_logger("leasehold.agent")

_READ_BYTES = 1 << 18
#: The most bytes of one read of output: as many as a pipe holds.
PIPE_BYTES = 1 << 16
#: The most bytes of a request in a message; a larger one is handed over in a file.
_MOST_IN_MESSAGE = 60_000
#: The most descriptors with one: of such a file, and of a new output pipe.
_DESCRIPTORS = 2
#: Seconds of run time after which a task is not short: what waits behind it is taken back.
OVERDUE = 0.05
#: Seconds between two looks at the memory of a child.
_LOOK_AT_MEMORY = 0.5
#: Bytes of a page of memory.
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: The most reads of output after the end, because a process that goes on may hold the pipe open and keep writing.
_LAST_READS = 32
#: Errors of a send that the child cures by reading: its socket is full, or holds too many descriptors.
_FULL = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)


@dataclass(frozen=True)
class ChildLimits:
    """After which use of it a child is replaced, between two calls; None = never.

    calls: calls that it has run. memory_mib: MiB of memory that it holds (resident). age: seconds since its start.
    """

    calls: int | None = None
    memory_mib: int | None = None
    age: float | None = None

    def reached(self, child: "WarmChild") -> str | None:
        """Return which limit a child has reached, or None."""
        now = clock.monotonic()
        if self.calls is not None and child.calls_run >= self.calls:
            return "calls"
        if self.age is not None and now - child.begun >= self.age:
            return "age"
        if self.memory_mib is not None and now >= child.look_at_memory:
            child.look_at_memory = now + _LOOK_AT_MEMORY
            if child.memory >= self.memory_mib << 20:
                return "memory"
        return None


@dataclass(frozen=True)
class App:
    """What children import, and where they run.

    place: `MODULE:POOL`. environment: the allowed variables of the agent's own. Children import as the agent does:
    from its directory first, and from its PYTHONPATH.
    """

    place: str
    workplace: Workspace
    containment: Containment
    environment: Mapping[str, str]
    limits: ChildLimits = ChildLimits()

    @property
    def seen(self) -> dict[str, str]:
        """The variables of the agent that children see."""
        return {**self.environment, **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}}

    def request(self, site: Site) -> dict[str, Any]:
        """Return what a supervisor is asked to run."""
        own = {"HOME": str(site.directory), "TMPDIR": str(site.directory / "tmp"), MARK: str(site.directory)}
        return {
            "command": [sys.executable, "-m", "leasehold.runtime.task_child", self.place],
            "env": {**self.seen, **site.environment, **own},
            "directory": str(Path.cwd()),
            "privileges": site.privileges.to_json(),
        }


@dataclass(eq=False)
class OutputPipe:
    """A pipe for the output of a call. A child keeps its end of it for later calls, known by its number.

    reader: the agent's end.
    """

    number: int
    reader: int
    run: "TaskRun | None" = None


@dataclass(eq=False)
class WarmChild:
    """One child process. Only the thread of the launcher uses it.

    calls: the socket by which it gets calls. inbox: the end of it from which the child takes them, and the agent too.
    """

    site: Site
    control: socket.socket
    channel: socket.socket
    calls: socket.socket
    inbox: socket.socket
    begun: float = field(default_factory=clock.monotonic)
    #: Process ids of the supervisor and of the child, once they are known.
    supervisor: int | None = None
    pid: int | None = None
    #: What it serves: "def" or "async"; None until it has imported the app.
    serves: str | None = None
    #: Why it could not import the app, or could not be started.
    failure: str | None = None
    exit_code: int | None = None
    #: No process of it is left, or its supervisor is gone (`lost`). expired: the guardian's alarm rang.
    over: bool = False
    lost: bool = False
    expired: bool = False
    #: The calls that it was handed, in their order. Of `def` tasks, all but the first wait for the one before.
    runs: dict[int, "TaskRun"] = field(default_factory=dict)
    #: Output pipes that no call has.
    pipes: list[OutputPipe] = field(default_factory=list)
    #: How many calls in a row have left nothing behind. Only behind such calls others may wait.
    clean_ends: int = 0
    #: Calls that it has ended, and when to look at its memory again.
    calls_run: int = 0
    look_at_memory: float = 0.0
    #: It gets no further calls, because it is being replaced.
    retired: bool = False
    #: When it is killed if it has not ended by itself, once it was dismissed.
    dismissed_until: float | None = None
    #: The run for which it was killed.
    killed_for: "TaskRun | None" = None
    #: The run that blocks its event loop, and where in the code of the app.
    blocker: "TaskRun | None" = None
    blocked_at: str = ""
    #: The empty directory for its next attempt; None if one has to be made.
    directory: Path | None = None
    #: SIGTERM was sent to it for the latest call that it was given.
    stopped_before: bool = False
    _process: int | None = None
    _said: bytearray = field(default_factory=bytearray)
    _pipe_numbers: Iterator[int] = field(default_factory=lambda: itertools.count())

    @classmethod
    def start(cls, app: App, launch: Callable[[int, int], socket.socket]) -> "WarmChild":
        """Let the guardian start a child. What it prints outside of tasks goes where the agent's log goes.

        Raises OSError or LeaseholdError.
        """
        site = app.containment.open(app.workplace)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                control = launch(2, theirs.fileno())
        except BaseException:
            ours.close()
            app.workplace.discard(site.directory)
            app.containment.close(site, silent=True)
            raise
        with contextlib.suppress(OSError):
            control.sendall(json.dumps(app.request(site)).encode() + b"\n")
        ours.setblocking(False)
        calls, inbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        calls.setblocking(False)
        return cls(site, control, ours, calls, inbox)

    @property
    def end(self) -> str:
        """How the process of a child ended that is over and not yet cleared away."""
        if self.exit_code is None:
            return "the guardian is gone"
        return describe_exit(self.exit_code, self.site.privileges) if self.exit_code else "exit code 0"

    def close(self, app: App) -> None:
        """Clear away what is left of a child that is over."""
        self.hang_up()
        if self._process is not None:
            os.close(self._process)
            self._process = None
        for pipe in self.pipes:
            os.close(pipe.reader)
        self.pipes = []
        for directory in (self.directory, self.site.directory):
            if directory is not None:
                app.workplace.discard(directory)
        if not app.containment.close(self.site, silent=not self.lost):
            _log.warning("a cgroup cannot be removed", cgroup=self.site.privileges.cgroup)

    def hang_up(self) -> None:
        """Close all sockets."""
        for each in (self.control, self.channel, self.calls, self.inbox):
            each.close()

    def listen(self) -> None:
        """Read what the supervisor says."""
        messages = read_messages(self.control, self._said)
        if messages is None:
            self.over = self.lost = True
            return
        for facts in messages:
            match facts:
                case {"ready": int(supervisor)}:
                    self.supervisor = supervisor
                case {"started": int(pid)}:
                    self.pid = pid
                    with contextlib.suppress(ProcessLookupError):
                        self._process = os.pidfd_open(pid)
                case {"unable": str(text)}:
                    self.failure, self.over = f"its process cannot be started: {text}", True
                case {"exit": int(code)}:
                    self.exit_code = code
                    if self.runs:
                        # What it has left would hold them, if it does not heed the SIGTERM of the supervisor.
                        self.ask_to_die()
                case {"over": True, "expired": bool(expired)}:
                    self.over, self.expired = True, expired
                case _:
                    pass  # what a newer supervisor may add

    def read(self) -> dict[str, Any] | CallEnd | None:
        """Return the next message of the child itself; None if there will be none. Raises BlockingIOError if there is
        none now.
        """
        try:
            try:
                message = self.channel.recv(_READ_BYTES)
            except ConnectionResetError:
                # It has ended without having read everything. What it has said follows.
                message = self.channel.recv(_READ_BYTES)
            if (end := read_end(message)) is not None:
                return end
            found = json.loads(message) if message else {}
        except BlockingIOError:
            raise
        except OSError:
            return None
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found or None
        _log.error("a process of the app says what is no message; killing it", process=self.pid)
        self.ask_to_die()
        return None

    def place(self, app: App) -> Path:
        """Return the directory for an attempt; those that run side by side share that of the child. Raises OSError."""
        if self.serves == "async":
            return self.site.directory
        if self.directory is None:
            self.directory = app.workplace.make(self.site.privileges.account)
        return self.directory

    def leave(self, app: App) -> None:
        """Clear away the directory of an attempt that has left something in it, and let the child go on."""
        if self.directory is not None:
            app.workplace.discard(self.directory)
            self.directory = None
        self.send({"go on": True})

    def serve(self, kind: str) -> None:
        """Let it serve `def` or `async`, and give it the socket of its calls."""
        self.serves = kind
        self.send({"serve": kind}, [self.inbox.fileno()])

    def send(self, facts: Mapping[str, object], descriptors: Sequence[int] = ()) -> bool:
        """Send a message beside the calls; return False if the child has to read some of the others first."""
        return _sent(self.channel, json.dumps(facts).encode(), descriptors)

    def new_pipe(self) -> tuple[OutputPipe, int]:
        """Make an output pipe; return it with the end that is the child's. Raises OSError."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        return OutputPipe(next(self._pipe_numbers), reader), writer

    @property
    def memory(self) -> int:
        """The bytes of memory that it holds; 0 if it has ended."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path("/proc", str(self.pid), "statm").read_text().split()[1]) * _PAGE
        return 0

    def dismiss(self) -> None:
        """Let it end, which has no calls."""
        self.dismissed_until = clock.monotonic() + STUCK_AFTER
        with contextlib.suppress(OSError):
            self.calls.shutdown(socket.SHUT_WR)

    def takes_ahead(self, most: int) -> bool:
        """Return whether another `def` call may wait behind those that it has. most: calls that may wait."""
        if self.serves != "def" or not 0 < len(self.runs) <= min(most, self.clean_ends) or self.over:
            return False
        first = next(iter(self.runs.values()))
        return self.killed_for is None and not (self.retired or first.stopping) and first.age < OVERDUE

    def recall(self) -> "list[tuple[TaskRun, bool]]":
        """Take back the calls that the child has not taken, with whether it knows the pipe of the call."""
        back: list[tuple[TaskRun, bool]] = []
        while True:
            try:
                message, descriptors = receive(self.inbox, _READ_BYTES, _DESCRIPTORS, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return back
            for descriptor in descriptors:
                os.close(descriptor)
            if not message:
                # A task has shut the socket down, or `dismiss` has, and the child is over.
                self.ask_to_die()
                return back
            facts = read_call(message)
            self.stopped_before = self.stopped_before or facts["stopped_before"]
            back.append((self.runs.pop(facts["run"]), not facts["new"]))

    def terminate(self) -> None:
        """Send SIGTERM to the child and to all processes below it, as a supervisor does for a command.

        Not by the supervisor, which would do it some time later, when the child may have another call.
        """
        self.stopped_before = True
        if self._process is None or self.pid is None:
            return
        below = descendants([self.pid], process_tree())
        for number in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)
            kill(below, number)

    def ask_to_die(self) -> None:
        """Ask the supervisor to kill the child, with all processes below it."""
        with contextlib.suppress(OSError):
            self.control.send(b"K")
        if self.supervisor is not None:
            # A task may have stopped it.
            kill([self.supervisor], signal.SIGCONT)


# Runs of tasks


@dataclass(frozen=True)
class Queue:
    """The launcher, as the runs that wait in it see it. put: takes a new run. heed: looks at one that has to stop."""

    put: "Callable[[TaskRun], None]"
    heed: "Callable[[TaskRun], None]"


class TaskRun(AttemptRun):
    """The run of a call of a task. Only `start`, `stop` and `give_back` are for other threads than the launcher's."""

    def __init__(
        self,
        assignment: Assignment,
        place: RunContext,
        *,
        queue: Queue,
        notify: Callable[[], None],
        after: AttemptRun | None = None,
    ) -> None:
        super().__init__(assignment, place, notify=notify)
        self._queue, self.after = queue, after
        self.number = 0
        #: When the launcher got it, and when a child did, on the monotonic clock.
        self.put_at = 0.0
        self.started_at: float | None = None
        self.child: WarmChild | None = None
        #: Its output pipe, while a child has it.
        self.pipe: OutputPipe | None = None
        #: What it was asked last: nothing, `T` to end, or `K` when its process was killed.
        self.asked = ""
        #: The child has not been told yet that the run is cancelled.
        self.must_cancel = False
        #: The child has confirmed that it was told, so its event loop went on then.
        self.was_cancelled = False
        self.task = ""
        self._stdin = ""
        self._checked: Payload | None = None
        self._directory: Path | None = None
        self._files: FileNames | None = None
        #: Why it is given back, unless a child has it.
        self._returned: str | None = None

    def start(self) -> None:
        self._queue.put(self)

    def _wake(self) -> None:
        self._queue.heed(self)

    def give_back(self, reason: str) -> None:
        """Return the lease to the pool, unless the task has started."""
        self._returned = reason
        self._wake()

    @property
    def age(self) -> float:
        """Seconds since the task started."""
        return 0.0 if self.started_at is None else clock.monotonic() - self.started_at

    @property
    def stopping(self) -> bool:
        """True if it has to end."""
        return self._stop is not None or self._returned is not None

    @property
    def may_wait(self) -> bool:
        """True if it may wait in a child for another to end: no file of it is in the directory before its turn."""
        return not self._has_files and not self.stopping

    @property
    def _has_files(self) -> bool:
        return self.assignment.checkpoint is not None or self.inputs is not None

    def check(self, app: str | None, tasks: frozenset[str] | None) -> Outcome | None:
        """Look which task is called; return the outcome if it cannot be one. tasks: those there are; None = any."""
        try:
            payload = self._payload()
        except ValueError as error:
            return invalid(error)
        if self.refused is not None and not self.stopping:
            return self.refused
        if payload.command[0] != COMMAND or len(payload.command) != 3:
            wrong = Unable(None, f"this bot runs nothing but tasks of the app '{app}'")
            return Outcome(verdict="error", reason=inability(wrong, payload.command[0]))
        self._checked, self.task = payload, payload.command[2]
        # No bot can tell a name of another length, so that nothing would keep the call from this bot: it fails here.
        if tasks is None or self.task in tasks or not 0 < len(self.task) <= MAX_TASK:
            return None
        told = f"this bot has not imported the task '{wire.escaped(self.task, 200)}'"
        return Outcome(verdict="released", reason=told, unknown_task=True)

    def hand_over(self, child: WarmChild, app: App) -> bool:
        """Hand the call to a child; return False if the child has to read other messages first. Raises OSError."""
        assert self._checked is not None
        files = self._files = numbered(self.number)
        directory = child.place(app)
        inside = str(directory)
        self._place_files(inside, files, child.site.privileges.account)
        writer: int | None = None
        if child.pipes:
            self.pipe = child.pipes.pop()
        else:
            self.pipe, writer = child.new_pipe()
        request = {
            "run": self.number,
            "task": self.task,
            "stdin": self._checked.stdin or "",
            "env": self._variables(self._checked, inside, files),
            "directory": inside,
            "stopped_before": child.stopped_before,
            "pipe": self.pipe.number,
            "new": writer is not None,
        }
        sent = False
        try:
            sent = _handed_over(child, request, writer)
        finally:
            if writer is not None:
                os.close(writer)
            if not sent and (reader := self.drop_pipe(reusable=writer is None, child=child)) is not None:
                os.close(reader)
        if not sent:
            for name in (files.checkpoint, files.inputs):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(directory / name)
            return False
        self.child, self._directory, self.pipe.run = child, directory, self
        child.stopped_before = False
        child.runs[self.number] = self
        return True

    def begin(self) -> None:
        """Take note that the child begins the call, as far as the agent knows."""
        self.started_at = clock.monotonic()
        self.has_started = True
        self._notify()

    def take_back(self) -> None:
        """Take note that the child has not taken the call and never will."""
        self.child = self._directory = self.started_at = None
        self.asked = ""

    def drop_pipe(self, *, reusable: bool, child: WarmChild) -> int | None:
        """Give the output pipe up; return the agent's end if that has to be closed, so that no other call has it."""
        pipe, self.pipe = self.pipe, None
        if pipe is None:
            return None
        pipe.run = None
        if reusable:
            child.pipes.append(pipe)
            return None
        return pipe.reader

    def read(self) -> bool:
        """Read from the output pipe; return False if there is nothing more, now or ever."""
        assert self.pipe is not None
        try:
            data = os.read(self.pipe.reader, PIPE_BYTES)
        except BlockingIOError:
            return False
        self.output.write(data)
        return bool(data)

    def due(self) -> float | None:
        """Return when `step` has to be called; None = not without a request to stop."""
        kill_at = self._kill_at
        if kill_at is not None:
            return {"": 0.0, "T": kill_at, "K": kill_at + STUCK_AFTER}[self.asked]
        if self.assignment.timeout is None or self.started_at is None:
            return None
        return self.started_at + self.assignment.timeout

    def step(self) -> str:
        """Return what must be done now to end the task: `T`, `K`, `give up`, or nothing."""
        now = clock.monotonic()
        if self._kill_at is None and (due := self.due()) is not None and now >= due:
            self.stop(StopReason.TIMEOUT)
        with self._lock:
            cause, kill_at = self._stop, self._kill_at
        if kill_at is None:
            return ""
        self._cause = cause
        if self.asked == "K":
            return "give up" if now >= kill_at + STUCK_AFTER else ""
        wanted = "T" if now < kill_at else "K"
        if wanted == self.asked:
            return ""
        self.asked = wanted
        return wanted

    def end_before_start(self) -> bool:
        """End a run that no child has, if it has to stop or is given back; return True if it is over."""
        with self._lock:
            cause = self._stop
        if cause is not None:
            self._finish(self._stopped(cause, Ending()))
        elif self._returned is not None:
            self._finish(Outcome(verdict="released", reason=self._returned))
        else:
            return False
        return True

    def refuse(self, outcome: Outcome) -> None:
        """End a run that cannot start."""
        self._finish(outcome)

    def give_way(self, reason: str) -> None:
        """End a run whose process was killed because of another one: it runs again, and is not charged for this."""
        if self._cause is None or self._cause is StopReason.TIMEOUT:
            # Its time has passed while it could do nothing.
            self._finish(Outcome(verdict="released", reason=reason))
        else:
            self._finish(self._stopped(self._cause, Ending()))

    def end(
        self, code: int | None, *, told: CallEnd | None = None, broken: str | None = None, blamed: str | None = None
    ) -> None:
        """End a run that a child had, which has been read from to the end. No process of it is left, but what the child
        keeps.

        code: exit code; None = nobody knows. told: what the child says of the end; None if it said nothing. broken: why
        the process ended, if the task is not to blame. blamed: why the task was killed, if nobody had stopped it.
        """
        # A task can send whatever it likes in the name of its process.
        seconds = told.seconds if told is not None and 0 <= told.seconds <= MAX_USED else self.age
        ending = Ending(code, None if code is None else round(seconds, 6))
        outcome: Outcome | None
        if self._cause is not None:
            outcome = self._stopped(self._cause, ending)
        elif blamed is not None:
            outcome = self._outcome("failed", ending, reason=wire.escaped(blamed, 400))
        elif broken is not None:
            outcome = Outcome(verdict="error", reason=wire.escaped(broken, 400))
        elif code is None:
            outcome = Outcome(verdict="error", reason=SUPERVISOR_KILLED)
        else:
            assert self.child is not None
            outcome = self._ended(ending, self.child.site)
        self._finish(None if outcome is None else self._completed(outcome, told))

    def expire(self) -> None:
        """End a run whose process the guardian's alarm has killed: the lease is lost."""
        with self._lock:
            self._stop = StopReason.LOST
        self._finish(None)

    def _completed(self, outcome: Outcome, told: CallEnd | None) -> Outcome:
        """Add what the task has left to its outcome."""
        clean = told is not None and told.clean
        assert self.child is not None
        assert self._directory is not None
        if told is not None and told.result:
            try:
                found = check_json("result", told.result, validation.MAX_RESULT_BYTES)
                outcome = outcome.model_copy(update={"result": found})
            except BadInput as error:
                outcome = complaining(outcome, f"{NO_RESULT} it {error.reason}")
        files = self._files
        assert files is not None
        if not clean:
            outcome = self._with_files(outcome, self._directory, files, self.child.site.owner)
        if self._directory == self.child.site.directory and (not clean or self._has_files):
            for name in (files.usage, files.result, files.checkpoint, files.progress, files.inputs):
                with contextlib.suppress(OSError):
                    os.unlink(self._directory / name)
        return outcome

    def read_to_end(self) -> None:
        """Read what is in the output pipe, but not for ever what a process that goes on writes there."""
        for _ in range(_LAST_READS):
            if not self.read():
                return


def _handed_over(child: WarmChild, request: dict[str, Any], output: int | None) -> bool:
    """Send a request, with the descriptor of its output if that is new; in a file without a name if it is large."""
    descriptors = [] if output is None else [output]
    text = call_message(request)
    if len(text) <= _MOST_IN_MESSAGE:
        return _sent(child.calls, text, descriptors)
    file = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(text)
        os.lseek(file, 0, os.SEEK_SET)
        told = {name: request[name] for name in ("run", "stopped_before", "pipe", "new")}
        return _sent(child.calls, call_message({**told, "file": True}), [file, *descriptors])
    finally:
        os.close(file)


def _sent(channel: socket.socket, message: bytes, descriptors: Sequence[int]) -> bool:
    """Send a message; return False if the child has to read some of the others first."""
    try:
        if descriptors:
            socket.send_fds(channel, [message], descriptors)
        else:
            channel.send(message)
    except OSError as error:
        # A child that is gone gets nothing; its supervisor says so.
        return error.errno not in _FULL
    return True
