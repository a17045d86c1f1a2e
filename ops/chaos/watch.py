"""Watching a pool while faults hit it: its invariants, processes that outlive their attempts, and its progress."""

import random
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import psycopg
from leasehold.errors import LeaseholdError

from ops.chaos import execution
from ops.chaos.checker import Kind, Violation
from ops.chaos.load import Room
from ops.chaos.server import DatabaseServer
from schema import clock
from schema.diagnostics import invariants
from schema.postgres.engine import Database, DatabaseSettings

#: Seconds between two looks at the invariants, which pause for so many times as long as a look took.
EVERY, SHARE = 1.0, 10
#: Seconds between two looks at the progress.
PROGRESS_EVERY = 0.05
_CURRENT = "SELECT public_id::text, fence FROM leasehold.jobs WHERE public_id = ANY (%s) AND finished_at IS NULL"
_NEWEST = "SELECT coalesce(max(id), 0) FROM leasehold.job_events"
# A job that was granted and finished since then: an assigner or a gateway, a bot and the database have all worked.
_FINISHED = """
SELECT max(f.id) FROM leasehold.job_events f WHERE f.id > %s AND f.move = 'finish' AND EXISTS (
    SELECT FROM leasehold.job_events g
    WHERE g.job_id = f.job_id AND g.fence = f.fence AND g.move = 'grant' AND g.id > %s)"""
_UNFINISHED = "SELECT count(*) FROM leasehold.jobs WHERE finished_at IS NULL"


class _Thread:
    """A thread that looks again and again until it is closed; a server that is down is no error."""

    def __init__(self, name: str, every: float, *, share: float = 0.0) -> None:
        self._every, self._share = every, share
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        #: Looks that worked, and looks that did not because the server was away.
        self.looks, self.missed = 0, 0
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self.close()

    def look(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release what the looks needed."""

    def _run(self) -> None:
        pause = self._every
        while not clock.wait(self._stopping, pause):
            began = clock.monotonic()
            try:
                self.look()
                self.looks += 1
            except (LeaseholdError, psycopg.OperationalError):
                self.missed += 1
            except BaseException as error:
                self.error = error
                return
            pause = max(self._every, self._share * (clock.monotonic() - began))


class Invariants(_Thread):
    """Samples the invariants of `leasehold db verify`."""

    def __init__(self, server: DatabaseServer) -> None:
        super().__init__("invariants", EVERY, share=SHARE)
        settings = DatabaseSettings(pool=1, reserve=1, outage_seconds=0.0, lock_timeout=30.0)
        self._database = Database(server.url, settings, role="chaos-watch", chance=random.Random(0))
        self.violations: list[Violation] = []
        self._known: set[tuple[str, tuple[str, ...]]] = set()

    def look(self) -> None:
        for finding in invariants.verify(self._database):
            told = finding.id, tuple(finding.sample)
            if finding.rows and told not in self._known:
                self._known.add(told)
                what = f"{finding.id} {finding.title}: {finding.rows}, such as {', '.join(finding.sample)}"
                self.violations.append(Violation(Kind.INVARIANT, what, clock.monotonic()))

    def close(self) -> None:
        self._database.close()


class Survivors(_Thread):
    """Finds processes of attempts that are over.

    A process may outlive the end of its attempt in the database for a moment, or as long as its bot is stopped and
    its own guardian needs. `patience` is how many seconds that may be.
    """

    def __init__(self, server: DatabaseServer, run: str, *, patience: float) -> None:
        super().__init__("survivors", EVERY)
        self._server, self._run_mark, self._patience = server, run, patience
        self._since: dict[int, float] = {}
        self.violations: list[Violation] = []

    def look(self) -> None:
        running = execution.processes(self._run_mark)
        with self._server.connect() as connection:
            rows = connection.execute(_CURRENT, [[each.job for each in running]]).fetchall()
        current = {(job, fence) for job, fence in rows}
        over = {each.pid: each for each in running if (each.job, each.fence) not in current}
        now = clock.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in over}
        for pid, since in self._since.items():
            if self._patience < now - since < float("inf"):
                self._since[pid] = float("-inf")
                each = over[pid]
                what = f"process {pid} of job {each.job} fence {each.fence} lives {now - since:.0f} s after its attempt"
                self.violations.append(Violation(Kind.SURVIVOR, what, since))


class Progress(_Thread):
    """Notes when a job is granted and finished after a moment, and how many jobs are unfinished.

    connect: opens a connection to the server, past every proxy of the pool, with further arguments of libpq.
    """

    def __init__(self, connect: Callable[..., psycopg.Connection[Any]], room: Room) -> None:
        super().__init__("progress", PROGRESS_EVERY)
        self._connect, self.room = connect, room
        self._connection: psycopg.Connection[tuple[int]] | None = None
        self._event: int | None = None
        #: When the first job that was granted after `mark` was seen to be finished; None = none yet.
        self.finished_at: float | None = None

    def mark(self) -> None:
        """Wait for a job that is granted from now on."""
        self._event, self.finished_at = None, None

    def look(self) -> None:
        try:
            if self._connection is None:
                self._connection = self._connect(application_name="chaos-progress")
                self._connection.execute("SET statement_timeout = '2s'")
            if self.looks % 5 == 0:
                self.room.unfinished = self._number(_UNFINISHED)
            since = self._event
            if since is None:
                self._event = self._number(_NEWEST)
            elif self.finished_at is None and self._number(_FINISHED, since, since) and self._event == since:
                self.finished_at = clock.monotonic()
        except psycopg.Error:
            self.close()
            raise psycopg.OperationalError("no answer") from None

    def _number(self, query: str, *arguments: int) -> int:
        assert self._connection is not None
        row = self._connection.execute(query.encode(), arguments).fetchone()
        assert row is not None
        return row[0] or 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
