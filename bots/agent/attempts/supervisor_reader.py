"""What the supervisor of a command and the command itself write: messages about its life, and bytes of its output."""

import contextlib
import math
import os
import select
import signal
import socket

from bots.agent.attempts.endings import Ending, Unable
from bots.agent.attempts.output import Output
from bots.agent.guardian import kill
from bots.agent.launcher import read_messages
from schema import clock

_READ_BYTES = 64 * 1024
#: The most reads after the end, because a process outside the tree may hold the pipe open and keep writing.
_LAST_READS = 32


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
