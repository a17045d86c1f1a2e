"""Taking turns at what is nearly used up: whoever has just been undone by a limit goes on only where nobody else does.

Assigners plan on what they have read, and near a limit several of them plan for the same rest of it. One of them gets
it, so that the pool goes on; the others are undone. Each of these takes turns for a while, without waiting for one:
where it is not its turn, it leaves the jobs at their gates to the one whose turn it is.
"""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from schema import turns
from schema.clock import Monotonic
from schema.engine import Database, is_conflict

T = TypeVar("T")

#: Seconds for which turns are taken after a transaction was undone.
CAREFUL = 5.0


class Turns:
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
        return self._now() >= self._until or turns.take_alone(connection)
