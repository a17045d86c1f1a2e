"""Retention: finished jobs and graphs leave when they have been kept long enough, as fast as the pool ends them.

Every assigner process does so in a loop of its own, so that it may delete without a pause while nothing else waits for
it.
"""

from collections.abc import Iterator
from datetime import datetime
from functools import partial

from leasehold.states import JobState

from assigner import metrics
from assigner.maintenance.duties import Duty, Rounds
from assigner.maintenance.upkeep import UpkeepSettings
from schema.clock import Monotonic
from schema.moves.graphs import BEGINNING, delete_graph
from schema.moves.retention import delete_finished
from schema.postgres.engine import Database

#: Seconds between two rounds while nothing is overdue.
PAUSE = 1.0
#: The most batches of one duty in one round.
BATCHES = 10
#: Jobs of one batch: the least, and the most. Batches become smaller if one takes longer than `LONG` seconds, so that
#: they end in time on a slow disk, and larger if one takes less than `SHORT`.
LEAST, MOST = 100, 2000
SHORT, LONG = 0.2, 1.0
#: Seconds between two looks at jobs that ended before those which were deleted last. There are some if their rows were
#: locked, or if their ends were committed late.
LOOK_BACK = 60.0
#: The most graphs that are looked at for one that can be deleted: of each, nodes are read until one is kept.
GRAPHS = 20


class Retention(Rounds):
    """Deletes finished jobs and graphs. While some are overdue there is no pause between two rounds."""

    def __init__(self, database: Database, settings: UpkeepSettings, *, now: Monotonic) -> None:
        super().__init__(pause=PAUSE, now=now, hurries=True)
        self._database = database
        self._graphs_after = BEGINNING
        self.reconfigure(settings)

    def reconfigure(self, settings: UpkeepSettings) -> None:
        """Use these settings from the next round on."""
        self._keep_graphs = settings.keep_succeeded
        self.duties = [*self._duties(settings)]

    def _duties(self, settings: UpkeepSettings) -> Iterator[Duty]:
        yield Duty("old graphs", settings.retention_interval, self._delete_graphs)
        ages = {
            JobState.SUCCEEDED: settings.keep_succeeded,
            JobState.FAILED: settings.keep_failed,
            JobState.CANCELLED: settings.keep_cancelled,
            JobState.DEAD: settings.keep_dead,
        }
        for state, age in ages.items():
            old = OldJobs(self._database, state, age=age, now=self._now)
            yield Duty(f"old {state} jobs", settings.retention_interval, old.run_once)

    def _delete_graphs(self) -> bool:
        """Delete finished graphs, as far as a few looks go; the next round goes on where this one ended."""
        for _ in range(BATCHES):
            delete = partial(delete_graph, age=self._keep_graphs, after=self._graphs_after, limit=GRAPHS)
            found = self._database.run(delete)
            self._graphs_after = found.after or BEGINNING
            if found.after is None:
                return False
        return True


class OldJobs:
    """Deletes the jobs that have been in one final state for `age` seconds, the oldest first."""

    def __init__(self, database: Database, state: JobState, *, age: float, now: Monotonic) -> None:
        self._database, self._state, self._age, self._now = database, state, age, now
        self._limit = MOST
        self._since: datetime | None = None
        self._look_back_at = now()

    def run_once(self) -> bool:
        """Delete a few batches; return True if more may be overdue."""
        if self._now() >= self._look_back_at:
            self._since, self._look_back_at = None, self._now() + LOOK_BACK
        return all(self._delete() for _ in range(BATCHES))

    def _delete(self) -> bool:
        began, limit = self._now(), self._limit
        self._limit = max(LEAST, limit // 2)  # if it fails, which may be by its time
        delete = partial(delete_finished, state=self._state, age=self._age, limit=limit, since=self._since)
        deleted = self._database.run(delete)
        took = self._now() - began
        if took <= LONG:
            self._limit = min(MOST, 2 * limit) if took < SHORT else limit
        self._since = deleted.last or self._since
        is_full = deleted.jobs == limit
        metrics.observe_reaped("retention", deleted.jobs)
        metrics.RETENTION_LATE.labels(state=self._state).set(deleted.late if is_full else 0.0)
        return is_full
