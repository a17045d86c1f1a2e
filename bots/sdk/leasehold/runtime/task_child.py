"""The warm process of a bot: it has imported an app once, and runs its tasks one after the other or side by side.

    python -m leasehold.runtime.task_child MODULE:POOL

It is a child of a supervisor of the bot's guardian, and talks with the agent over a socket, its standard input, in
datagrams: of JSON, and for ends of calls a `CallEnd`. From the child: `ready` with the app and its tasks, or `failed`
with the reason; then the end of each call. A child that serves `async` also says which call `blocks` its event loop,
and `where`, and confirms what is `cancelling`. From the agent: `serve`, "def" or "async", with the descriptor of a
second socket; `cancel` with the number of an asynchronous call. Any other call is cancelled by SIGTERM. A child that
serves `def` and has said of a call that it is not clean waits for `go on`.

The second socket brings calls, marshalled: `run` with the number of a call, its task, `stdin`, `env` and `directory`,
and the number of the `pipe` of its output, with the descriptor if that is `new`. A large request comes in a file
without a name, whose descriptor is the first. What the child has not taken from this socket, the agent may take back.

A child that serves `def` runs one task at a time in its main thread, as a command would be run: its directory, its
environment and its output are those of the attempt, also for the processes that it starts. A child that serves `async`
runs all its tasks in one event loop. Only what Python code prints reaches the output of their jobs.
"""

import asyncio
import contextlib
import fcntl
import io
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import termios
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from leasehold.errors import BadInput
from leasehold.runtime.attempt import Attempt
from leasehold.runtime.call_messages import CallEnd, read_call, receive
from leasehold.runtime.surroundings import ProcessesLeft, Surroundings
from leasehold.runtime.task_runner import CANCELLED, FAILED, TaskCall, handle_termination, import_failure, load
from leasehold.tasks.task import TaskRegistry

_DESCRIPTORS = 2
#: The most bytes of a message; more of a request is in a file.
_MOST_BYTES = 65_536
#: The most characters of a result in a message. A longer one is stored in the file of the attempt.
_MOST_RESULT = 16_384
#: The most characters of a place in the code in a message.
_MOST_PLACE = 300
#: Seconds for which an event loop may stand before somebody looks who blocks it, and before the second look.
_BLOCKED, _BLOCKED_STILL = 0.5, 0.1
#: Where the modules of the standard library are, and what may be below that and is none.
_LIBRARY, _INSTALLED = sysconfig.get_path("stdlib") + "/", ("site-packages/", "dist-packages/")
#: What FIONREAD says of an empty pipe.
_NONE = bytes(4)


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

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

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

    def reconfigure(self, **options: Any) -> None:
        """Set up the stream of the process, as programs do when they begin. Calls write UTF-8, and at once."""
        self._otherwise.reconfigure(**options)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it. A call that has ended, and a reader that is gone, lose it."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


class LoopWatch:
    """Looks from a thread of its own whether an event loop goes on, and tells which call keeps it from that.

    A call that waits without `await`, or computes, stops all others of the loop. Nobody is told of one that keeps the
    interpreter's lock too.

    tell: called with the output of the call and the place where it is, and with None once the loop goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[CallOutput | None, str], None]) -> None:
        self._loop, self._tell = loop, tell
        self._loops_thread = threading.get_ident()
        #: Set while calls run. An idle process has nothing to look at.
        self.wanted = threading.Event()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.wanted.wait()
            goes_on = threading.Event()
            try:
                self._loop.call_soon_threadsafe(goes_on.set)
            except RuntimeError:
                # The loop is closed.
                return
            if not goes_on.wait(_BLOCKED):
                blocker, where = self._look()
                # What has only been there by chance has made room meanwhile.
                if not goes_on.wait(_BLOCKED_STILL) and blocker is not None and self._look()[0] is blocker:
                    self._tell(blocker, where)
                    goes_on.wait()
                    self._tell(None, "")
            time.sleep(_BLOCKED)

    def _look(self) -> tuple[CallOutput | None, str]:
        """Return the output of the call that the loop runs, and the innermost place in it outside of the library."""
        frame, where = sys._current_frames().get(self._loops_thread), ""
        while frame is not None:
            code = frame.f_code
            if not where and not is_of_library(code.co_filename):
                where = f"{code.co_filename}:{frame.f_lineno}"
            if code is asyncio.Handle._run.__code__:
                # Also the tasks and callbacks that a call has made have its context.
                return frame.f_locals["self"]._context.get(_output), where
            frame = frame.f_back
        return None, where


def is_of_library(file: str) -> bool:
    """Tell whether the code of a file belongs to Python itself."""
    inside = file.removeprefix(_LIBRARY)
    return file.startswith("<") or (inside != file and not inside.startswith(_INSTALLED))


class WarmAttempt(Attempt):
    """An attempt whose short result goes to the agent with the end of the call, and not through a file."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self.result = b""
        #: The attempt has written no file by itself.
        self.fileless = True

    def store_result(self, document: str) -> None:
        if len(document) <= _MOST_RESULT:
            # At once, so that a task that stores what is no text has the error, and not the end of its call.
            self.result = document.encode()
        else:
            self.fileless = False
            super().store_result(document)

    def checkpoint(self, data: Any) -> None:
        self.fileless = False
        super().checkpoint(data)

    def store_progress(self, share: float, text: str) -> None:
        self.fileless = False
        super().store_progress(share, text)


class CallRequest:
    """What the agent asks for: a call, and the descriptor of its output."""

    def __init__(self, message: dict[str, Any], output: int) -> None:
        self.number: int = message["run"]
        self.pipe: int = message["pipe"]
        self.output = output
        self.environment: dict[str, str] = message["env"]
        self.directory: str = message["directory"]
        self._task, self._stdin = message["task"], message["stdin"]
        self.attempt = WarmAttempt(self.environment)
        self.began = time.monotonic()

    def call(self, pool: TaskRegistry) -> TaskCall:
        """Return the call of the task that the command names."""
        return TaskCall(pool, self._task, self._stdin, self.attempt)

    def end(self, code: int, *, clean: bool) -> CallEnd:
        """Return what the agent is told of the end."""
        seconds = time.monotonic() - self.began
        quiet = False
        # The task may have closed it.
        with contextlib.suppress(OSError):
            quiet = clean and fcntl.ioctl(self.output, termios.FIONREAD, _NONE) == _NONE
        return CallEnd(self.number, code, seconds, clean, quiet, self.attempt.result)


class TaskChild:
    """Serves the agent's requests with the tasks of one app."""

    def __init__(self, pool: TaskRegistry, channel: socket.socket, calls: socket.socket) -> None:
        self._pool, self._channel, self._inbox = pool, channel, calls
        #: The descriptors of output pipes.
        self._pipes: dict[int, int] = {}
        self._running: TaskCall | None = None
        #: SIGTERM came while no call ran. It may be for one whose message has not been read yet.
        self._early = False
        self._calls: dict[int, asyncio.Task[int]] = {}
        self._called: dict[int, TaskCall] = {}
        self._outputs: dict[int, CallOutput] = {}
        self._watch: LoopWatch | None = None
        #: The agent is gone, or cannot be told of ends any more.
        self._gone = asyncio.Event()

    def serve(self) -> None:
        """Run calls one after the other, until the agent is gone."""
        surroundings, left = Surroundings(), ProcessesLeft()
        handle_termination(self._cancel)
        while (message := self._take(surroundings)) is not None:
            if message["stopped_before"]:
                # It was, or may have been, for the call before, which has ended by itself.
                self._early = False
            request = CallRequest(message, self._pipes[message["pipe"]])
            code, clean = FAILED, False
            try:
                code = self._run_in(surroundings, request)
                # Then another attempt may have the directory.
                clean = left.none() and surroundings.is_untouched(request.began)
            except OSError:
                clean = False
            finally:
                # Whatever has been raised: without this message the agent would wait for the end of the call.
                said = self._end(request, code, clean=clean)
            if not (said and (clean or self._channel.recv(_MOST_BYTES))):
                return

    def _run_in(self, surroundings: Surroundings, request: CallRequest) -> int:
        """Run a call with the directory, the environment and the output of its attempt; return the exit code."""
        try:
            surroundings.enter(request.environment, request.directory, request.output)
            return self._run(request)
        except OSError as error:
            _write(request.output, f"the directory of the attempt cannot be used: {error}\n".encode())
            return FAILED
        finally:
            surroundings.leave()
            if signal.getsignal(signal.SIGTERM) != self._cancel:
                # The task has set another handler.
                handle_termination(self._cancel)

    def _take(self, surroundings: Surroundings) -> dict[str, Any] | None:
        """Return the next call; None if the agent is gone. While none waits, the process is as it was made."""
        try:
            return self._receive_call(socket.MSG_DONTWAIT)
        except BlockingIOError:
            surroundings.rest()
            return self._receive_call()

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
        gone = self._gone
        loop = asyncio.get_running_loop()

        def take() -> None:
            try:
                while (message := self._receive_call(socket.MSG_DONTWAIT)) is not None:
                    self._begin(message)
                gone.set()
            except BlockingIOError:
                return
            except BaseException:
                # The loop would log it and go on without this call, which the agent would hold for ever.
                gone.set()
                raise

        def obey() -> None:
            with contextlib.suppress(BlockingIOError):
                while message := _received(self._channel.recv, _MOST_BYTES):
                    self._cancel_call(json.loads(message)["cancel"])
                gone.set()

        self._watch = LoopWatch(loop, self._tell_of_blocker)
        loop.add_reader(self._inbox, take)
        loop.add_reader(self._channel, obey)
        await gone.wait()
        loop.remove_reader(self._inbox)
        loop.remove_reader(self._channel)

    def _cancel_call(self, number: int) -> None:
        if number in self._calls:
            self._called[number].mark_cancelled()
            self._calls[number].cancel()
            self._tell({"cancelling": number})

    def _begin(self, message: dict[str, Any]) -> None:
        """Begin a call beside others."""
        request = CallRequest(message, self._pipes[message["pipe"]])
        output, call = CallOutput(request.output), request.call(self._pool)
        task = asyncio.create_task(_printing_to(output, call))
        self._called[request.number], self._calls[request.number] = call, task
        self._outputs[request.number] = output
        assert self._watch is not None
        self._watch.wanted.set()

        def end(task: asyncio.Task[int]) -> None:
            output.descriptor = None
            del self._calls[request.number], self._called[request.number], self._outputs[request.number]
            if not self._calls and self._watch is not None:
                self._watch.wanted.clear()
            if self._gone.is_set():
                # The process ends, which is why this call does. It is for the agent to say what that means.
                return
            code, said = FAILED, False
            try:
                # A task that is cancelled before its first step runs none of its own code.
                code = CANCELLED if task.cancelled() else task.result()
            finally:
                try:
                    said = self._end(request, code, clean=request.attempt.fileless)
                finally:
                    if not said:
                        # A process that cannot tell of an end would hold its call for ever.
                        self._gone.set()

        task.add_done_callback(end)

    def _receive_call(self, flags: int = 0) -> dict[str, Any] | None:
        """Return the next call, and keep the descriptor of its output; None if there will be none.

        That is so if the agent is gone, or if this process can open no more files, as after tasks that leave them open.
        """
        received = _received(receive, self._inbox, _MOST_BYTES, _DESCRIPTORS, flags)
        if received is None or not received[0]:
            return None
        message = read_call(received[0])
        descriptors: list[int] = received[1]
        if len(descriptors) < message["new"] + ("file" in message):
            # The kernel leaves out what does not fit.
            _write(2, b"this process has too many open files to take another call; it ends\n")
            return None
        if message["new"]:
            self._close_unread_pipes()
            self._pipes[message["pipe"]] = descriptors[-1]
        if "file" in message:
            with open(descriptors[0], "rb") as file:
                message = {**read_call(file.read()), **message}
        return message

    def _close_unread_pipes(self) -> None:
        """Close pipes that the agent does not read any more, because somebody wrote there who had no call."""
        unread = select.poll()
        for descriptor in self._pipes.values():
            unread.register(descriptor, 0)
        gone = {descriptor for descriptor, event in unread.poll(0) if event & select.POLLERR}
        for number in [number for number, descriptor in self._pipes.items() if descriptor in gone]:
            os.close(self._pipes.pop(number))

    def _end(self, request: CallRequest, code: int, *, clean: bool) -> bool:
        """Tell the agent of the end of a call; return False if the agent is gone."""
        said = self._say(request.end(code, clean=clean).message())
        if not clean:
            # The agent makes another one, because a process that is left may write to this one.
            with contextlib.suppress(OSError):
                os.close(self._pipes.pop(request.pipe))
        return said

    def _tell_of_blocker(self, output: CallOutput | None, where: str) -> None:
        """Say which call blocks the loop, or that none does any more. Called by another thread than the loop's."""
        blocker = next((number for number, each in list(self._outputs.items()) if each is output), None)
        self._tell({"blocks": blocker, "where": where[-_MOST_PLACE:]})

    def _tell(self, facts: dict[str, Any]) -> None:
        """Tell the agent something that it can do without."""
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(facts).encode())

    def _say(self, message: bytes) -> bool:
        while True:
            try:
                self._channel.send(message)
                return True
            except BlockingIOError:
                # The agent reads all the time, so that there is room soon.
                room = select.poll()
                room.register(self._channel, select.POLLOUT)
                room.poll()
            except (BrokenPipeError, ConnectionResetError):
                return False


def _received(receive: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function receives; None if the agent was killed before it had read what this process said."""
    try:
        return receive(*arguments)
    except ConnectionResetError:
        return None


async def _printing_to(output: CallOutput, call: TaskCall) -> int:
    _output.set(output)
    return await call.run_in_loop()


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
        if not (isinstance(error, BadInput) and error.field == "app"):  # else it says all in one line
            traceback.print_exception(error)
        channel.send(json.dumps({"failed": import_failure(error)[:1000]}).encode())
        sys.exit(1)
    facts = {
        "ready": pool.app or place.partition(".")[0].partition(":")[0],
        "async": [task.name for task in pool.tasks.values() if task.is_async],
        "def": [task.name for task in pool.tasks.values() if not task.is_async],
    }
    channel.send(json.dumps(facts).encode())
    try:
        mode, (calls,) = receive(channel, _MOST_BYTES, 1)
    except (ConnectionResetError, ValueError):
        # The agent is gone.
        return
    child = TaskChild(pool, channel, socket.socket(fileno=calls))
    if json.loads(mode)["serve"] == "async":
        asyncio.run(child.serve_side_by_side())
    else:
        child.serve()


if __name__ == "__main__":
    main()
