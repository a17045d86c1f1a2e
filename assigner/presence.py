"""An assigner process shows that it is there, and learns whether an operator wants it to place nothing."""

import threading
from collections.abc import Callable, Mapping, Sequence

from schema import drains
from schema.engine import Database

#: Seconds between two looks of an assigner that may place nothing.
DRAINED_LOOK = 1.0
#: Seconds until the next look at whether the last cycle has ended, so that who waits for a drain hears of it soon.
OBEY_LOOK = 0.2


class Presence:
    """The row of one process in the table of assigners. Methods may be called from any thread."""

    def __init__(self, database: Database, name: str, *, interval: float) -> None:
        self._database, self._name, self._interval = database, name, interval
        self._lock = threading.Lock()
        self._draining, self._at_work = False, 0
        self._serves: Sequence[Mapping[str, Sequence[str] | None]] | None = None

    def serves(self, entries: Sequence[Mapping[str, Sequence[str] | None]]) -> None:
        """What each of the process's assigners serves, told the next time it is seen: names of `instances` and
        `cohorts`, None = all."""
        with self._lock:
            self._serves = entries

    def begin(self) -> None:
        """Register the process before it places anything. What an operator wished of one of its name still holds."""
        self._wish(
            self._database.run(
                lambda connection: drains.assigner_seen(connection, self._name, starts=True, serves=self._serves)
            )
        )

    def run_once(self) -> float:
        """Mark the process seen; once it places nothing more, tell that too. Returns the seconds until the next."""
        idle = self._idle()
        draining = self._database.run(
            lambda connection: drains.assigner_seen(connection, self._name, idle=idle, serves=self._serves),
            urgent=True,
        )
        self._wish(draining)
        return OBEY_LOOK if draining and not idle else self._interval

    def end(self) -> None:
        """The process stops."""
        self._database.run(lambda connection: drains.assigner_stopped(connection, self._name))

    def guarded(self, run_once: Callable[[], float]) -> Callable[[], float]:
        """The same work, left out while the process is drained."""

        def run() -> float:
            with self._lock:
                if self._draining:
                    return DRAINED_LOOK
                self._at_work += 1
            try:
                return run_once()
            finally:
                with self._lock:
                    self._at_work -= 1

        return run

    def _wish(self, draining: bool) -> None:
        with self._lock:
            self._draining = draining

    def _idle(self) -> bool:
        with self._lock:
            return self._draining and self._at_work == 0
