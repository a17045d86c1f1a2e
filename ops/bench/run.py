"""Measure how fast jobs are submitted, assigned and finished, and what each job costs the database.

Two processes work on a private PostgreSQL with its default durability (fsync and synchronous_commit on). Each shape
first runs once with all invariants checked while it works; that run is not counted. Then all contenders take turns, one
run each, so that a slow minute of the machine affects all of them. Every invariant is checked after each run.

    python -m ops.bench.run [--runs 3] [--peers] [--pooler] [--scale 1.0] [--only submit] [--json]
"""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ops.bench import pgbouncer
from ops.bench.fixtures import Shape, server
from ops.bench.measure import Stretch, blank_table, per_job, percentiles, spread
from ops.bench.peers import run as peers_run
from ops.bench.workloads import Measurement, assigning, cycling, submitting

OURS = "leasehold"
#: Connections to the server of the PgBouncer before it: as many as the workers' pools have together.
POOLED = 20


@dataclass
class Contest:
    """One shape of work, by Leasehold first and then by all others that can do it."""

    shape: str
    contenders: dict[str, Measurement]
    found: dict[str, list[Stretch]] = field(default_factory=dict)

    def run(self, url: str, runs: int) -> None:
        """Run Leasehold once with the invariants checked meanwhile, then all contenders in turns."""
        self.contenders[OURS].work(url, True)
        for _ in range(runs):
            for name, contender in self.contenders.items():
                self.found.setdefault(name, []).append(contender.work(url, False))


def contests(scale: float, *, peers: bool, pooler: bool = False) -> list[Contest]:
    """Return every shape, with `scale` times its usual number of jobs."""

    def jobs(usual: int) -> int:
        return max(500, int(usual * scale))

    found = [
        Contest("submit in bulk", {OURS: Measurement(OURS, submitting(1000, jobs(40_000)))}),
        Contest("submit one by one", {OURS: Measurement(OURS, submitting(1, jobs(3000)))}),
    ]
    for bots in (100, 1000):
        for queued in (10_000, 100_000):
            shape = Shape(bots=bots, capacity=2 * queued // bots, queued=queued)
            ours = assigning(shape, min(jobs(30_000), int(queued * 0.9)))
            found.append(Contest(f"assign, {bots:,} bots, {queued:,} queued", {OURS: Measurement(OURS, ours)}))
    full = Shape(bots=50, capacity=10, quotas=False)
    found.append(Contest("full cycle", {OURS: Measurement(OURS, cycling(full, jobs(30_000)))}))
    for contest in found:
        if pooler:
            through = f"{OURS}, PgBouncer"
            contest.contenders[through] = Measurement(through, _pooled(contest.contenders[OURS].work))
        _add_floor(contest, jobs)
        if peers:
            _add_peers(contest, jobs)
    return found


def _pooled(work: Callable[[str, bool], Stretch]) -> Callable[[str, bool], Stretch]:
    """The same work, with the workers behind a PgBouncer in transaction mode."""

    def through(server_url: str, watched: bool) -> Stretch:
        with pgbouncer.pooled(server_url, servers=POOLED) as url:
            os.environ[pgbouncer.DIRECTORY_VARIABLE] = pgbouncer.directory_of(url)
            try:
                return work(server_url, watched)
            finally:
                del os.environ[pgbouncer.DIRECTORY_VARIABLE]

    return through


def _add_floor(contest: Contest, jobs: Any) -> None:
    kind = contest.shape.split(",")[0]
    for batch in {"submit in bulk": (1000,), "submit one by one": (1,), "assign": (100, 500)}.get(kind, (100, 500)):
        shape = {"submit in bulk": "submit", "submit one by one": "submit", "assign": "assign"}.get(kind, "cycle")
        work = peers_run.floor_of(shape, batch=batch, jobs=jobs(2000 if batch == 1 else 40_000))
        contest.contenders[f"floor, {batch} at a time"] = Measurement("floor", work)


def _add_peers(contest: Contest, jobs: Any) -> None:
    kind, *rest = contest.shape.split(", ")
    two = {"processes": 2, "threads": 1}
    if kind == "submit in bulk":
        found = {
            name: peers_run.peer(name, "submit-bulk", jobs=jobs(40_000), **two)
            for name in ("pgqueuer", "procrastinate")
        }
    elif kind == "submit one by one":
        found = {
            name: peers_run.peer(name, "submit-single", jobs=jobs(2000), **two)
            for name in ("pgqueuer", "procrastinate")
        }
        found["buildgrid"] = peers_run.peer("buildgrid", "submit-single", jobs=jobs(600), **two)
    elif kind == "full cycle":
        found = {
            "buildgrid": peers_run.peer(
                "buildgrid", "cycle", jobs=jobs(1500), bots=50, capacity=10, processes=2, threads=2
            ),
            "pgqueuer": peers_run.peer("pgqueuer", "cycle", jobs=jobs(30_000), **two),
            "procrastinate": peers_run.peer("procrastinate", "cycle", jobs=jobs(2000), **two),
        }
    else:
        bots, queued = (int(part.split()[0].replace(",", "")) for part in rest)
        options = {"jobs": jobs(800), "bots": bots, "queued": queued, "sample": 10, "processes": 2, "threads": 2}
        found = {"buildgrid": peers_run.peer("buildgrid", "assign", **options)}
    contest.contenders |= {
        f"{name} {peers_run.version_of(name)}": Measurement(name, work) for name, work in found.items()
    }


def _rates(found: Sequence[Contest]) -> Table:
    figures = ("jobs/s", "least", "most", "Leasehold is")
    table = blank_table("Jobs per second: median, least and most", "shape", "contender", *figures, names=2)
    table.add_column("leaves out", no_wrap=True)
    for contest in found:
        ours = statistics.median(each.rate for each in contest.found[OURS])
        for name, stretches in contest.found.items():
            median, least, most = spread([each.rate for each in stretches])
            ratio = "" if name == OURS else f"{ours / median:.2f} x"
            lacks = peers_run.LACKS.get(contest.contenders[name].name, "")
            table.add_row(contest.shape, name, f"{median:,.0f}", f"{least:,.0f}", f"{most:,.0f}", ratio, lacks)
    return table


def _costs(found: Sequence[Contest]) -> Table:
    figures = ("transactions", "statements", "round trips", "WAL, bytes", "buffers", "p50", "p95", "p99", "lost")
    table = blank_table("Costs of one job in Leasehold, and milliseconds of a transaction", "shape", *figures)
    for contest in found:
        stretches = contest.found[OURS]
        costs, waits = per_job(stretches), percentiles([wait for each in stretches for wait in each.waits])
        lost = sum(each.lost for each in stretches) / max(1, sum(each.jobs for each in stretches))
        table.add_row(
            contest.shape,
            *(f"{costs[name]:.4f}" for name in ("transactions", "statements", "round_trips")),
            *(f"{costs[name]:,.0f}" for name in ("wal_bytes", "buffers")),
            *(f"{value:.1f}" for value in waits.values()),
            f"{lost:.2%}",
        )
    return table


def _as_json(found: Sequence[Contest]) -> dict[str, Any]:
    return {
        contest.shape: {
            name: {
                "rates": [round(each.rate, 1) for each in stretches],
                "median": round(statistics.median(each.rate for each in stretches), 1),
                "per_job": {key: round(value, 5) for key, value in per_job(stretches).items()},
            }
            for name, stretches in contest.found.items()
        }
        for contest in found
    }


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option(
    "--runs", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each contender, in turns."
)
@click.option(
    "--peers",
    is_flag=True,
    help="Also measure BuildGrid, PgQueuer and Procrastinate; installing them needs a package index.",
)
@click.option(
    "--pooler",
    is_flag=True,
    help="Also measure Leasehold through PgBouncer in transaction mode, which must be installed.",
)
@click.option(
    "--scale",
    type=click.FloatRange(0.01, 100),
    default=1.0,
    show_default=True,
    help="Multiplies the usual number of jobs.",
)
@click.option("--only", metavar="TEXT", help="Measure only the shapes whose name contains this text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(runs: int, *, peers: bool, pooler: bool, scale: float, only: str | None, as_json: bool) -> None:
    if pooler and not pgbouncer.is_installed():
        raise click.UsageError("--pooler: PgBouncer is not installed")
    if peers:
        peers_run.install(("buildgrid", "pgqueuer", "procrastinate"))
    chosen = [
        contest for contest in contests(scale, peers=peers, pooler=pooler) if only is None or only in contest.shape
    ]
    if not chosen:
        raise click.UsageError(f"no shape has '{only}' in its name")
    with server() as url:
        for contest in chosen:
            click.echo(f"{contest.shape} …", err=True)
            contest.run(url, runs)
    if as_json:
        click.echo(json.dumps(_as_json(chosen)))
        return
    console = Console(width=200)
    console.print(_rates(chosen))
    console.print()
    console.print(_costs(chosen))


if __name__ == "__main__":
    main()
