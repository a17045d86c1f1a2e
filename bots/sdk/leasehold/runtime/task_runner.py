"""Runs one call of a task in this process, and stores its value or its error. `main` is `leasehold-task`.

The result of the job is `{"ok": VALUE}` or `{"error": {"type", "message", "traceback"}}`.
"""

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from leasehold.errors import BadInput, LeaseholdError
from leasehold.runtime import attempt as attempts
from leasehold.runtime.attempt import Again, Attempt, Cancelled
from leasehold.tasks.arguments import decode_call, encode_result
from leasehold.tasks.periodic import AppRegistry
from leasehold.tasks.task import Task, TaskRegistry
from leasehold.wire import AGAIN, COMMAND, MAX_RESULT_BYTES, check_place, escaped, json_text, suggestion

#: Exit codes of a task: its function returned; it failed; it was cancelled, as a shell reports SIGTERM.
DONE, FAILED, CANCELLED = 0, 1, 128 + signal.SIGTERM
#: The most characters of a remote error's message and traceback. JSON has at most six bytes for one.
_MAX_MESSAGE, _MAX_TRACEBACK = 1000, 8000


#: How this process handles SIGTERM, which processes that tasks fork do not take over.
_handler: Any = None


class UnknownTask(LeaseholdError):
    """The pool that was imported has no task of this name."""


class ResultRefused(LeaseholdError):
    """What the function returned cannot be stored."""


def handle_termination(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let this process handle SIGTERM so, and none that it forks: a handler would keep a worker from ending."""
    global _handler
    signal.signal(signal.SIGTERM, handler)
    _handler = handler


def _as_usual_after_fork() -> None:
    if _handler is not None and signal.getsignal(signal.SIGTERM) == _handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_as_usual_after_fork)


def load(place: str) -> AppRegistry:
    """Import `MODULE:POOL`. Raises BadInput if that is no module or no pool, and whatever the module raises."""
    module, attribute = check_place(place)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not
        where = "in the directory where the command was started, PYTHONPATH or what is installed"
        raise BadInput("app", f"there is no module '{error.name}' {where}") from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            if getattr(found, "__file__", "") is None:  # a directory that Python takes for a package
                raise BadInput(
                    "app", f"'{module}' is the directory {escaped(next(iter(found.__path__)))}, and no module"
                )
            pools = [each for each, value in vars(sys.modules[module]).items() if isinstance(value, AppRegistry)]
            one = f"; its pool is '{pools[0]}'" if len(pools) == 1 else suggestion(attribute, pools)
            raise BadInput("app", f"the module '{module}' has no '{attribute}'{one}")
        found = getattr(found, name)
    if not isinstance(found, AppRegistry):
        raise BadInput("app", f"'{place}' is a '{type(found).__name__}', not a pool")
    return found


class TaskCall:
    """One call of a task of this pool, with the arguments of a job's standard input, in an attempt."""

    def __init__(self, pool: TaskRegistry, name: str, stdin: str, attempt: Attempt) -> None:
        self._pool, self._name, self._stdin, self._attempt = pool, name, stdin, attempt
        self._process = os.getpid()
        #: The function runs, so that a request to end may interrupt it.
        self.interruptible = False

    def run(self) -> int:
        """Run the call in this thread, store its result and return the exit code."""
        try:
            before = attempts.set_in_process(self._attempt)
            try:
                task, args, kwargs = self._parse()
                self.interruptible = True
                if self._attempt.cancelled:
                    raise Cancelled
                value = (
                    asyncio.run(self._interruptibly(task, args, kwargs))
                    if task.is_async
                    else task.function(*args, **kwargs)
                )
            finally:
                self.interruptible = False
                attempts.set_in_process(before)
            self._end_if_forked()
            return self._succeed(task, value)
        except BaseException as error:
            self._end_if_forked(error)
            is_cancelled = isinstance(error, (Cancelled, asyncio.CancelledError)) and self._attempt.cancelled
            return CANCELLED if is_cancelled else self._fail(error)

    async def run_in_loop(self) -> int:
        """Run the call of an `async def` beside others in this loop; cancelling the caller cancels the function."""
        try:
            attempts.in_context(self._attempt)
            task, args, kwargs = self._parse()
            if not task.is_async:
                raise UnknownTask(f"'{self._name}' has become a plain function; the bot has to be started again")
            value = await task.function(*args, **kwargs)
            self._end_if_forked()
            return self._succeed(task, value)
        except BaseException as error:
            self._end_if_forked(error)
            running = asyncio.current_task()
            assert running is not None
            # A function may also cancel what it waits for itself, which is an error like others.
            is_cancelled = isinstance(error, (Cancelled, asyncio.CancelledError)) and (
                self._attempt.cancelled or running.cancelling() > 0
            )
            return CANCELLED if is_cancelled else self._fail(error)

    def _end_if_forked(self, error: BaseException | None = None) -> None:
        """End a process that the function has forked and that has come back from it. The call is its parent's."""
        if os.getpid() == self._process:
            return
        code = 0 if error is None else 1
        try:
            if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
                code = error.code or 0
            elif error is not None:
                traceback.print_exception(error)
            sys.stderr.flush()
            sys.stdout.flush()
        finally:
            # Whatever became of its streams, it must not go on as its parent.
            os._exit(code)

    def cancel(self) -> None:
        """Ask the attempt to end: a handler of SIGTERM. Raises Cancelled where the function runs."""
        self._attempt.cancelled = True
        if self.interruptible:
            raise Cancelled

    def mark_cancelled(self) -> None:
        """Let the attempt know that it has to end, beside the cancellation of its coroutine."""
        self._attempt.cancelled = True

    async def _interruptibly(self, task: Task[Any, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run an `async def` that a signal cancels."""
        running = asyncio.current_task()
        assert running is not None

        def cancel() -> None:
            self._attempt.cancelled = True
            running.cancel()

        loop = asyncio.get_running_loop()
        self.interruptible = False
        global _handler
        before = _handler, signal.getsignal(signal.SIGTERM)
        loop.add_signal_handler(signal.SIGTERM, cancel)
        _handler = signal.getsignal(signal.SIGTERM)
        try:
            if self._attempt.cancelled:
                raise asyncio.CancelledError
            function: Coroutine[Any, Any, Any] = task.function(*args, **kwargs)
            try:
                value = await function
            except BaseException as error:
                self._end_if_forked(error)
                raise
            # Not later: a process that closed this loop would take the wake-ups of its parent's away.
            self._end_if_forked()
            return value
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            _handler, handler = before
            signal.signal(signal.SIGTERM, handler)

    def _parse(self) -> tuple[Task[Any, Any], list[Any], dict[str, Any]]:
        task = self._pool.tasks.get(self._name)
        if task is None:
            raise UnknownTask(f"'{self._name}' is not one of the tasks that this bot has imported")
        args, kwargs = decode_call(
            task.function, self._pool.serialiser, self._stdin, results=self._attempt.read_inputs, fetch=self._fetch
        )
        return task, args, kwargs

    def _fetch(self, reference: Any) -> Any:
        return json.loads(self._pool.fetch_result(reference))

    def _succeed(self, task: Task[Any, Any], value: Any) -> int:
        try:
            document = json_text(encode_result(task.function, self._pool.serialiser, value))
            size = len(document.encode())
        except (TypeError, ValueError) as error:
            raise ResultRefused(f"the value cannot be stored: {error}") from error
        if size > MAX_RESULT_BYTES and self._pool.large_results is not None:
            here = self._attempt
            reference = self._pool.large_results.keep(f"{here.job}-{here.fence}", document.encode())
            document = json_text({"kept": reference})
            size = len(document.encode())
        if size > MAX_RESULT_BYTES:
            raise ResultRefused(f"the value has {size} bytes as JSON, and at most {MAX_RESULT_BYTES} are stored")
        self._attempt.store_result(document)
        return DONE

    def _fail(self, error: BaseException) -> int:
        """Print and store the error, and return the exit code. Never raises, whatever the error or its task are."""
        if isinstance(error, Again):
            self._attempt.store_result(json.dumps({"again": error.seconds}))
            return AGAIN
        shown = _traceback(error)
        _complain(shown)
        told = {
            "type": storable(_name(error)),
            "message": _text(error)[:_MAX_MESSAGE],
            "traceback": storable(shown)[-_MAX_TRACEBACK:],
            "bases": _bases(error),
        }
        try:
            self._attempt.store_result(json.dumps({"error": told}))
        except BaseException as unwritten:
            _complain(f"the result cannot be stored: {_text(unwritten)}\n")
        return FAILED


def storable(text: str) -> str:
    """Return the text without what a text of PostgreSQL cannot hold."""
    # A text of a derived class may do anything if its own methods are called.
    return str.encode(text, errors="backslashreplace").decode().replace("\0", "\\0")


def _complain(text: str) -> None:
    """Print to the output of the attempt, unless the task has left a stream that cannot be written to."""
    with contextlib.suppress(BaseException):
        print(text, file=sys.stderr, end="")


def _name(error: BaseException) -> str:
    """Return the name of an error's class, which the class itself may refuse to tell."""
    name: str = type.__dict__["__name__"].__get__(type(error))
    return name


def _bases(error: BaseException) -> list[str]:
    """Return the names of the error's class and of what it derives from, by which retries are chosen."""
    classes: tuple[type, ...] = type.__dict__["__mro__"].__get__(type(error))
    return [storable(type.__dict__["__name__"].__get__(each)) for each in classes[:20]]


def _text(error: BaseException) -> str:
    """Return the text of an error, as it can be stored. It may raise another one when it is asked for."""
    try:
        return storable(str(error))
    except BaseException as refused:
        return storable(f"its text cannot be shown: {_name(refused)}")


def _traceback(error: BaseException) -> str:
    """Format an error without the frames of this module that lie above the function's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:
        return "".join(["Traceback (most recent call last):\n", *traceback.format_tb(trace)]) + (
            f"{_name(error)}: {_text(error)}\n"
        )


def import_failure(error: BaseException) -> str:
    """Return in one line why an app cannot be imported: the last line of the traceback, and where it was raised."""
    if isinstance(error, BadInput) and error.field == "app":
        return error.reason
    said = _last_line(error)
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{said} ({error.filename}, line {error.lineno})"
    ours, importer = str(Path(__file__).parent.parent), str(Path(importlib.__file__).parent)
    trace = traceback.extract_tb(error.__traceback__)
    # What called `load` says nothing of the app.
    loaded = next((place for place, frame in enumerate(trace) if frame.filename == __file__), 0)
    frames = [frame for frame in trace[loaded:] if not frame.filename.startswith((ours, importer, "<"))]
    # Nobody looks for a mistake in Python's own modules, which an app or this library calls.
    own = [frame for frame in frames if not _is_of_python(frame.filename)] or frames
    return f"{said} ({own[-1].filename}, line {own[-1].lineno})" if own else said


def _is_of_python(filename: str) -> bool:
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return filename.startswith(str(Path(importlib.__file__).parent.parent)) and not is_installed


def _last_line(error: BaseException) -> str:
    try:
        shown = [_text(error)] if isinstance(error, LeaseholdError) else traceback.format_exception_only(error)
        return "".join(shown).strip().splitlines()[-1]
    except BaseException:
        return f"{_name(error)}: {_text(error)}"


def main() -> None:
    """The console script: run the task of a job's command, `leasehold-task MODULE:POOL TASK`, in a new process."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {COMMAND} MODULE:POOL TASK, as the command of a job")
    place, name = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        attempt = Attempt(os.environ)
    except LeaseholdError as error:
        sys.exit(f"error: {error}")
    running: list[TaskCall] = []

    def cancel(_number: int, _frame: FrameType | None) -> None:
        if not running:
            sys.exit(CANCELLED)
        running[0].cancel()

    handle_termination(cancel)
    try:
        # Bots write UTF-8, whatever the encoding of the locale is.
        stdin = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        sys.exit(f"error: the standard input is no UTF-8: {error}")
    try:
        pool = load(place)
    except Exception as error:
        sys.exit(f"error: the app cannot be imported: {import_failure(error)}")
    running.append(TaskCall(pool, name, stdin, attempt))
    sys.exit(running[0].run())
