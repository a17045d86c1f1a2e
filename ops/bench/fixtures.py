"""Pools to measure: a private server with its default durability, and databases filled through the real moves."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from leasehold.errors import BadInput, LeaseholdError
from sqlalchemy import make_url

from bots.protocol import OpenSession, Session, Sync
from bots.sync import sessions
from bots.sync.call import NewCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.accounting import accounts
from schema.accounting import quotas as quotas_accounting
from schema.accounting.accounts import Account
from schema.moves import submit as submit_moves
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.postgres.statements import Statement
from schema.timing import Timing

#: Session length in seconds: no bot may expire while a pool is still being filled.
TIMING = Timing(ttl=3000.0)
#: Requests in one submit, and sessions opened in one transaction, while a pool is filled.
FILL, FEW = 5000, 200
MANY = 1_000_000
#: Requirement sets that share one key: the properties of a bot have at most 64 keys of a kilobyte each.
ALIKE = 100


@dataclass(frozen=True)
class Shape:
    """The content of a pool: bots, and queued jobs spread evenly over instances and requirement sets.

    `shares` gives each instance a share of the pool, and a budget and a limit of jobs that are never reached.
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
    """Start a private server, with fsync and synchronous_commit on; yields its URL."""
    with embedded.serve_for_now("leasehold-bench-", durable=True) as running:
        yield running.url


@contextmanager
def blank(server_url: str, name: str, *, copy_of: str | None = None) -> Iterator[str]:
    """Create an empty database, or a copy of another that nobody uses, and drop it at the end; yields its URL."""
    template = "TEMPLATE template0" if copy_of is None else f'TEMPLATE "{copy_of}" STRATEGY file_copy'

    def do(*statements: str) -> None:
        with psycopg.connect(libpq_url(server_url), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    drop = f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'
    do(drop, f'CREATE DATABASE "{name}" {template}')
    try:
        yield make_url(libpq_url(server_url)).set(database=name).render_as_string(hide_password=False)
    finally:
        do(drop)


@contextmanager
def empty(server_url: str, name: str) -> Iterator[str]:
    """Create a database with the schema and drop it at the end; yields its URL."""
    with blank(server_url, name) as url:
        with opened(url) as database:
            migrate.upgrade(database)
        yield url


@contextmanager
def filled(server_url: str, name: str, shape: Shape) -> Iterator[str]:
    """Create a database with what the shape describes, to be copied, and drop it at the end; yields its name."""
    with empty(server_url, name) as url:
        with opened(url) as database:
            fill(database, shape)
        yield name


@contextmanager
def opened(url: str, **settings: float) -> Iterator[Database]:
    """Open the database for statements that may take minutes."""
    patient = DatabaseSettings.model_validate(
        {"statement_timeout": 600.0, "idle_in_transaction_timeout": 600.0} | settings
    )
    database = Database(url, patient, role="bench", chance=random.Random(1))
    try:
        yield database
    finally:
        database.close()


def instance(number: int) -> str:
    """Return the name of an instance."""
    return f"tenant-{number}"


def properties(number: int) -> dict[str, list[str]]:
    """Return a requirement set."""
    return {f"kind-{number // ALIKE}": [str(number % ALIKE)]}


def request(number: int, shape: Shape) -> dict[str, object]:
    """Return a request; consecutive numbers belong to different queues."""
    return {
        "instance": instance(number % shape.instances),
        "properties": properties(number // shape.instances % shape.platforms),
        "payload": {"command": ["true"]},
    }


def submit(database: Database, shape: Shape, jobs: int, *, first: int = 0, keyed: bool = False) -> None:
    """Submit `jobs` jobs. keyed: each with a key made of its number."""
    for start in range(first, first + jobs, FILL):
        numbers = range(start, min(start + FILL, first + jobs))
        wanted = [request(number, shape) | ({"key": f"{number:032d}"} if keyed else {}) for number in numbers]
        database.run(lambda connection, wanted=wanted: submit_moves.submit(connection, wanted, actor="bench"))


def fill(database: Database, shape: Shape) -> list[Session]:
    """Create what the shape describes and run ANALYZE; return the sessions of the bots."""
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
            name, account = instance(number), Account(weight=number + 1.0, budget=MANY, max_concurrent=MANY)
            database.run(
                lambda connection, name=name, account=account: accounts.put_account(
                    connection, name, account, actor="bench"
                )
            )
    openings = [
        OpenSession(bot=f"bot-{number}", capacity=shape.capacity, properties=offered) for number in range(shape.bots)
    ]
    found = [each for first in range(0, shape.bots, FEW) for each in working(database, openings[first : first + FEW])]
    submit(database, shape, shape.queued)
    settle(database)
    return found


def working(database: Database, openings: Sequence[OpenSession]) -> list[Session]:
    """Open the sessions of these bots and make their first syncs, so that they may be given jobs."""
    found: list[Session] = []
    for opened_ in sessions.open_sessions(database, openings, timing=TIMING):
        if isinstance(opened_, BadInput):
            raise opened_
        found.append(opened_)
    service = SyncService(database, timing=TIMING, fetch=FetchSettings(enabled=False), now=clock.monotonic)
    calls = [Sync(bot=each.bot, epoch=each.epoch, secret=each.secret, seq=1) for each in found]
    for answer in service.answer([NewCall(call, clock.monotonic()) for call in calls]):
        if isinstance(answer, LeaseholdError):
            raise answer
    return found


def settle(database: Database) -> None:
    """Run ANALYZE and a checkpoint, so that no run pays for the filling."""
    with psycopg.connect(libpq_url(database.url), autocommit=True) as connection:
        connection.execute("SET search_path TO leasehold")
        connection.execute("ANALYZE")
        connection.execute("CHECKPOINT")


def count(database: Database, query: str) -> int:
    """Return the number that a query selects."""
    return int(database.run(lambda connection: connection.execute(Statement(query)).scalar_one()))
