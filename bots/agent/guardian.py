"""The guardian: a process that kills every command of its agent if the agent dies or hangs. Linux only.

One guardian serves one agent. It forks a supervisor for each command. The supervisor is a child subreaper: every
process that the command starts stays below it in the process tree, even a process with a session of its own. So
wait(2) tells the supervisor reliably when no process is left.

The supervisor kills the whole process tree in three cases. Its control socket closes, because the agent died. The
agent asks for it. Or the alarm rings, which the agent moves on at every renewal of its session: then the agent hangs
or is stopped. If a supervisor itself is killed, the guardian kills the processes that it leaves behind. If the guardian
is killed with it, the command dies by the kernel's parent death signal, and the agent kills the rest. A command can
also stop its supervisor with SIGSTOP: the guardian continues it, and kills it if it does not do what the alarm asks.

The guardian is run by file name in an isolated interpreter and imports only the standard library, `privileges` and
`clock`, which do the same. So it needs about 10 MB, and a fork of it takes about a millisecond. The kernel's interval
timer measures the alarm.

Messages from agent to guardian are datagrams: `A<seconds>` sets the alarm, `A0` switches it off, `R` with the
descriptors of control socket, output pipe and standard input starts a supervisor. The agent sends a supervisor one line
of JSON (command, env, directory, privileges), then the bytes `T` (end all processes with SIGTERM) and `K` (kill all
processes). A supervisor sends the agent lines of JSON: `ready` with its own process id, `started`,
`unable`, `exit`, `over`. `started` and `exit` say when, on the monotonic clock that all processes of a machine share,
because the agent may read both at once, long after a short command has ended.
"""

import contextlib
import ctypes
import errno
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# An isolated interpreter does not search the folder of its program.
sys.path.append(str(Path(__file__).parents[2]))

from bots.agent.isolation.privileges import Privileges, hide_memory
from schema import clock

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
#: Seconds that supervisors have to kill their commands before the guardian kills them all.
_INSIST = 2.0
#: Seconds between two looks at the process tree while it is being killed.
_LOOK_AGAIN = 0.02
#: States of processes that have ended.
ENDED = ("Z", "X")
_DESCRIPTORS = 3


@dataclass
class SignalPipe:
    """Makes signals readable for select. A forked child needs a pipe of its own."""

    reader: socket.socket = field(init=False)
    writer: socket.socket = field(init=False)
    rung: set[int] = field(default_factory=set)

    def hang(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Not SIG_IGN, because commands would inherit it.
            signal.signal(number, lambda number, _frame: self.rung.add(number))

    def wait(self, other: socket.socket | None, seconds: float | None) -> bool:
        """Wait for a signal or for `other`; return True if `other` can be read."""
        sources = [self.reader] if other is None else [self.reader, other]
        ready, _, _ = select.select(sources, [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass
        return other in ready


def process_tree() -> dict[int, list[int]]:
    """Map each visible process to its children. Empty if /proc cannot be read."""
    children: dict[int, list[int]] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return children
    for entry in entries:
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                children.setdefault(int(facts(int(entry))[1]), []).append(int(entry))
    return children


def facts(process: int) -> list[str]:
    """Read state, parent, process group and session of a process. Raises OSError if it does not exist."""
    with open(f"/proc/{process}/stat", errors="replace") as file:
        stat = file.read()
    return stat[stat.rindex(")") + 2 :].split(maxsplit=4)[:4]


def descendants(roots: list[int], tree: dict[int, list[int]]) -> list[int]:
    """List all processes below `roots`, parents first."""
    found: list[int] = []
    while roots:
        roots = [child for parent in roots for child in tree.get(parent, ())]
        found += roots
    return found


def kill(processes: list[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists and that this one may signal."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


class Supervisor:
    """Runs one command in a process of its own and ends every process that the command starts."""

    def __init__(self, control: socket.socket, output: int, stdin: int, signals: SignalPipe) -> None:
        self._control, self._output, self._stdin, self._signals = control, output, stdin, signals
        self._command: subprocess.Popen[bytes] | None = None
        self._privileges = Privileges()
        self._connected = True
        self._killing = False
        self._expired = False
        #: What a sandbox program says of the command in it, and that it could not run it.
        self._status: int | None = None
        self._refused = False

    def run(self) -> None:
        """Run the command; return when none of its processes is left. `over` is the last message to the agent."""
        if not self._send_fact(ready=os.getpid()):
            return
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
        if self._refused and not self._expired:
            self._send_fact(unable="the sandbox cannot run it, see the output", errno=None)
        self._send_fact(over=True, expired=self._expired)

    def _request(self) -> dict[str, Any] | None:
        """Read from the agent what to run; None if the agent died before it sent it."""
        text = bytearray()
        while not text.endswith(b"\n"):
            part = self._receive(1 << 16)
            if not part:
                return None
            text += part
        request: dict[str, Any] = json.loads(text)
        return request

    def _start(self, request: dict[str, Any]) -> bool:
        privileges = self._privileges = Privileges.from_json(request["privileges"])
        command, environment, passed = request["command"], request["env"], []
        if privileges.wrapped:
            self._status, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            # The sandbox program must not run with them: LD_PRELOAD and the like would act outside of the sandbox.
            variables, environment = _variables(environment), {}
            passed = [writer, variables]
            command = [command[0], "--args", str(variables), "--json-status-fd", str(writer), *command[1:]]
        try:
            self._command = subprocess.Popen(
                command,
                stdin=self._stdin,
                stdout=self._output,
                stderr=self._output,
                cwd=request["directory"],
                env=environment,
                start_new_session=True,
                pass_fds=passed,
                preexec_fn=functools.partial(_begin, privileges, os.getpid()),
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            number = error.errno if isinstance(error, OSError) and error.filename != request["directory"] else None
            if number == errno.EACCES and not _is_in_path(command[0], environment, request["directory"]):
                number = errno.ENOENT
            self._send_fact(unable=str(error), errno=number)
            return False
        for descriptor in (self._output, self._stdin, *passed):
            os.close(descriptor)
        self._send_fact(started=self._command.pid, at=clock.monotonic())
        return True

    def _reap(self) -> bool:
        """Collect processes that ended; return False when no process is left below this one."""
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
                code = self._command.returncode = os.waitstatus_to_exitcode(status)
                self._refused = code > 0 and not self._has_run()
                if not self._refused:
                    self._send_fact(exit=code, at=clock.monotonic())
                ended = True

    def _has_run(self) -> bool:
        """Return True unless a sandbox program ended without an exit code of the command in it."""
        if self._status is None:
            return True
        try:
            return b'"exit-code"' in os.read(self._status, 1 << 16)
        except BlockingIOError:
            return False

    def _obey(self) -> None:
        command = self._receive(64)
        if not command:
            self._connected, self._killing = False, True
        elif b"K" in command:
            self._killing = True
        elif b"T" in command:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def _receive(self, most: int) -> bytes:
        """Read from the agent; return nothing if it is gone. It resets the connection if it had not read everything."""
        try:
            return self._control.recv(most)
        except ConnectionError:
            return b""

    def _signal(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self._privileges.kill_all()
        leader = self._command if self._command is not None and self._command.returncode is None else None
        spared = {leader.pid} if leader is not None and self._privileges.wrapped and number == signal.SIGTERM else set()
        if leader is not None and not spared:
            # The group's number cannot be reused before its leader is reaped. One signal reaches even a fork bomb.
            with contextlib.suppress(OSError):
                os.killpg(leader.pid, number)
        kill([each for each in descendants([os.getpid()], process_tree()) if each not in spared], number)

    def _send_fact(self, **facts: object) -> bool:
        """Tell the agent something; return False if it does not listen any more."""
        try:
            self._control.sendall(json.dumps(facts).encode() + b"\n")
        except OSError:
            return False
        return True


class Guardian:
    """Starts supervisors, and kills their commands when the alarm rings."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._signals = SignalPipe()
        self._supervisors: set[int] = set()
        self._expired = False
        self._bereft = False

    def run(self) -> None:
        """Serve until the agent is gone and none of its processes is left."""
        self._signals.hang()
        connected = True
        while connected or self._supervisors or self._bereft:
            ready = self._signals.wait(self._channel if connected else None, None)
            if signal.SIGALRM in self._signals.rung:
                self._signals.rung.discard(signal.SIGALRM)
                self._ring()
            self._reap()
            if ready:
                connected = self._obey()
                if not connected:
                    self._ring()

    def _ring(self) -> None:
        """Make all supervisors kill their commands; called again, kill the supervisors that have not done it."""
        if self._expired:
            kill(list(self._supervisors), signal.SIGKILL)
        else:
            kill(list(self._supervisors), signal.SIGUSR1)
            kill(list(self._supervisors), signal.SIGCONT)
        self._expired = True
        if self._supervisors:
            signal.setitimer(signal.ITIMER_REAL, _INSIST)

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
        # SIGUSR1 must not reach a child that does not have its own signal pipe yet.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            supervisor = os.fork()
        except OSError as error:
            # No process is left, as where a command forks without end. Other commands go on.
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            said = json.dumps({"unable": str(error), "errno": error.errno}).encode() + b"\n"
            with contextlib.suppress(OSError):
                os.write(descriptors[0], said)
            return
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
        """Collect supervisors that ended, continue stopped ones, kill what a killed supervisor left behind."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                self._bereft = False
                return
            if process == 0:
                break
            if os.WIFSTOPPED(status):
                kill([process] if process in self._supervisors else [], signal.SIGCONT)
                continue
            self._supervisors.discard(process)
            self._bereft = self._bereft or status != 0
        if self._bereft:
            tree = process_tree()
            orphans = [child for child in tree.get(os.getpid(), ()) if child not in self._supervisors]
            self._bereft = bool(orphans)
            kill(orphans + descendants(orphans, tree), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Make the kernel kill this process, a new child of `parent`, when `parent` ends.

    Has to be called after the last change of the user, which switches the signal off.
    """
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_in_path(program: str, environment: dict[str, str], working_directory: str) -> bool:
    """Return whether some directory of the path has this program, or it is named by a path of its own.

    The system says "permission denied" of a program that is nowhere too, if the account may not look into a directory.
    """
    return "/" in program or any(
        os.path.lexists(os.path.join(working_directory, directory, program))
        for directory in os.get_exec_path(environment)
    )


def _variables(environment: dict[str, str]) -> int:
    """Return a file with the arguments of a sandbox program that set a command's environment.

    Not on its command line, which every account can read.
    """
    words = [word for name, value in environment.items() for word in ("--setenv", name, value)]
    file = os.memfd_create("environment", os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(b"".join(os.fsencode(word) + b"\0" for word in words))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _begin(privileges: Privileges, parent: int) -> None:
    privileges.drop()
    die_with(parent)


def main() -> None:
    """Entry point. Arguments: the number of the inherited socket to the agent, and the guard, by which it is found."""
    hide_memory()
    # select() cannot watch numbers above 1023, and the inherited number may be one; dup() takes the lowest free one.
    channel = socket.socket(fileno=os.dup(int(sys.argv[1])))
    os.close(int(sys.argv[1]))
    adopt_orphans()
    Guardian(channel).run()


if __name__ == "__main__":
    main()
