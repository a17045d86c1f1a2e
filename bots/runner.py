"""One command of a lease: a private directory, a process tree of its own, its output, and how it ended."""

import contextlib
import json
import math
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, assert_never

import structlog
from pydantic import ValidationError

from bots import usage
from bots.launcher import Launcher
from bots.output import Output
from bots.protocol import Outcome
from bots.watch import Watch, ending, inability
from bots.workplace import MARK, Workplace, remove
from schema import clock, limits
from schema.errors import BadInput
from schema.requests import Payload

_log = structlog.get_logger("leasehold.agent")

#: Seconds after SIGKILL until a supervisor that does not report the end is killed itself.
STUCK_AFTER = 5.0
_RESERVED = "LEASEHOLD_"
Verdict = Literal["succeeded", "failed", "error", "stopped", "released"]


class Stop(Enum):
    """Why a command is being stopped."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # the server asked for it
    RELEASED = "released"  # the agent leaves
    LOST = "lost"  # the lease is not ours any more: nothing is reported


@dataclass(frozen=True)
class Assignment:
    """What to run, for whom. `timeout`: seconds of run time, None = unlimited."""

    job: str
    fence: int
    attempt: int
    instance: str
    timeout: float | None
    payload: Mapping[str, Any] | None


@dataclass(frozen=True)
class Place:
    """What all commands of one agent share. `grace`: seconds between SIGTERM and SIGKILL; `environment`: allow-listed
    variables of the agent's own environment."""

    workplace: Workplace
    launcher: Launcher
    grace: float
    environment: Mapping[str, str]


class Run:
    """Runs one assignment in a thread of its own; `notify` is called when it has started and when it is over."""

    def __init__(
        self, assignment: Assignment, place: Place, *, notify: Callable[[], None], after: "Run | None" = None
    ) -> None:
        self.assignment = assignment
        self.output = Output()
        self.started = threading.Event()
        self.over = threading.Event()
        #: How it ended, set before `over`; None if the lease was lost.
        self.outcome: Outcome | None = None
        self._place, self._notify, self._after = place, notify, after
        self._lock = threading.Lock()
        self._stop: Stop | None = None
        self._kill_at: float | None = None
        #: Why the command was stopped; None if it ended by itself.
        self._cause: Stop | None = None
        self._bell_reader, self._bell = socket.socketpair()

    def start(self) -> None:
        """Begin, as soon as an earlier run of the same job is over. Returns at once."""
        threading.Thread(target=self._live, name=f"run-{self.assignment.job}", daemon=True).start()

    def stop(self, why: Stop, *, grace: float | None = None) -> None:
        """End the command whole: SIGTERM, and SIGKILL after `grace` seconds (default: the agent's setting).

        The first reason is what gets reported, except that LOST silences every other. Calling it again can only
        shorten the grace. Returns at once.
        """
        with self._lock:
            if self._stop is None or why is Stop.LOST:
                self._stop = why
            kill_at = clock.monotonic() + (self._place.grace if grace is None else grace)
            self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _live(self) -> None:
        if self._after is not None:
            self._after.over.wait()
            self._after = None
        try:
            outcome = self._attempt()
        except Exception:
            _log.exception("a run failed inside the agent", job=self.assignment.job, fence=self.assignment.fence)
            outcome = Outcome(verdict="error", reason="the agent failed, see its log")
        with self._lock:
            self.outcome = None if self._stop is Stop.LOST else outcome
        self._bell_reader.close()
        self._bell.close()
        self.over.set()
        self._notify()

    def _attempt(self) -> Outcome | None:
        try:
            payload = self._payload()
        except ValueError as error:
            return Outcome(verdict="failed", reason=f"invalid payload: {limits.escaped(str(error), 400)}")
        with self._lock:
            if self._stop is not None:
                return self._stopped(self._stop, None)
        try:
            directory = self._place.workplace.make()
        except OSError as error:
            return Outcome(verdict="error", reason=f"the work directory cannot be made: {error.strerror}")
        try:
            return self._execute(payload, directory)
        except OSError as error:
            return Outcome(verdict="error", reason=f"the command cannot be started: {error.strerror or error}")
        finally:
            if not remove(directory):
                _log.warning("a work directory cannot be removed", directory=str(directory))

    def _payload(self) -> Payload:
        """Raises ValueError for what no bot could run."""
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

    def _environment(self, payload: Payload, directory: Path) -> dict[str, str]:
        own = {name: value for name, value in payload.env.items() if not name.startswith(_RESERVED)}
        return {
            **self._place.environment,
            "HOME": str(directory),
            "TMPDIR": str(directory / "tmp"),
            **own,
            "LEASEHOLD_JOB": self.assignment.job,
            "LEASEHOLD_FENCE": str(self.assignment.fence),
            "LEASEHOLD_ATTEMPT": str(self.assignment.attempt),
            "LEASEHOLD_INSTANCE": self.assignment.instance,
            "LEASEHOLD_USAGE": str(directory / usage.FILE),
            "LEASEHOLD_BOT": self._place.workplace.name,
            MARK: str(directory),
        }

    def _execute(self, payload: Payload, directory: Path) -> Outcome | None:
        request = {
            "command": payload.command,
            "env": self._environment(payload, directory),
            "directory": str(directory),
        }
        text = json.dumps(request).encode() + b"\n"
        watch = self._launch(payload, directory, text)
        if not watch.ready and watch.over and self._stop is None:
            # Only a guardian that was dying when it was asked, so nothing has run: another one is asked, once.
            watch = self._launch(payload, directory, text)
        return self._with_usage(self._verdict(watch, payload.command[0]), directory)

    def _with_usage(self, outcome: Outcome | None, directory: Path) -> Outcome | None:
        """What the command says it has used; where that cannot be understood it has said nothing."""
        try:
            used = None if outcome is None else usage.read(directory / usage.FILE)
        except BadInput as error:
            _log.warning("what a command says it used is no use", job=self.assignment.job, reason=str(error))
            return outcome
        return outcome if outcome is None or used is None else outcome.model_copy(update={"usage": used})

    def _launch(self, payload: Payload, directory: Path, request: bytes) -> Watch:
        """Have the command started and stay until nothing is left of it. Raises OSError."""
        with contextlib.ExitStack() as stack:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reader)
            with contextlib.ExitStack() as theirs:
                theirs.callback(os.close, writer)
                stdin = theirs.enter_context(tempfile.TemporaryFile(dir=directory / "tmp"))
                stdin.write((payload.stdin or "").encode())
                stdin.seek(0)
                control = stack.enter_context(self._place.launcher.launch(writer, stdin.fileno()))
            with contextlib.suppress(OSError):
                control.sendall(request)
            watch = Watch(control, reader, bell=self._bell_reader, output=self.output)
            self._attend(watch)
            return watch

    def _attend(self, watch: Watch) -> None:
        asked = b""
        while not watch.over:
            watch.step(self._delay(watch, asked))
            if watch.started_at is not None and not self.started.is_set():
                self.started.set()
                self._notify()
            if watch.ended_at is None:
                self._cause = self._due(watch)
            elif self._kill_at is None:
                self._limit_leftovers()
            asked = self._press(watch, asked)
        watch.finish()

    def _due(self, watch: Watch) -> Stop | None:
        """Why the command, which still runs, is to be stopped."""
        if self._timeout_at(watch) <= clock.monotonic() and self._stop is None:
            self.stop(Stop.TIMEOUT)
        return self._stop

    def _limit_leftovers(self) -> None:
        """The command has ended; what it left in the background was asked to end and has the same grace."""
        with self._lock:
            self._kill_at = clock.monotonic() + self._place.grace

    def _press(self, watch: Watch, asked: bytes) -> bytes:
        """Ask, then insist, then give up; tells how far it has come: nothing, `T`, or `K`."""
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

    def _delay(self, watch: Watch, asked: bytes) -> float | None:
        """Seconds until this thread has to act on its own; None = when something happens."""
        instants = [] if watch.ended_at is not None or self._stop is not None else [self._timeout_at(watch)]
        if self._kill_at is not None:
            if not asked and watch.started_at is not None:
                return 0.0
            insisted = asked == b"K" or watch.started_at is None
            instants.append(self._kill_at + (STUCK_AFTER if insisted else 0.0))
        left = min(instants, default=math.inf) - clock.monotonic()
        return None if left == math.inf else max(0.0, left)

    def _timeout_at(self, watch: Watch) -> float:
        if watch.started_at is None or self.assignment.timeout is None:
            return math.inf
        return watch.started_at + self.assignment.timeout

    def _verdict(self, watch: Watch, program: str) -> Outcome | None:
        if watch.expired:
            with self._lock:
                self._stop = Stop.LOST
            return None
        if watch.unable is not None:
            return Outcome(verdict="error", reason=inability(watch.unable, program))
        if self._cause is not None:
            return self._stopped(self._cause, watch)
        if watch.exit_code is None:
            return Outcome(verdict="error", reason="the process that supervised the command was killed")
        if watch.exit_code == 0:
            return self._outcome("succeeded", watch, reason=None)
        return self._outcome("failed", watch, reason=ending(watch.exit_code))

    def _stopped(self, cause: Stop, watch: Watch | None) -> Outcome | None:
        match cause:
            case Stop.TIMEOUT:
                return self._outcome("failed", watch, reason=f"timeout after {self.assignment.timeout:g} s")
            case Stop.CANCELLED:
                return self._outcome("stopped", watch, reason=None)
            case Stop.RELEASED:
                return self._outcome("released", watch, reason="the bot leaves")
            case Stop.LOST:
                return None
            case _:
                assert_never(cause)

    def _outcome(self, verdict: Verdict, watch: Watch | None, *, reason: str | None) -> Outcome:
        seconds = None
        if watch is not None and watch.started_at is not None and watch.ended_at is not None:
            seconds = round(watch.ended_at - watch.started_at, 6)
        return Outcome(
            verdict=verdict,
            exit_code=None if watch is None else watch.exit_code,
            reason=reason,
            seconds=seconds,
            output_bytes=self.output.written,
            output_truncated=self.output.truncated,
        )
