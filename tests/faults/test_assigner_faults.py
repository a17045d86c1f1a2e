"""Assigner processes are killed at any moment, also in the middle of a grant: what they had begun never was."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from bots.sync.fetch import FetchSettings
from schema.postgres.connection import Connection
from schema.postgres.failures import is_conflict
from schema.postgres.statements import Statement
from schema.timing import Timing
from tests.support.model import Journal, Watching
from tests.support.patience import eventually
from tests.support.pool import Pool
from tests.support.servers import READY_WITHIN, Process, Processes
from tests.support.swarm import Swarm

KILLS_VARIABLE = "LEASEHOLD_TEST_KILLS"
KILLS = int(os.environ.get(KILLS_VARIABLE) or 2)
#: Every so many of the kills hit a process that waits in the middle of a grant; the others come by chance.
HELD_EVERY = 2
BACKLOG = 25
#: One thread in each process, so that a backend tells whose it is; little sleep, so that they are mostly at work.
CONFIG = "[[assigners]]\nthreads = 1\nbatch = 10\ninterval = 0.1\njitter = 0.1\n"
NAMES = """
SELECT pid, split_part(application_name, ' ', 2) AS name FROM pg_stat_activity WHERE datname = current_database()
    AND application_name LIKE 'leasehold-assign %' AND application_name NOT LIKE '%-reserve'"""
STUCK = NAMES + " AND :holder = ANY (pg_blocking_pids(pid)) ORDER BY pid"
IN_TRANSACTION = NAMES + " AND xact_start IS NOT NULL"
GRANTS = "SELECT count(*) AS grants FROM job_events WHERE move = 'grant'"
QUEUED = "SELECT count(*) AS jobs FROM jobs WHERE state = 'queued'"
FINISHED = "SELECT count(*) AS jobs FROM jobs WHERE finished_at IS NOT NULL"
# The leases that would come next, undecided: whoever grants one of them has to wait for what becomes of these.
IN_THE_WAY = Statement("""
INSERT INTO leases (job_id, fence, bot_id, bot_epoch, instance, units, assigner, strategy, due_at)
SELECT id, fence + 1, 1, 1, instance, units, 'in the way', 'in the way', now() FROM jobs WHERE state = 'queued'
ON CONFLICT DO NOTHING
""")
PID = Statement("SELECT pg_backend_pid()")


@dataclass(frozen=True)
class Member:
    """One assigner process, under the name that the server's backends know it by."""

    name: str
    process: Process


class Crew:
    """The assigner processes that live."""

    def __init__(self, pool: Pool, processes: Processes) -> None:
        self._pool, self._processes = pool, processes
        self.alive: list[Member] = []
        self._born = 0

    def add(self, count: int = 1) -> None:
        """Start so many more at once; returns when each has a connection."""
        born = [f"assigner-{self._born + nth}" for nth in range(1, count + 1)]
        self._born += count
        self.alive += [Member(name, self._processes.start(name, "assign", "--name", name)) for name in born]
        eventually(lambda: set(born) <= {row.name for row in self._pool.rows(NAMES)}, READY_WITHIN, every=0.1)

    def kill(self, member: Member) -> None:
        """SIGKILL."""
        member.process.kill()
        self.alive.remove(member)

    def served_by(self, backend: int) -> Member:
        """Whose backend it is."""
        (name,) = [row.name for row in self._pool.rows(NAMES) if row.pid == backend]
        return next(member for member in self.alive if member.name == name)


@contextmanager
def in_the_way(pool: Pool) -> Iterator[int]:
    """While inside, no grant gets further than its writes; gives the process id of the backend they wait for."""
    with pool.database.connect() as connection:
        pid: int = connection.execute(PID).scalar_one()
        _occupy(connection)
        try:
            yield pid
        finally:
            connection.rollback()


def _occupy(connection: Connection) -> None:
    """Grants that are under way insert in another order: if they and we wait for each other, try again."""
    while True:
        try:
            connection.execute(IN_THE_WAY)
            return
        except psycopg.Error as error:
            if not is_conflict(error):
                raise
            connection.rollback()


def stuck(pool: Pool, holder: int) -> list[int]:
    """Backends of assigners that wait for the holder."""
    return [row.pid for row in pool.rows(STUCK, holder=holder)]


@pytest.fixture
def swarm(pool: Pool, chance: random.Random) -> Iterator[Swarm]:
    """Bots that fetch nothing by themselves: only assigners place jobs."""
    how = {"seconds": lambda _: chance.uniform(0.02, 0.15), "fetch": FetchSettings(enabled=False), "pace": 0.3}
    with Swarm(pool.database, pool.timing, 8, **how, threads=2) as swarm:  # type: ignore[arg-type]
        yield swarm


@pytest.mark.long
def test_kills_of_one_or_all_of_three_assigners_lose_nothing_and_double_nothing(
    pool: Pool, swarm: Swarm, scratch: Path, database_url: str, timing: Timing, chance: random.Random
) -> None:
    """2 of single ones, and then of all at once in the middle of their grants; `LEASEHOLD_TEST_KILLS=20` takes a
    longer look."""
    journal = Journal(pool)
    with Processes(scratch, database_url, timing, config=CONFIG) as processes, Watching(database_url) as watching:
        crew = Crew(pool, processes)
        journal.submit(BACKLOG)
        crew.add(3)
        for number in range(KILLS):
            if pool.row(QUEUED).jobs < BACKLOG:
                journal.submit(BACKLOG)
            if number % HELD_EVERY:
                with in_the_way(pool) as holder:
                    backend = eventually(lambda holder=holder: stuck(pool, holder))[0]
                    crew.kill(crew.served_by(backend))
            else:
                target = pool.row(FINISHED).jobs + chance.randint(1, 15)
                eventually(lambda target=target: pool.row(FINISHED).jobs >= target, what="work goes on")
                crew.kill(chance.choice(crew.alive))
            crew.add()
        journal.submit(2 * BACKLOG)
        with in_the_way(pool) as holder:
            eventually(lambda: stuck(pool, holder))
            for member in list(crew.alive):
                crew.kill(member)
        eventually(lambda: not pool.rows(IN_TRANSACTION), what="their transactions are undone")
        begun = pool.row(GRANTS).grants
        crew.add()
        eventually(lambda: pool.row(GRANTS).grants > begun, what="the new one goes on")
        journal.wait()
    print(f"{len(journal.jobs)} jobs, {watching.looks} looks")
    journal.check()
    assert swarm.log.overlaps() == []
