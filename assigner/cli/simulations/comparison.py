"""The comparison of simulated policies in words and tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import click

from assigner.simulation import charts, report
from assigner.simulation.history import UNUSABLE
from assigner.simulation.past import Past
from assigner.simulation.records import Records
from assigner.simulation.report import Loser, Measured, Waits
from assigner.simulation.runs import Outcome
from schema.readable import duration, plural, print_line, table

#: The columns of what really happened and of its replay as configured; of a load that never was, as configured; and the
#: name of the rows of the whole pool.
REAL, NOW, CONFIGURED, POOL = "real", "replayed", "configured", "all"
#: What is above the jobs that lose most under a policy, and their columns.
OF_LOSERS, LOSERS = "Jobs that lose most under", ("job", "instance", "before", "then")
#: Parts of the shaken replays that an interval leaves out on each side.
TAIL = 0.05


@dataclass(frozen=True)
class Result:
    """What was simulated. base: the name of the outcome with which others are compared. real: None if nothing was.

    error: as of `report.error_of`. lost: by name, the jobs that wait longer than under `base`.
    known_since: since when jobs that have ended are known.
    """

    past: Past
    real: Measured | None
    outcomes: Mapping[str, Outcome]
    base: str
    error: float | None
    lost: Mapping[str, Sequence[Loser]]
    known_since: float


#: Takes a figure from what a pool did; None if it has none.
Figure = Callable[[Measured], float | None]


@dataclass(frozen=True)
class _Row:
    """A row of the table: its titles, its figure, how that is told, and whether it is only the least that it can be."""

    title: tuple[str, str]
    figure: Figure
    told: Callable[[float], str]
    is_least: Callable[[Measured], bool] = lambda _: False


@dataclass(frozen=True)
class Told:
    """The report in words. head: lines above the table. losers: rows by what was tried, which have `LOSERS`."""

    head: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    losers: Mapping[str, Sequence[Sequence[str]]]


def told(result: Result) -> Told:
    """Put a result into words."""
    shown = {} if result.real is None else {REAL: result.real}
    shown |= {name: each.replayed.measured for name, each in result.outcomes.items()}
    rows = [[*row.title, *(_cell(result, run, row) for run in shown)] for row in _rows(shown)]
    ids = {job.name: job.public_id or job.name for job in result.past.jobs}
    losers = {name: [_loser(each, ids) for each in lost] for name, lost in result.lost.items() if lost}
    return Told([*_head(result)], ["instance", "figure", *shown], rows, losers)


def show(report: Told) -> None:
    """Print the whole report."""
    for line in report.head:
        print_line("", line)
    table(report.columns, report.rows)
    for name, lost in report.losers.items():
        click.echo(f"\n{OF_LOSERS} {name}:")
        table(LOSERS, lost)


def kept(report: Told, result: Result) -> dict[str, object]:
    """Return what is kept of a report: its words, and the points of its charts by run, kind and instance."""
    past = result.past
    runs = named_runs(result)
    names = charts.largest(runs.values())
    return {
        **asdict(report),
        "since": past.since,
        "until": past.until,
        "charts": {
            name: {"units": charts.units_in_use(each, names), "waits": charts.waits(each, names)}
            for name, each in runs.items()
        },
    }


def named_runs(result: Result) -> dict[str, Records]:
    """Return what really happened, if it did, and each replay, by the names of their columns."""
    real = {} if result.past.records is None else {REAL: result.past.records}
    return real | {name: each.replayed.records for name, each in result.outcomes.items()}


def _head(result: Result) -> Iterator[str]:
    past = result.past
    since, until = (datetime.fromtimestamp(each, UTC) for each in (past.since, past.until))
    yield (
        f"{plural(len(past.jobs), 'job')} on {plural(len({bot.name for bot in past.bots}), 'bot')}, "
        f"{since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"
        + (f"; {past.guessed:,} of them never ended a run, and get a usual run time" if past.guessed else "")
    )
    for why, number in past.left_out.items():
        yield f"Left out: {plural(number, 'job')} that {why}."
    if past.bots_left_out:
        yield f"Left out: {plural(past.bots_left_out, 'session')} of bots that {UNUSABLE}."
    if past.since < result.known_since:
        known = datetime.fromtimestamp(result.known_since, UTC)
        yield f"Of jobs that ended before {known:%Y-%m-%d %H:%M} UTC the journal has nothing."
    if result.real is None:
        yield "Nobody knows how far this is from what a pool would do: nothing of it has happened on one."
    elif result.error is None:
        yield f"No instance has {report.LEAST_JOBS} jobs, so nobody knows how far the replay is from what was."
    else:
        yield (
            f"Median and 95 % waits of the replay differ from the real ones by up to {result.error:.0%}, of instances "
            f"with {report.LEAST_JOBS} jobs or more."
        )
        yield "'=': a change of no more than that."
    shaken = len(result.outcomes[result.base].shaken)
    if shaken:
        yield f"In brackets: what 90 % of {plural(shaken, 'replay')} with shaken arrivals and run times lie between."


def _rows(shown: Mapping[str, Measured]) -> Iterator[_Row]:
    measured = [*shown.values()]
    for group in ("waits", "classes"):
        for name in sorted({name for each in measured for name in getattr(each, group)}):
            for title, field in (("median", "p50"), ("95 %", "p95"), ("longest", "most")):
                yield _Row((f"class {name}" if group == "classes" else name, title), *_of_waits(group, name, field))
    for name in sorted({name for each in measured for name in each.unmet}):
        yield _Row((name, "below minimum"), lambda each, name=name: each.unmet.get(name), duration)  # type: ignore[misc]
    yield _Row((POOL, "starts"), lambda each: each.starts, _whole)
    yield _Row((POOL, "evictions"), lambda each: each.evictions, _whole)
    yield _Row((POOL, "in use"), lambda each: each.utilisation, _part)
    yield _Row((POOL, "of it lost"), lambda each: each.lost, _part)
    yield _Row((POOL, "unstarted"), lambda each: sum(waits.waiting for waits in each.waits.values()), _whole)
    if any(each.fairness is not None for each in measured):
        yield _Row((POOL, "fairness"), lambda each: each.fairness, lambda value: f"{value:.3f}")
    if any(each.due for each in measured):
        yield _Row((POOL, "late"), lambda each: each.late, _whole)
    if any(each.hinted for each in measured):
        yield _Row((POOL, "near"), lambda each: each.near / each.hinted if each.hinted else None, _part)


def _of_waits(group: str, name: str, field: str) -> tuple[Figure, Callable[[float], str], Callable[[Measured], bool]]:
    """The figure of a row of waits, how it is told, and whether it is only the least that it can be."""

    def waits(measured: Measured) -> Waits | None:
        found: Waits | None = getattr(measured, group).get(name)
        return found

    def figure(measured: Measured) -> float | None:
        return None if (found := waits(measured)) is None else float(getattr(found, field))

    def is_least(measured: Measured) -> bool:
        return (found := waits(measured)) is not None and not found.is_known(field)

    return figure, duration, is_least


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _part(value: float) -> str:
    return f"{value:.1%}"


def _cell(result: Result, run: str, row: _Row) -> str:
    """A figure in words, with its interval; under a tried policy, with a mark if it is no other than in the replay."""
    figure, told = row.figure, row.told
    base, outcome = result.outcomes[result.base], result.outcomes.get(run)
    measured = result.real if outcome is None else outcome.replayed.measured
    value = None if measured is None else figure(measured)
    if measured is None or value is None:
        return "-"
    words = f"at least {told(value)}" if row.is_least(measured) else told(value)
    if outcome is None:
        return words
    shaken = sorted(each for each in map(figure, outcome.shaken) if each is not None)
    if shaken:
        low, high = (told(report.quantile(shaken, part)) for part in (TAIL, 1 - TAIL))
        words += "" if low == high == told(value) else f" ({low} to {high})"
    before = figure(base.replayed.measured)
    if run != result.base and before is not None and told is duration and not _is_changed(result, run, figure):
        words = f"= {words}"
    return words


def _is_changed(result: Result, run: str, figure: Figure) -> bool:
    """Whether a wait is another than under the base: by more than the error, and in nearly all shaken pasts alike."""
    base, tried = result.outcomes[result.base], result.outcomes[run]
    before, after = figure(base.replayed.measured) or 0.0, figure(tried.replayed.measured) or 0.0
    if not report.is_told(before, after, error=result.error):
        return False
    pairs = ((figure(one), figure(two)) for one, two in zip(base.shaken, tried.shaken, strict=True))
    changes = sorted(two - one for one, two in pairs if one is not None and two is not None)
    low, high = (report.quantile(changes, part) if changes else after - before for part in (TAIL, 1 - TAIL))
    return (low > 0 and after > before) or (high < 0 and after < before)


def _loser(loser: Loser, ids: Mapping[str, str]) -> list[str]:
    after = f"at least {duration(loser.after)}" if loser.waits else duration(loser.after)
    return [ids[loser.name], loser.instance, duration(loser.before), after]
