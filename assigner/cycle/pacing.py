"""How many jobs an assigner takes at a time, how long it sleeps between cycles, and its caution after a conflict."""

import os
import random
from collections.abc import Callable
from typing import Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from assigner.admission.gates import ReleaseTime
from schema.accounting.rates import GATHER_SECONDS
from schema.clock import Monotonic
from schema.postgres import advisory
from schema.postgres.engine import Database, is_conflict

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


class CyclePacer:
    """interval + random x jitter, times busy_sleep_factor after work, half an interval after a failed match.

    A failed match is no work: the sleep doubles while nothing matches, so that a queue that nobody can serve is not
    scanned at full speed. Losing every race to other assigners is busy. Nobody sleeps for longer than until a rate
    or a delay that keeps jobs waiting allows the next one, and a random bit, so that assigners do not all come for the
    same token.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._failures = chance, 0

    def pause(self, settings: Pauses, *, busy: bool, failed: bool, returns: ReleaseTime | None) -> float:
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
            pause = min(pause, returns.due + self._chance.random() * min(GATHER_SECONDS, returns.slack))
        return pause


# How many jobs an assigner places together: few on a quiet pool, for latency, many under backlog, for throughput; and
# how many assigners place many at the same time.


#: The least that a cycle looks for: a few milliseconds' work, which no job behind it feels.
LEAST = 100
#: A cycle that took less than so many seconds may take twice as many jobs, one that took more than `SLOW` half as many.
QUICK, SLOW = 0.25, 0.75

#: Assigners at least that may place many at the same time: while one of them waits for the server, another one works.
MIN_CONCURRENT_BATCHES = 2


class Batch:
    """Doubles while cycles are quick and full, halves when they are slow or mostly empty; never above the limit that
    is configured. A burst into a quiet pool thus sees its first leases after a few milliseconds."""

    def __init__(self) -> None:
        self._size = LEAST

    def size(self, limit: int) -> int:
        """How many jobs the next cycle may take."""
        return min(self._size, limit)

    @property
    def grown(self) -> bool:
        """Whether there has been much to place lately."""
        return self._size > LEAST

    def learn(self, *, placed: int, seconds: float, limit: int) -> None:
        """A cycle placed so many jobs, and took so long."""
        size = self.size(limit)
        if seconds > SLOW or placed <= size // 4:
            self._size = max(LEAST, size // 2)
        elif placed > size // 2 and seconds < QUICK:
            self._size = size * 2


def concurrent_batches(configured: int | None) -> int:
    """How many assigners may place many at the same time: as configured, or as many as this host has cores."""
    return configured or max(MIN_CONCURRENT_BATCHES, os.cpu_count() or 0)


# Caution after a conflict near a limit. Assigners plan on what they have read, and near a limit several of them plan
# for the same rest of it. One of them gets it, so that the pool goes on; the others are undone. Each of these is
# careful for a while: it places constrained jobs only where nobody else that is careful does so at the same time, and
# otherwise leaves them to that one.


T = TypeVar("T")

#: Seconds for which an assigner is careful after a transaction was undone.
CAREFUL = 5.0


class ConflictBackoff:
    """What one assigner remembers of its last transaction that was undone."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._until = now()

    def run(self, database: Database, work: Callable[[Connection], T], *, undone: Callable[[], None]) -> T | None:
        """Run `work` in one transaction, begun anew when it is undone, for which `undone` is called. Return None if
        every try was undone, which is no error: those who did it have gone on."""

        def note() -> None:
            undone()
            self._until = self._now() + CAREFUL

        try:
            return database.run(work, undone=note)
        except DBAPIError as error:
            if not is_conflict(error):
                raise
            return None

    def may_charge(self, connection: Connection) -> bool:
        """Return whether this transaction may grant against limits: nothing was undone lately, or nobody else that is
        careful does so, who then has to wait for this transaction."""
        return self._now() >= self._until or advisory.try_take_exclusive(connection)
