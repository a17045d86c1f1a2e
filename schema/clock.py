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
