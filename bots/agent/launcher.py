"""The agent's connection to its guardian: starts it, passes it commands and moves its alarm on."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import structlog

from bots.agent import guardian
from bots.agent.guardian import kill
from bots.agent.orphans import Orphans, Watched, stopped
from schema import clock

_log = structlog.get_logger("leasehold.agent")

#: Seconds within which a guardian must read a message; after that the agent replaces it.
_START_TIMEOUT = 5.0


#: The most bytes that are read from a supervisor at once.
_READ_BYTES = 64 * 1024


def read_messages(control: socket.socket, said: bytearray) -> list[dict[str, Any]] | None:
    """Read what a supervisor has sent, and return its whole messages; None if the supervisor is gone.

    said: bytes of a message that has not ended yet, from one call to the next.
    """
    try:
        part = control.recv(_READ_BYTES)
    except OSError:
        part = b""
    if not part:
        return None
    *lines, rest = (bytes(said) + part).split(b"\n")
    said[:] = rest
    return [json.loads(line) for line in lines]


class Launcher:
    """Keeps one guardian process and replaces it if it dies. Commands run on under their supervisors meanwhile.

    guard: a descriptor that guardians and supervisors, but not their commands, keep open while they live.
    open_files: the soft limit RLIMIT_NOFILE of guardians, supervisors and commands. adopt: see Orphans.
    """

    def __init__(self, guard: int, *, open_files: int, adopt: bool = False) -> None:
        self._guard, self._open_files = guard, open_files
        self._orphans = Orphans(adopt=adopt)
        self._lock = threading.Lock()
        self._alarm: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The guardian's process id; None before the first message to it."""
        return None if self._process is None else self._process.pid

    def launch(self, output: int, stdin: int) -> socket.socket:
        """Let the guardian start a supervisor; return the supervisor's control socket. Raises OSError.

        The supervisor receives copies of both descriptors; the caller closes its own. If the socket is closed at once,
        the alarm had already rung.
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
        """Set the alarm that kills every command at `deadline` (own monotonic clock). Raises OSError."""
        self._alarm = deadline
        self._orphans.reap()
        self._send(self._alarm_message(), [])

    def disarm(self) -> None:
        """Switch the alarm off, at the end of a session."""
        self._alarm = None
        with contextlib.suppress(OSError):
            self._send(b"A0", [])

    def sweep(
        self, directory: Path, *, supervisor: int | None, command: int | None, account: int | None, seconds: float
    ) -> list[int]:
        """Kill every process of a command whose supervisor was lost; return those that are left after `seconds`.

        account: the user id that this command has to itself.
        """
        return self._orphans.sweep(Watched(directory, supervisor, command, self.pid, account), seconds)

    def replace(self, guardian: int | None) -> None:
        """Replace a guardian that starts no supervisor, if it is still the present one; commands run on."""
        with self._lock:
            if guardian == self.pid:
                _log.error("the guardian does not start commands, starting another", guardian=guardian)
                self._drop(at_once=True)

    def close(self) -> None:
        """End the guardian, after it has killed every running command."""
        with self._lock:
            self._drop()

    def _alarm_message(self) -> bytes:
        left = 0.0 if self._alarm is None else max(0.001, self._alarm - clock.monotonic())
        return f"A{left:.6f}".encode()

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        with self._lock:
            if self._channel is None:
                self._start()
            elif self.pid is not None and stopped(self.pid):
                _log.warning("the guardian was stopped, continuing it", guardian=self.pid)
                kill([self.pid], signal.SIGCONT)
            try:
                self._write(message, descriptors)
            except OSError:
                _log.warning("the guardian is gone, starting another", guardian=self.pid)
                self._drop(at_once=True)
                self._start()
                self._write(message, descriptors)

    def _write(self, message: bytes, descriptors: list[int]) -> None:
        assert self._channel is not None
        socket.send_fds(self._channel, [message], descriptors)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", "-X", "utf8", guardian.__file__]
        with theirs:
            with self._orphans.starting:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), os.readlink(f"/proc/self/fd/{self._guard}")],
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

    def _drop(self, *, at_once: bool = False) -> None:
        """End the guardian; `at_once`: by SIGKILL, so that it does not kill the running commands."""
        if at_once and self._process is not None:
            self._process.kill()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            try:
                self._process.wait(_START_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
