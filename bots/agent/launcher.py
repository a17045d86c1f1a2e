"""The agent's end of its guardian: starts it, has commands started by it, and puts its alarm off."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading

import structlog

from bots.agent import guardian
from schema import clock

_log = structlog.get_logger("leasehold.agent")

#: Seconds a guardian may take to read a message before it is given up as stuck.
_START_TIMEOUT = 5.0


class Launcher:
    """One guardian process, replaced if it dies. Commands it had started are supervised on their own and go on.

    guard: a descriptor that guardians and supervisors, but not their commands, keep open while they live.
    open_files: the limit (RLIMIT_NOFILE, soft) for them and their commands.
    """

    def __init__(self, guard: int, *, open_files: int) -> None:
        self._guard, self._open_files = guard, open_files
        self._lock = threading.Lock()
        self._alarm: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the guardian, once something was started."""
        return None if self._process is None else self._process.pid

    def launch(self, output: int, stdin: int) -> socket.socket:
        """Have a supervisor started; the answer is its control socket. Raises OSError.

        The supervisor gets copies of both descriptors, the caller keeps (and closes) its own. A socket that is
        closed at once means that the alarm had rung.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._send(b"R", [theirs.fileno(), output, stdin])
            except BaseException:
                ours.close()
                raise
        return ours

    def arm(self, deadline: float) -> None:
        """Unless it is put off before, kill every command at `deadline` (own monotonic clock). Raises OSError."""
        self._alarm = deadline
        self._send(self._alarm_message(), [])

    def disarm(self) -> None:
        """No session, no alarm."""
        self._alarm = None
        with contextlib.suppress(OSError):
            self._send(b"A0", [])

    def close(self) -> None:
        """End the guardian; whatever still runs is killed whole first."""
        with self._lock:
            self._drop()

    def _alarm_message(self) -> bytes:
        left = 0.0 if self._alarm is None else max(0.001, self._alarm - clock.monotonic())
        return f"A{left:.6f}".encode()

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        with self._lock:
            if self._channel is None:
                self._start()
            try:
                self._write(message, descriptors)
            except OSError:
                _log.warning("the guardian is gone, starting another", guardian=self.pid)
                self._drop()
                self._start()
                self._write(message, descriptors)

    def _write(self, message: bytes, descriptors: list[int]) -> None:
        assert self._channel is not None
        socket.send_fds(self._channel, [message], descriptors)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", guardian.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath},
                pass_fds=[theirs.fileno(), self._guard],
                start_new_session=True,
            )
        soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != self._open_files:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, (self._open_files, most))
        ours.settimeout(_START_TIMEOUT)
        self._channel = ours
        if self._alarm is not None:
            self._write(self._alarm_message(), [])

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            try:
                self._process.wait(_START_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
