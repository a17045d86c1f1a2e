"""A fork server: a process that has imported the whole command line and forks a child for each command.

The console script spends most of its time on imports. A test that runs it only to see output and exit code puts the
directory of `shared_program()` in front of PATH: the program `leasehold` there forwards to this process. A child runs
what the console script runs, as a fresh process would. Tests about a process itself start the console script.

All workers of a run share one fork server. Each holds the pipe `users` in its directory open, and the fork server ends
when nobody does.
"""

import atexit
import fcntl
import gc
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from tests.support.patience import MINUTE

ROOT = Path(__file__).parent.parent.parent.parent
FORWARDER = Path(__file__).parent / "forwarder.py"
PACKAGES = ("assigner", "bots", "schema")
#: Alembic runs what is in here, inside a migration.
NOT_IMPORTED = "schema.migrations"
#: What other packages import only when it is used for the first time.
LATE = ("encodings.idna", "encodings.unicode_escape", "httpcore", "importlib.resources.readers", "tzdata")


#: Names in the directory of a fork server: what workers hold open while they may use it, and the lock of its start.
USERS, START = "users", "start"
#: What all workers of one run have, and no other run.
RUN_VARIABLE = "PYTEST_XDIST_TESTRUNUID"
_users: list[int] = []
_started: list[subprocess.Popen[bytes]] = []


@cache
def _directory() -> Path:
    """The directory of the fork server of this run, in which each worker of the run has said that it may use it."""
    directory = Path(tempfile.gettempdir()) / f"leasehold-fork-server-{os.environ.get(RUN_VARIABLE) or os.getpid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.mkfifo(directory / USERS)
    _users.append(os.open(directory / USERS, os.O_RDWR | os.O_CLOEXEC))
    fcntl.flock(_users[0], fcntl.LOCK_SH)
    return directory


def announce() -> None:
    """Let the fork server of this run, if it is started, go on until this process stops or ends."""
    _directory()


@cache
def shared_program() -> Path:
    """The program of the fork server of this run, which starts with the first use by any worker."""
    directory = _directory()
    program = directory / "leasehold"
    with (directory / START).open("w") as start:
        fcntl.flock(start, fcntl.LOCK_EX)
        if not program.exists():
            _started.append(_start(directory))
            program.write_text(f"#!{sys.executable} -IS\n{FORWARDER.read_text()}")
            program.chmod(0o700)
    return program


def _start(directory: Path) -> "subprocess.Popen[bytes]":
    with socket.socket(socket.AF_UNIX) as listener, open(os.open(directory / USERS, os.O_RDONLY), "rb") as users:
        listener.bind(str(directory / "socket"))
        listener.listen(64)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server.server", str(listener.fileno()), str(directory)],
            cwd=ROOT, stdin=users, stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()], start_new_session=True,
        )  # fmt: skip


def stop() -> None:
    """End the fork server and what is left of its commands, unless another worker of this run may use it."""
    directory, users = _directory(), _users.pop()
    if not (directory / "leasehold").exists():
        with suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
    os.close(users)
    if RUN_VARIABLE not in os.environ:
        for process in _started:
            process.wait(MINUTE)
    shared_program.cache_clear()
    _directory.cache_clear()


class ForkedProcess:
    """A command of the fork server with the methods of `subprocess.Popen` that tests use, without a program between.

    Standard input is a pipe; output goes to the file `output`. directory: of the fork server; None = the shared one.
    """

    def __init__(
        self, arguments: Sequence[str], *, output: int, environment: Mapping[str, str], directory: Path | None = None
    ) -> None:
        reading, writing = os.pipe()
        self.args, self.stdin = ["leasehold", *arguments], os.fdopen(writing, "wb", buffering=0)
        self.returncode: int | None = None
        variables = [f"{name}={value}" for name, value in environment.items()]
        request = "\0".join([os.getcwd(), str(len(arguments)), *arguments, *variables]).encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str((directory or shared_program().parent) / "socket"))
        try:
            socket.send_fds(self._connection, [len(request).to_bytes(4, "little")], [reading, output, output])
            self._connection.sendall(request)
        finally:
            os.close(reading)
        self.pid = int.from_bytes(self._connection.recv(4, socket.MSG_WAITALL), "little")
        assert self.pid, "the fork server has ended"

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the command runs."""
        with suppress(BlockingIOError, subprocess.TimeoutExpired):
            self._hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutExpired after `timeout` seconds."""
        self._hear(timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _hear(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        self._connection.settimeout(timeout)
        try:
            status = self._connection.recv(4, socket.MSG_WAITALL)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little")) if status else -signal.SIGKILL
        self._connection.close()


@dataclass(frozen=True)
class Request:
    """A command line, and what its process is to have: directory, environment, and the three standard streams."""

    directory: bytes
    arguments: list[str]
    environment: dict[bytes, bytes]
    streams: list[int]


def receive(connection: socket.socket) -> Request | None:
    """Read a request; None if the program that sends it is gone."""
    length, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as file:
        read = file.read(int.from_bytes(length, "little"))
    if len(streams) != 3 or len(read) != int.from_bytes(length, "little"):
        for stream in streams:
            os.close(stream)
        return None
    directory, count, *rest = read.split(b"\0")
    pairs = [entry.partition(b"=") for entry in rest[int(count) :]]
    return Request(
        directory=directory,
        arguments=[os.fsdecode(argument) for argument in rest[: int(count)]],
        environment={name: value for name, _, value in pairs},
        streams=streams,
    )


class Server:
    """The loop of the fork server. It has one thread, and leaves every connection to its children."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._running: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._awake, self._alarm = socket.socketpair()
        for end in (self._awake, self._alarm):
            end.setblocking(False)
        signal.set_wakeup_fd(self._alarm.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (sys.stdin, listener, self._awake):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> Request | None:
        """Serve until standard input ends. Returns None then, and in each child its request."""
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                if source is sys.stdin:
                    for pid in self._running:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if source is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif source is self._awake:
                    self._reap()
                else:
                    self._abandon(source)

    def _fork(self) -> Request | None:
        """Accept a request and fork; returns the request in the child."""
        connection, _ = self._listener.accept()
        request = receive(connection)
        if request is None:
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Closed, never unregistered: the kernel's list of sources is shared with the parent.
            for one in (connection, self._listener, self._awake, self._alarm, *self._running.values()):
                one.close()
            self._selector.close()
            return request
        for stream in request.streams:
            os.close(stream)
        self._running[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ)
        self._tell(connection, pid)
        return None

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._awake.recv(4096):
                pass
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                connection = self._running.pop(pid)
                with suppress(KeyError):
                    self._selector.unregister(connection)
                self._tell(connection, status)
                connection.close()

    def _abandon(self, source: object) -> None:
        """End the command whose program is gone, which has been killed."""
        for pid, connection in self._running.items():
            if connection is source:
                self._selector.unregister(connection)
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _tell(connection: socket.socket, number: int) -> None:
        with suppress(OSError):
            connection.sendall(number.to_bytes(4, "little"))


def become(request: Request) -> None:
    """Make this process what the console script would have been for the request."""
    os.setsid()
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.directory)
    os.environ.clear()
    os.environb.update(request.environment)
    time.tzset()
    sys.argv[:] = ["leasehold", *request.arguments]
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdin = os.fdopen(0, encoding=encoding, errors=errors, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, errors=errors, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)


def forking(directory: Path) -> SimpleNamespace:
    """Return what stands for the module `subprocess` where processes of this tree are to be forked, not started."""

    def start(command: Sequence[str], **options: Any) -> Any:
        if tuple(command[:3]) != (sys.executable, "-m", "assigner.cli.main") or options.get("cwd", ROOT) != ROOT:
            return subprocess.Popen(command, **options)
        return ForkedProcess(
            command[3:], output=options["stdout"].fileno(), environment=options["env"], directory=directory
        )

    return SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)


def fork_children(directory: Path) -> None:
    """Have the pool that this process starts fork its processes too, by the fork server of that directory."""
    vars(import_module("assigner.process.children"))["subprocess"] = forking(directory)


def run(main: Callable[[], None]) -> NoReturn:
    """Run the function as the interpreter runs a program, and end this process with its exit code.

    The interpreter would also destroy every module, which takes five times longer than most commands.
    """
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    # As at the end of the interpreter: threads are waited for, what was left to do at exit is done.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code & 0xFF)


def load() -> ModuleType:
    """Import the whole command line; returns the module of the console script."""
    for package in PACKAGES:
        for found in walk_packages(import_module(package).__path__, f"{package}."):
            if not found.name.startswith(NOT_IMPORTED):
                import_module(found.name)
    for name in LATE:
        import_module(name)
    main = import_module("assigner.cli.main")
    main.sections()
    # A model that is built when it is first used, which takes half the time of `leasehold submit`.
    import_module("schema.requests").JobRequest.model_rebuild()
    return main


def main() -> None:
    """Serve on the inherited socket whose number is the first argument, and run the command of each child.

    The second argument is the directory of the fork server.
    """
    number, directory = sys.argv[1:]
    loaded = load()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(fileno=int(number)))
        request = Server(listener).run()
    if request is None:
        shutil.rmtree(directory)
    else:
        become(request)
        fork_children(Path(directory))
        run(loaded.main)


if __name__ == "__main__":
    main()
