"""The command of fault runs: `python -m ops.chaos.run --minutes 10 --seed 1`. README.md explains its output."""

import json
import random
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from leasehold.errors import BadInput

from ops.chaos import schedule
from ops.chaos.faults import FAULTS
from ops.chaos.pool import FAST, Shape, chaos_pool
from ops.chaos.report import Report, table
from ops.chaos.schedule import Plan
from schema.timing import Timing

TIMINGS = {"fast": FAST, "production": Timing()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), help="How long faults are injected [default: 10]."
)
@click.option("--faults", type=click.IntRange(min=1), help="How many faults are injected.")
@click.option("--seed", type=int, help="Seed of all chance [default: drawn].")
@click.option("--only", multiple=True, type=click.Choice(sorted(FAULTS)), help="Inject only this fault; repeatable.")
@click.option("--without", multiple=True, type=click.Choice(sorted(FAULTS)), help="Do not inject it; repeatable.")
@click.option(
    "--timing", type=click.Choice(sorted(TIMINGS)), default="fast", show_default=True, help="Times of the pool."
)
@click.option("--bots", type=click.IntRange(1, 100), default=Shape.bots, show_default=True, help="Bots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option(
    "--merge",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing: print one table of runs, each a file that --json has printed; repeatable.",
)
def main(
    minutes: float | None,
    faults: int | None,
    seed: int | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    timing: str,
    bots: int,
    as_json: bool,
    merge: tuple[Path, ...],
) -> None:
    """Inject random faults into a whole pool under load, and check that it breaks none of its promises.

    Exits with 1 on any violation. The order of faults and their targets repeat with the seed; the moments at which
    they hit the processes do not.
    """
    if merge:
        reports = [read(path) for path in merge]
        click.echo(told(*reports))
        sys.exit(1 if any(report.violations for report in reports) else 0)
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    seconds = 60.0 * (minutes or 10.0) if minutes is not None or faults is None else None
    kinds = [kind for name, kind in FAULTS.items() if (not only or name in only) and name not in without]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with chaos_pool(random.Random(seed), shape=Shape(bots=bots), timing=TIMINGS[timing]) as pool:
        report = schedule.run(
            pool, Plan(kinds, faults=faults, seconds=seconds), seed=seed, say=partial(click.echo, err=True)
        )
    click.echo(json.dumps(report.json()) if as_json else told(report))
    sys.exit(1 if report.violations else 0)


def read(path: Path) -> Report:
    """Read the report of a run that has ended; exit with 2 if the file holds none."""
    try:
        return Report.from_json(json.loads(path.read_bytes()))
    except (BadInput, ValueError) as error:
        reason = error.reason if isinstance(error, BadInput) else f"is no JSON: {error}"
        click.echo(f"error: {path}: {reason}", err=True)
        sys.exit(2)


def told(*reports: Report) -> str:
    """Return one report, or several in one table, for people."""
    return "\n".join([table(reports), "", *(line for report in reports for line in _details(report))])


def _details(report: Report) -> Sequence[str]:
    lines = [f"not injected: {name}: {reason}" for name, reason in report.not_injected.items()]
    lines += [f"nothing to hit: {name}: {times} times" for name, times in report.missed.items()]
    lines.append(", ".join(f"{number} {name}" for name, number in report.counts.items()))
    lines += [f"after {report.fault_of(violation)}: {violation}" for violation in report.violations]
    verdict = f"{len(report.violations)} violations" if report.violations else "no violation"
    lines.append(
        f"{verdict} in {len(report.injections)} faults and {report.seconds:.0f} s; seed {report.seed}"
        + (f"; logs, journal and execution log: {report.directory}" if report.violations else "")
    )
    return lines


if __name__ == "__main__":
    main()
