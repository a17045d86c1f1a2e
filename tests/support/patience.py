"""Waiting for a condition, with a deadline: the only place in the tests that sleeps. And waits that take no time."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from schema import clock

T = TypeVar("T")

#: Seconds within which a test expects an event, also on a busy machine.
MINUTE = 60.0
#: Seconds within which a call is answered by news. It may be held for a minute, so the end of the hold does not count.
NEWS = 45.0
#: Seconds between two evaluations of a condition.
LOOK = 0.015


def eventually(condition: Callable[[], T], within: float = MINUTE, *, what: str = "", every: float = LOOK) -> T:
    """Poll `condition` until its result is true, and return the result; fail after `within` seconds.

    every: seconds between two evaluations; larger for an expensive condition.
    An AssertionError inside the condition counts as "not yet", and so does a value that it looks for in vain: a missing
    key or place (LookupError), or another number of rows than it unpacks (ValueError).
    """
    deadline = clock.monotonic() + within
    while True:
        failure: Exception | None = None
        try:
            found = condition()
        except (AssertionError, LookupError, ValueError) as error:
            found, failure = None, error
        if found:
            return found
        if clock.monotonic() >= deadline:
            raise AssertionError(f"not within {within} s: {what or failure or found!r}") from failure
        clock.sleep(every)


def wait_instead(monkeypatch: pytest.MonkeyPatch, function: str, stand_in: Callable[..., Any]) -> None:
    """Call `stand_in` where this thread would call schema.clock.`function` (sleep or wait), until the test ends.

    Other threads of the process wait as before: those of servers and listeners that outlive a test, for example.
    """
    real, here = getattr(clock, function), threading.get_ident()

    def choose(*args: object) -> object:
        return (stand_in if threading.get_ident() == here else real)(*args)

    monkeypatch.setattr(clock, function, choose)
