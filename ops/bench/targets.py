"""Measure in one run everything that the documents promise about speed, and say which of it is met.

Contenders of one shape of work take turns: a pair is one run of Leasehold and one of another contender, in changing
order. A target is a bound on the median of the pairs' ratios, or, without a contender, on the median of Leasehold's own
figure. All of it runs on private servers with their default durability, and every invariant is checked after each run.

    python -m ops.bench.targets [--pairs 5] [--only "wire 50 x 1"] [--no-peers] [--json]
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import click
import psycopg
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from ops.bench import scale, tasks
from ops.bench.fixtures import Shape, server
from ops.bench.gateway import latency, throughput
from ops.bench.measure import Stretch, blank_table, spread
from ops.bench.peers import run as peers_run
from ops.bench.workloads import cycling, submitting

OURS = "leasehold"
BUILDGRID, PGQUEUER, PROCRASTINATE = PEERS = ("buildgrid", "pgqueuer", "procrastinate")
FLOOR = "floor"
RATE = "jobs/s"
#: Seconds in which a gateway with busy bots is measured; jobs that it could finish in each of them, and in its warm-up.
BUSY, ENOUGH = 6.0, 20_000
#: Jobs of one run of the full cycle: by Leasehold and PgQueuer, by BuildGrid, and by raw SQL.
CYCLED, BUILDGRID_CYCLED, FLOOR_CYCLED = 20_000, 1_000, 40_000
#: Jobs that BuildGrid's server finishes over gRPC, by the capacity of its 50 bots; and with 200 bots of capacity 4.
#: It has as many connections for calls as these.
WIRED, CONNECTIONS = 600, 50
#: Most jobs assigned in each run of a comparison of two pools.
ASSIGNED = 40_000
#: A run of a comparison of two pools, or of submits one by one, takes about a second. These trials have `SHORT` times
#: as many pairs as the others.
SHORT = 2
#: Bots in long polls, and seconds in which their pool is watched for one figure.
RESTING, WATCH = 10_000, 30.0
#: Single jobs submitted to an idle pool for one figure; calls of tasks in one run, and tasks that a bot runs at once.
SAMPLES, CALLS, CONCURRENCY = 100, 2_000, 8
#: Least parts of the rate on a small pool that a large one keeps, in the order of the comparisons of `scale`.
KEPT = {"depth": (0.85,), "fleet": (0.85, 0.85, 0.85), "shares": (0.85, 0.7, 0.55)}

#: The figures of one run, by name.
Figures = Mapping[str, float]
#: One run of one contender.
Turn = Callable[[], Figures]


@dataclass(frozen=True)
class Target:
    """What is promised of a figure of one trial.

    name: what the table and `--only` call it. figure: which of the figures. bound: what the median must reach, or must
    not exceed if `at_most`. against: the contender whose figure ours is divided by, None = ours itself.
    """

    name: str
    figure: str
    bound: float
    against: str | None = None
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Return True if this median keeps the promise."""
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True)
class Trial:
    """Contenders that take turns, and what is promised of their figures.

    prepare: starts what the contenders need until the stack closes, and returns them by name, ours first. often: how
    many times as many pairs as of other trials are taken, because the runs are short and their ratios differ more.
    """

    what: str
    targets: Sequence[Target]
    prepare: Callable[[ExitStack], Mapping[str, Turn]]
    often: int = 1


@dataclass
class Result:
    """The values of one target: ours, the contender's in the same pairs, and the ratios or ours alone."""

    what: str
    target: Target
    contender: str = ""
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """What the target bounds, by pair."""
        if self.target.against is None:
            return self.ours
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def met(self) -> bool:
        return self.target.met(spread(self.values)[0])

    def as_json(self) -> dict[str, Any]:
        """Return one row of the JSON output."""
        median, least, most = spread(self.values)
        return {
            "name": self.target.name,
            "what": self.what,
            "figure": self.target.figure,
            "ours": self.ours,
            "contender": self.contender or None,
            "theirs": self.theirs,
            "median": median,
            "least": least,
            "most": most,
            "at_most" if self.target.at_most else "at_least": self.target.bound,
            "met": self.met,
        }


def run(trial: Trial, pairs: int, *, report: Callable[[str], None]) -> list[Result]:
    """Let the contenders that the trial's targets name take `pairs` turns each, or more if their runs are short."""
    results = [Result(trial.what, target) for target in trial.targets]
    wanted = {OURS, *(target.against for target in trial.targets)}
    with ExitStack() as stack:
        contenders = {name: turn for name, turn in trial.prepare(stack).items() if name in wanted}
        for result in results:
            result.contender = _versioned(result.target.against)
        for nth in range(pairs * trial.often):
            # Which of them is first alternates, so that none always works on what another has left behind.
            names = list(contenders)[:: -1 if nth % 2 else 1]
            found = {name: contenders[name]() for name in names}
            for name, figures in found.items():
                report(f"{trial.what}, {name}: " + ", ".join(f"{key} {each:,.4g}" for key, each in figures.items()))
            for result in results:
                result.ours.append(found[OURS][result.target.figure])
                if result.target.against is not None:
                    result.theirs.append(found[result.target.against][result.target.figure])
    return results


def _versioned(contender: str | None) -> str:
    return f"{contender} {peers_run.version_of(contender)}" if contender in PEERS else contender or ""


# What is measured


def trials(url: str) -> Iterator[Trial]:
    """Return all trials; those that need no pool of processes work on the server with that URL."""
    yield from _over_the_wire(url)
    yield _full_cycle(url)
    yield from _submits(url)
    yield _idle_job(url)
    yield from _growth(url)
    yield _held_bots()
    yield from _tasks()


def _over_the_wire(url: str) -> Iterator[Trial]:
    """Bots that finish all their jobs and fetch as many in each call: HTTP, against BuildGrid's gRPC server."""
    promised = {
        (50, 10): (Target("wire 50 x 10", RATE, 60, BUILDGRID), Target("wire 50 x 10, floor", RATE, 0.15, FLOOR)),
        (50, 1): (Target("wire 50 x 1", RATE, 35, BUILDGRID),),
        (200, 4): (Target("wire 200 x 4", RATE, 80, BUILDGRID),),
    }
    for (bots, capacity), targets in promised.items():
        theirs = {"bots": bots, "capacity": capacity, "processes": 1, "threads": CONNECTIONS}
        turns = {
            OURS: partial(_busy, bots, capacity),
            BUILDGRID: _rated(peers_run.peer(BUILDGRID, "wire", jobs=WIRED, **theirs), url),
            FLOOR: _rated(peers_run.floor_of("cycle", batch=500, jobs=FLOOR_CYCLED), url),
        }
        yield Trial(f"{bots} busy bots of capacity {capacity}, one gateway", targets, _ready(turns))


def _busy(bots: int, capacity: int) -> Figures:
    jobs = int(ENOUGH * (BUSY + throughput.WARM_UP))
    with throughput.scratch() as data:
        found = throughput.busy(data, bots=bots, capacity=capacity, jobs=jobs, seconds=BUSY, clients=1)
    if found["troubles"]:
        raise LeaseholdError(f"calls of bots failed: {found['troubles']}")
    return {RATE: found["jobs_per_second"], "calls/s": found["syncs_per_second"]}


def _full_cycle(url: str) -> Trial:
    """Submit and work off by the functions that the gateway calls."""
    two = {"processes": 2, "threads": 1}
    turns = {
        OURS: _rated(cycling(Shape(bots=50, capacity=10, quotas=False), CYCLED), url),
        BUILDGRID: _rated(
            peers_run.peer(BUILDGRID, "cycle", jobs=BUILDGRID_CYCLED, bots=50, capacity=10, processes=2, threads=2),
            url,
        ),
        FLOOR: _rated(peers_run.floor_of("cycle", batch=500, jobs=FLOOR_CYCLED), url),
        PGQUEUER: _rated(peers_run.peer(PGQUEUER, "cycle", jobs=CYCLED, **two), url),
    }
    targets = (
        Target("full cycle", RATE, 60, BUILDGRID),
        Target("full cycle, floor", RATE, 0.2, FLOOR),
        Target("full cycle, PgQueuer", RATE, 0.5, PGQUEUER),
        Target("log of a job, bytes", "wal_bytes", 2700, at_most=True),
        Target("buffers of a job", "buffers", 85, at_most=True),
        Target("statements of a job", "statements", 0.03, at_most=True),
    )
    return Trial("full cycle, 50 bots of capacity 10, by functions", targets, _ready(turns))


def _submits(url: str) -> Iterator[Trial]:
    """Submits by two clients."""
    for name, batch, jobs, bound, often in (("in bulk", 1000, 40_000, 0.55, 1), ("one by one", 1, 3_000, 0.75, SHORT)):
        turns = {
            OURS: _rated(submitting(batch, jobs), url),
            FLOOR: _rated(peers_run.floor_of("submit", batch=batch, jobs=jobs), url),
        }
        yield Trial(f"submit {name}", [Target(f"submit {name}", RATE, bound, FLOOR)], _ready(turns), often)


def _idle_job(url: str) -> Trial:
    """Single jobs on an idle pool, against the start of PgQueuer's function in the process that polls the queue."""

    def prepare(stack: ExitStack) -> Mapping[str, Turn]:
        bench = stack.enter_context(latency.pool(stack.enter_context(throughput.scratch()), random.Random(1)))

        def turn() -> Figures:
            waits = bench.measure(SAMPLES, announced=True)
            lease, bot = waits.submit_to_lease_ms, waits.submit_to_bot_ms
            return {"lease p50": lease.p50, "lease p99": lease.p99, "bot p50": bot.p50, "bot p99": bot.p99}

        def theirs() -> Figures:
            started = peers_run.latency(PGQUEUER, url, SAMPLES)["p50_ms"]
            return {"lease p50": started, "bot p50": started}

        return {OURS: turn, PGQUEUER: theirs}

    bounds = {"lease p50": 2.4, "bot p50": 4}
    targets = [Target(f"idle job to {name}", name, bound, PGQUEUER, at_most=True) for name, bound in bounds.items()]
    return Trial("a job of an idle pool", targets, prepare)


def _growth(url: str) -> Iterator[Trial]:
    """Assigners on a large pool, or one with shares, against the same on a small one, or one without."""
    for name, bounds in KEPT.items():
        for comparison, bound in zip(scale.COMPARISONS[name](1.0), bounds, strict=True):
            yield _comparison(url, comparison, bound)


def _comparison(url: str, compared: scale.Comparison, bound: float) -> Trial:
    jobs = min(compared.jobs, ASSIGNED)

    def prepare(stack: ExitStack) -> Mapping[str, Turn]:
        base, other = stack.enter_context(compared.turns(url))
        return {OURS: lambda: {RATE: other(jobs).rate}, "base": lambda: {RATE: base(jobs).rate}}

    return Trial(compared.what, [Target(compared.what, RATE, bound, "base")], prepare, often=SHORT)


def _held_bots() -> Trial:
    """A pool whose bots all wait in long polls."""

    def prepare(stack: ExitStack) -> Mapping[str, Turn]:
        data = stack.enter_context(throughput.scratch())
        resting = stack.enter_context(throughput.idle_bots(data, bots=RESTING, clients=1))

        def turn() -> Figures:
            found = resting.watch(WATCH)
            if found["alive"] != RESTING:
                raise LeaseholdError(f"only {found['alive']} of {RESTING} sessions are alive")
            return {"gateway": found["gateway_cpu_percent"], "PostgreSQL": found["postgres_cpu_percent"]}

        return {OURS: turn}

    bounds = {"gateway": 8, "PostgreSQL": 3}
    targets = [Target(f"held bots, {name}, % of a core", name, bound, at_most=True) for name, bound in bounds.items()]
    return Trial(f"{RESTING:,} bots in long polls", targets, prepare)


def _tasks() -> Iterator[Trial]:
    """Tasks that do nothing, through the warm children of one bot."""
    for kind in tasks.KINDS:

        def prepare(stack: ExitStack, kind: str = kind) -> Mapping[str, Turn]:
            data = stack.enter_context(throughput.scratch())
            ours = stack.enter_context(tasks.works(data, CONCURRENCY))
            return {
                OURS: lambda: {"tasks/s": ours.run(kind, CALLS)},
                PROCRASTINATE: lambda: {"tasks/s": tasks.peer_rate(PROCRASTINATE, kind, CALLS, ours.server)},
            }

        targets = [Target(f"tasks, {kind}", "tasks/s", 5, PROCRASTINATE)]
        yield Trial(f"tasks that do nothing, `{kind}`, {CONCURRENCY} warm children", targets, prepare)


def _ready(turns: Mapping[str, Turn]) -> Callable[[ExitStack], Mapping[str, Turn]]:
    """The contenders of a trial that needs nothing but the server."""
    return lambda _: turns


def _rated(work: Callable[[str, bool], Stretch], url: str) -> Turn:
    """Turn a measurement into figures: its rate, and what the database spent on one job."""

    def turn() -> Figures:
        stretch = work(url, False)
        costs = {name: getattr(stretch.costs, name) / stretch.jobs for name in ("wal_bytes", "buffers", "statements")}
        return {RATE: stretch.rate, **costs}

    return turn


# The command


def chosen(found: Sequence[Trial], *, only: Sequence[str], peers: bool) -> list[Trial]:
    """Return the trials with those of their targets whose name contains one of these texts; none = all."""

    def wanted(target: Target) -> bool:
        named = not only or any(text.lower() in target.name.lower() for text in only)
        return named and (peers or target.against not in PEERS)

    kept = [replace(trial, targets=[target for target in trial.targets if wanted(target)]) for trial in found]
    return [trial for trial in kept if trial.targets]


def table(results: Sequence[Result]) -> Table:
    """Return the table of all results."""
    figures = ("ours", "theirs", "ratio", "least–most", "target", "")
    made = blank_table("Targets, as medians of the pairs", "name", "what", *figures, names=2)
    made.add_column("beside", no_wrap=True)
    for each in results:
        median, least, most = spread(each.values)
        against = each.target.against is not None
        made.add_row(
            each.target.name,
            each.what,
            _figure(spread(each.ours)[0]),
            _figure(spread(each.theirs)[0]) if against else "",
            _figure(median) if against else "",
            f"{_figure(least)}–{_figure(most)}",
            f"{'≤' if each.target.at_most else '≥'} {each.target.bound:g}",
            "met" if each.met else "missed",
            each.contender,
        )
    return made


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what makes a run invalid into one line on standard error."""
    try:
        yield
    except (LeaseholdError, psycopg.Error) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--pairs", type=click.IntRange(1, 100), default=5, show_default=True, help="Turns of each contender.")
@click.option("--only", metavar="TEXT", multiple=True, help="Only targets whose name contains this text; repeatable.")
@click.option("--no-peers", is_flag=True, help="Leave out targets beside BuildGrid, PgQueuer and Procrastinate.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
def main(pairs: int, only: tuple[str, ...], *, no_peers: bool, as_json: bool) -> None:
    results: list[Result] = []
    with _failures(), server() as url:
        selected = chosen(list(trials(url)), only=only, peers=not no_peers)
        if not selected:
            raise click.UsageError("no target has such a name")
        needed = sorted({str(each.against) for trial in selected for each in trial.targets if each.against in PEERS})
        if needed:
            peers_run.install(needed)
        for trial in selected:
            results += run(trial, pairs, report=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps([each.as_json() for each in results]))
    else:
        Console(width=200).print(table(results))


if __name__ == "__main__":
    main()
