"""An app whose tasks do what a test asks for, and fail in every way in which a task can."""

import asyncio
import atexit
import contextlib
import io
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import leasehold
from leasehold.pool import Pool

pool = Pool.from_env()
_log = logging.getLogger("tests.task_app")
logging.basicConfig(format="%(message)s")


@pool.task
def add(left: int, right: int = 0) -> int:
    """Add two numbers."""
    print(f"{left} + {right}")
    return left + right


@pool.task
def note(file: str, number: int) -> None:
    """Write a line with the number at the end of the file."""
    with Path(file).open("a") as lines:
        lines.write(f"{number}\n")


@pool.task(retries=2, timeout=60, label="tested", priority=7, unique=lambda text: text, metadata={"kind": "echo"})
def echo(text: Any) -> Any:
    """Return what it is given."""
    return text


@pool.task
async def hold_up_all(file: str) -> None:
    """Let no other call of the process go on until the file is there."""
    while not os.path.exists(file):
        time.sleep(0.01)


@pool.task
async def count_characters(text: str) -> int:
    """Count characters."""
    return len(text)


@pool.task
def fail(text: str) -> None:
    """Raise an error."""
    raise ValueError(text)


class _Nameless(type):
    """The class of classes that do not tell their name."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError("no name")


class Wordless(Exception):
    """An error that does not tell its text."""

    def __str__(self) -> str:
        raise self.args[0]


class Nameless(Exception, metaclass=_Nameless):
    """An error whose class does not tell its name."""


class Silent(io.StringIO):
    """A stream that takes nothing."""

    def write(self, text: str) -> int:
        raise SystemExit(f"does not print {text}")

    def flush(self) -> None:
        raise SystemExit("does not print")


def _fail_badly(how: str) -> None:
    match how:
        case "no text":
            raise Wordless(ValueError("no text"))
        case "an exit instead of a text":
            raise Wordless(SystemExit(3))
        case "no name":
            raise Nameless("told")
        case "no output":
            sys.stdout, sys.stderr = Silent(), Silent()
            raise ValueError("told")
        case "no descriptors":
            os.closerange(3, 256)


@pool.task
def fail_badly(how: str) -> None:
    """Fail in a way that leaves hardly anything with which the failure could be told."""
    _fail_badly(how)


@pool.task
async def fail_badly_beside_others(how: str) -> None:
    """Fail in the same ways in the process of asynchronous tasks."""
    _fail_badly(how)


@pool.task
def surroundings() -> dict[str, Any]:
    """Show where the task runs, and write by every way that leads to the output."""
    print("printed")
    _log.warning("logged")
    subprocess.run([sys.executable, "-S", "-c", "print('by a process')"], check=True)
    os.write(1, b"by the descriptor\n")
    here = leasehold.current()
    print(os.getcwd() == os.environ["HOME"], here.job == os.environ["LEASEHOLD_JOB"], here.attempt)
    return {"process": os.getpid()}


@pool.task
def variables(*names: str) -> list[str | None]:
    """Return the values of environment variables, of job and fence too, and the job as the attempt knows it."""
    return [*map(os.environ.get, (*names, "LEASEHOLD_JOB", "LEASEHOLD_FENCE")), leasehold.current().job]


@pool.task
def litter(late: str) -> list[str]:
    """List what is in the directory of the attempt, and leave two files, or a process that writes late."""
    found = sorted([*os.listdir(), *os.listdir(os.environ["TMPDIR"])])
    if late:
        write = f"sleep 0.1; echo '{late}' > $LEASEHOLD_RESULT"
        subprocess.Popen(["sh", "-c", f"( {write} ) &" if late == "orphan" else write], stderr=subprocess.DEVNULL)
    else:
        Path("left").touch()
        Path(os.environ["TMPDIR"], "temporary").touch()
    return found


@pool.task
def write_later(text: str, seconds: float) -> None:
    """Leave a thread that goes on writing to the output of this call, by a descriptor of its own."""
    output, ends = os.dup(1), time.monotonic() + seconds

    def write() -> None:
        with contextlib.suppress(OSError):
            while time.monotonic() < ends:
                os.write(output, text.encode())
                time.sleep(0.0005)
        os.close(output)

    threading.Thread(target=write).start()


@pool.task
def open_files() -> int:
    """Count the open files of the process, in which no thread of an earlier call is left."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    return len(os.listdir("/proc/self/fd"))


@pool.task
def end_process(code: int, file: str) -> None:
    """End the process in the middle of the first attempt; the second one goes on."""
    if not Path(file).exists():
        Path(file).touch()
        os._exit(code)


def _fork(how: str) -> int:
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if how == "raise":
        raise ValueError("forked")
    if how == "exit":
        sys.exit(7)
    if how == "close":
        sys.stdout = None  # type: ignore[assignment]
        sys.stderr.close()
        raise ValueError("forked")
    if how == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    return -1


@pool.task
def fork(how: str) -> int:
    """Fork a process that comes back from the function in some way, and return its exit code."""
    return _fork(how)


@pool.task
async def fork_beside_others(how: str) -> int:
    """The same in a process that runs several calls."""
    code = _fork(how)
    if code != -1:  # the parent
        await asyncio.to_thread(time.sleep, 0.01)  # which needs the loop's wake-ups
    return code


@pool.task
async def cancel_itself() -> None:
    """Wait for what was cancelled, although nobody has cancelled this call."""
    other = asyncio.create_task(asyncio.sleep(60))
    other.cancel()
    await other


@pool.task
def reconfigure() -> str | None:
    """Set up standard output as programs do, and return how it takes what it cannot encode."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is no redirected stream
    return sys.stdout.errors


@pool.task
def write_at_exit(file: str) -> None:
    """Let the process write a file when it ends."""
    atexit.register(Path(file).touch)


@pool.task
async def write_at_exit_beside_others(file: str) -> None:
    """The same in a process that runs several calls."""
    atexit.register(Path(file).touch)


@pool.task
def hold(file: str, seconds: float = 60.0) -> None:
    """Write the process id into a file, and stay until a test ends it."""
    try:
        Path(file).write_text(str(os.getpid()))
        time.sleep(seconds)
    except leasehold.Cancelled:
        print("asked to end", leasehold.current().cancelled)
        raise


@pool.task
def nap(seconds: float) -> float:
    """Do nothing for a while, and return when that began, seconds since 1970."""
    began = time.time()
    time.sleep(seconds)
    return began


@pool.task
def hold_until(file: str) -> None:
    """Stay until the file is there."""
    while not Path(file).exists():
        time.sleep(0.005)


@pool.task
def hold_on(file: str) -> None:
    """Stay whatever is asked."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(file).write_text(str(os.getpid()))
    time.sleep(60)


@pool.task
async def meet(file: str, other: str) -> int:
    """Wait for a task that runs beside this one: each makes a file, and waits for that of the other."""
    print(f"{Path(file).name} is here")
    Path(file).touch()
    while not Path(other).exists():
        await asyncio.sleep(0.005)
    print(f"{Path(file).name} has met {Path(other).name}")
    return os.getpid()


_kept: list[bytes] = []


@pool.task
def keep(mebibytes: int) -> int:
    """Take memory that the process keeps, and return its id."""
    _kept.append(b"x" * (mebibytes << 20))
    return os.getpid()


@pool.task
async def keep_beside_others(mebibytes: int) -> int:
    """Take memory that the process of asynchronous tasks keeps, and return its id."""
    _kept.append(b"x" * (mebibytes << 20))
    return os.getpid()


@pool.task
async def rest(file: str) -> None:
    """Stay until it is cancelled."""
    Path(file).touch()
    try:
        await asyncio.sleep(60)
    finally:
        print("rested", leasehold.current().cancelled)


@pool.task
async def use_up_descriptors(file: str) -> int:
    """In the first attempt, make the file, let the process open no more and stay; return the number of the second."""
    if leasehold.current().attempt == 1:
        Path(file).touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
        await asyncio.sleep(60)
    return leasehold.current().attempt


@pool.task
def store(document: Any) -> None:
    """Store a result by the function for commands that are no tasks."""
    leasehold.current().store_result(document)


@pool.task
async def store_beside_others(document: Any) -> None:
    """Do the same in the process of asynchronous tasks."""
    leasehold.current().store_result(document)


@pool.task
async def rest_on(file: str) -> None:
    """Stay whatever is asked, and let the others go on."""
    Path(file).touch()
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@pool.task
def advance(file: str) -> list[Any]:
    """Store a checkpoint and die; the next attempt shows what it finds."""
    here = leasehold.current()
    found = here.last_checkpoint
    if found is None:
        here.checkpoint({"row": 41})
        Path(file).write_text(str(os.getpid()))
        time.sleep(60)
    return [here.attempt, found]


@pool.task
def hang_up(then: str) -> None:
    """Close the sockets to the agent and stay, or leave a process that stays and end this one."""
    if then == "stay":
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                if found.type == socket.SOCK_SEQPACKET:
                    os.close(int(name))
        time.sleep(60)
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60 & wait; sleep 60"], start_new_session=True)
    os._exit(3)


@pool.task
def say_nonsense(text: str) -> None:
    """Send a message over the socket to the agent, and stay."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.type == socket.SOCK_SEQPACKET:
                found.send(text.encode())
    signal.pause()
