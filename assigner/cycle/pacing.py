"""The size of an assigner's batches, its pauses between cycles, and its caution after a conflict."""

import os
import random
from collections.abc import Callable
from typing import TypeVar

import psycopg
import structlog
from leasehold.errors import NotReady

from assigner.admission.gates import ReleaseTime
from assigner.cycle.settings import AssignerSettings
from assigner.placement.fleet import SMALL
from schema.accounting.held_rows import SHORT_WAIT, HeldRows, held_rows
from schema.accounting.rates import GATHER_SECONDS
from schema.clock import Monotonic
from schema.postgres import advisory
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import is_conflict

log = structlog.get_logger()

#: The longest pause of an assigner that keeps failing to match, as a multiple of its usual pause.
SLOWEST = 2.0


class CyclePacer:
    """interval + random x jitter, times busy_sleep_factor after work, half an interval after a failed match.

    A failed match is no work. The pause doubles while nothing matches, so that a queue that no bot can serve is not
    scanned at full speed. A cycle that loses all its races to other assigners counts as work. An assigner sleeps no
    longer than until a rate or an advised pause allows the next job, and a random time more, so that assigners do not
    all come for the same token.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._failures = chance, 0

    def pause(self, settings: AssignerSettings, *, busy: bool, failed: bool, returns: ReleaseTime | None) -> float:
        """Return the seconds to sleep after a cycle that was `busy`, or `failed` to match.

        returns: when the first waiting job may start, if time alone decides that.
        """
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


# The size of batches: small on a quiet pool, for latency, and large under backlog, for throughput. And the number of
# assigners that place large batches at the same time.


#: The smallest batch. It takes a few milliseconds, so that the jobs behind it hardly wait longer.
LEAST = 100
#: After a cycle of less than `QUICK` seconds the batch may double; after one of more than `SLOW` seconds it is halved.
QUICK, SLOW = 0.25, 0.75

#: The least number of assigners that may place large batches at the same time. While one waits for the server, another
#: works.
MIN_CONCURRENT_BATCHES = 2


class Batch:
    """The size of the next batch. It doubles while cycles are quick and full, and halves when they are slow or mostly
    empty. A burst into a quiet pool thus receives its first leases after a few milliseconds."""

    def __init__(self) -> None:
        self._size = LEAST

    def size(self, limit: int) -> int:
        """Return how many jobs the next cycle may take; at most the configured limit."""
        return min(self._size, limit)

    @property
    def grown(self) -> bool:
        """Return whether there has been much to place lately."""
        return self._size > LEAST

    def learn(self, *, chosen: int, seconds: float, limit: int) -> None:
        """Adapt the size to a cycle. chosen: the number of jobs for which it chose bots. seconds: how long it took.

        Placements that were lost to other assigners count. A batch that shrank by them would have no part of the fleet
        to itself any more, and would lose the next race as well.
        """
        size = self.size(limit)
        if seconds > SLOW or chosen <= size // 4:
            self._size = max(LEAST, size // 2)
        elif chosen > size // 2 and seconds < QUICK:
            self._size = size * 2


def concurrent_batches(configured: int | None, *, bots: int) -> int:
    """Return how many assigners may place large batches at the same time: as configured, or one for each core, where
    the fleet has a part of its `bots` for each of them."""
    return configured or max(MIN_CONCURRENT_BATCHES, min(os.cpu_count() or 0, bots // SMALL))


# Caution after a conflict near a limit. Several assigners may plan with the same rest of a limit. One of them gets it,
# and the transactions of the others are undone. These assigners are careful for a while: only one careful assigner at a
# time places constrained jobs, and the others leave such jobs to it.


T = TypeVar("T")

#: Seconds for which an assigner is careful after a transaction was undone, and for which it goes round the rows that
#: somebody holds after it could not have a lock at any try.
CAREFUL, HINDERED = 5.0, 30.0
#: Seconds between two looks for rows that somebody holds: a look locks all others for a moment.
LOOK_INTERVAL = 1.0


class ConflictBackoff:
    """What one assigner remembers of its last transaction that was undone."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._until = self._hindered_until = self._look_at = now()
        self._hindered = 0
        self._charges = False
        self._held: HeldRows | None = None

    @property
    def is_hindered(self) -> bool:
        """Return whether somebody has lately held a row for longer than all tries of a cycle take."""
        return self._now() < self._hindered_until

    def run(
        self,
        database: Database,
        work: Callable[[Connection], T],
        *,
        undone: Callable[[], None],
        kept_plans: bool = False,
    ) -> T | None:
        """Run `work` in one transaction, begun anew when it is undone, for which `undone` is called. Return None if
        every try was undone, which is no error: those who did it have gone on. kept_plans: as of `Database.run`.

        After an error of a transaction that might grant against limits, jobs with constraints are left for a while:
        most of what can go wrong by a stored value is theirs. An outage, a time-out and a full disk are none of theirs.
        """
        self._charges = False

        def note() -> None:
            undone()
            self._until, self._look_at = self._now() + CAREFUL, self._now()

        try:
            return database.run(work, undone=note, kept_plans=kept_plans)
        except NotReady:
            raise
        except Exception as error:
            if not is_conflict(error):
                if self._charges and not isinstance(error, psycopg.OperationalError):
                    self._hinder(2, "a cycle failed, so jobs with constraints do not start")
                raise
            if isinstance(error, psycopg.errors.LockNotAvailable):
                level = self._hindered + 1 if self.is_hindered else 1
                self._hinder(level, "somebody holds a row, so jobs that need it do not start")
            return None

    def _hinder(self, level: int, said: str) -> None:
        if not self.is_hindered:
            self._hindered_until = self._now() + HINDERED
            log.warning(said, seconds=HINDERED)
        self._hindered = level

    def may_charge(self, connection: Connection) -> bool:
        """Return whether this transaction may grant against limits: nothing was undone lately, or nobody else that is
        careful does so, who then has to wait for this transaction. It may not if it was hindered again although it went
        round the held rows, or after another error."""
        if self.is_hindered and self._hindered > 1:
            return False
        self._charges = self._now() >= self._until or advisory.try_take_exclusive(connection)
        return self._charges

    def held_rows(self, connection: Connection) -> HeldRows | None:
        """Return the rows that somebody held at the last look, if they are gone round; None = they are not.

        The transaction then waits only shortly for locks.
        """
        if not self.is_hindered:
            return None
        connection.execute(SHORT_WAIT)
        if self._now() >= self._look_at:
            self._held, self._look_at = held_rows(connection), self._now() + LOOK_INTERVAL
        return self._held
