"""Pools to be measured: a private server with its default durability, and databases filled through the real moves."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from sqlalchemy import make_url, text

from bots.protocol import OpenSession, Session
from bots.sync import sessions
from schema.accounting import accounts
from schema.accounting import quotas as quotas_accounting
from schema.accounting.accounts import Account
from schema.moves import submit as submit_moves
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.timing import Timing

#: Seconds of a session: no bot of a benchmark may expire while others are being filled in.
TIMING = Timing(ttl=3000.0)
#: Requests in one submit while a pool is filled.
FILL = 5000
MANY = 1_000_000
#: Requirement sets that ask for values of one key: a bot's properties have at most 64 keys of a kilobyte.
ALIKE = 100


@dataclass(frozen=True)
class Shape:
    """What a pool holds: so many bots of that capacity, and jobs spread evenly over instances and requirement sets.

    `shares`: each instance has a share of the pool, a budget and a limit of jobs, both out of reach.
    """

    bots: int = 100
    capacity: int = 10
    queued: int = 0
    instances: int = 1
    platforms: int = 1
    quotas: bool = True
    shares: bool = False


@contextmanager
def server() -> Iterator[str]:
    """The URL of a fresh private server; fsync and synchronous_commit are on."""
    data = embedded.scratch("leasehold-bench-")
    try:
        with embedded.serve(data) as running:
            yield running.url
    finally:
        shutil.rmtree(data, ignore_errors=True)


@contextmanager
def blank(server_url: str, name: str) -> Iterator[str]:
    """A new database without anything in it; dropped at the end."""

    def do(*statements: str) -> None:
        with psycopg.connect(libpq_url(server_url), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    drop = f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'
    do(drop, f'CREATE DATABASE "{name}" TEMPLATE template0')
    try:
        yield make_url(libpq_url(server_url)).set(database=name).render_as_string(hide_password=False)
    finally:
        do(drop)


@contextmanager
def empty(server_url: str, name: str) -> Iterator[str]:
    """A new database with the schema; dropped at the end."""
    with blank(server_url, name) as url:
        with opened(url) as database:
            migrate.upgrade(database)
        yield url


@contextmanager
def opened(url: str, **settings: float) -> Iterator[Database]:
    """A way into the database for work that may take long."""
    patient = DatabaseSettings.model_validate(
        {"statement_timeout": 600.0, "idle_in_transaction_timeout": 600.0} | settings
    )
    database = Database(url, patient, role="bench", chance=random.Random(1))
    try:
        yield database
    finally:
        database.close()


def instance(number: int) -> str:
    """The name of one of the instances."""
    return f"tenant-{number}"


def properties(number: int) -> dict[str, list[str]]:
    """One of the requirement sets."""
    return {f"kind-{number // ALIKE}": [str(number % ALIKE)]}


def request(number: int, shape: Shape) -> dict[str, object]:
    """One of the jobs: queues take turns."""
    return {
        "instance": instance(number % shape.instances),
        "properties": properties(number // shape.instances % shape.platforms),
        "payload": {"command": ["true"]},
    }


def submit(database: Database, shape: Shape, jobs: int, *, first: int = 0) -> None:
    """Queue so many jobs."""
    for start in range(first, first + jobs, FILL):
        wanted = [request(number, shape) for number in range(start, min(start + FILL, first + jobs))]
        database.run(lambda connection, wanted=wanted: submit_moves.submit(connection, wanted, actor="bench"))


def fill(database: Database, shape: Shape) -> list[Session]:
    """Make everything that the shape asks for, and tell the planner; returns the bots' sessions."""
    offered: dict[str, list[str]] = {}
    for number in range(shape.platforms):
        for key, values in properties(number).items():
            offered.setdefault(key, []).extend(values)
    if shape.quotas:
        for number in range(shape.instances):
            name = instance(number)
            database.run(
                lambda connection, name=name: quotas_accounting.set_quota(
                    connection, "default", name, minimum=0, maximum=MANY, actor="bench"
                )
            )
    if shape.shares:
        for number in range(shape.instances):
            name, account = instance(number), Account(credit_weight=number + 1.0, budget=MANY, max_concurrent=MANY)
            database.run(
                lambda connection, name=name, account=account: accounts.put_account(
                    connection, name, account, actor="bench"
                )
            )
    found = [bot(database, f"bot-{number}", shape, offered) for number in range(shape.bots)]
    submit(database, shape, shape.queued)
    settle(database)
    return found


def bot(database: Database, name: str, shape: Shape, offered: dict[str, list[str]]) -> Session:
    """A session of one bot that offers all of these."""
    opening = OpenSession(bot=name, capacity=shape.capacity, properties=offered)
    return sessions.open_session(database, opening, timing=TIMING)


def settle(database: Database) -> None:
    """ANALYZE, and a checkpoint, so that no run pays for the filling."""
    with psycopg.connect(libpq_url(database.url), autocommit=True) as connection:
        connection.execute("SET search_path TO leasehold")
        connection.execute("ANALYZE")
        connection.execute("CHECKPOINT")


def count(database: Database, query: str) -> int:
    """One number."""
    return int(database.run(lambda connection: connection.execute(text(query)).scalar_one()))
