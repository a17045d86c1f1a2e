"""`leasehold simulate`: read the pool's past, replay it under each configuration, and print the comparison."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
from leasehold.errors import BadInput
from pydantic import ValidationError

from assigner.cli.output import print_json
from assigner.config import loading
from assigner.process.policies import DECLARED, merged
from assigner.settings import COMMAND_TIMEOUT, Installation, PoolSettings
from assigner.simulation import history, report
from assigner.simulation.replay import BotsOf, replay
from assigner.simulation.report import Measured
from schema.accounting.accounts import PoolLimits
from schema.policy import versions
from schema.policy.versions import Content
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database
from schema.readable import duration, plural, table

#: The columns of what really happened and of its replay as configured; the name of the rows of the whole pool.
REAL, NOW, POOL = "real", "replayed", "all"


def run(
    installation: Installation,
    span: float,
    policies: Sequence[Path],
    seed: int,
    *,
    bots_of: BotsOf,
    as_json: bool,
) -> None:
    """Simulate the last `span` seconds and print.

    Raises BadInput for a span without jobs or bots, and for a bad configuration.
    """
    settings = installation.settings
    longest = max(settings.upkeep.keep_succeeded, settings.upkeep.keep_journal)
    if not 60 <= span <= longest:
        raise BadInput("--since", f"must be from 1 min to {duration(longest)}, for which the pool knows its jobs")
    files = {
        path: loading.load(path, installation.sections, installation.environ)
        for path in policies
        if not _is_number(path)
    }
    with installation.database("simulate", patience=COMMAND_TIMEOUT) as database:
        migrate.require(database)
        past = database.run(lambda connection: history.read(connection, span))
        tried = {NOW: _of_version(database, settings, None)} | {
            _title(path, policies): Tried(files[path])
            if path in files
            else _of_version(database, settings, int(str(path)))
            for path in policies
        }
    if not past.jobs or not past.bots:
        raise BadInput("--since", f"the pool had no {'bot' if past.jobs else 'job'} in that time")
    found = {REAL: past.measured} | {name: _replayed(past, each, bots_of, seed) for name, each in tried.items()}
    error = report.error_of(past.measured, found[NOW])
    if as_json:
        runs = {name: asdict(each) for name, each in found.items()}
        print_json({"since": past.since, "until": past.until, "jobs": len(past.jobs), "guessed": past.guessed,
                    "error": error, "runs": runs})  # fmt: skip
        return
    _print(past, found, error, kept=settings.upkeep.keep_succeeded)


@dataclass(frozen=True)
class Tried:
    """What is tried: the settings, and the limits of a version; None = those in force, and what settings declare."""

    settings: PoolSettings
    content: Content | None = None


def _is_number(path: Path) -> bool:
    return str(path).isdecimal() and not path.exists()


def _of_version(database: Database, file: PoolSettings, id: int | None) -> Tried:
    """The settings of a version, or of the one in force for None, with its limits. Raises BadInput, and NotFound."""
    found = database.run(partial(versions.version, id=id) if id is not None else versions.in_force)
    if found is None or found.content is None:
        return Tried(file)
    try:
        wanted = merged(file, found.id, found.content["settings"]).settings
    except ValidationError as error:
        raise BadInput("--policy", f"version {found.id} cannot be used here: {error.errors()[0]['msg']}") from None
    # What the file declares is among the limits of the version, as it was then.
    fair = wanted.fair_share.model_copy(update=dict.fromkeys(PoolLimits.model_fields))
    return Tried(wanted.model_copy(update={**dict.fromkeys(DECLARED, ()), "fair_share": fair}), found.content)


def _title(path: Path, policies: Sequence[Path]) -> str:
    """The name of what is tried in the table: of a file its name, with its directory where that is not enough."""
    if _is_number(path):
        return f"version {path}"
    return path.name if sum(each.name == path.name for each in policies) == 1 else str(path)


def _replayed(past: history.Past, tried: Tried, bots_of: BotsOf, seed: int) -> Measured:
    """Replay on a private server, which is gone afterwards."""
    with embedded.serve_for_now("leasehold-simulate-") as server:
        return replay(past, tried.settings, server.url, bots_of, seed=seed, limits=tried.content)


def _print(past: history.Past, found: dict[str, Measured], error: float | None, *, kept: float) -> None:
    since, until = (datetime.fromtimestamp(each, UTC) for each in (past.since, past.until))
    click.echo(
        f"{plural(len(past.jobs), 'job')} on {plural(len({bot.name for bot in past.bots}), 'bot')}, "
        f"{since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"
        + (f"; {past.guessed:,} of them never ended a run, and get a usual run time" if past.guessed else "")
    )
    known_since = past.until - kept if past.journal_begins is None else min(past.until - kept, past.journal_begins)
    if past.since < known_since:
        known = datetime.fromtimestamp(known_since, UTC)
        click.echo(f"Of jobs that ended before {known:%Y-%m-%d %H:%M} UTC the journal has nothing.")
    if error is None:
        click.echo(f"No instance has {report.LEAST_JOBS} jobs, so nobody knows how far the replay is from what was.")
    else:
        click.echo(
            f"Median and 95 % waits of the replay differ from the real ones by up to {error:.0%}, of instances with "
            f"{report.LEAST_JOBS} jobs.\n'=': a change of no more than that."
        )
    columns, base = ["instance", "wait", *found], found[NOW]
    rows: list[list[str]] = []
    for name in report.instances_of([*found.values()]):
        for title, figure in (("median", "p50"), ("95 %", "p95"), ("longest", "most")):
            rows.append([name, title])
            for run, measured in found.items():
                waits = measured.waits.get(name)
                rows[-1].append("-" if waits is None else _wait(getattr(waits, figure), run, base, name, figure, error))
    for title, figure in (("starts", "starts"), ("evictions", "evictions")):
        rows.append([POOL, title, *(f"{getattr(each, figure):,}" for each in found.values())])
    rows.append([POOL, "in use", *(f"{each.utilisation:.1%}" for each in found.values())])
    waiting = [sum(each.waiting for each in measured.waits.values()) for measured in found.values()]
    rows.append([POOL, "unstarted", *(f"{each:,}" for each in waiting)])
    table(columns, rows)


def _wait(value: float, run: str, base: Measured, name: str, figure: str, error: float | None) -> str:
    """A wait in words; under a tried configuration, with a mark if it is no other than in the replay."""
    if run in (REAL, NOW) or name not in base.waits:
        return duration(value)
    before = float(getattr(base.waits[name], figure))
    return duration(value) if report.is_told(before, value, error=error) else f"= {duration(value)}"
