"""Measure the processor time that one job costs an idle pool, in each of its processes.

Real processes run on a private PostgreSQL: one assigner, one gateway, and one agent that runs `true`. Jobs are
submitted one by one over HTTP, each when the pool has gone to sleep, and their results are waited for. Stretches with
jobs take turns with stretches without any, which are as long. What the latter cost is subtracted. The processes of a
job's command count as the agent's.

    python -m ops.bench.gateway.job_cost [--jobs 100] [--rounds 4] [--statements] [--json]
"""

import json
import os
import random
import re
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import psycopg
from leasehold import Pool
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from assigner.process.children import Child, Children, Role
from ops.bench.fixtures import opened
from ops.bench.gateway.latency import ready
from ops.bench.measure import blank_table, cpu_seconds_of_tree
from schema import clock
from schema.postgres import embedded, migrate
from schema.postgres.engine import libpq_url
from schema.tenancy import tokens

#: Seconds for which the pool goes to sleep before each job.
PAUSE = 0.2
#: Jobs that are not measured: they fill caches and prepare statements.
WARM_UP = 20
#: Seconds after which a job without a result fails the benchmark.
JOB_WITHIN = 60.0
#: Characters of each statement that are printed.
SHOWN = 160
_PROCESSES = ("postgres", "assigner", "gateway", "agent")
#: An entry of the server's log: which process sent the statement, how long the server worked on which step of it.
_LOGGED = re.compile(
    r"^\S+ \S+ \S+ \[\d+\] (?P<sender>.*?) +LOG:  duration: (?P<ms>[\d.]+) ms  "
    r"(?P<step>parse|bind|execute|statement)(?: [^:\n]+)?: (?P<text>[^\n]*(?:\n\t[^\n]*)*)",
    re.MULTILINE,
)


@dataclass
class JobCost:
    """Milliseconds of processor time of one process: for each job, and for each second without jobs; by rounds."""

    job_ms: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)


@dataclass
class StatementCost:
    """One statement of one sender: how often it is executed for each job, and milliseconds of each step of it."""

    sender: str
    text: str
    calls: float = 0.0
    ms: Counter[str] = field(default_factory=Counter)


class IdlePool:
    """A running pool of one assigner, one gateway and one agent, and the caller that submits to it."""

    def __init__(self, data: Path, stack: ExitStack) -> None:
        server = stack.enter_context(embedded.serve(data))
        database = stack.enter_context(opened(server.url))
        migrate.upgrade(database)
        operator, bot = (
            database.run(lambda connection, kind=kind, name=name: tokens.create(connection, kind, bot=name))
            for kind, name in ((tokens.Kind.OPERATOR, None), (tokens.Kind.BOT, "*"))
        )
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        environ |= {"LEASEHOLD_DATABASE_URL": server.url, "LEASEHOLD_GATEWAY_PORT": "0"}
        environ |= {"LEASEHOLD_BOT_WORK_DIR": str(data / "work"), "LEASEHOLD_TOKEN": bot}
        defaults = data / "leasehold.toml"
        defaults.touch()
        program = (sys.executable, "-m", "assigner.cli.main", "--data", str(data), "--config", str(defaults))
        children = Children(data / "log", environ, report=lambda _: None, chance=random.Random(1), restart=False)
        stack.callback(children.kill)
        children.start(Child(name="assigner", role=Role.ASSIGNER, command=(*program, "assign", "--name", "bench")))
        children.start(Child(name="gateway", role=Role.GATEWAY, command=(*program, "gateway")))
        url = ready(children, data / "gateway.url", database)
        children.start(Child(name="agent", role=Role.BOT, command=(*program, "bot", "--name", "bench", "--url", url)))
        self._pids = {"postgres": server.pid, **children.processes()}
        self._server_url, self._log = server.url, data / "postgres.log"
        self._pool = stack.enter_context(Pool(url, token=operator))

    def run(self, jobs: int) -> float:
        """Submit jobs one by one; return the seconds that this took."""
        began = clock.monotonic()
        for _ in range(jobs):
            clock.sleep(PAUSE)
            job = self._pool.submit(["true"])
            self._pool.wait(job, timeout=JOB_WITHIN)[0].check()
        return clock.monotonic() - began

    def processor_seconds(self) -> dict[str, float]:
        """Return the processor time of each process and its children so far."""
        return {name: cpu_seconds_of_tree(self._pids[name]) for name in _PROCESSES}

    def statements(self, jobs: int) -> list[StatementCost]:
        """Return the statements of a stretch with jobs, as the server logs them; the costliest first."""
        self._set_logging("0")
        start = self._log.stat().st_size
        self.run(jobs)
        self._set_logging("-1")
        with self._log.open("rb") as log:
            log.seek(start)
            entries = log.read().decode(errors="replace")
        found: dict[tuple[str, str], StatementCost] = {}
        for entry in _LOGGED.finditer(entries):
            words = " ".join(entry["text"].split())
            cost = found.setdefault((entry["sender"], words), StatementCost(entry["sender"], words))
            cost.ms[entry["step"]] += float(entry["ms"]) / jobs
            cost.calls += (entry["step"] in ("execute", "statement")) / jobs
        return sorted(found.values(), key=lambda cost: -cost.ms.total())

    def _set_logging(self, least: str) -> None:
        with psycopg.connect(libpq_url(self._server_url), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET log_min_duration_statement = {least}")
            connection.execute("SELECT pg_reload_conf()")
        clock.sleep(PAUSE)


@contextmanager
def idle_pool() -> Iterator[IdlePool]:
    """Start a fresh pool, which is warm when it is yielded, and remove it in the end."""
    data = embedded.scratch("leasehold-bench-")
    try:
        with ExitStack() as stack:
            pool = IdlePool(data, stack)
            pool.run(WARM_UP)
            yield pool
    finally:
        shutil.rmtree(data, ignore_errors=True)


def measure(pool: IdlePool, *, jobs: int, rounds: int) -> dict[str, JobCost]:
    """Run stretches with jobs and without in turns; return the costs by process, and of all together as `all`."""
    costs = {name: JobCost() for name in (*_PROCESSES, "all")}
    for _ in range(rounds):
        before = pool.processor_seconds()
        seconds = pool.run(jobs)
        between = pool.processor_seconds()
        clock.sleep(seconds)
        after = pool.processor_seconds()
        for each in (before, between, after):
            each["all"] = sum(each.values())
        for name, cost in costs.items():
            idle = after[name] - between[name]
            cost.idle_ms.append(idle * 1000 / seconds)
            cost.job_ms.append((between[name] - before[name] - idle) * 1000 / jobs)
    return costs


def _table(costs: Mapping[str, JobCost]) -> Table:
    figures = ("one job", "least", "most", "a second without jobs")
    table = blank_table("Processor time, milliseconds", "process", *figures)
    for name, cost in costs.items():
        figures = (statistics.median(cost.job_ms), min(cost.job_ms), max(cost.job_ms), statistics.median(cost.idle_ms))
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    return table


def _print_statements(statements: Sequence[StatementCost]) -> None:
    """Print a line for each statement: a table would be wider than a terminal."""
    total = sum(cost.ms.total() for cost in statements)
    click.echo(f"\nStatements of one job, milliseconds in the server; {total:.2f} in all")
    click.echo(f"{'times':>7} {'parse':>7} {'bind':>7} {'execute':>7}  sender: statement")
    for cost in statements:
        steps = (cost.ms["parse"], cost.ms["bind"], cost.ms["execute"] + cost.ms["statement"])
        figures = " ".join(f"{figure:7.3f}" for figure in steps)
        click.echo(f"{cost.calls:7.2f} {figures}  {cost.sender}: {cost.text[:SHOWN]}")


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--jobs", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Jobs of a stretch.")
@click.option("--rounds", type=click.IntRange(1, 100), default=4, show_default=True, help="Stretches of each kind.")
@click.option("--statements", is_flag=True, help="Also list the statements of a job, from the server's log.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(jobs: int, rounds: int, *, statements: bool, as_json: bool) -> None:
    try:
        with idle_pool() as pool:
            costs = measure(pool, jobs=jobs, rounds=rounds)
            listed = pool.statements(jobs) if statements else []
    except (LeaseholdError, psycopg.Error) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if as_json:
        found = {"processes": {name: asdict(cost) for name, cost in costs.items()}}
        click.echo(json.dumps(found | ({"statements": [asdict(cost) for cost in listed]} if statements else {})))
        return
    Console().print(_table(costs))
    if statements:
        _print_statements(listed)


if __name__ == "__main__":
    main()
