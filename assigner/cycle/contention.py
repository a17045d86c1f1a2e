"""Slots for large batches, and caution after a conflict: how assigners keep from working against each other.

Only as many assigners place large batches at a time as there are cores. An assigner whose grant a limit has just undone
goes on only where no other assigner works.

Who places many keeps its turn for several cycles: the others, which place jobs of the same instances and cohorts, ask
for one now and then, and stand in line only after a while. Where each hands its turn to the next one after every cycle,
or is often asked for it, every job takes longer.

Assigners plan on what they have read, and near a limit several of them plan for the same rest of it. One of them gets
it, so that the pool goes on; the others are undone. Each of these takes turns for a while, without waiting for one:
where it is not its turn, it leaves the jobs at their gates to the one whose turn it is.
"""

import math
import random
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from assigner.loops import Again
from schema.clock import Monotonic
from schema.postgres import advisory
from schema.postgres.engine import Database, is_conflict

T = TypeVar("T")

#: Seconds, more or less, after which who has got no turn asks again, and after which it stands in line for one.
RETRY_SECONDS, IN_LINE = 0.5, 5.0
#: Seconds for which turns are taken after a transaction was undone.
CAREFUL = 5.0


class BatchSlot:
    """How one assigner comes to its turns at placing many jobs."""

    def __init__(self, now: Monotonic, chance: random.Random) -> None:
        self._now, self._chance = now, chance
        self._since = self._asked_at = -math.inf
        #: Seconds that the latest attempt has waited.
        self.waited = 0.0

    def take(self, connection: Connection, most: int, *, among: str) -> bool:
        """Take one of `most` turns of those who place the same jobs, to the end of the transaction, which has locked
        nothing yet; false to come again after `pause`. After a while a turn is waited for, and if it does not come,
        then done without."""
        began, self.waited = self._now(), 0.0
        if not advisory.try_take_slot(connection, most, chance=self._chance, among=among):
            # Who has not asked for long, because there was little to place, begins anew.
            self._since = began if began - self._asked_at > IN_LINE else self._since
            self._asked_at = began
            if began - self._since < IN_LINE:
                return False
            advisory.wait_for_slot(connection, most, chance=self._chance, among=among)
            self.waited = self._now() - began
        self._asked_at = -math.inf
        return True

    def pause(self) -> Again:
        """Seconds after which to come again."""
        return Again(self._chance.uniform(0.5, 1.5) * RETRY_SECONDS)


class ConflictBackoff:
    """What one assigner remembers of its last defeat."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._until = now()

    def run(self, database: Database, work: Callable[[Connection], T]) -> T | None:
        """`work` in one transaction, begun anew when it is undone; None where the turn is another's, or where every try
        was undone, which is no error: those who did it have gone on."""

        def once(connection: Connection) -> T | None:
            return work(connection) if self._mine(connection) else None

        try:
            return database.run(once, undone=self._undone)
        except DBAPIError as error:
            if not is_conflict(error):
                raise
            return None

    def _undone(self) -> None:
        self._until = self._now() + CAREFUL

    def _mine(self, connection: Connection) -> bool:
        """Whether nothing was undone lately, or nobody else has the turn, which this transaction keeps then."""
        return self._now() >= self._until or advisory.try_take_exclusive(connection)
