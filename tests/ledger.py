"""What a client of the pool knows for certain, kept outside of it: the model that a random history is held against."""

from dataclasses import dataclass, field
from typing import Any

from schema.states import FINAL, TRANSITIONS, JobState
from schema.submissions import RESULT
from tests.pool import Bot, Pool

JOBS = f"""
SELECT j.public_id, j.state, j.fence, j.result_fence, j.attempts, j.max_attempts, j.priority, j.units,
    i.name AS instance, f.properties, p.payload, {RESULT} AS result
FROM jobs j JOIN instances i ON i.id = j.instance JOIN platforms f ON f.id = j.platform
JOIN job_payloads p ON p.job_id = j.id ORDER BY j.id"""
LEASES = """
SELECT j.public_id, l.fence, l.state, b.name, b.status = 'ok' AND NOT b.draining AND NOT b.closing AS fit
FROM live l JOIN jobs j ON j.id = l.job_id JOIN bots b ON b.id = l.bot_id ORDER BY l.job_id"""
# Every grant is an attempt, unless it was given back or evicted, or its bot was lost before it had been told of it.
CHARGED = """
SELECT j.public_id, j.attempts, count(*) FILTER (WHERE e.move = 'grant')
    - count(*) FILTER (WHERE e.move IN ('requeue', 'evict'))
    - count(*) FILTER (WHERE e.move = 'expire' AND l.delivered_at IS NULL) AS charged
FROM jobs j JOIN job_events e ON e.job_id = j.id
LEFT JOIN leases l ON l.job_id = j.id AND l.fence = e.fence - 1 GROUP BY j.id"""

Lease = tuple[str, int]


@dataclass
class Entry:
    """One acknowledged submit: what was asked for, and what is known of the job since."""

    request: dict[str, Any]
    state: str = "queued"
    fence: int = 0
    cancelled: bool = False


@dataclass
class Worker:
    """A session as its bot sees it: what it believes to hold, by its last answer."""

    bot: Bot
    beliefs: dict[Lease, str] = field(default_factory=dict)
    message: Any = None
    answer: bytes = b""


class Ledger:
    """Entries, workers and results; `check` compares them with the database."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.jobs: dict[str, Entry] = {}
        self.keys: dict[tuple[str, str], str] = {}
        self.workers: dict[str, Worker] = {}
        #: Sessions that are over, whose bots do not know it.
        self.ghosts: list[Worker] = []
        self.closing: set[str] = set()
        #: What an operator has drained stays so, whatever the bots do.
        self.drained: set[str] = set()
        #: Every lease that was ever offered, and the exit code its holder has reported.
        self.offered: list[Lease] = []
        self.exit_codes: dict[Lease, int] = {}
        self._leases: set[Lease] = set()

    def bury(self, name: str) -> None:
        """The session of a bot is over."""
        worker = self.workers.pop(name, None)
        self.closing.discard(name)
        if worker is not None:
            self.ghosts.append(worker)

    def forget(self) -> int:
        """Retention has run: final jobs are gone, and with them their keys. Returns how many."""
        final = [job for job, entry in self.jobs.items() if entry.state in FINAL]
        for job in final:
            del self.jobs[job]
        self.keys = {key: job for key, job in self.keys.items() if job in self.jobs}
        return len(final)

    def pending(self) -> set[Lease]:
        """Leases that may still be on their way to their bots, as nobody has asked to stop them."""
        return {(str(row.public_id), row.fence) for row in self.pool.rows(LEASES) if row.state == "pending"}

    def check(self) -> None:
        """Every acknowledged submit is there as it was sent, and has gone only where it may have gone."""
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
    """Where a job may be after any number of moves; with the `same` fence it was neither granted nor revoked."""
    if before in FINAL:
        return frozenset({before})
    found, edge = {before}, {before}
    while edge:
        edge = {after for state in edge for after in TRANSITIONS[state]} - found
        if same:
            edge -= {JobState.QUEUED, JobState.LEASED}
        found |= edge
    return frozenset(found)
