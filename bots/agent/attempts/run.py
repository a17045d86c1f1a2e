"""One running command of a bot: its processes, when it has to stop, and how it ended.

The thread that runs it does all of this in one loop: it reads what the supervisor and the command write, decides when
to stop the command, and makes the outcome.
"""

import contextlib
import json
import math
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import structlog
from leasehold import wire
from leasehold.errors import LeaseholdError

from bots.agent.attempts.attempt import Assignment, AttemptRun, RunContext, StopReason
from bots.agent.attempts.endings import EXIT_CODES, SUPERVISOR_KILLED, Ending, Unable, inability, invalid
from bots.agent.attempts.supervisor_reader import SupervisorReader
from bots.agent.isolation.containment import Site, unable_to_contain
from bots.agent.job_files import FILES
from bots.protocol import MAX_REASON, Outcome
from schema import clock
from schema.requests import Payload
from schema.timing import STUCK_AFTER

_log = structlog.get_logger("leasehold.agent")

#: Seconds within which the guardian must start a supervisor; then the agent replaces the guardian.
READY_AFTER = 10.0


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
        try:
            threading.Thread(target=self._live, name=f"run-{self.assignment.job}", daemon=True).start()
        except RuntimeError:
            self._close_waker()
            raise

    def start_late(self) -> None:
        # Not in another thread, which there may not be.
        self._live()

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
        self._close_waker()
        self._finish(outcome)
        # Afterwards, because it takes as long as the removal of all that the command left in shared memory.
        if self._site is not None and not self._place.containment.close(self._site, silent=self._silent):
            _log.warning("a cgroup cannot be removed", cgroup=self._site.privileges.cgroup)

    def _close_waker(self) -> None:
        self._waker_reader.close()
        self._waker.close()

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
        return self._ended(watch.ending, site)
