"""Clients that speak raw SQL: processes with one psycopg connection each, started together and timed together.

Each statement is a transaction of its own and one round trip. Everything happens in the schema `floor`.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, LiteralString

import crews
import psycopg
from meters import Stretch

from schema import clock
from schema.postgres.engine import libpq_url

#: Every statement finds its rows by index and keeps that plan: one made while a table was small would be kept for long.
OPTIONS = {
    "search_path": "floor",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}

#: What one client does until there is no more to do.
Work = Callable[["Client"], None]


class Client:
    """One process with its connection, and the jobs that all of them still have to do."""

    def __init__(self, connection: psycopg.Connection, number: int, wanted: int, done: Any) -> None:
        self.number = number
        self.stretch = Stretch()
        self._connection, self._wanted, self._done = connection, wanted, done

    def execute(self, statement: LiteralString, values: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Run one transaction; what comes back, by column."""
        began = clock.monotonic()
        cursor = self._connection.execute(statement, values)
        rows = cursor.fetchall() if cursor.description else []
        self.stretch.waits.append(clock.monotonic() - began)
        names = [column.name for column in cursor.description or ()]
        return {name: [row[n] for row in rows] for n, name in enumerate(names)}

    def add(self, jobs: int) -> None:
        """So many more are done."""
        self.stretch.placements += jobs
        with self._done.get_lock():
            self._done.value += jobs

    @property
    def more(self) -> bool:
        """Whether there is more to do."""
        return bool(self._done.value < self._wanted)


class Cycling:
    """Submit a batch, assign as many, finish what was assigned; `finish` is told what `assign` returns, by column.

    Clients take each other's jobs, so that a batch may be smaller when somebody was faster; the rest stays queued.
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
    """So many jobs to be submitted, by column."""
    return {"priorities": [0] * jobs, "payloads": ['{"command": ["true"]}'] * jobs}


def connect(url: str) -> psycopg.Connection:
    """A connection that commits after each statement."""
    options = " ".join(f"-c {name}={value}" for name, value in OPTIONS.items())
    connection = psycopg.connect(libpq_url(url), autocommit=True, options=options)
    connection.prepare_threshold = 0
    return connection


def create(url: str, statements: Sequence[str]) -> None:
    """Make the schema anew with these tables in it."""
    with connect(url) as connection:
        connection.execute("DROP SCHEMA IF EXISTS floor CASCADE")
        connection.execute("CREATE SCHEMA floor")
        for statement in statements:
            connection.execute(statement.encode(), prepare=False)
    settle(url)


def settle(url: str) -> None:
    """ANALYZE, and a checkpoint."""
    with connect(url) as connection:
        connection.execute("ANALYZE")
    checkpoint(url)


def checkpoint(url: str) -> None:
    """Write what is dirty, so that no run pays for what was before it; statistics stay as the server keeps them."""
    with connect(url) as connection:
        connection.execute("CHECKPOINT")


def one(url: str, query: LiteralString) -> int:
    """One number."""
    with connect(url) as connection:
        row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])


def expect(what: str, found: int, wanted: int) -> None:
    """Stop where a run did not do what it says: its figures mean nothing."""
    if found != wanted:
        raise SystemExit(f"error: {what}: {found} instead of {wanted}")


def run(url: str, work: Work, *, processes: int, jobs: int) -> Stretch:
    """Let so many clients do `work` until so many jobs are done."""
    return crews.run(url, work, processes=processes, jobs=jobs, main=_main)


def alone(url: str, work: Work, *, jobs: int) -> None:
    """Let one client in this process do `work`, for tables that are to be filled and not measured."""
    with connect(url) as connection:
        work(Client(connection, 0, jobs, multiprocessing.Value("q", 0)))


def _main(work: Work, arguments: tuple[Any, ...], results: Any) -> None:
    url, number, _, wanted, done, barrier = arguments
    try:
        with connect(url) as connection:
            client = Client(connection, number, wanted, done)
            barrier.wait(crews.PATIENCE)
            work(client)
            ended = clock.monotonic()
        costs = client.stretch.costs
        costs.statements = costs.transactions = len(client.stretch.waits)
        results.put((number, client.stretch, ended))
    except BaseException as error:
        barrier.abort()
        results.put((number, f"{type(error).__name__}: {error}", clock.monotonic()))
        raise
