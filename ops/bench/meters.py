"""What a measured stretch cost the database, and how figures of several runs are put together."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import psycopg

from schema.diagnostics.invariants import verify
from schema.postgres.engine import Database, libpq_url

# Sessions report what they did when they end, so the workers must be gone when this is read.
READ = """
SELECT (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()),
    (SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()),
    (SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()),
    pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint
"""


@dataclass
class Costs:
    """What the stretch cost: transactions and statements as the clients counted them, the rest as the server did.

    alone: statements that were transactions of their own; they are among both.
    """

    transactions: int = 0
    statements: int = 0
    alone: int = 0
    buffers: int = 0
    wal_bytes: int = 0
    deadlocks: int = 0

    @property
    def round_trips(self) -> int:
        """The statements, and a BEGIN and a COMMIT for each transaction that has several."""
        return 2 * (self.transactions - self.alone) + self.statements


@dataclass
class Stretch:
    """One measured stretch: so many jobs in so many seconds."""

    jobs: int = 0
    seconds: float = 0.0
    costs: Costs = field(default_factory=Costs)
    placements: int = 0
    lost: int = 0
    #: Seconds of each transaction or call, where the shape measures them.
    waits: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds if self.seconds else 0.0


@contextmanager
def metered(url: str) -> Iterator[Costs]:
    """Fills the server's part of the costs when the block ends. Nobody else may use the server meanwhile."""
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
    """Stop the benchmark where an invariant does not hold: figures of a wrong run say nothing."""
    broken = [found for found in verify(database) if found.rows]
    if broken:
        raise SystemExit(f"error: invariants are broken: {', '.join(f'{each.id} ({each.title})' for each in broken)}")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)


def percentiles(seconds: Sequence[float], ranks: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """Milliseconds by nearest rank: the smallest value that at least q % of all do not exceed."""
    ordered = sorted(seconds)
    return {f"p{q}": round(ordered[max(0, -(-len(ordered) * q // 100) - 1)] * 1000, 3) for q in ranks}


def per_job(stretches: Sequence[Stretch]) -> dict[str, float]:
    """The costs of one job, the median over the runs."""
    names = [each.name for each in fields(Costs)] + ["round_trips"]
    return {
        name: statistics.median(getattr(each.costs, name) / max(1, each.jobs) for each in stretches) for name in names
    }
