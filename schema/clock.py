"""The only home of real time.

Stored times are the database's (`now()` inside the statements); processes measure durations on the monotonic
clock. Nothing else in the code may ask for the time, and a test on the syntax tree keeps it so.
"""

import threading
import time
from collections.abc import Callable

#: A source of monotonic seconds; classes take one as an argument so that a test can drive it.
Monotonic = Callable[[], float]


def monotonic() -> float:
    """Seconds on a clock that never goes back; only differences mean anything."""
    return time.monotonic()


def sleep(seconds: float) -> None:
    """Block this thread for `seconds`. Loops wait on an event instead, see `wait`."""
    time.sleep(seconds)


def wait(event: threading.Event, seconds: float) -> bool:
    """Wait until `event` is set, at most `seconds`; tells whether it was set."""
    return event.wait(max(0.0, seconds))


def wall() -> float:
    """Seconds since 1970 on this host's clock, to be compared with the database's and used for nothing else."""
    return time.time()


# What may be done as often as one likes while it is quick, and seldom while it is slow.


#: Seconds up to which it is quick, if nothing else is said; what is slower may take one part in so many of the time.
QUICK_SECONDS, SLOW_FACTOR = 0.05, 20
#: Seconds for which nobody else begins it. It may never end, because the server gave it up.
UNDER_WAY = 20.0


class Throttle:
    """Something that is quick as a rule, and slow with many queues or much that cannot be cleaned up in its way."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._not_before = now()

    def try_begin(self) -> bool:
        """Whether it may be done now; who is told so does it, and says what it took."""
        now = self._now()
        if now < self._not_before:
            return False
        self._not_before = now + UNDER_WAY
        return True

    def finished(self, seconds: float, *, quick: float = QUICK_SECONDS) -> None:
        """It has been done, and took so long; up to `quick` seconds would have been quick."""
        self._not_before = self._now() + (SLOW_FACTOR * seconds if seconds > quick else 0.0)
