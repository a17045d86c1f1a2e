"""Background loops, process signals, and the bounded end of a process.

A loop calls a function again and again. The function does its work once and returns the seconds until the next call.
`Signals` collects process signals for a main thread that waits. A signal handler could interrupt code that holds any
lock, so the main thread reads the signals where it holds none.
"""

import math
import os
import random
import selectors
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any, Self

import structlog
from leasehold.errors import LeaseholdError

from assigner import metrics
from schema import clock
from schema.postgres.failures import said_of_outage
from schema.postgres.notify import Signal

#: A loop that pauses for at most this many seconds counts as busy and needs no wake-up.
SHORT = 0.05
#: Seconds by which the wait after an error grows at most with further errors in a row, and the longest wait, seconds. A
#: database that is back is then used again after a few seconds, however long it was away.
ERROR_DELAY_GROWTH, ERROR_DELAY_MAX = 2.0, 30.0
#: Seconds after which a run of a loop counts as standing still, and seconds between two looks for such runs. No
#: statement takes so long, and a wait for a server that does not answer ends before.
STANDS, LOOK = 60.0, 5.0
#: Seconds to wait after an error before a wake-up counts. So wake-ups that come with each submit cause at most two
#: errors a second.
ERROR_DELAY_MIN = 0.5

log = structlog.get_logger(__name__)


class Again(float):
    """Delay, in seconds, of a loop that waits for its turn: it counts as busy and needs no wake-up."""


class More(float):
    """Delay, in seconds, of a loop that has left work which another loop of its group could do meanwhile."""


class Loop:
    """A thread that calls `run_once` again and again, waiting the seconds it returns or until it is woken.

    name: name of the thread, and label in metrics; it comes from the configuration, so that there are few.
    signal: what wakes the loop; no other loop shares it, and its creator closes it.
    idle: context entered while the loop sleeps, so that others know that it wants to be woken (`Wakeups.idle`).
    on_error_delay: seconds until the next run after an error; for an assigner, its interval. It doubles with each error
        in a row, until it has grown by 2 s or is 30 s. The loop waits a random part of it, at least half, or until it
        is woken. (BuildGrid waits one interval after every error.)
    """

    def __init__(
        self,
        name: str,
        run_once: Callable[[], float],
        *,
        chance: random.Random,
        signal: Signal | None = None,
        idle: Callable[[], AbstractContextManager[None]] | None = None,
        on_error_delay: float = 1.0,
        monotonic: clock.Monotonic = clock.monotonic,
    ) -> None:
        self.name = name
        self._run_once = run_once
        self._chance = chance
        self._signal = signal or Signal()
        self._idle = idle
        self.on_error_delay = on_error_delay
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._errors_in_a_row = 0
        self._ended_well = math.nan
        self._began: float | None = None

    @property
    def running(self) -> bool:
        """True if the thread of the loop is alive."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def stopping(self) -> bool:
        """True if the loop was told to stop: it runs no more after its current run."""
        return self._stopping.is_set()

    @property
    def age(self) -> float:
        """Seconds since a run last succeeded, or since the start; NaN before the start."""
        return self._monotonic() - self._ended_well

    @property
    def stands(self) -> float:
        """Seconds that the current run has taken so far; 0 between two runs."""
        began = self._began
        return 0.0 if began is None else self._monotonic() - began

    @property
    def place(self) -> str:
        """Where the thread of the loop is now: the file and line of its innermost call."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def start(self) -> None:
        """Run in the background. Idempotent."""
        with self._lock:
            if self._thread is not None:
                return
            self._stopping.clear()
            self._ended_well = self._monotonic()
            metrics.LOOP_AGE.labels(loop=self.name).set_function(lambda: self.age)
            metrics.LOOP_STANDS.labels(loop=self.name).set_function(lambda: self.stands)
            _watch.add(self)
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Let the current run end and wait for it, at most `timeout` seconds. Idempotent.

        Returns True if the thread has ended.
        """
        self._stopping.set()
        self._signal.set()
        with self._lock:
            thread = self._thread
            if thread is None:
                return True
            if thread is not threading.current_thread():
                thread.join(timeout)
            if thread.is_alive():
                return False
            self._thread = None
            metrics.LOOP_AGE.remove(self.name)
            metrics.LOOP_STANDS.remove(self.name)
            _watch.remove(self)
            return True

    def wake(self) -> None:
        """Run again at once, or once more after the current run; after an error, when `ERROR_DELAY_MIN` has passed."""
        self._signal.set()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._signal.clear()
                delay = self._once()
                if self._idle is None or _is_busy(delay):
                    self._rest(delay)
                elif not self._stopping.is_set():
                    with self._idle():
                        self._sleep()
        finally:
            self._signal.wake_next()  # a wake-up may have chosen this loop just before it ended

    def _sleep(self) -> None:
        """Stay marked idle and run after each delay, until the loop is busy and was woken or has more work.

        The first run is at once. Work that was committed after the last run, but before the loop was marked idle,
        caused no wake-up and never will. Only a commit after the mark reaches the signal. A loop that has had work, and
        is not woken in the pause that follows, stays marked, because to be marked anew costs another run.
        """
        while not self._stopping.is_set():
            self._signal.clear()
            delay = self._once()
            was_woken = self._rest(delay)
            if _is_busy(delay) and (was_woken or delay <= 0 or isinstance(delay, Again)):
                return

    def _once(self) -> float:
        """Run once and return the delay. After an error, wait here and return 0."""
        self._began = self._monotonic()
        try:
            delay = self._run_once()
        except Exception as error:
            self._began = None  # the wait that follows is not part of the run
            metrics.LOOP_ERRORS.labels(loop=self.name).inc()
            delay = self._error_delay(error)
            if self._errors_in_a_row == 1:  # else loops that all fail would wake each other
                self._signal.wake_next()
            self._wait_after_error(delay)
            return 0.0
        finally:
            self._began = None
        self._errors_in_a_row = 0
        self._ended_well = self._monotonic()
        metrics.LOOP_CYCLES.labels(loop=self.name).inc()
        if isinstance(delay, More):
            self._signal.wake_next()
        return delay

    def _wait_after_error(self, delay: float) -> None:
        """Wait for `delay` seconds, or until woken. The next run follows at once, so it finds the announced work."""
        clock.wait(self._stopping, min(delay, ERROR_DELAY_MIN))
        with self._idle() if self._idle is not None else nullcontext():
            self._rest(delay - ERROR_DELAY_MIN)

    def _rest(self, delay: float) -> bool:
        """Wait for `delay` seconds; True if the loop was woken."""
        return delay > 0 and not self._stopping.is_set() and self._signal.wait(delay, busy=_is_busy(delay))

    def _error_delay(self, error: Exception) -> float:
        growing = self.on_error_delay * 2.0 ** min(self._errors_in_a_row, 32)
        longest = min(self.on_error_delay + ERROR_DELAY_GROWTH, ERROR_DELAY_MAX)
        delay = min(growing, longest) * self._chance.uniform(0.5, 1.0)
        self._errors_in_a_row += 1
        known = isinstance(error, LeaseholdError)
        said = said_of_outage(error.__cause__)
        log.error(
            "a loop failed and tries again",
            loop=self.name,
            error=(f"{error}: {said}" if said else str(error)) if known else type(error).__name__,
            in_a_row=self._errors_in_a_row,
            retry_in=round(delay, 3),
            exc_info=not known,
        )
        return delay


class _Watch:
    """A thread that logs which loops of this process stand still. It begins with the first loop and never ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: set[Loop] = set()
        self._told: set[Loop] = set()
        self._thread: threading.Thread | None = None

    def add(self, loop: Loop) -> None:
        with self._lock:
            self._loops.add(loop)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
                self._thread.start()

    def remove(self, loop: Loop) -> None:
        with self._lock:
            self._loops.discard(loop)
            self._told.discard(loop)

    def standing(self) -> list[Loop]:
        with self._lock:
            return [loop for loop in self._loops if loop.stands > STANDS]

    def look(self) -> None:
        found = self.standing()
        for loop in found:
            if loop not in self._told:
                log.error("a loop stands still", loop=loop.name, seconds=round(loop.stands), at=loop.place)
        for loop in self._told.difference(found):
            log.info("a loop goes on", loop=loop.name)
        self._told = {*found}

    def _run(self) -> None:
        never = threading.Event()
        while True:
            clock.wait(never, LOOK)
            self.look()


_watch = _Watch()


def standing() -> list[str]:
    """The names of this process's loops whose current run takes longer than `STANDS` seconds."""
    return sorted(loop.name for loop in _watch.standing())


def _begin_anew() -> None:
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_anew)


def _is_busy(delay: float) -> bool:
    return delay <= SHORT or isinstance(delay, Again)


class Signals:
    """Context manager that collects the given signals; for the main thread only."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}
        self._read = self._write = self._fd_before = -1

    def wait(self, seconds: float | None) -> signal.Signals | None:
        """Wait at most `seconds` (None = for ever) for the next signal; return None if none came."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            if not selector.select(None if seconds is None else max(0.0, seconds)):
                return None
        return signal.Signals(os.read(self._read, 1)[0])

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in self._numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._read)
        os.close(self._write)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the byte that `Signals.wait` reads."""


def exit_within(seconds: float, code: int) -> None:
    """End this process with the exit code `code`, `seconds` from now at the latest.

    A thread that waits for a server which does not answer cannot be interrupted, and the interpreter joins threads
    before it ends. What such a thread waits for is lost in any case: its transaction ends with the connection.
    """
    threading.Thread(target=_exit, args=(seconds, code), name="exit", daemon=True).start()


def _exit(seconds: float, code: int) -> None:
    clock.sleep(seconds)
    me = threading.current_thread()
    waiting = sorted(thread.name for thread in threading.enumerate() if thread is not me)
    log.error("the process ends, although some of its threads still wait", after=seconds, threads=", ".join(waiting))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
