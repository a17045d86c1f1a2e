"""Warm child processes, which have imported an app and run its tasks: one child, and one call, as the agent sees them.

A child is started by the guardian and has a supervisor, like a command. So it dies with the agent's lease alarm, and a
later agent finds it by its mark. Its standard input is a socket over which it gets its calls;
`leasehold/runtime/task_child.py` describes the messages.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from bots.agent.guardian import descendants, kill, process_tree
from bots.agent.isolation.containment import Containment, Site
from bots.agent.launcher import read_messages
from bots.agent.workspace import MARK, Workspace
from schema import clock

_log = structlog.get_logger("leasehold.agent")

_READ_BYTES = 1 << 18
#: Errors of a send that the child cures by reading: its socket is full, or holds too many descriptors.
_FULL = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)


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

    def request(self, site: Site) -> dict[str, Any]:
        """Return what a supervisor is asked to run."""
        searched = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        own = {"HOME": str(site.directory), "TMPDIR": str(site.directory / "tmp"), MARK: str(site.directory)}
        return {
            "command": [sys.executable, "-m", "leasehold.runtime.task_child", self.place],
            "env": {**self.environment, **searched, **site.environment, **own},
            "directory": str(Path.cwd()),
            "privileges": site.privileges.to_json(),
        }


class Call:
    """A command that the agent wants to run, as its supervisor would see it: a call of a task, if it names one.

    control: the supervisor's end of the control socket. output, stdin: copies of the command's descriptors.
    """

    def __init__(self, number: int, control: socket.socket, output: int, stdin: int) -> None:
        self.number, self.control = number, control
        self._descriptors = [output, stdin]
        self._text = bytearray()
        #: What to run, once it has come in full.
        self.request: dict[str, Any] | None = None
        self.child: WarmChild | None = None
        #: The child has not been told yet that the call is cancelled.
        self.must_cancel = False

    def read(self) -> bytes | None:
        """Read from the agent: return its letters after the request, or None if it is gone."""
        try:
            part = self.control.recv(_READ_BYTES)
        except ConnectionError:
            part = b""
        if not part:
            return None
        if self.request is not None:
            return part
        self._text += part
        if self._text.endswith(b"\n"):
            self.request = json.loads(self._text)
        return b""

    def say(self, **facts: object) -> None:
        """Tell the agent what a supervisor would; nothing if it has given up."""
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps(facts).encode() + b"\n")

    def descriptors(self) -> list[int]:
        """Return the descriptors for the child: the request in a file without a name, the output, standard input."""
        if len(self._descriptors) == 2:
            file = os.memfd_create("request", os.MFD_CLOEXEC)
            with open(file, "wb", closefd=False) as writer:
                writer.write(self._text)
            os.lseek(file, 0, os.SEEK_SET)
            self._descriptors.insert(0, file)
        return self._descriptors

    def release(self) -> None:
        """Close the descriptors, which the child has or will never get."""
        while self._descriptors:
            os.close(self._descriptors.pop())


@dataclass(eq=False)
class WarmChild:
    """One child process. Only the thread of the launcher uses it."""

    site: Site
    control: socket.socket
    channel: socket.socket
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
    calls: dict[int, Call] = field(default_factory=dict)
    #: The call for which it was killed.
    killed_for: Call | None = None
    #: SIGTERM was sent to it for the latest call that it was given.
    stopped_before: bool = False
    _process: int | None = None
    _said: bytearray = field(default_factory=bytearray)

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
        return cls(site, control, ours)

    def close(self, app: App) -> None:
        """Clear away what is left of a child that is over."""
        self.control.close()
        self.channel.close()
        if self._process is not None:
            os.close(self._process)
        app.workplace.discard(self.site.directory)
        if not app.containment.close(self.site, silent=not self.lost):
            _log.warning("a cgroup cannot be removed", cgroup=self.site.privileges.cgroup)

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
                case {"over": True, "expired": bool(expired)}:
                    self.over, self.expired = True, expired

    def read(self) -> dict[str, Any] | None:
        """Return the next message of the child itself; None if there is none, or the child is gone."""
        try:
            message = self.channel.recv(_READ_BYTES)
            found: dict[str, Any] | None = json.loads(message) if message else None
        except OSError:
            return None
        except ValueError:
            _log.error("a process of the app says what is no message; killing it", process=self.pid)
            self.ask_to_die()
            return None
        return found

    def send(self, message: Mapping[str, object], descriptors: list[int] | None = None) -> bool:
        """Send a message to the child; return False if it has to read some of the others first."""
        try:
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors or [])
        except OSError as error:
            # A child that is gone gets nothing; its supervisor says so.
            return error.errno not in _FULL
        return True

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
