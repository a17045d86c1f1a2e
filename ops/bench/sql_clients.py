"""Processes that run raw SQL on one psycopg connection each, started and timed together.

Each statement is a transaction of its own and takes one round trip. All tables are in the schema `floor`.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, LiteralString

import psycopg

from ops.bench import workers
from ops.bench.measure import Stretch
from schema import clock
from schema.postgres.engine import libpq_url

#: Settings that make every statement use an index: a plan made while a table was small would be kept for long.
OPTIONS = {
    "search_path": "floor",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}

#: The work of one client, until no job is left to do.
Work = Callable[["Client"], None]


class Client:
    """The connection of one process, and the count of jobs that all processes share."""

    def __init__(self, connection: psycopg.Connection, number: int, wanted: int, done: Any) -> None:
        self.number = number
        self.stretch = Stretch()
        self._connection, self._wanted, self._done = connection, wanted, done

    def execute(self, statement: LiteralString, values: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Run one statement as a transaction; return its rows by column."""
        began = clock.monotonic()
        cursor = self._connection.execute(statement, values)
        rows = cursor.fetchall() if cursor.description else []
        self.stretch.waits.append(clock.monotonic() - began)
        names = [column.name for column in cursor.description or ()]
        return {name: [row[n] for row in rows] for n, name in enumerate(names)}

    def add(self, jobs: int) -> None:
        """Count `jobs` more jobs as done."""
        self.stretch.placements += jobs
        with self._done.get_lock():
            self._done.value += jobs

    @property
    def more(self) -> bool:
        """True while fewer jobs are done than wanted."""
        return bool(self._done.value < self._wanted)


class Cycling:
    """Submit a batch, assign as many jobs, and finish those that were assigned.

    The columns that `assign` returns are the parameters of `finish`. Clients take each other's jobs, so a batch of
    assignments may be smaller than the batch that was submitted; the rest stays queued.
    """

    def __init__(self, submit: LiteralString, assign: LiteralString, finish: LiteralString, batch: int) -> None:
        self.submit, self.assign, self.finish, self.batch = submit, assign, finish, batch

    def __call__(self, client: Client) -> None:
        new = requests(self.batch)
        bot = {"batch": self.batch, "bot": client.number}
        while client.more:
            client.execute(self.submit, new)
            given = client.execute(self.assign, bot)
            client.add(len(client.execute(self.finish, given | bot)["id"]))


def requests(jobs: int) -> dict[str, list[Any]]:
    """Return the parameters for submitting `jobs` jobs, by column."""
    return {"priorities": [0] * jobs, "payloads": ['{"command": ["true"]}'] * jobs}


def connect(url: str) -> psycopg.Connection:
    """Open a connection that commits after each statement."""
    options = " ".join(f"-c {name}={value}" for name, value in OPTIONS.items())
    connection = psycopg.connect(libpq_url(url), autocommit=True, options=options)
    connection.prepare_threshold = 0
    return connection


def create(url: str, statements: Sequence[str]) -> None:
    """Drop the schema and create it again with these tables."""
    with connect(url) as connection:
        connection.execute("DROP SCHEMA IF EXISTS floor CASCADE")
        connection.execute("CREATE SCHEMA floor")
        for statement in statements:
            connection.execute(statement.encode(), prepare=False)
    settle(url)


def settle(url: str) -> None:
    """Run ANALYZE and a checkpoint."""
    with connect(url) as connection:
        connection.execute("ANALYZE")
    checkpoint(url)


def checkpoint(url: str) -> None:
    """Run a checkpoint, so that no run pays for the writes before it; statistics stay as they are."""
    with connect(url) as connection:
        connection.execute("CHECKPOINT")


def one(url: str, query: LiteralString) -> int:
    """Return the number that a query selects."""
    with connect(url) as connection:
        row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])


def expect(what: str, found: int, wanted: int) -> None:
    """Stop the benchmark if a run did not do what it claims: its figures would mean nothing."""
    if found != wanted:
        raise SystemExit(f"error: {what}: {found} instead of {wanted}")


def run(url: str, work: Work, *, processes: int, jobs: int) -> Stretch:
    """Let `processes` clients do `work` until `jobs` jobs are done."""
    return workers.run(url, work, processes=processes, jobs=jobs, main=_main)


def alone(url: str, work: Work, *, jobs: int) -> None:
    """Let one client in this process do `work`, to fill tables without measuring."""
    with connect(url) as connection:
        work(Client(connection, 0, jobs, multiprocessing.Value("q", 0)))


def _main(work: Work, arguments: tuple[Any, ...], results: Any) -> None:
    url, number, _, wanted, done, barrier = arguments
    try:
        with connect(url) as connection:
            client = Client(connection, number, wanted, done)
            barrier.wait(workers.PATIENCE)
            work(client)
            ended = clock.monotonic()
        costs = client.stretch.costs
        costs.statements = costs.transactions = len(client.stretch.waits)
        results.put((number, client.stretch, ended))
    except BaseException as error:
        barrier.abort()
        results.put((number, f"{type(error).__name__}: {error}", clock.monotonic()))
        raise
