"""The only module that reads a clock of the host: monotonic time, sleeping, waiting, throttling.

Stored times come from the database (`now()` inside the statements). Processes measure durations on the monotonic clock.
No other module may ask for the time; a test on the syntax tree enforces this. So one replacement here puts a whole
process on another clock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: A source of monotonic seconds; classes take one as an argument so that a test can drive it.
Monotonic = Callable[[], float]


_monotonic: Monotonic = time.monotonic
_wall: Monotonic = time.time


@contextmanager
def replaced(source: Monotonic) -> Iterator[None]:
    """Within the block `monotonic` and `wall` return what `source` returns: seconds since 1970 that never go back.

    For a process that does nothing else. Pauses (`sleep`, `wait`) still take the host's time.
    """
    global _monotonic, _wall
    before = _monotonic, _wall
    _monotonic = _wall = source
    try:
        yield
    finally:
        _monotonic, _wall = before


def monotonic() -> float:
    """Seconds on a clock that never goes back; only differences mean anything."""
    return _monotonic()


def sleep(seconds: float) -> None:
    """Block this thread for `seconds`. Loops call `wait` instead, so that an event can end the pause."""
    time.sleep(seconds)


def wait(event: threading.Event, seconds: float) -> bool:
    """Wait until `event` is set, at most `seconds`. True if it was set."""
    return event.wait(max(0.0, seconds))


def thread_processor() -> float:
    """Seconds of processor time that the calling thread has used so far."""
    return time.thread_time()


def wall() -> float:
    """Seconds since 1970 on this host's clock. Only to compare with the database's clock, or to tell people."""
    return _wall()


#: Seconds up to which a run of a throttled operation counts as quick by default.
#: After a slower run the pause is this many times its duration, so the operation takes at most a twentieth of the time.
QUICK_SECONDS, SLOW_FACTOR = 0.05, 20
#: Seconds after a begin during which no second run begins. The first may never finish, if the server aborted it.
UNDER_WAY = 20.0


class Throttle:
    """Throttle of an operation: no pause while it is quick, long pauses while it is slow.

    For reads whose duration grows with the number of queues and with dead rows that vacuum cannot remove yet.
    """

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._not_before = now()

    def try_begin(self) -> bool:
        """True if the operation may run now. The caller must then run it and report its duration with `finished`."""
        now = self._now()
        if now < self._not_before:
            return False
        self._not_before = now + UNDER_WAY
        return True

    def finished(self, seconds: float, *, quick: float = QUICK_SECONDS) -> None:
        """Record that a run took `seconds`; a run of up to `quick` seconds is followed by no pause."""
        self._not_before = self._now() + (SLOW_FACTOR * seconds if seconds > quick else 0.0)
