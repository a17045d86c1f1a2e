"""Models kept outside the database, to compare with it: executions of jobs, and promises given to callers.

`ExecutionLog` records which bot ran which job and when, on one monotonic clock. It shows whether a job ever ran twice
at the same time. `Ledger` is the model that a random history is compared with. `Journal` holds acknowledged submits,
and `Watching` checks every invariant again and again; `standing_pool` has real processes for both.
"""

import random
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from leasehold.client import Client
from leasehold.errors import NotReady
from leasehold.states import FINAL, JobState

from schema import clock
from schema.diagnostics import invariants
from schema.postgres import embedded
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.fragments import JOB_RESULT
from schema.states import TRANSITIONS
from schema.timing import Timing
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Bot, Pool
from tests.support.servers import Databases, Processes, opened


@dataclass
class Execution:
    """A span of time during which a bot ran a job; `end` is None while it runs."""

    job: str
    fence: int
    bot: str
    begin: float
    end: float | None = None


class ExecutionLog:
    """All executions of jobs by bots. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Execution] = []

    def begin(self, job: str, fence: int, bot: str) -> Execution:
        with self._lock:
            entry = Execution(job, fence, bot, clock.monotonic())
            self._entries.append(entry)
            return entry

    def end(self, entry: Execution, at: float | None = None) -> None:
        with self._lock:
            if entry.end is None:
                entry.end = clock.monotonic() if at is None else max(entry.begin, at)

    def entries(self) -> list[Execution]:
        with self._lock:
            return list(self._entries)

    def overlaps(self) -> list[tuple[Execution, Execution]]:
        """Pairs of executions of one job that overlap in time; must be empty at any moment."""
        by_job: dict[str, list[Execution]] = defaultdict(list)
        for entry in self.entries():
            by_job[entry.job].append(entry)
        found = []
        for entries in by_job.values():
            entries.sort(key=lambda entry: entry.begin)
            found += [
                (first, second) for first, second in pairwise(entries) if first.end is None or second.begin < first.end
            ]
        return found


# The model of a random history


JOBS = f"""
SELECT j.public_id, j.state, j.fence, j.result_fence, j.attempts, j.max_attempts, j.priority, j.units,
    i.name AS instance, f.properties, p.payload, {JOB_RESULT} AS result
FROM jobs j JOIN instances i ON i.id = j.instance JOIN platforms f ON f.id = j.platform
JOIN job_payloads p ON p.job_id = j.id ORDER BY j.id"""
LEASES = """
SELECT j.public_id, l.fence, l.state, b.name, b.status = 'ok' AND NOT b.draining AND NOT b.closing AS fit
FROM live l JOIN jobs j ON j.id = l.job_id JOIN bots b ON b.id = l.bot_id ORDER BY l.job_id"""
# Every grant is an attempt, unless the job was returned or evicted, or its bot was lost before the lease was delivered.
CHARGED = """
SELECT j.public_id, j.attempts, count(*) FILTER (WHERE e.move = 'grant')
    - count(*) FILTER (WHERE e.move IN ('requeue', 'evict'))
    - count(*) FILTER (WHERE e.move = 'expire' AND l.delivered_at IS NULL) AS charged
FROM jobs j JOIN job_events e ON e.job_id = j.id
LEFT JOIN leases l ON l.job_id = j.id AND l.fence = e.fence - 1 GROUP BY j.id"""

Lease = tuple[str, int]


@dataclass
class Entry:
    """An acknowledged submit: its request, and the last known state of its job."""

    request: dict[str, Any]
    state: str = "queued"
    fence: int = 0
    cancelled: bool = False


@dataclass
class Worker:
    """A session as its bot sees it. `beliefs`: the states of its leases by its last answer."""

    bot: Bot
    beliefs: dict[Lease, str] = field(default_factory=dict)
    message: Any = None
    answer: bytes = b""


class Ledger:
    """The model: entries, workers and results. `check` compares it with the database."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.jobs: dict[str, Entry] = {}
        #: By instance and key: the job and its request, also of a job that retention has deleted.
        self.keys: dict[tuple[str, str], tuple[str, Mapping[str, Any]]] = {}
        self.workers: dict[str, Worker] = {}
        #: Sessions that have ended although their bots do not know it.
        self.ghosts: list[Worker] = []
        self.closing: set[str] = set()
        #: Bots that an operator has drained; they stay drained whatever they do.
        self.drained: set[str] = set()
        #: Every lease that was ever offered, and the exit codes that bots have reported.
        self.offered: list[Lease] = []
        self.exit_codes: dict[Lease, int] = {}
        self._leases: set[Lease] = set()

    def bury(self, name: str) -> None:
        """Record that the session of a bot has ended."""
        worker = self.workers.pop(name, None)
        self.closing.discard(name)
        if worker is not None:
            self.ghosts.append(worker)

    def forget(self) -> int:
        """Record that retention has deleted all final jobs. Returns how many these were."""
        final = [job for job, entry in self.jobs.items() if entry.state in FINAL]
        for job in final:
            del self.jobs[job]
        return len(final)

    def pending(self) -> set[Lease]:
        """Leases that are not acknowledged and that nobody has asked to stop."""
        return {(str(row.public_id), row.fence) for row in self.pool.rows(LEASES) if row.state == "pending"}

    def check(self) -> None:
        """Assert that every acknowledged submit is stored as sent, and made legal transitions only."""
        rows = self.pool.rows(JOBS)
        assert [str(row.public_id) for row in rows] == list(self.jobs), "an acknowledged submit was lost, or made twice"
        for row in rows:
            self._check_job(row, self.jobs[str(row.public_id)])
        for row in self.pool.rows(CHARGED):
            assert row.attempts == row.charged, f"{row.public_id}: {row.attempts} attempts, {row.charged} charged"
        self._check_leases()

    def _check_job(self, row: Any, entry: Entry) -> None:
        request = {name: getattr(row, name) for name in ("instance", "properties", "priority", "units", "payload")}
        assert request.items() <= entry.request.items()
        before, now = JobState(entry.state), JobState(row.state)
        assert row.fence >= entry.fence
        assert now in reachable(before, same=row.fence == entry.fence), f"{before} -> {now}"
        if entry.cancelled:
            assert now not in (JobState.QUEUED, JobState.DEAD), "a cancelled job went on"
        if now is JobState.CANCELLED:
            assert entry.cancelled, "nobody cancelled it"
        if now in (JobState.SUCCEEDED, JobState.FAILED):
            assert row.result_fence == row.fence
            assert row.result["exit_code"] == self.exit_codes[str(row.public_id), row.fence]
        assert row.attempts <= row.max_attempts
        entry.state, entry.fence = row.state, row.fence

    def _check_leases(self) -> None:
        rows = self.pool.rows(LEASES)
        live = {(str(row.public_id), row.fence): row for row in rows}
        for lease in live.keys() - self._leases:
            assert live[lease].fit, "a bot that takes no work was given some"
        self._leases = set(live)
        for name, worker in self.workers.items():
            for lease in worker.beliefs:
                assert lease in live, f"{lease} was taken from {name}, which may still run it"
                assert live[lease].name == name


def reachable(before: JobState, *, same: bool) -> frozenset[JobState]:
    """States that a job may have after any number of moves. `same`: its fence did not change, so no lease was made."""
    if before in FINAL:
        return frozenset({before})
    found, edge = {before}, {before}
    while edge:
        edge = {after for state in edge for after in TRANSITIONS[state]} - found
        if same:
            edge -= {JobState.QUEUED, JobState.LEASED}
        found |= edge
    return frozenset(found)


# Acknowledged submits


STATES = "SELECT public_id, state FROM jobs"
ENDS = """
SELECT job_id, count(*) AS times FROM job_events
WHERE to_state IN ('succeeded', 'failed', 'cancelled', 'dead') GROUP BY job_id"""
# Only the bot with the last fence of a job may end it.
WRONG_ENDS = """
SELECT j.public_id FROM jobs j JOIN job_events e ON e.job_id = j.id AND e.move = 'finish'
WHERE e.fence <> j.fence OR j.result_fence IS DISTINCT FROM j.fence"""


class Journal:
    """Acknowledged submits: the key of each, and the id of its job."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.jobs: dict[str, str] = {}

    def submit(self, count: int, **fields: Any) -> list[str]:
        """Submit `count` jobs through the function that the gateway calls, each with another key."""
        return [self._note(key, *self._pool.submit(key=key, **fields)) for key in self._keys(count)]

    def send(self, client: Client, count: int, *command: str, **fields: Any) -> list[str]:
        """Submit `count` jobs over HTTP in one request, which the client repeats until it is answered."""
        keys = self._keys(count)
        taken = client.submit([{"command": list(command), "key": key, **fields} for key in keys])
        return [self._note(key, job.id) for key, job in zip(keys, taken, strict=True)]

    def wait(self, within: float = MINUTE) -> None:
        """Wait until every acknowledged job is final."""
        eventually(self._all_final, within, what="every acknowledged job is final")

    def check(self) -> None:
        """Assert that every job succeeded, ended once, exists once, and that no invariant is violated."""
        states = {str(row.public_id): row.state for row in self._pool.rows(STATES)}
        assert set(self.jobs.values()) - states.keys() == set(), "acknowledged submits are lost"
        assert len(states) == len(self.jobs), "a submit made more than one job"
        assert Counter(states.values()) == {"succeeded": len(self.jobs)}
        ends = Counter(row.times for row in self._pool.rows(ENDS))
        assert ends == {1: len(self.jobs)}, "a job has not ended exactly once"
        assert self._pool.rows(WRONG_ENDS) == []
        assert [finding for finding in invariants.verify(self._pool.database) if finding.rows] == []

    def _all_final(self) -> bool:
        final = {str(row.public_id) for row in self._pool.rows(STATES) if row.state in FINAL}
        return final >= set(self.jobs.values())

    def _keys(self, count: int) -> list[str]:
        return [f"key-{len(self.jobs) + number}" for number in range(count)]

    def _note(self, key: str, job: str) -> str:
        assert self.jobs.setdefault(key, job) == job, "one key, two jobs"
        return job


# Checking the invariants during a fault


#: Seconds between two checks of the invariants.
EVERY = 0.25


class Watching:
    """A thread that checks all invariants on its own connection. Leaving it asserts that no check found anything."""

    def __init__(self, database_url: str) -> None:
        settings = DatabaseSettings(pool=1, reserve=1, outage_seconds=0.0)
        self._database = Database(database_url, settings, role="watching", chance=random.Random(0))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watching", daemon=True)
        self.findings: list[invariants.Finding] = []
        #: Complete checks, and checks that failed because the server was down.
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
        self._database.close()
        if kind is None:
            assert self.error is None, f"the invariants could not be looked at: {self.error!r}"
            assert self.looks > 0
        assert self.findings == []

    def _run(self) -> None:
        while not clock.wait(self._stopping, EVERY):
            try:
                self.findings += [finding for finding in invariants.verify(self._database) if finding.rows]
                self.looks += 1
            except NotReady:
                self.missed += 1
            except BaseException as error:
                self.error = error
                return


@contextmanager
def standing_pool(databases: Databases, template: str, timing: Timing) -> Iterator[tuple[Pool, Processes]]:
    """A gateway and an assigner on a database of their own, for all tests of a module; the invariants are watched."""
    url, scratch = databases.make(template=template), embedded.scratch("leasehold-test-")
    database = opened(url)
    with Processes(scratch, url, timing) as processes, Watching(url):
        processes.gateway()
        processes.assigner()
        yield Pool(database, timing, random.Random(0)), processes
    database.close()
    databases.give_back(url)
    shutil.rmtree(scratch)
