"""Measure how many busy bots, and how many idle bots in long polls, one gateway serves.

Real processes run on a private PostgreSQL with its default durability: one gateway, one assigner, and bots on raw
sockets in processes of their own. A busy bot reports its jobs as done and is given the next ones. Each idle bot waits
in one long poll; then single jobs are submitted, and the time from a submit until a bot has the job is measured.

    python -m ops.bench.gateway.throughput [--busy 200] [--seconds 15] [--idle 10000] [--watch 60]
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from assigner.process.children import Child, Children, Role
from bots.protocol import Session
from bots.sync.sessions import digest
from ops.bench.fixtures import MANY, Shape, count, opened, properties, submit
from ops.bench.gateway.latency import ready
from ops.bench.gateway.wire import PATIENCE, BotProcesses, bot_processes
from ops.bench.measure import (
    checked,
    child_named,
    cpu_seconds,
    cpu_seconds_of_tree,
    percentiles,
    resident_mib,
)
from schema import clock
from schema.accounting import quotas
from schema.moves import submit as submit_moves
from schema.moves.sessions import SessionOpening, open_sessions
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.tenancy import tokens
from schema.timing import Timing

#: Seconds in which bots and caches reach a steady pace before anything is counted.
WARM_UP = 3.0
#: Longest long poll, in seconds: the limit of the gateway.
HELD = 60.0
#: Idle bots that connect in a second: 10,000 spread their calls evenly over the time for which each is held.
RAMP = 170
#: Connections from this machine beside those of idle bots.
SPARE = 64
#: Sessions opened in one transaction.
TOGETHER = 200
#: Gives idle sessions the mixed ages of a fleet that was not started at one moment.
AGE = Statement("UPDATE bots SET expires_at = now() + make_interval(secs => :ttl * (0.4 + 0.6 * random()))")
ALIVE = "SELECT count(*) FROM bots WHERE session IS NOT NULL AND epoch = 1 AND expires_at > now()"
TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
HOLDS, OF_BOTS = "leasehold_waits{", 'topic="bots"'


@dataclass(frozen=True)
class RunningPool:
    """A pool of running processes. gateway, server: ids of processes; the server has children."""

    database: Database
    url: str
    token: str
    gateway: int
    server: int


@dataclass(frozen=True)
class Reading:
    """Processor time, in seconds, and transactions since the start."""

    at: float
    gateway: float
    server: float
    transactions: int


@contextmanager
def running_pool(
    data: Path, *, assigner: bool = True, settings: Mapping[str, str] | None = None
) -> Iterator[RunningPool]:
    """Start a fresh database, a gateway and an assigner. settings: environment variables for both."""
    with ExitStack() as stack:
        server = stack.enter_context(embedded.serve(data))
        database = stack.enter_context(opened(server.url))
        migrate.upgrade(database)
        token = database.run(lambda connection: tokens.create(connection, tokens.Kind.BOT, bot="*"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        environ |= {"LEASEHOLD_DATABASE_URL": server.url, "LEASEHOLD_GATEWAY_PORT": "0", **(settings or {})}
        children = Children(data / "log", environ, report=lambda _: None, chance=random.Random(1), restart=False)
        stack.callback(children.kill)
        defaults = data / "leasehold.toml"
        defaults.touch()
        program = (sys.executable, "-m", "assigner.cli.main", "--data", str(data), "--config", str(defaults))
        if assigner:
            children.start(Child(name="assigner", role=Role.ASSIGNER, command=(*program, "assign", "--name", "bench")))
        children.start(Child(name="gateway", role=Role.GATEWAY, command=(*program, "gateway")))
        url = ready(children, data / "gateway.url", database, listeners=1 + assigner)
        yield RunningPool(database, url, token, child_named("gateway"), server.pid)


def sessions(database: Database, bots: int, capacity: int) -> list[Session]:
    """Open sessions for `bots` bots that last as long as the benchmark."""
    offered = {key: list(values) for key, values in properties(0).items()}
    found = []
    for first in range(0, bots, TOGETHER):
        secrets = {f"bot-{number}": f"{number:040}" for number in range(first, min(first + TOGETHER, bots))}
        openings = [
            SessionOpening(name, session=digest(secret), capacity=capacity, properties=offered)
            for name, secret in secrets.items()
        ]
        opened = database.run(lambda connection, openings=openings: open_sessions(connection, openings, ttl=3600.0))
        found += [
            Session(bot=name, epoch=each.epoch, secret=secret, expires_in=3600.0, sync_in=5.0)
            for (name, secret), each in zip(secrets.items(), opened, strict=True)
        ]
    return found


def read(running: RunningPool) -> Reading:
    """Read the processor time and the transactions used so far."""
    return Reading(
        clock.monotonic(),
        cpu_seconds(running.gateway),
        cpu_seconds_of_tree(running.server),
        count(running.database, TRANSACTIONS),
    )


def used(before: Reading, after: Reading) -> dict[str, float]:
    """Return the processor time between two readings, in % of one core, and transactions per second."""
    seconds = after.at - before.at
    return {
        "gateway_cpu_percent": round((after.gateway - before.gateway) / seconds * 100, 1),
        "postgres_cpu_percent": round((after.server - before.server) / seconds * 100, 1),
        "transactions_per_second": round((after.transactions - before.transactions) / seconds, 1),
    }


def busy(data: Path, *, bots: int, capacity: int, jobs: int, seconds: float, clients: int) -> dict[str, Any]:
    """Measure bots that always have work."""
    with running_pool(data) as running:
        database = running.database
        database.run(
            lambda connection: quotas.set_quota(
                connection, "default", "tenant-0", minimum=0, maximum=MANY, actor="bench"
            )
        )
        opened_ = sessions(database, bots, capacity)
        submit(database, Shape(), jobs)
        with bot_processes(running.url, running.token, opened_, processes=clients, wait=1.0, pause=0.0) as bots_:
            clock.sleep(WARM_UP)
            bots_.count()
            before = read(running)
            clock.sleep(seconds)
            after = read(running)
            seen = bots_.stop()
        left = count(database, "SELECT count(*) FROM jobs WHERE state = 'queued'")
        if not left:
            raise LeaseholdError(
                f"{jobs} jobs are not enough for these bots in {seconds:g} seconds: give more (--jobs)"
            )
        checked(database)
        took = after.at - before.at
        return {
            "bots": bots,
            "syncs_per_second": round(seen.calls / took),
            "jobs_per_second": round(seen.jobs / took),
            "jobs_left": left,
            "latency_ms": percentiles(seen.waits),
            "refused": seen.refused,
            "troubles": seen.troubles[:3],
            "gateway_mib": resident_mib(running.gateway),
            **used(before, after),
        }


@dataclass(frozen=True)
class IdleBots:
    """Bots that wait in long polls of a running pool."""

    running: RunningPool
    bots: BotProcesses
    number: int
    bare_mib: float

    def watch(self, seconds: float) -> dict[str, Any]:
        """Return what gateway and server use while nothing happens, and the bots whose sessions are alive after it."""
        before = read(self.running)
        clock.sleep(seconds)
        after = read(self.running)
        alive = count(self.running.database, ALIVE)
        return {"alive": alive, "gateway_mib": resident_mib(self.running.gateway), **used(before, after)}


@contextmanager
def idle_bots(data: Path, *, bots: int, clients: int) -> Iterator[IdleBots]:
    """Start a pool whose bots all wait in long polls, with sessions of mixed ages."""
    settings = {"LEASEHOLD_GATEWAY_MAX_CONNECTIONS_PER_ADDRESS": str(bots + SPARE)}
    with running_pool(data, settings=settings) as running:
        database = running.database
        bare = resident_mib(running.gateway)
        opened_ = sessions(database, bots, 1)
        with bot_processes(running.url, running.token, opened_, processes=clients, wait=HELD, pause=1 / RAMP) as bots_:
            clock.sleep(WARM_UP)
            patience = clock.monotonic() + PATIENCE
            while (held := _held(running)) < bots * 0.99:
                if clock.monotonic() > patience:
                    raise LeaseholdError(f"only {held:g} calls are held; trouble: {bots_.stop().troubles[:3]}")
                clock.sleep(0.5)
            database.run(lambda connection: connection.execute(AGE, {"ttl": Timing().ttl}))
            yield IdleBots(running, bots_, bots, bare)
        checked(database)


def idle(data: Path, *, bots: int, seconds: float, samples: int, clients: int) -> dict[str, Any]:
    """Measure bots that wait in long polls."""
    with idle_bots(data, bots=bots, clients=clients) as resting:
        resting.bots.count()
        found = resting.watch(seconds)
        waits = [_sample(resting.running, resting.bots, number) for number in range(samples)]
        seen = resting.bots.stop()
    return {
        "bots": bots,
        "calls_per_second": round(seen.calls / seconds, 1),
        "gateway_mib_bare": resting.bare_mib,
        "submit_to_bot_ms": percentiles(waits, (50, 99)) if waits else {},
        "refused": seen.refused,
        "troubles": seen.troubles[:3],
        **found,
    }


def _sample(running: RunningPool, bots: BotProcesses, number: int) -> float:
    clock.sleep(0.1 + 0.01 * (number % 7))
    wanted = {"instance": "default", "properties": properties(0), "payload": {"command": ["true"], "told": True}}
    began = clock.monotonic()
    job = running.database.run(lambda connection: submit_moves.submit(connection, [wanted], actor="bench"))[0]
    return bots.taken(str(job.public_id)) - began


def _held(running: RunningPool) -> float:
    lines = httpx.get(f"{running.url}/metrics", trust_env=False, timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(HOLDS) and OF_BOTS in line)


def _table(title: str, found: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    for name, value in found.items():
        shown = ", ".join(f"{key} {each:g}" for key, each in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name.replace("_", " "), shown)
    return table


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--busy", "working", type=click.IntRange(0, 5000), default=200, show_default=True, help="Busy bots.")
@click.option("--capacity", type=click.IntRange(1, 100), default=4, show_default=True, help="Capacity of a busy bot.")
@click.option(
    "--jobs", type=click.IntRange(1), default=150_000, show_default=True, help="Jobs queued for the busy bots."
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=15.0,
    show_default=True,
    help="Seconds in which the busy bots are measured.",
)
@click.option("--idle", "resting", type=click.IntRange(0, 15_000), default=10_000, show_default=True, help="Idle bots.")
@click.option(
    "--watch",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds in which the idle bots are measured.",
)
@click.option(
    "--samples",
    type=click.IntRange(0, 1000),
    default=20,
    show_default=True,
    help="Single jobs submitted to the idle bots.",
)
@click.option(
    "--clients", type=click.IntRange(1, 8), default=1, show_default=True, help="Processes that the bots run in."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(
    working: int,
    capacity: int,
    jobs: int,
    seconds: float,
    resting: int,
    watch: float,
    samples: int,
    clients: int,
    *,
    as_json: bool,
) -> None:
    found: dict[str, dict[str, Any]] = {}
    try:
        if working:
            with scratch() as data:
                found["busy"] = busy(
                    data,
                    bots=working,
                    capacity=capacity,
                    jobs=jobs,
                    seconds=seconds,
                    clients=clients,
                )
        if resting:
            with scratch() as data:
                found["idle"] = idle(data, bots=resting, seconds=watch, samples=samples, clients=clients)
    except LeaseholdError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(found))
        return
    for title, values in found.items():
        Console().print(_table(title, values))


@contextmanager
def scratch() -> Iterator[Path]:
    data = embedded.scratch("leasehold-bench-")
    try:
        yield data
    finally:
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    main()
