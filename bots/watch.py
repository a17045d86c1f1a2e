"""What a supervisor says and what its command writes, read by the thread that runs the lease."""

import contextlib
import errno
import json
import math
import os
import select
import signal
import socket
from dataclasses import dataclass

from bots.output import Output
from schema import clock, limits

_READ_BYTES = 64 * 1024
#: Reads after the end, should a process that is not ours hold the pipe open and write to it.
_LAST_READS = 32


@dataclass(frozen=True)
class Unable:
    """Why a command could not be started at all; `number` is its errno, if it has one."""

    number: int | None
    text: str


class Watch:
    """One command as seen from the agent. `control` and `pipe` stay the caller's; so does `bell`, any byte on which
    ends a `step`."""

    def __init__(self, control: socket.socket, pipe: int, *, bell: socket.socket, output: Output) -> None:
        self._control, self._pipe, self._bell, self._output = control, pipe, bell, output
        self._said = bytearray()
        self._piping = True
        self._supervisor: int | None = None
        #: There is a supervisor; what it was given to run may run.
        self.ready = False
        #: On our own monotonic clock, when the news arrived.
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.exit_code: int | None = None
        self.unable: Unable | None = None
        #: Nothing is left of the command, or there is nobody left who could say so.
        self.over = False
        #: The guardian's alarm rang.
        self.expired = False
        os.set_blocking(pipe, False)

    def step(self, seconds: float | None) -> None:
        """Wait for news, at most `seconds`, and take what has come."""
        sources: list[socket.socket | int] = [self._control, self._bell]
        if self._piping:
            sources.append(self._pipe)
        # Not select(), which cannot watch descriptors above 1023: a bot may run hundreds of commands.
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        news = {
            descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0, math.ceil(seconds * 1000)))
        }
        ready = [source for source in sources if (source if isinstance(source, int) else source.fileno()) in news]
        if self._bell in ready:
            self._bell.recv(64)
        if self._pipe in ready:
            self._piping = self._read()
        if self._control in ready:
            self._listen()

    def finish(self) -> None:
        """Take what is still in the pipe, without waiting for those who may hold it open."""
        for _ in range(_LAST_READS):
            if not self._piping:
                return
            self._piping = self._read(stop_when_empty=True)

    def ask(self, wish: bytes) -> None:
        """`T`: everything shall end; `K`: kill everything."""
        with contextlib.suppress(OSError):
            self._control.send(wish)

    def give_up(self) -> None:
        """Kill a supervisor that does not answer; its guardian then kills what it had below it."""
        if self._supervisor is not None:
            with contextlib.suppress(OSError):
                os.kill(self._supervisor, signal.SIGKILL)
        self.over = True

    def _read(self, *, stop_when_empty: bool = False) -> bool:
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return not stop_when_empty
        self._output.write(data)
        return bool(data)

    def _listen(self) -> None:
        try:
            part = self._control.recv(_READ_BYTES)
        except OSError:
            part = b""
        if not part:
            self.over = True
        self._said += part
        while (end := self._said.find(b"\n")) >= 0:
            line = bytes(self._said[:end])
            del self._said[: end + 1]
            self._hear(json.loads(line))

    def _hear(self, facts: dict[str, object]) -> None:
        match facts:
            case {"ready": True}:
                self.ready = True
            case {"started": int(), "supervisor": int(supervisor)}:
                self.started_at, self._supervisor = clock.monotonic(), supervisor
            case {"unable": str(text), "errno": int() | None as number}:
                self.unable, self.over = Unable(number=number, text=text), True
            case {"exit": int(code)}:
                self.ended_at, self.exit_code = clock.monotonic(), code
            case {"over": True, "expired": bool(expired)}:
                self.over, self.expired = True, expired


def ending(code: int) -> str:
    """What an exit code other than 0 says."""
    if code > 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def inability(unable: Unable, program: str) -> str:
    """One sentence; the command is named as the caller wrote it."""
    shown = limits.escaped(program)
    match unable.number:
        case errno.ENOENT | errno.ENOTDIR:
            return f"command not found: '{shown}' (or the interpreter it names)"
        case errno.EACCES | errno.EPERM:
            return f"command is not executable: '{shown}'"
        case None:
            return f"command '{shown}' cannot be started: {limits.escaped(unable.text)}"
        case number:
            return f"command '{shown}' cannot be started: {os.strerror(number)}"
