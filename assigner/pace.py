"""How long an assigner sleeps between two cycles."""

import random
from typing import Protocol

from assigner.rate import Return
from schema.rates import GATHER

#: An assigner that keeps failing to match sleeps at most so many times its usual pause.
SLOWEST = 2.0


class Pauses(Protocol):
    """The settings that decide; see `AssignerSettings`."""

    @property
    def interval(self) -> float:
        """Seconds."""

    @property
    def jitter(self) -> float:
        """Seconds."""

    @property
    def busy_sleep_factor(self) -> float:
        """0 to 1."""


class Pace:
    """interval + random x jitter, times busy_sleep_factor after work, half an interval after a failed match.

    A failed match is no work: the sleep doubles while nothing matches, so that a queue that nobody can serve is not
    scanned at full speed. Losing every race to other assigners is busy. Nobody sleeps for longer than until a rate
    or a delay that keeps jobs waiting allows the next one, and a random bit, so that assigners do not all come for the
    same token.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._failures = chance, 0

    def pause(self, settings: Pauses, *, busy: bool, failed: bool, returns: Return | None) -> float:
        """Seconds to sleep after a cycle that was `busy`, or `failed` to match; `returns`: when the first of
        what waits may start."""
        pause = settings.interval + self._chance.random() * settings.jitter
        if busy:
            self._failures = 0
            return pause * settings.busy_sleep_factor
        if failed:
            self._failures += 1
            pause *= min(0.5 * 2.0 ** min(self._failures - 1, 10), SLOWEST)
        else:
            self._failures = 0
        if returns is not None:
            pause = min(pause, returns.due + self._chance.random() * min(GATHER, returns.slack))
        return pause
