"""Waiting for a condition, with a deadline: the only place in the tests that sleeps."""

from collections.abc import Callable
from typing import TypeVar

from schema import clock

T = TypeVar("T")

#: Seconds within which a test expects what has to happen, also on a machine that does much else.
MINUTE = 60.0
#: Seconds for the answer to a call that may be held for a minute: by news, not by the end of its wait.
NEWS = 45.0
#: Seconds between two looks.
LOOK = 0.015


def eventually(condition: Callable[[], T], within: float = MINUTE, *, what: str = "", every: float = LOOK) -> T:
    """Poll `condition` until it is true and return what it gave; fail after `within` seconds.

    every: seconds between two looks; more for a condition that is dear to look at.
    An AssertionError inside counts as "not yet".
    """
    deadline = clock.monotonic() + within
    while True:
        failure: AssertionError | None = None
        try:
            found = condition()
        except AssertionError as error:
            found, failure = None, error
        if found:
            return found
        if clock.monotonic() >= deadline:
            raise AssertionError(f"not within {within} s: {what or failure or found!r}") from failure
        clock.sleep(every)
