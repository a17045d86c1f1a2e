"""The process that outlives an agent just long enough to leave nothing running. Linux only.

One guardian serves one agent. It forks a supervisor for each command; the supervisor is a child subreaper, so
whatever a command starts stays below it in the process tree, also children that asked for a session of their own, and
"nothing is left" is a fact that wait(2) tells instead of a guess. Three things kill everything whole: the supervisor's
control socket closes (the agent died), the agent asks for it, or the alarm rings that the agent has to put off at every
renewal of its session (the agent hangs or is stopped). A guardian that finds orphans of a dead supervisor kills them.

It is run by file name in an isolated interpreter and imports only the standard library: that keeps it at some 10 MB and
forking it at about a millisecond. It needs no clock; the kernel's interval timer and the agent's runner count time.

Agent to guardian (datagrams): `A<seconds>` sets the alarm, `A0` switches it off, `R` with the descriptors of control
socket, output pipe and standard input starts a supervisor. Agent to supervisor: one line of JSON (command, env,
directory), then the bytes `T` (ask everything to end) and `K` (kill everything). Supervisor to agent: lines of JSON:
`ready`, `started`, `unable`, `exit`, `over`.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_SET_CHILD_SUBREAPER = 36
#: Seconds between two looks at the process tree while it is being killed.
_LOOK_AGAIN = 0.02
_DESCRIPTORS = 3


@dataclass
class SignalPipe:
    """Signals as something that select can wait for; a forked child needs its own."""

    reader: socket.socket = field(init=False)
    writer: socket.socket = field(init=False)
    rung: set[int] = field(default_factory=set)

    def hang(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A handler, not SIG_IGN, because commands would inherit that.
            signal.signal(number, lambda number, _frame: self.rung.add(number))

    def wait(self, other: socket.socket | None, seconds: float | None) -> bool:
        """Wait for a signal or for `other`; tells whether `other` can be read."""
        sources = [self.reader] if other is None else [self.reader, other]
        ready, _, _ = select.select(sources, [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass
        return other in ready


def process_tree() -> dict[int, list[int]]:
    """Parent → its children, of every process that can be seen. Empty if /proc cannot be read."""
    children: dict[int, list[int]] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return children
    for entry in entries:
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path("/proc", entry, "stat").read_bytes()
                parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(entry))
    return children


def descendants(roots: list[int], tree: dict[int, list[int]]) -> list[int]:
    """Every process below one of `roots`, parents first."""
    found: list[int] = []
    while roots:
        roots = [child for parent in roots for child in tree.get(parent, ())]
        found += roots
    return found


def kill(processes: list[int], number: signal.Signals) -> None:
    """Send a signal to each that is still there and may be signalled."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


class Supervisor:
    """Runs one command and answers for everything that comes out of it. Lives in a process of its own."""

    def __init__(self, control: socket.socket, output: int, stdin: int, signals: SignalPipe) -> None:
        self._control, self._output, self._stdin, self._signals = control, output, stdin, signals
        self._command: subprocess.Popen[bytes] | None = None
        self._connected = True
        self._killing = False
        self._expired = False

    def run(self) -> None:
        """Return once nothing is left of the command. Sends nothing after `over`."""
        self._send_fact(ready=True)
        request = self._request()
        if request is None or not self._start(request):
            return
        while self._reap():
            if self._killing:
                self._signal(signal.SIGKILL)
            ready = self._signals.wait(
                self._control if self._connected else None, _LOOK_AGAIN if self._killing else None
            )
            if signal.SIGUSR1 in self._signals.rung:
                self._expired = self._killing = True
            if ready:
                self._obey()
        self._send_fact(over=True, expired=self._expired)

    def _request(self) -> dict[str, object] | None:
        """What to run; nothing if the agent died before it had said it."""
        text = bytearray()
        while not text.endswith(b"\n"):
            part = self._control.recv(1 << 16)
            if not part:
                return None
            text += part
        request: dict[str, object] = json.loads(text)
        return request

    def _start(self, request: dict[str, object]) -> bool:
        try:
            self._command = subprocess.Popen(
                request["command"],  # type: ignore[call-overload]
                stdin=self._stdin,
                stdout=self._output,
                stderr=self._output,
                cwd=request["directory"],
                env=request["env"],
                start_new_session=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            number = error.errno if isinstance(error, OSError) else None
            self._send_fact(unable=str(error), errno=number)
            return False
        os.close(self._output)
        os.close(self._stdin)
        self._send_fact(started=self._command.pid, supervisor=os.getpid())
        return True

    def _reap(self) -> bool:
        """Collect what has ended; false once there is no process below this one."""
        ended = False
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if process == 0:
                if ended:
                    self._signal(signal.SIGTERM)
                return True
            if self._command is not None and process == self._command.pid:
                self._command.returncode = os.waitstatus_to_exitcode(status)
                self._send_fact(exit=self._command.returncode)
                ended = True

    def _obey(self) -> None:
        wish = self._control.recv(64)
        if not wish:
            self._connected, self._killing = False, True
        elif b"K" in wish:
            self._killing = True
        elif b"T" in wish:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._command is not None and self._command.returncode is None:
            # The group is ours for as long as its leader has not been reaped, and it takes a whole fork bomb at once.
            with contextlib.suppress(OSError):
                os.killpg(self._command.pid, number)
        kill(descendants([os.getpid()], process_tree()), number)

    def _send_fact(self, **facts: object) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(facts).encode() + b"\n")


class Guardian:
    """Starts supervisors and is there when the agent no longer is."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._signals = SignalPipe()
        self._supervisors: set[int] = set()
        self._expired = False
        self._bereft = False

    def run(self) -> None:
        """Serve until the agent is gone, then until nothing of it is left."""
        self._signals.hang()
        connected = True
        while connected or self._supervisors or self._bereft:
            ready = self._signals.wait(self._channel if connected else None, None)
            if signal.SIGALRM in self._signals.rung:
                self._signals.rung.discard(signal.SIGALRM)
                self._expired = True
                kill(list(self._supervisors), signal.SIGUSR1)
            self._reap()
            if ready:
                connected = self._obey()

    def _obey(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._channel, 64, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if message.startswith(b"A"):
            seconds = float(message[1:])
            self._expired = False
            signal.setitimer(signal.ITIMER_REAL, seconds)
        elif message == b"R" and len(descriptors) == _DESCRIPTORS and not self._expired:
            self._fork(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return bool(message)

    def _fork(self, descriptors: list[int]) -> None:
        # SIGUSR1 must not meet a child that has no bell of its own yet.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        supervisor = os.fork()
        if supervisor:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            self._supervisors.add(supervisor)
            return
        code = 1
        try:
            self._channel.close()
            signals = SignalPipe()
            signals.hang()
            self._signals.reader.close()
            self._signals.writer.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            adopt_orphans()
            control, output, stdin = descriptors
            Supervisor(socket.socket(fileno=control), output, stdin, signals).run()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Collect supervisors that have ended; kill what one that was killed has left behind."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._bereft = False
                return
            if process == 0:
                break
            self._supervisors.discard(process)
            self._bereft = self._bereft or status != 0
        if self._bereft:
            tree = process_tree()
            orphans = [child for child in tree.get(os.getpid(), ()) if child not in self._supervisors]
            self._bereft = bool(orphans)
            kill(orphans + descendants(orphans, tree), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> None:
    """Entry point: the argument is the number of the inherited socket to the agent."""
    # The number it was inherited under may be one that select() cannot watch; the lowest free one is not.
    channel = socket.socket(fileno=os.dup(int(sys.argv[1])))
    os.close(int(sys.argv[1]))
    adopt_orphans()
    Guardian(channel).run()


if __name__ == "__main__":
    main()
