"""Measure whether the cost of a job stays the same when the pool grows.

Grown are the depth of the queue, the fleet, requirement sets, instances and their shares, the history, the number of
assigners, and the age of an open snapshot. Each comparison is a ratio of two rates of one run, on one server with its
default durability. Rates that are measured several times are measured in turns, and their ratio is the median over the
pairs of neighbours, which a disturbance of a minute changes little. Every invariant is checked after each measurement.

    python -m ops.bench.scale [--only depth] [--scale 1.0] [--json]
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import click
import psycopg
from rich.console import Console

from ops.bench.fixtures import Shape, blank, count, empty, fill, filled, opened, server, submit
from ops.bench.measure import Stretch, blank_table, checked
from ops.bench.workers import Assigning, Cycling, Retaining, run
from ops.bench.workloads import PROCESSES, TOGETHER
from schema import clock
from schema.postgres.engine import Database, libpq_url
from schema.postgres.statements import Statement

#: Jobs assigned in one measurement, which takes a few seconds; jobs queued for it; a short queue, and jobs
#: assigned from it.
JOBS, QUEUED, SHALLOW, SOME = 60_000, 70_000, 10_000, 8_000
#: Jobs queued while several processes are measured; seconds until all of them are at work; seconds that are measured.
LASTING, BEGUN, STEADY = 260_000, 2.0, 4.0
#: Measurements of each side of a comparison.
RUNS = 5
#: Jobs finished in one measurement of the history; jobs queued beyond them, so that the queue never ends.
PIECE, SPARE = 50_000, 4_000
#: Jobs kept queued while a rate is measured; a number of jobs that is never reached.
DEEP, ENDLESS = 30_000, 10**12
#: Seconds of load before the snapshot, after which checkpoints and autovacuum take part; seconds over which the rate is
#: measured before it, at its end and after it; seconds that it is held; seconds after which the rate must be back.
WARM, LONG, HELD, RECOVERED = 120.0, 60.0, 300.0, 60.0
#: Seconds for which a pool works at its full speed with and without retention, and for which it then keeps jobs.
LASTED, KEPT = 1800.0, 300.0


SIZES = Statement("""
SELECT (SELECT count(*) FROM jobs) AS jobs, (SELECT count(*) FROM submit_keys) AS keys,
    sum(pg_total_relation_size(oid))::bigint / 1048576 AS mib
FROM pg_class WHERE relnamespace = CAST('leasehold' AS regnamespace) AND relkind = 'r'
""")


@dataclass(frozen=True)
class Ratio:
    """Rates of one run, in jobs/s: pairs of the base and the rate that is divided by it."""

    what: str
    pairs: list[tuple[float, float]]
    lost: float = 0.0
    deadlocks: int = 0
    #: Processor time of a job, in microseconds: of the base and of the other, in the same pairs; empty if not measured.
    cpu_pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def base(self) -> float:
        return median(base for base, _ in self.pairs)

    @property
    def rate(self) -> float:
        return median(rate for _, rate in self.pairs)

    @property
    def ratios(self) -> list[float]:
        """Ratios of the pairs, in ascending order."""
        return sorted(rate / base for base, rate in self.pairs)

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def cpu_ratio(self) -> float | None:
        """Processor time of a job of the base divided by that of the other, which other programs disturb less."""
        return median(base / other for base, other in self.cpu_pairs) if self.cpu_pairs else None


#: Runs assigners until they have placed the given number of jobs, and returns what was measured.
Placing = Callable[[int], Stretch]


@dataclass(frozen=True)
class Comparison:
    """Two pools on which assigners do the same work: how many `jobs` are assigned on each."""

    what: str
    base: Shape
    other: Shape
    jobs: int

    @contextmanager
    def turns(self, url: str) -> Iterator[tuple[Placing, Placing]]:
        """Fill both pools; yield what measures assigners on a copy of the base, and on a copy of the other.

        Copies are alike and soon made, so that the two runs of a pair follow each other within seconds.
        """
        with filled(url, "base", self.base) as base, filled(url, "other", self.other) as other:
            yield partial(assigned, url, base), partial(assigned, url, other)

    def ratio(self, url: str) -> Ratio:
        """Measure several pairs; which of the two is first alternates."""
        pairs: list[tuple[Stretch, Stretch]] = []
        with self.turns(url) as (base_turn, other_turn):
            for nth in range(RUNS):
                if nth % 2 == 0:
                    base, other = base_turn(self.jobs), other_turn(self.jobs)
                else:
                    other, base = other_turn(self.jobs), base_turn(self.jobs)
                pairs.append((base, other))
        rates = [(base.rate, other.rate) for base, other in pairs]
        return Ratio(self.what, rates, cpu_pairs=[(_cpu_of_job(base), _cpu_of_job(other)) for base, other in pairs])


def assigned(url: str, pool: str, jobs: int) -> Stretch:
    """Measure assigners on a copy of a filled pool, whose bots have capacity for all jobs."""
    with blank(url, "scale", copy_of=pool) as target, opened(target) as database:
        stretch = run(target, Assigning(), processes=PROCESSES, jobs=jobs)
        checked(database)
    return stretch


def _room(bots: int, queued: int = QUEUED) -> int:
    return max(4, 2 * queued // bots)


def _cpu_of_job(stretch: Stretch) -> float:
    return round(stretch.cpu / stretch.jobs * 1e6, 1)


def depth(scale: float) -> list[Comparison]:
    """Compare 1,000,000 queued jobs with 10,000; 8,000 of them are assigned."""
    deep = int(1_000_000 * scale)
    shallow = Shape(bots=100, capacity=_room(100), queued=SHALLOW)
    return [Comparison(f"{deep:,} queued / {SHALLOW:,}", shallow, replace(shallow, queued=deep), SOME)]


def fleet(scale: float) -> list[Comparison]:
    """Compare many bots, requirement sets and instances with few."""
    few, jobs = _few(scale)
    bots, sets, tenants = int(20_000 * scale), int(1_000 * scale), max(2, int(200 * scale))
    return [
        Comparison(f"{bots:,} bots / 100", few, replace(few, bots=bots, capacity=_room(bots, few.queued)), jobs),
        Comparison(f"{sets:,} requirement sets / 1", few, replace(few, platforms=sets), jobs),
        Comparison(f"{tenants} instances with quotas / 1", few, replace(few, instances=tenants), jobs),
    ]


def shares(scale: float) -> list[Comparison]:
    """Compare instances that have quotas, weighted shares, budgets and limits with instances that have quotas only."""
    few, jobs = _few(scale)
    return [
        Comparison(
            f"{tenants} instances with shares / without",
            replace(few, instances=tenants),
            replace(few, instances=tenants, shares=True),
            jobs,
        )
        for tenants in (3, 30, 1000)
    ]


def _few(scale: float) -> tuple[Shape, int]:
    """Return the pool that larger ones are compared with, and how many jobs are assigned on it."""
    queued = int(QUEUED * scale)
    return Shape(bots=100, capacity=_room(100, queued), queued=queued), int(JOBS * scale)


def _compared(comparisons: Callable[[float], list[Comparison]]) -> Callable[[str, float], Iterator[Ratio]]:
    """Return a shape that measures these comparisons one after the other."""
    return lambda url, scale: (each.ratio(url) for each in comparisons(scale))


def processes(url: str, scale: float) -> Iterator[Ratio]:
    """Compare 1, 2 and 4 assigner processes on one queue, in turns, measured once all of them are at work."""
    queued = int(LASTING * scale)
    shape = Shape(bots=100, capacity=_room(100, queued), queued=queued)
    seconds = (BEGUN * scale, STEADY * scale)
    rounds = [{of: _pace(url, shape, processes=of, seconds=seconds) for of in (1, 2, 4)} for _ in range(RUNS)]
    for base, of in ((1, 2), (2, 4), (1, 4)):
        placed, lost = (sum(getattr(each[of], what) for each in rounds) for what in ("placements", "lost"))
        deadlocks = sum(each[of].costs.deadlocks for each in rounds)
        pairs = [(each[base].rate, each[of].rate) for each in rounds]
        yield Ratio(f"{of} assigner processes / {base}", pairs, lost / max(1, placed + lost), deadlocks)


def _pace(url: str, shape: Shape, *, processes: int, seconds: tuple[float, float]) -> Stretch:
    """Measure assigners on a fresh pool; `seconds` are those before the measurement and those of it."""
    begun, steady = seconds
    paced = Stretch()

    def meanwhile(placed: Callable[[], int]) -> None:
        clock.sleep(begun)
        before, began = placed(), clock.monotonic()
        clock.sleep(steady)
        paced.jobs, paced.seconds = placed() - before, clock.monotonic() - began

    with empty(url, "scale") as target, opened(target) as database:
        fill(database, shape)
        whole = run(target, Assigning(), processes=processes, jobs=ENDLESS, meanwhile=meanwhile)
        if not count(database, "SELECT count(*) FROM jobs WHERE state = 'queued'"):
            raise SystemExit(f"error: {shape.queued} jobs do not last for {begun + steady:g} seconds")
        checked(database)
    return replace(whole, jobs=paced.jobs, seconds=paced.seconds)


def history(url: str, scale: float) -> Iterator[Ratio]:
    """Compare a pool after 2,000,000 jobs, without a manual vacuum, with fresh pools that have just come to work."""
    shape = Shape(bots=100, capacity=20, quotas=False)
    gone = 0
    with empty(url, "scale") as target:
        while gone < 2_000_000 * scale:
            _cycled(target, shape)
            gone += PIECE
        pairs = []
        for _ in range(RUNS):
            with empty(url, "fresh") as fresh:
                _cycled(fresh, shape)
                pairs.append((_cycled(fresh, shape), _cycled(target, shape)))
    yield Ratio(f"after {gone:,} jobs / fresh", pairs)


def _cycled(url: str, shape: Shape) -> float:
    """Return the rate at which jobs go through the pool from submit to end, in jobs/s."""
    with opened(url) as database:
        sessions = fill(database, shape)
        submit(database, shape, PIECE + SPARE - count(database, "SELECT count(*) FROM jobs WHERE state = 'queued'"))
        work = Cycling(sessions, capacity=shape.capacity, together=TOGETHER)
        rate = run(url, work, processes=PROCESSES, jobs=PIECE).rate
        checked(database)
    return rate


def snapshot(url: str, scale: float) -> Iterator[Ratio]:
    """Compare the rate while a snapshot is held for five minutes under load, and a minute after its end, with before.

    The same processes work all the time, and long enough before the snapshot to have reached a steady rate.
    """
    shape = Shape(bots=100, capacity=20, quotas=False)
    found: list[Ratio] = []
    with empty(url, "scale") as target, opened(target) as database:
        sessions = fill(database, shape)

        def meanwhile(finished: Callable[[], int]) -> None:
            feed = _Feed(database, shape, finished)
            feed.pace(WARM)
            before = feed.pace(LONG)
            with _held(target):
                feed.pace(HELD * scale - LONG)
                last = feed.pace(LONG)
            held = f"in the last {LONG:.0f} s of a snapshot held for {HELD * scale:.0f} s / before"
            found.append(Ratio(held, [(before, last)]))
            feed.pace(RECOVERED)
            found.append(Ratio(f"from {RECOVERED:.0f} s after its end on / before", [(before, feed.pace(LONG))]))

        work = Cycling(sessions, capacity=shape.capacity, together=TOGETHER)
        run(target, work, processes=PROCESSES, jobs=ENDLESS, meanwhile=meanwhile)
        checked(database)
    yield from found


class _Feed:
    """Keeps a queue filled and measures the rate at which it is emptied."""

    def __init__(self, database: Database, shape: Shape, finished: Callable[[], int], *, keyed: bool = False) -> None:
        self._database, self._shape, self._finished, self._keyed = database, shape, finished, keyed
        self._submitted = 0

    def pace(self, seconds: float) -> float:
        """Return the jobs finished per second over `seconds` seconds."""
        began, before = clock.monotonic(), self._finished()
        while clock.monotonic() - began < seconds:
            missing = DEEP - (self._submitted - self._finished())
            if missing > 0:
                submit(self._database, self._shape, missing, first=self._submitted, keyed=self._keyed)
                self._submitted += missing
            clock.sleep(0.2)
        return (self._finished() - before) / (clock.monotonic() - began)


def retention(url: str, scale: float) -> Iterator[Ratio]:
    """Compare a pool that deletes what it has ended, while it works at its full speed, with one that keeps all.

    Each job has a key. The rates are those of the last two thirds.
    """
    seconds, keep = LASTED * scale, KEPT * scale
    base, other = _aged(url, seconds, keep=None), _aged(url, seconds, keep=keep)
    cpu = [(_cpu_of_job(base), _cpu_of_job(other))]
    yield Ratio(f"{seconds:.0f} s of jobs kept for {keep:.0f} s / all kept", [(base.rate, other.rate)], cpu_pairs=cpu)


def _aged(url: str, seconds: float, *, keep: float | None) -> Stretch:
    """Measure a pool whose ended jobs are kept for `keep` seconds, or all.

    Raises SystemExit if the pool with retention has many more jobs or keys at the end than ended within that time.
    """
    shape = Shape(bots=50, capacity=10)
    rates: list[float] = []

    def meanwhile(finished: Callable[[], int]) -> None:
        feed = _Feed(database, shape, finished, keyed=True)
        for _ in range(3):
            rates.append(feed.pace(seconds / 3))
            sizes = database.run(lambda c: c.execute(SIZES).one())
            click.echo(
                f"keep {keep}: {rates[-1]:,.0f} jobs/s, {sizes.jobs:,} jobs, {sizes.keys:,} keys, {sizes.mib:,} MiB",
                err=True,
            )
        ended.append(finished())
        left.append(max(sizes.jobs, sizes.keys))

    ended, left = list[int](), list[int]()
    with empty(url, "scale") as target, opened(target) as database:
        work: Any = Cycling(fill(database, shape), capacity=shape.capacity, together=TOGETHER)
        work = work if keep is None else Retaining(work, keep)
        whole = run(target, work, processes=PROCESSES, jobs=ENDLESS, meanwhile=meanwhile)
        checked(database)
    rate = (rates[1] + rates[2]) / 2
    if keep is not None and left[-1] > (most := DEEP + max(rates) * (1.1 * keep + 10)):
        raise SystemExit(f"error: the pool has {left[-1]:,} jobs or keys, and should have at most {most:,.0f}")
    return replace(whole, jobs=ended[-1], seconds=ended[-1] / rate)


@contextmanager
def _held(url: str) -> Iterator[None]:
    """Hold a snapshot open in a database session of its own."""
    with psycopg.connect(libpq_url(url)) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM leasehold.bots")
        yield
        connection.rollback()


COMPARISONS: dict[str, Callable[[float], list[Comparison]]] = {"depth": depth, "fleet": fleet, "shares": shares}
SHAPES: dict[str, Callable[[str, float], Iterator[Ratio]]] = {
    **{name: _compared(comparisons) for name, comparisons in COMPARISONS.items()},
    "processes": processes,
    "snapshot": snapshot,
    "history": history,
    "retention": retention,
}


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--only", multiple=True, type=click.Choice(list(SHAPES)), help="Measure only these; repeatable.")
@click.option(
    "--scale", type=click.FloatRange(0.01, 10), default=1.0, show_default=True, help="Multiplies the usual sizes."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(only: tuple[str, ...], *, scale: float, as_json: bool) -> None:
    found: list[Ratio] = []
    for name in only or SHAPES:
        with server() as url:
            for ratio in SHAPES[name](url, scale):
                click.echo(
                    f"{ratio.what}: {ratio.rate:,.0f} and {ratio.base:,.0f}, in pairs {ratio.ratio:.2f}"
                    + ("" if ratio.cpu_ratio is None else f", by processor time {ratio.cpu_ratio:.2f}"),
                    err=True,
                )
                found.append(ratio)
    if as_json:
        told = ("base", "rate", "ratio", "cpu_ratio")
        click.echo(json.dumps([{**vars(each), **{name: getattr(each, name) for name in told}} for each in found]))
        return
    figures = ("base", "rate", "ratio", "least–most", "CPU ratio", "lost", "deadlocks")
    table = blank_table("Jobs per second against the base of the same run", "what", *figures)
    for each in found:
        spread = f"{each.ratios[0]:.2f}–{each.ratios[-1]:.2f}" if len(each.pairs) > 1 else ""
        rates = (f"{each.base:,.0f}", f"{each.rate:,.0f}", f"{each.ratio:.2f}", spread)
        cpu = "" if each.cpu_ratio is None else f"{each.cpu_ratio:.2f}"
        table.add_row(each.what, *rates, cpu, f"{each.lost:.2%}", str(each.deadlocks))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
