"""What one gateway process carries: bots that always work, and idle bots whose calls it holds.

Real processes on a private PostgreSQL with its default durability: one gateway, one assigner, and the bots on raw
sockets in processes of their own. Busy bots report what they were given as done and get the next. Idle bots each hold
one long poll; then single jobs come, and the time from the submit until some bot has the job is taken.

    python ops/bench/gateway.py [--busy 200] [--seconds 15] [--idle 10000] [--watch 60] [--json]
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import processes
from latency import ready
from meters import checked, percentiles
from pools import MANY, Shape, count, opened, properties, submit
from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from wire import PATIENCE, crowd

from assigner.process.children import Child, Children, Role
from bots.protocol import Session
from bots.sync.sessions import digest
from schema import clock
from schema.accounting import quotas
from schema.errors import LeaseholdError
from schema.moves import submit as submit_moves
from schema.moves.sessions import open_session
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database
from schema.tenancy import tokens
from schema.timing import Timing

#: Seconds in which bots and caches come to an even pace before anything is counted.
WARM_UP = 3.0
#: Seconds a held call may last: the gateway's own limit.
HELD = 60.0
#: Idle bots that come in a second.
RAMP = 250
#: Sessions opened in one transaction.
TOGETHER = 200
#: Idle sessions are as old as those of a fleet that nobody started at once.
AGE = text("UPDATE bots SET expires_at = now() + make_interval(secs => :ttl * (0.4 + 0.6 * random()))")
ALIVE = "SELECT count(*) FROM bots WHERE session IS NOT NULL AND epoch = 1 AND expires_at > now()"
TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
HOLDS = 'leasehold_waits{topic="bots"}'


@dataclass(frozen=True)
class House:
    """The running processes."""

    database: Database
    url: str
    token: str
    gateway: int
    server: int


@dataclass(frozen=True)
class Reading:
    """Seconds of processor time so far, and transactions."""

    at: float
    gateway: float
    server: float
    transactions: int


@contextmanager
def house(data: Path, *, assigner: bool = True) -> Iterator[House]:
    """A fresh database, a gateway and an assigner."""
    with ExitStack() as stack:
        server = stack.enter_context(embedded.serve(data))
        database = stack.enter_context(opened(server.url))
        migrate.upgrade(database)
        token = database.run(lambda connection: tokens.create(connection, tokens.Kind.BOT, bot="*"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        environ |= {"LEASEHOLD_DATABASE_URL": server.url, "LEASEHOLD_GATEWAY_PORT": "0"}
        children = Children(data / "log", environ, report=lambda _: None, chance=random.Random(1), restart=False)
        stack.callback(children.kill)
        defaults = data / "leasehold.toml"
        defaults.touch()
        program = (sys.executable, "-m", "assigner.cli.main", "--data", str(data), "--config", str(defaults))
        if assigner:
            children.start(Child(name="assigner", role=Role.ASSIGNER, command=(*program, "assign", "--name", "bench")))
        children.start(Child(name="gateway", role=Role.GATEWAY, command=(*program, "gateway")))
        url = ready(children, data / "gateway.url", database, listeners=2 if assigner else 1)
        yield House(database, url, token, processes.named("gateway"), server.pid)


def sessions(database: Database, bots: int, capacity: int) -> list[Session]:
    """Open that many sessions, for as long as the benchmark takes."""
    found = []

    def work(connection: Any, first: int) -> None:
        for number in range(first, min(first + TOGETHER, bots)):
            name, secret = f"bot-{number}", f"{number:040}"
            epoch = open_session(
                connection,
                name,
                session=digest(secret),
                capacity=capacity,
                priority=0,
                properties={key: tuple(values) for key, values in properties(0).items()},
                instance=None,
                pool=None,
                labels=[],
                ttl=3600.0,
            ).epoch
            found.append(Session(bot=name, epoch=epoch, secret=secret, expires_in=3600.0, sync_in=5.0))

    for first in range(0, bots, TOGETHER):
        database.run(lambda connection, first=first: work(connection, first))
    return found


def read(running: House) -> Reading:
    """How much was used so far."""
    return Reading(
        clock.monotonic(),
        processes.seconds(running.gateway),
        processes.seconds_of_all(running.server),
        count(running.database, TRANSACTIONS),
    )


def used(before: Reading, after: Reading) -> dict[str, float]:
    """Processor time as % of one core, and transactions per second."""
    seconds = after.at - before.at
    return {
        "gateway_cpu_percent": round((after.gateway - before.gateway) / seconds * 100, 1),
        "postgres_cpu_percent": round((after.server - before.server) / seconds * 100, 1),
        "transactions_per_second": round((after.transactions - before.transactions) / seconds, 1),
    }


def busy(data: Path, *, bots: int, capacity: int, jobs: int, seconds: float, clients: int) -> dict[str, Any]:
    """Bots that always work."""
    with house(data) as running:
        database = running.database
        database.run(
            lambda connection: quotas.set_quota(
                connection, "default", "tenant-0", minimum=0, maximum=MANY, actor="bench"
            )
        )
        opened_ = sessions(database, bots, capacity)
        submit(database, Shape(), jobs)
        with crowd(running.url, running.token, opened_, processes=clients, wait=1.0, pause=0.0) as bots_:
            clock.sleep(WARM_UP)
            bots_.count()
            before = read(running)
            clock.sleep(seconds)
            after = read(running)
            heard = bots_.stop()
        left = count(database, "SELECT count(*) FROM jobs WHERE state = 'queued'")
        if not left:
            raise LeaseholdError(
                f"{jobs} jobs are not enough for these bots in {seconds:g} seconds: give more (--jobs)"
            )
        checked(database)
        took = after.at - before.at
        return {
            "bots": bots,
            "syncs_per_second": round(heard.calls / took),
            "jobs_per_second": round(heard.jobs / took),
            "jobs_left": left,
            "latency_ms": percentiles(heard.waits),
            "refused": heard.refused,
            "troubles": heard.troubles[:3],
            "gateway_mib": processes.mebibytes(running.gateway),
            **used(before, after),
        }


def idle(data: Path, *, bots: int, seconds: float, samples: int, clients: int) -> dict[str, Any]:
    """Bots whose calls are held."""
    with house(data) as running:
        database = running.database
        bare = processes.mebibytes(running.gateway)
        opened_ = sessions(database, bots, 1)
        with crowd(running.url, running.token, opened_, processes=clients, wait=HELD, pause=1 / RAMP) as bots_:
            clock.sleep(WARM_UP)
            patience = clock.monotonic() + PATIENCE
            while (held := _held(running)) < bots * 0.99:
                if clock.monotonic() > patience:
                    raise LeaseholdError(f"only {held:g} calls are held; trouble: {bots_.stop().troubles[:3]}")
                clock.sleep(0.5)
            database.run(lambda connection: connection.execute(AGE, {"ttl": Timing().ttl}))
            bots_.count()
            before = read(running)
            clock.sleep(seconds)
            after = read(running)
            resident = processes.mebibytes(running.gateway)
            waits = [_sample(running, bots_, number) for number in range(samples)]
            alive = count(database, ALIVE)
            heard = bots_.stop()
        checked(database)
        return {
            "bots": bots,
            "alive": alive,
            "calls_per_second": round(heard.calls / (after.at - before.at), 1),
            "gateway_mib": resident,
            "gateway_mib_bare": bare,
            "submit_to_bot_ms": percentiles(waits, (50, 99)) if waits else {},
            "refused": heard.refused,
            "troubles": heard.troubles[:3],
            **used(before, after),
        }


def _sample(running: House, bots: Any, number: int) -> float:
    clock.sleep(0.1 + 0.01 * (number % 7))
    wanted = {"instance": "default", "properties": properties(0), "payload": {"command": ["true"], "told": True}}
    began = clock.monotonic()
    job = running.database.run(lambda connection: submit_moves.submit(connection, [wanted], actor="bench"))[0]
    return float(bots.taken(str(job.public_id)) - began)


def _held(running: House) -> float:
    lines = httpx.get(f"{running.url}/metrics", trust_env=False, timeout=60).text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(HOLDS)), 0.0)


def _table(title: str, found: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    for name, value in found.items():
        shown = ", ".join(f"{key} {each:g}" for key, each in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name.replace("_", " "), shown)
    return table


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--busy", "working", type=click.IntRange(0, 5000), default=200, show_default=True, help="Bots that work.")
@click.option("--capacity", type=click.IntRange(1, 100), default=4, show_default=True, help="Of a bot that works.")
@click.option("--jobs", type=click.IntRange(1), default=150_000, show_default=True, help="Queued for them.")
@click.option("--seconds", type=click.FloatRange(1), default=15.0, show_default=True, help="That they work.")
@click.option("--idle", "resting", type=click.IntRange(0, 15_000), default=10_000, show_default=True, help="Idle bots.")
@click.option("--watch", type=click.FloatRange(1), default=60.0, show_default=True, help="Seconds of idleness.")
@click.option("--samples", type=click.IntRange(0, 1000), default=20, show_default=True, help="Jobs for idle bots.")
@click.option("--clients", type=click.IntRange(1, 8), default=1, show_default=True, help="Processes for the bots.")
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
            with _scratch() as data:
                found["busy"] = busy(data, bots=working, capacity=capacity, jobs=jobs, seconds=seconds, clients=clients)
        if resting:
            with _scratch() as data:
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
def _scratch() -> Iterator[Path]:
    data = embedded.scratch("leasehold-bench-")
    try:
        yield data
    finally:
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    main()
