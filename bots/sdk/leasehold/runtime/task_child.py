"""The warm process of a bot: it has imported an app once, and runs its tasks one after the other or side by side.

    python -m leasehold.runtime.task_child MODULE:POOL

It is a child of a supervisor of the bot's guardian, and talks with the agent over a socket, its standard input, in
datagrams of JSON. From the child: `ready` with the app and its tasks, or `failed` with the reason; then `over` with the
number of a call, its exit code, its `result` unless that is in the file, and whether it left nothing in its directory
(`clean`). From the agent: `serve`, "def" or "async"; then `run` with the number of a call, its task, `stdin`, `env` and
`directory`, and the descriptor of its output; `cancel` with the number of an asynchronous call. Any other call is
cancelled by SIGTERM. A large request comes in a file without a name, whose descriptor precedes that of the output.

A child that serves `def` runs one task at a time in its main thread, as a command would be run: its directory, its
environment and its output are those of the attempt, also for the processes that it starts. A child that serves `async`
runs all its tasks in one event loop. Only what Python code prints reaches the output of their jobs.
"""

import asyncio
import contextlib
import ctypes
import io
import json
import os
import select
import signal
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from leasehold.errors import BadInput
from leasehold.runtime.attempt import Attempt
from leasehold.runtime.task_runner import CANCELLED, FAILED, TaskCall, import_failure, load
from leasehold.tasks import TaskRegistry

_DESCRIPTORS = 2
#: The most bytes of a message; more of a request is in a file.
_MOST_BYTES = 65_536
#: The most characters of a result in a message. A longer one is stored in the file of the attempt.
_MOST_RESULT = 16_384
_libc = ctypes.CDLL(None)


@dataclass
class CallOutput:
    """The output of one call. descriptor: None once it has ended, however long its threads print on."""

    descriptor: int | None


#: The output of the call that prints, where several run side by side.
_output: ContextVar[CallOutput | None] = ContextVar("output", default=None)


class OutputByContext(io.TextIOBase):
    """A stream that writes into the output of the call that prints, or else into the stream of the process."""

    def __init__(self, otherwise: io.TextIOWrapper) -> None:
        self._otherwise = otherwise

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._otherwise.fileno()

    @property
    def buffer(self) -> Any:
        """The stream of bytes of the process. What is written there reaches the output only one task at a time."""
        return self._otherwise.buffer

    def write(self, text: str, /) -> int:
        output = _output.get()
        if output is None or output.descriptor is None:
            return self._otherwise.write(text)
        _write(output.descriptor, text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        self._otherwise.flush()


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it. A call that has ended, and a reader that is gone, lose it."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


class WarmAttempt(Attempt):
    """An attempt whose short result goes to the agent with the end of the call, and not through a file."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self.result: str | None = None
        #: The attempt has written no file by itself.
        self.fileless = True

    def store_result(self, document: str) -> None:
        if len(document) <= _MOST_RESULT:
            self.result = document
        else:
            self.fileless = False
            super().store_result(document)

    def checkpoint(self, data: Any) -> None:
        self.fileless = False
        super().checkpoint(data)


class CallRequest:
    """What the agent asks for: a call, and the descriptor of its output."""

    def __init__(self, message: dict[str, Any], descriptors: list[int]) -> None:
        self.number: int = message["run"]
        self.output = descriptors[-1]
        if len(descriptors) == _DESCRIPTORS:
            with open(descriptors[0], "rb") as file:
                message = json.loads(file.read())
        self.environment: dict[str, str] = message["env"]
        self.directory: str = message["directory"]
        self._task, self._stdin = message["task"], message["stdin"]
        self.attempt = WarmAttempt(self.environment)

    def call(self, pool: TaskRegistry) -> TaskCall:
        """Return the call of the task that the command names."""
        return TaskCall(pool, self._task, self._stdin, self.attempt)

    def end(self, code: int, *, clean: bool) -> dict[str, Any]:
        """Close the output and return what the agent is told."""
        os.close(self.output)
        return {"over": self.number, "code": code, "clean": clean, "result": self.attempt.result}


class TaskChild:
    """Serves the agent's requests with the tasks of one app."""

    def __init__(self, pool: TaskRegistry, channel: socket.socket) -> None:
        self._pool, self._channel = pool, channel
        self._running: TaskCall | None = None
        #: SIGTERM came while no call ran. It may be for one whose message has not been read yet.
        self._early = False
        self._calls: dict[int, asyncio.Task[int]] = {}
        self._called: dict[int, TaskCall] = {}

    def serve(self) -> None:
        """Run calls one after the other, until the agent is gone."""
        log, home = os.dup(2), os.getcwd()
        signal.signal(signal.SIGTERM, self._cancel)
        while (received := self._receive()) is not None:
            message, descriptors = received
            if message["stopped_before"]:
                # It was, or may have been, for the call before, which has ended by itself.
                self._early = False
            request = CallRequest(message, descriptors)
            try:
                with _at_home_afterwards(log, home), _as_in(request):
                    code = self._run(request)
            except OSError as error:
                _write(request.output, f"the directory of the attempt cannot be used: {error}\n".encode())
                code = FAILED
            # The task may have set another handler.
            signal.signal(signal.SIGTERM, self._cancel)
            self._say(request.end(code, clean=_is_empty(request.directory)))

    def _run(self, request: CallRequest) -> int:
        self._running = request.call(self._pool)
        try:
            if self._early:
                self._running.mark_cancelled()
            return self._running.run()
        finally:
            self._running, self._early = None, False

    def _cancel(self, _number: int, _frame: FrameType | None) -> None:
        if self._running is None:
            self._early = True
        else:
            self._running.cancel()

    async def serve_side_by_side(self) -> None:
        """Run calls in this loop, until the agent is gone."""
        self._channel.setblocking(False)
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()

        def take() -> None:
            with contextlib.suppress(BlockingIOError):
                received = self._receive()
                if received is None:
                    loop.remove_reader(self._channel)
                    gone.set()
                else:
                    self._obey(*received)

        loop.add_reader(self._channel, take)
        await gone.wait()

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "cancel" in message:
            number = message["cancel"]
            if number in self._calls:
                self._called[number].mark_cancelled()
                self._calls[number].cancel()
            return
        request = CallRequest(message, descriptors)
        output, call = CallOutput(request.output), request.call(self._pool)
        task = asyncio.create_task(_printing_to(output, call))
        self._called[request.number], self._calls[request.number] = call, task

        def end(task: asyncio.Task[int]) -> None:
            # A task that is cancelled before its first step runs none of its own code.
            output.descriptor = None
            del self._calls[request.number], self._called[request.number]
            code = CANCELLED if task.cancelled() else task.result()
            self._say(request.end(code, clean=request.attempt.fileless))

        task.add_done_callback(end)

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the agent's next message with its descriptors; None if the agent is gone."""
        try:
            message, descriptors, _, _ = socket.recv_fds(
                self._channel, _MOST_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            # The agent was killed before it had read what this process said.
            return None
        return (json.loads(message), descriptors) if message else None

    def _say(self, facts: dict[str, Any]) -> None:
        message = json.dumps(facts).encode()
        while True:
            try:
                self._channel.send(message)
                return
            except BlockingIOError:
                # The agent reads all the time, so that there is room soon.
                room = select.poll()
                room.register(self._channel, select.POLLOUT)
                room.poll()
            except (BrokenPipeError, ConnectionResetError):
                return


def _is_empty(directory: str) -> bool:
    """Return whether the directory of an attempt is as it was made and no process is left that could write to it.

    Then another attempt may have it.
    """
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return False
    try:
        above = os.getppid()
        # The supervisor adopts what has lost its parent.
        with open(f"/proc/{above}/task/{above}/children", encoding="ascii") as file:
            if file.read().split() != [str(os.getpid())]:
                return False
        modes = [stat.S_IMODE(os.lstat(place).st_mode) for place in (directory, f"{directory}/tmp")]
        return modes == [0o700, 0o700] and os.listdir(directory) == ["tmp"] and not os.listdir(f"{directory}/tmp")
    except OSError:
        return False


async def _printing_to(output: CallOutput, call: TaskCall) -> int:
    _output.set(output)
    return await call.run_in_loop()


@contextlib.contextmanager
def _as_in(request: CallRequest) -> Iterator[None]:
    """Give this process the directory, environment and output of an attempt."""
    before = dict(os.environ)
    os.environ.update(request.environment)
    # It was derived from the environment of the attempt before.
    tempfile.tempdir = None
    try:
        os.chdir(request.directory)
        os.dup2(request.output, 1)
        os.dup2(request.output, 2)
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        tempfile.tempdir = None


@contextlib.contextmanager
def _at_home_afterwards(log: int, home: str) -> Iterator[None]:
    """Afterwards flush what was printed, and give this process its own output and directory back."""
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Of the C library: what an extension has printed belongs to this output, not to that of the next task.
        _libc.fflush(None)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(home)


def main() -> None:
    """Entry point. Imports the app, says so, and serves the agent on standard input until that is closed."""
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Before the import, because a module may keep a stream, as handlers of `logging` do.
    sys.stdout, sys.stderr = OutputByContext(sys.stdout), OutputByContext(sys.stderr)  # type: ignore[arg-type]
    place = sys.argv[1]
    try:
        pool = load(place)
        if not pool.tasks:
            raise BadInput("app", f"'{place}' has no tasks; name a module that imports them")
    except BaseException as error:
        traceback.print_exception(error)
        channel.send(json.dumps({"failed": import_failure(error)[:1000]}).encode())
        sys.exit(1)
    side_by_side = [task.name for task in pool.tasks.values() if task.is_async]
    facts = {"ready": pool.app or place.partition(".")[0].partition(":")[0], "async": side_by_side}
    channel.send(json.dumps({**facts, "def": len(pool.tasks) > len(side_by_side)}).encode())
    try:
        mode = channel.recv(_MOST_BYTES)
    except ConnectionResetError:
        return
    child = TaskChild(pool, channel)
    if not mode:
        return
    if json.loads(mode)["serve"] == "async":
        asyncio.run(child.serve_side_by_side())
    else:
        child.serve()


if __name__ == "__main__":
    main()
