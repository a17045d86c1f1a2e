"""Duties of an assigner process: what it does again and again in the background, and the rounds in which it does so.

Each duty is bounded and skips locked rows, so any process may run it at any time. One that fails keeps no other
waiting: it is named in a metric and the log, and tried again soon.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from leasehold.errors import NotReady

from assigner import metrics
from schema.accounting.held_rows import SHORT_WAIT
from schema.clock import Monotonic
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import HINDRANCES

log = structlog.get_logger()

#: Seconds until a duty that failed is tried again: the first wait, which doubles with each failure, and the longest. A
#: duty that runs in each round is tried again in the next one.
RETRY_FIRST, RETRY_LAST = 5.0, 300.0

T = TypeVar("T")


def move_possible(database: Database, move: Callable[..., T]) -> T:
    """Make a move of many rows. If one of them needs another row, which somebody holds or which is wrong, make it again
    in parts, and leave those that cannot be moved. The move waits shortly for locks."""

    def work(connection: Connection, *, tries: bool) -> T:
        connection.execute(SHORT_WAIT)
        return move(connection, tries=tries)

    try:
        return database.run(partial(work, tries=False))
    except HINDRANCES:
        return database.run(partial(work, tries=True))


@dataclass(frozen=True)
class Duty:
    """One thing that upkeep does again and again.

    name: names it in metrics and in the log.
    every: seconds between two runs; 0 = in each round.
    run: does a bounded part of the work; returns True if some is left, which the next round then goes on with.
    """

    name: str
    every: float
    run: Callable[[], bool | None]


@dataclass
class _State:
    """When a duty is due, whether its last run has left work, and how often in a row it has failed."""

    due: float
    left: bool = False
    failures: int = 0


class Rounds:
    """Runs duties in rounds. Rounds of several processes may overlap freely.

    pause: seconds between two rounds. hurries: True = no pause while a duty has left work.
    """

    duties: Sequence[Duty] = ()

    def __init__(self, *, pause: float, now: Monotonic, hurries: bool = False) -> None:
        self._pause, self._hurries, self._now = pause, hurries, now
        self._states: dict[str, _State] = {}
        self._begin = 0

    def run_once(self) -> float:
        """Run the duties that are due; returns the seconds until the next round is.

        Raises NotReady if the database cannot be reached, because then no duty would do better. The next round begins
        behind the duty that failed so, because the statement of that duty may be what loses the connection.
        """
        begin, self._begin = self._begin, 0
        for number in (*range(begin, len(self.duties)), *range(min(begin, len(self.duties)))):
            try:
                self._run(self.duties[number])
            except NotReady:
                self._begin = number + 1
                raise
        return 0.0 if self._hurries and any(state.left for state in self._states.values()) else self._pause

    def _run(self, duty: Duty) -> None:
        state = self._states.setdefault(duty.name, _State(self._now()))
        if self._now() < state.due:
            return
        try:
            state.left = bool(duty.run())
        except Exception as error:
            wait = min(duty.every, RETRY_FIRST * 2.0 ** min(state.failures, 30), RETRY_LAST)
            state.failures += 1
            state.left = False
            state.due = self._now() + wait
            metrics.observe_duty(duty.name, failures=state.failures)
            kind = type(error).__name__
            # A duty that runs in each round may fail for days, so ever fewer of its failures are logged with a trace.
            is_traced = state.failures & (state.failures - 1) == 0
            log.error(
                "a duty of upkeep failed", duty=duty.name, error=kind, in_a_row=state.failures, exc_info=is_traced
            )
            if isinstance(error, NotReady):
                raise
        else:
            state.failures = 0
            state.due = self._now() + (0.0 if state.left else duty.every)
            metrics.observe_duty(duty.name, failures=0)
