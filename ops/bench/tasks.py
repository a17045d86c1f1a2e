"""Measure tasks: how many calls of functions that do nothing a bot with warm processes runs, and how soon one begins.

Real processes run on a private PostgreSQL with its default durability: one assigner, one gateway and one bot, whose
processes have imported this module and have run tasks before. A run submits its calls in bulk and ends when the last
one has ended. Processor time is that of each part between these two moments. With --peers, PgQueuer and Procrastinate
do the same in turns, each with one worker process.

    python -m ops.bench.tasks [--count 5000] [--runs 3] [--concurrency 8] [--samples 100] [--peers] [--json]
"""

import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from leasehold.client import Client
from leasehold.errors import LeaseholdError
from leasehold.pool import Pool
from rich.console import Console
from rich.table import Table

from assigner.process.children import Child, Children, Role
from ops.bench.fixtures import opened
from ops.bench.gateway.latency import ready
from ops.bench.measure import (
    blank_table,
    checked,
    child_named,
    child_pids,
    cpu_seconds,
    cpu_seconds_of_tree,
    parent_pid,
    percentiles,
)
from ops.bench.peers import run as peers_run
from schema import clock
from schema.moves.submit import submit
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.tenancy import tokens

#: The kinds of tasks, and the peers that run them too.
KINDS, PEERS = ("def", "async def"), ("procrastinate", "pgqueuer")
APP, BOT = "ops.bench.tasks:pool", "bench"
#: Seconds within which all calls of a run must have ended.
PATIENCE = 600.0
#: Calls in one submit, and calls that start all processes of the bot before the first run.
BATCH, WARM_UP = 1000, 200
#: Least and most seconds between two samples of latency.
PAUSE = (0.1, 0.2)
#: True while the bot has leases. It is asked again and again, so it does not read all jobs as the next question does.
BUSY = Statement("SELECT EXISTS (SELECT FROM leasehold.bots WHERE held > 0)")
LEFT = Statement("SELECT count(*) FROM leasehold.jobs WHERE finished_at IS NULL")
BACKEND = Statement("SELECT pg_backend_pid()")
SUCCEEDED = Statement("SELECT count(*) FROM leasehold.jobs WHERE state = 'succeeded'")

pool = Pool.from_env()


@pool.task(name="def")
def plain() -> None:
    """Do nothing."""


@pool.task(name="async def")
async def asynchronous() -> None:
    """Do nothing."""


@pool.task(name="began")
def began() -> float:
    """Return the moment at which this line ran."""
    return clock.monotonic()


def call(task: str) -> dict[str, Any]:
    """Return the request of one call."""
    command = ["leasehold-task", APP, task]
    return {"command": command, "stdin": json.dumps({"args": [], "kwargs": {}}), "properties": {"app": "ops"}}


@dataclass
class Rate:
    """Tasks per second of each run, and milliseconds of processor time for a task by the part of the pool."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the medians, and the least and the largest rate."""
        cpu = {part: round(statistics.median(each), 3) for part, each in self.cpu_ms.items()}
        return {
            "per_second": round(statistics.median(self.rates), 1),
            "least": round(min(self.rates), 1),
            "most": round(max(self.rates), 1),
            **({"cpu_ms": {**cpu, "all": round(sum(cpu.values()), 3)}} if cpu else {}),
        }


@dataclass
class Works:
    """A pool with one bot that serves this module's tasks."""

    database: Database
    client: Client
    #: URL of the server, on which the peers work too.
    server: str
    #: The main process of each part.
    processes: dict[str, int]

    def run(self, kind: str, count: int, into: Rate | None = None) -> float:
        """Run `count` calls; return tasks per second. Raises LeaseholdError if one does not succeed in time."""
        request = call(kind)
        payload = {name: request.pop(name) for name in ("command", "stdin")}
        request = {**request, "instance": "default", "payload": payload}
        before = self._cpu()
        done = self._asked(SUCCEEDED)
        began = clock.monotonic()
        for start in range(0, count, BATCH):
            requests = [request] * min(BATCH, count - start)
            self.database.run(lambda connection, requests=requests: submit(connection, requests, actor="bench"))
        while self._asked(BUSY) or self._asked(LEFT):
            if clock.monotonic() - began > PATIENCE:
                raise LeaseholdError(f"{kind}: not done within {PATIENCE:.0f} s")
            clock.sleep(0.02)
        seconds = clock.monotonic() - began
        succeeded = self._asked(SUCCEEDED) - done
        if succeeded != count:
            raise LeaseholdError(f"{kind}: {succeeded} of {count} calls have succeeded")
        if into is not None:
            into.rates.append(count / seconds)
            for part, used in self._cpu().items():
                into.cpu_ms.setdefault(part, []).append((used - before[part]) * 1000 / count)
        return count / seconds

    def _asked(self, question: Statement) -> Any:
        return self.database.run(lambda connection: connection.execute(question).scalar_one())

    def latency(self, samples: int) -> list[float]:
        """Return the seconds from the defer of a call to its first line, each in an idle pool."""
        chance, found = random.Random(1), list[float]()
        for number in range(-5, samples):
            clock.sleep(chance.uniform(*PAUSE))
            deferred = clock.monotonic()
            (job,) = self.client.submit([call("began")])
            list(self.client.wait([job.id], timeout=PATIENCE))
            if number >= 0:
                found.append(self.client.result(job.id)["ok"] - deferred)
        return found

    def _cpu(self) -> dict[str, float]:
        """Return the processor seconds of each part so far."""
        agent = self.processes["agent"]
        found = {"agent": cpu_seconds(agent), "tasks": sum(map(_cpu_of_all, child_pids(agent)))}
        for part in ("gateway", "assigner"):
            found[part] = cpu_seconds(self.processes[part])
        return found | {"PostgreSQL": cpu_seconds_of_tree(self.processes["PostgreSQL"])}


def _cpu_of_all(pid: int) -> float:
    """Return the processor time of a process and of all below it that live."""
    return cpu_seconds(pid) + sum(map(_cpu_of_all, child_pids(pid)))


@contextmanager
def works(data: Path, concurrency: int) -> Iterator[Works]:
    """Start a pool whose bot has run tasks of both kinds."""
    with ExitStack() as stack:
        server = stack.enter_context(embedded.serve(data))
        database = stack.enter_context(opened(server.url))
        migrate.upgrade(database)
        token = database.run(lambda connection: tokens.create(connection, tokens.Kind.BOT, bot="*"))
        operator = database.run(lambda connection: tokens.create(connection, tokens.Kind.OPERATOR))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        environ |= {"LEASEHOLD_DATABASE_URL": server.url, "LEASEHOLD_GATEWAY_PORT": "0", "LEASEHOLD_TOKEN": token}
        environ |= {"LEASEHOLD_BOT_WORK_DIR": str(data / "work")}
        chance = random.Random(1)
        children = Children(data / "log", environ, report=lambda _: None, chance=chance, restart=False)
        stack.callback(children.kill)
        (data / "leasehold.toml").touch()
        program = (sys.executable, "-m", "assigner.cli.main", "--data", str(data))
        program += ("--config", str(data / "leasehold.toml"))
        children.start(Child(name="assigner", role=Role.ASSIGNER, command=(*program, "assign", "--name", "assigner")))
        children.start(Child(name="gateway", role=Role.GATEWAY, command=(*program, "gateway")))
        url = ready(children, data / "gateway.url", database)
        serving = ("bot", "--url", url, "--app", APP, "--concurrency", str(concurrency), "--name", BOT)
        children.start(Child(name="bot", role=Role.BOT, command=(*program, *serving)))
        backend = database.run(lambda connection: connection.execute(BACKEND).scalar_one())
        processes = {"agent": child_named(BOT), "gateway": child_named("gateway"), "assigner": child_named("assigner")}
        client = stack.enter_context(Client(url, operator, chance=chance))
        found = Works(database, client, server.url, {**processes, "PostgreSQL": parent_pid(backend)})
        for kind in KINDS:
            found.run(kind, WARM_UP)
        yield found
        children.check()
        checked(database)


def peer_rate(name: str, kind: str, count: int, server: str) -> float:
    """Return the tasks per second of a peer, from the first submit to the end of the last."""
    return peers_run.peer(name, "cycle", jobs=count, plain=int(kind == "def"))(server, False).rate


def measure(
    data: Path, *, count: int, runs: int, concurrency: int, samples: int, peers: bool
) -> tuple[dict[tuple[str, str], Rate], dict[str, dict[str, float]]]:
    """Return the rates by contender and kind of task, and the latencies in milliseconds by contender."""
    rates: dict[tuple[str, str], Rate] = {}
    waits: dict[str, dict[str, float]] = {}
    with works(data, concurrency) as ours:
        for _ in range(runs):
            for kind in KINDS:
                ours.run(kind, count, rates.setdefault(("leasehold", kind), Rate()))
                for name in PEERS if peers else ():
                    rates.setdefault((name, kind), Rate()).rates.append(peer_rate(name, kind, count, ours.server))
        if samples:
            waits["leasehold"] = percentiles(ours.latency(samples), (50, 99))
            for name in PEERS if peers else ():
                found = peers_run.latency(name, ours.server, samples)
                waits[name] = {rank: found[f"{rank}_ms"] for rank in ("p50", "p99")}
    return rates, waits


def _tables(rates: dict[tuple[str, str], Rate], waits: dict[str, dict[str, float]]) -> Iterator[Table]:
    table = blank_table(
        "Tasks that do nothing", "", "task", "per second", "least", "most", "ratio", "CPU of a task, ms", names=2
    )
    for (name, kind), rate in rates.items():
        shown = rate.figures()
        ratio = rates["leasehold", kind].figures()["per_second"] / shown["per_second"]
        cpu = ", ".join(f"{part} {used:.2f}" for part, used in shown.get("cpu_ms", {}).items())
        cells = [f"{shown[each]:,.0f}" for each in ("per_second", "least", "most")]
        table.add_row(name, kind, *cells, f"{ratio:.2f}", cpu)
    yield table
    table = blank_table("Defer to first line, ms", "", "p50", "p99")
    for name, found in waits.items():
        table.add_row(name, f"{found['p50']:.1f}", f"{found['p99']:.1f}")
    yield table


def _option(name: str, default: int, least: int, meaning: str) -> Callable[..., Any]:
    return click.option(name, type=click.IntRange(least), default=default, show_default=True, help=meaning)


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@_option("--count", 5000, 1, "Calls in one run.")
@_option("--runs", 3, 1, "Runs of each kind of task.")
@_option("--concurrency", 8, 1, "Tasks that the bot runs at once.")
@_option("--samples", 100, 0, "Samples of latency.")
@click.option("--peers", is_flag=True, help="PgQueuer and Procrastinate too, which are installed once.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(*, as_json: bool, peers: bool, **options: int) -> None:
    if peers:
        peers_run.install(PEERS)
    data = embedded.scratch("leasehold-bench-")
    try:
        rates, waits = measure(data, peers=peers, **options)
    except LeaseholdError as error:
        for log in (data / "log").glob("*"):
            click.echo(f"{log.name}: {log.read_text()[-1000:]}", err=True)
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    finally:
        shutil.rmtree(data, ignore_errors=True)
    if as_json:
        shown = [{"contender": name, "task": kind, **rate.figures()} for (name, kind), rate in rates.items()]
        click.echo(json.dumps({"rates": shown, "latency_ms": waits}))
    else:
        for table in _tables(rates, waits):
            Console(width=160).print(table)


if __name__ == "__main__":
    main()
