"""Costs of a measured stretch of work in the database and in processes, and figures of several runs put together.

The figures of processes are read from /proc, so they need Linux.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import psycopg
from leasehold.errors import LeaseholdError
from rich.table import Table

from schema.diagnostics.invariants import verify
from schema.postgres.engine import Database, libpq_url

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# A session reports its statistics when it ends, so the workers must have ended when this is read.
READ = """
SELECT (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()),
    (SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()),
    (SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()),
    pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint
"""


@dataclass
class Costs:
    """Costs of a stretch: transactions and statements are counted by the clients, the rest by the server.

    alone: statements that were transactions of their own; they count as both.
    """

    transactions: int = 0
    statements: int = 0
    alone: int = 0
    buffers: int = 0
    wal_bytes: int = 0
    deadlocks: int = 0

    @property
    def round_trips(self) -> int:
        """Statements, and a BEGIN and a COMMIT for each transaction that is not one statement alone."""
        return 2 * (self.transactions - self.alone) + self.statements


@dataclass
class Stretch:
    """One measured stretch of work."""

    jobs: int = 0
    seconds: float = 0.0
    costs: Costs = field(default_factory=Costs)
    placements: int = 0
    lost: int = 0
    #: Seconds that each transaction or call took, if the shape measures them.
    waits: list[float] = field(default_factory=list)
    #: Processor time of the workers and of the server, in seconds.
    cpu: float = 0.0

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds if self.seconds else 0.0


@contextmanager
def metered(url: str) -> Iterator[Costs]:
    """Yield costs whose server part is filled in when the block ends. Nothing else may use the server meanwhile."""
    costs = Costs()
    before = _read(url)
    yield costs
    after = _read(url)
    costs.buffers, costs.deadlocks, costs.wal_bytes = (after[n] - before[n] for n in (1, 2, 3))
    if not costs.transactions:
        costs.transactions = after[0] - before[0]


def _read(url: str) -> tuple[int, int, int, int]:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        row = connection.execute(READ).fetchone()
        assert row is not None
        return row[0], row[1], row[2], row[3]


def checked(database: Database) -> None:
    """Stop the benchmark if an invariant is broken: the figures of a wrong run would mean nothing."""
    broken = [found for found in verify(database) if found.rows]
    if broken:
        raise SystemExit(f"error: invariants are broken: {', '.join(f'{each.id} ({each.title})' for each in broken)}")


def blank_table(title: str, *columns: str, names: int = 1) -> Table:
    """Return an empty table. names: how many of its first columns are names; the others are figures."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, no_wrap=True, justify="left" if number < names else "right")
    return made


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the least and the largest value."""
    return statistics.median(values), min(values), max(values)


def percentiles(seconds: Sequence[float], ranks: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """Return milliseconds by nearest rank: the smallest value that at least q % of the values do not exceed.

    Raises RuntimeError if nothing was measured.
    """
    if not seconds:
        raise RuntimeError("nothing was measured: no call was answered while it was watched; measure for longer")
    ordered = sorted(seconds)
    return {f"p{q}": round(ordered[max(0, -(-len(ordered) * q // 100) - 1)] * 1000, 3) for q in ranks}


def per_job(stretches: Sequence[Stretch]) -> dict[str, float]:
    """Return the costs of one job, as medians over the runs."""
    names = [each.name for each in fields(Costs)] + ["round_trips"]
    return {
        name: statistics.median(getattr(each.costs, name) / max(1, each.jobs) for each in stretches) for name in names
    }


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    return sum(_stat_numbers(pid)[10:12]) / _TICKS


def cpu_seconds_of_tree(pid: int) -> float:
    """Return the processor time of a process and its children, including those that have ended."""
    total = 0.0
    for child in child_pids(pid):
        # A child that has just ended is among those that its parent has collected.
        with suppress(FileNotFoundError, ProcessLookupError):
            total += cpu_seconds(child)
    return total + sum(_stat_numbers(pid)[10:14]) / _TICKS


def server_cpu_seconds(url: str) -> float:
    """Return the processor time of all processes of the server, which runs on this machine."""
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        return cpu_seconds_of_tree(parent_pid(connection.info.backend_pid))


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 2**20, 1)


def child_pids(pid: int) -> list[int]:
    """Return the children of a process, of all its threads, including those that have ended and are not collected."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end meanwhile. Its children are then those of another thread.
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (thread / "children").read_text().split())
    return found


def parent_pid(pid: int) -> int:
    """Return the parent of a process."""
    return _stat_numbers(pid)[0]


def child_named(last: str) -> int:
    """Return the child of this process whose command line ends with that word. Raises LeaseholdError."""
    for child in child_pids(os.getpid()):
        if Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1] == last.encode():
            return child
    raise LeaseholdError(f"there is no process '{last}'")


def _stat_numbers(pid: int) -> list[int]:
    """Return the fields of `stat` after the state: `utime`, field 14 of proc(5), is at index 10."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return [int(each) for each in text[text.rindex(")") + 4 :].split()]
