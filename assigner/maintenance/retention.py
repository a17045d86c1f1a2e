"""Retention: finished jobs, graphs and keys of submits leave when their time is over, as fast as the pool makes them.

What is kept of a job for longer is written to the journal by the statement that deletes it.

Every assigner process does so in a loop of its own, so that it may delete without a pause while nothing else waits for
it.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Protocol

import structlog
from leasehold.states import JobState

from assigner import metrics
from assigner.maintenance.duties import Duty, Rounds
from assigner.maintenance.upkeep import UpkeepSettings
from schema.clock import Monotonic
from schema.moves.graphs import BEGINNING, delete_graph
from schema.moves.retention import (
    Deleted,
    Finished,
    delete_finished,
    delete_keys,
    delete_unique_keys,
    keep_journal_days,
    oldest_finished,
)
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import HINDRANCES

#: Seconds between two rounds while nothing is overdue.
PAUSE = 1.0
#: Seconds between two looks whether the journal has the days that are needed: today and tomorrow are made ahead.
JOURNAL_INTERVAL = 3600.0
#: The most calls that make the days which the journal lacks; each makes some.
MOST_CALLS = 50
#: The most batches of one duty in one round.
BATCHES = 10
#: Rows of one batch: the least, and the most. Batches become smaller if one takes longer than `LONG` seconds, so that
#: they end in time on a slow disk, and larger if one takes less than `SHORT`.
LEAST, MOST = 100, 2000
SHORT, LONG = 0.2, 1.0
#: Seconds between two looks at rows that are older than those which were deleted last. There are some if they were
#: locked, or committed late.
LOOK_BACK = 60.0
#: Seconds for which keys are kept that clients made for their own repeats.
KEEP_KEYS_OF_CLIENTS = 3600.0
#: The most graphs that are looked at for one that can be deleted: of each, nodes are read until one is kept.
GRAPHS = 20

log = structlog.get_logger()


class Retention(Rounds):
    """Deletes finished jobs, graphs and keys. While some are overdue there is no pause between two rounds."""

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
        keep_days = partial(keep_journal_days, age=settings.keep_journal)
        yield Duty("days of the journal", JOURNAL_INTERVAL, lambda: self._database.run(keep_days))
        yield Duty("old graphs", settings.retention_interval, self._delete_graphs)
        ages = {
            JobState.SUCCEEDED: settings.keep_succeeded,
            JobState.FAILED: settings.keep_failed,
            JobState.CANCELLED: settings.keep_cancelled,
            JobState.DEAD: settings.keep_dead,
        }
        for state, age in ages.items():
            of_state = partial(delete_finished, state=state, age=age, journal=settings.keep_journal)
            jobs = OldRows(self._database, f"old {state} jobs", of_state, now=self._now)
            run = partial(self._delete_jobs, jobs, partial(oldest_finished, state=state, age=age), keep_days)
            yield Duty(jobs.name, settings.retention_interval, run)
        keys: dict[str, Delete] = {
            "old keys": partial(delete_keys, of_clients=False, age=settings.keep_keys),
            "old keys of clients": partial(delete_keys, of_clients=True, age=KEEP_KEYS_OF_CLIENTS),
            "deduplication keys": delete_unique_keys,
        }
        for name, delete in keys.items():
            yield Duty(name, settings.retention_interval, OldRows(self._database, name, delete, now=self._now).run_once)

    def _delete_jobs(self, rows: "OldRows", oldest: "Oldest", keep_days: Callable[[Connection], bool]) -> bool:
        """Delete jobs. If that is refused, make the days that the journal lacks, and delete one job after the other.

        Days lack after the journal has become longer, or where another process keeps a shorter one.
        """
        try:
            return rows.run_once()
        except HINDRANCES:
            for _ in range(MOST_CALLS):
                if not self._database.run(keep_days):
                    break
        return rows.run_singly(oldest)

    def _delete_graphs(self) -> bool:
        """Delete finished graphs, as far as a few looks go; the next run goes on where this one ended.

        Returns True if some were deleted and more may be overdue; graphs that are kept for their jobs are no hurry.
        """
        deleted = False
        for _ in range(BATCHES):
            delete = partial(delete_graph, age=self._keep_graphs, after=self._graphs_after, limit=GRAPHS)
            found = self._database.run(delete)
            self._graphs_after = found.after or BEGINNING
            deleted = deleted or found.deleted
            if found.after is None:
                return False
        return deleted


class Delete(Protocol):
    """Deletes up to `limit` rows that have outlived their age, the oldest first, without those kept since before
    `since`."""

    def __call__(self, connection: Connection, *, limit: int, since: datetime | None) -> Deleted: ...


class Oldest(Protocol):
    """Finds the row with which a batch of these begins."""

    def __call__(self, connection: Connection, *, since: datetime | None) -> Finished | None: ...


class OldRows:
    """Deletes rows in batches. Each batch begins where the one before it ended."""

    def __init__(self, database: Database, name: str, delete: Delete, *, now: Monotonic) -> None:
        self.name = name
        self._database, self._delete, self._now = database, delete, now
        self._limit = MOST
        self._since: datetime | None = None
        self._look_back_at = now()
        #: Seconds for which the oldest that could not be deleted has outlived its age, since the last look back.
        self._kept = 0.0

    def run_once(self) -> bool:
        """Delete a few batches; return True if more may be overdue."""
        if self._now() >= self._look_back_at:
            self._since, self._look_back_at, self._kept = None, self._now() + LOOK_BACK, 0.0
        return all(self._next_batch() for _ in range(BATCHES))

    def run_singly(self, oldest: Oldest) -> bool:
        """Delete one job after the other as `run_once` does, and pass over those that cannot be deleted.

        Such a job has something that the journal cannot take, a row of somebody else's table refers to it, or somebody
        holds a row that goes with it.
        """
        for _ in range(LEAST):
            try:
                deleted = self._database.run(partial(self._delete, limit=1, since=self._since))
            except HINDRANCES as error:
                found = self._database.run(partial(oldest, since=self._since))
                if found is None:
                    return False
                log.warning("an old job cannot be deleted", job=found.public_id, error=type(error).__name__)
                self._since, self._kept = found.finished_at + timedelta(microseconds=1), max(self._kept, found.late)
                metrics.RETENTION_LATE.labels(duty=self.name).set(self._kept)
            else:
                if not deleted.rows:
                    return False
                self._since = deleted.last
                metrics.observe_reaped("retention", deleted.rows)
        return True

    def _next_batch(self) -> bool:
        began, limit = self._now(), self._limit
        self._limit = max(LEAST, limit // 2)  # if it fails, which may be by its time
        deleted = self._database.run(partial(self._delete, limit=limit, since=self._since))
        took = self._now() - began
        if took <= LONG:
            self._limit = min(MOST, 2 * limit) if took < SHORT else limit
        self._since = deleted.last or self._since
        is_full = deleted.rows == limit
        metrics.observe_reaped("retention", deleted.rows)
        metrics.RETENTION_LATE.labels(duty=self.name).set(max(self._kept, deleted.late if is_full else 0.0))
        return is_full
