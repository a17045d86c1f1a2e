"""`leasehold simulate`: find the past that is repeated, replay it under each policy, and print the comparison."""

import io
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import psycopg
from leasehold.errors import BadInput, NotReady
from pydantic import ValidationError

from assigner.cli.simulations import comparison
from assigner.config import loading
from assigner.process.policies import DECLARED, merged
from assigner.settings import COMMAND_TIMEOUT, Installation, PoolSettings
from assigner.simulation import generated, history, plot, report, traces
from assigner.simulation.past import Past, PastBot, onwards, with_more
from assigner.simulation.replay import BotsOf, measured_of, step_of
from assigner.simulation.runs import Trial, run_all
from schema.accounting import simulations
from schema.accounting.accounts import PoolLimits
from schema.fields import first_error
from schema.policy import versions
from schema.policy.versions import Content
from schema.postgres import migrate
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.readable import duration, print_json, tell

#: Who keeps reports, as the audit tells it.
ACTOR = "local"
#: The options that say what is repeated.
SOURCES = ("since", "from_now", "trace", "generate")
#: What `--bots` is if it is not a file: a number of bots more or fewer, and the name of one that they are like.
_MORE = re.compile(r"([+-]\d{1,5})(?::(.+))?")


@dataclass(frozen=True)
class Asked:
    """The options of a call. One of `since`, `from_now`, `trace` and `generate` is set, or none, which means 24 hours.

    since, from_now, span, step: seconds. bots: a file, or bots that are added or leave, as `+5` or `-2:NAME`.
    title: under which the report is kept in the pool; None = it is not.
    """

    since: float | None
    trace: Path | None
    span: float | None
    generate: Path | None
    bots: str | None
    seed: int
    step: float | None
    from_now: float | None = None
    policies: Sequence[Path] = ()
    shake: int = 0
    html: Path | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        """Raise BadInput for options that mean nothing together."""
        given = [f"--{name.replace('_', '-')}" for name in SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise BadInput(given[0], f"does not go together with {given[1]}")
        if self.span is not None and self.trace is None:
            raise BadInput("--span", "is a part of a trace: give --trace")
        for name in ("span", "step"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise BadInput(f"--{name}", "must be above 0")

    @property
    def source(self) -> str:
        """The option that says what is repeated."""
        return next((f"--{n.replace('_', '-')}" for n in SOURCES if getattr(self, n) is not None), "--since")


def run(installation: Installation, asked: Asked, *, bots_of: Callable[[PoolSettings], BotsOf], as_json: bool) -> None:
    """Simulate and print. Raises BadInput for wrong options, files and spans without jobs or bots."""
    if asked.html is not None:
        plot.require()
        if not os.access(asked.html.absolute().parent, os.W_OK) or asked.html.is_dir():
            raise BadInput("--html", "cannot be written there")
    if asked.title is not None:
        keep = partial(simulations.try_to_keep, title=asked.title, actor=ACTOR)
        require_can_write(installation, keep, "the report cannot be kept in the pool")
    # A wrong file is told before the pool is asked.
    files = {path: _loaded(installation, path) for path in asked.policies if not _is_number(path)}
    past, tried = read(installation, asked, files)
    if not past.jobs or not past.bots:
        raise BadInput(asked.source, f"there was no {'bot' if past.jobs else 'job'} in that time")
    step = step_of(past, asked.step)
    trials = _trials(tried, asked, past, bots_of)
    outcomes = dict(
        zip(
            (trial.name for trial in trials),
            run_all(past, trials, seed=asked.seed, step=step, shakes=asked.shake, told=tell_progress),
            strict=True,
        )
    )
    real = None if past.records is None else measured_of(past, past.records)
    base = trials[0].name
    error = None if real is None else report.error_of(real, outcomes[base].replayed.measured)
    lost = {
        name: report.losers(outcomes[base].replayed.records, outcome.replayed.records)
        for name, outcome in outcomes.items()
        if name != base
    }
    result = comparison.Result(
        past, real, outcomes, base, error, lost, known_since=_known_since(installation.settings, past)
    )
    told = comparison.told(result)
    if asked.html is not None:
        with redirect_stdout(io.StringIO()) as written:
            comparison.show(told)
        title = asked.title or f"Simulation from {datetime.fromtimestamp(past.since, UTC):%Y-%m-%d %H:%M} UTC"
        _write(asked.html, plot.page(title, written.getvalue(), comparison.named_runs(result)))
    # What took so long is told first: it may be that it cannot be kept.
    print_json(_document(result)) if as_json else comparison.show(told)
    if asked.title is not None:
        number = _keep(installation, asked.title, comparison.kept(told, result))
        tell(f"Kept as simulation {number}, for the console.")


def require_can_write(installation: Installation, write: Callable[[Connection], object], failing: str) -> None:
    """Write what is written at the end, and undo it. Raises NotReady if that cannot be, which otherwise is told only
    after the simulation. failing: what cannot be then, a clause."""

    def tried(connection: Connection) -> None:
        with connection.savepoint() as point:
            write(connection)
            point.rollback()

    with _pool(installation) as database:
        try:
            database.run(tried)
        except NotReady as error:
            raise NotReady(f"{failing}: {error}") from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise NotReady(f"{failing}: {error.diag.message_primary}") from None


@contextmanager
def _pool(installation: Installation) -> Iterator[Database]:
    """The live pool's database. Raises NotReady if it cannot be used as it is."""
    with installation.database("simulate", patience=COMMAND_TIMEOUT) as database:
        migrate.require(database)
        yield database


def _keep(installation: Installation, title: str, report: Mapping[str, object]) -> int:
    """Keep a report in the pool. Raises BadInput."""
    with _pool(installation) as database:
        return database.run(lambda connection: simulations.keep(connection, title=title, report=report, actor=ACTOR))


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
        raise BadInput("--policy", f"version {found.id} cannot be used here: {first_error(error)[1]}") from None
    # What the file declares is among the limits of the version, as it was then.
    fair = wanted.fair_share.model_copy(update=dict.fromkeys(PoolLimits.model_fields))
    return Tried(wanted.model_copy(update={**dict.fromkeys(DECLARED, ()), "fair_share": fair}), found.content)


def _loaded(installation: Installation, path: Path) -> PoolSettings:
    return loading.load(path, installation.sections, installation.environ)


def read(installation: Installation, asked: Asked, files: Mapping[Path, PoolSettings]) -> tuple[Past, dict[str, Tried]]:
    """Return the past that is repeated, and what is tried: first what is in force.

    A recorded and a generated load need no database unless a version is tried. What is in force is the configuration
    then.
    """
    settings, other = installation.settings, _other(asked)
    base = comparison.CONFIGURED if other else comparison.NOW
    if other and len(files) == len(asked.policies):
        return other, {base: Tried(settings)} | {_title(path, files): Tried(each) for path, each in files.items()}
    with _pool(installation) as database:
        past = other or _of_pool(database, settings, asked)
        tried = {base: Tried(settings) if other else _of_version(database, settings, None)}
        for path in asked.policies:
            number = int(str(path)) if path not in files else None
            title = _title(path, asked.policies)
            tried[title] = Tried(files[path]) if number is None else _of_version(database, settings, number)
    return past, tried


def _other(asked: Asked) -> Past | None:
    """The past that is not this pool's, if one was asked for."""
    if asked.generate is not None:
        return generated.generate(asked.generate, seed=asked.seed)
    if asked.trace is None:
        return None
    # A trace rarely tells its bots. Then those of a file are not tried: there are no others.
    given = None if asked.bots is None or _MORE.fullmatch(asked.bots) else generated.read_bots(Path(asked.bots))
    return traces.read_trace(asked.trace, given, span=asked.span)


def _of_pool(database: Database, settings: PoolSettings, asked: Asked) -> Past:
    span = asked.from_now if asked.from_now is not None else 86400.0 if asked.since is None else asked.since
    longest = max(settings.upkeep.keep_succeeded, settings.upkeep.keep_journal)
    if not 60 <= span <= longest:
        raise BadInput(asked.source, f"must be from 1 min to {duration(longest)}, for which the pool knows its jobs")
    past = database.run(lambda connection: history.read(connection, span))
    return onwards(past) if asked.from_now is not None else past


def _known_since(settings: PoolSettings, past: Past) -> float:
    """Since when the pool knows its jobs that have ended, in seconds since 1970."""
    if past.records is None:
        return past.since
    kept = past.until - settings.upkeep.keep_succeeded
    return kept if past.journal_begins is None else min(kept, past.journal_begins)


def _trials(
    tried: Mapping[str, Tried], asked: Asked, past: Past, bots_of: Callable[[PoolSettings], BotsOf]
) -> list[Trial]:
    """What each column is about. Other bots are for what is tried; with no other policy, for what is in force again."""
    base, *others = tried.items()
    changed = _bots(past, asked.bots)
    if changed is not past.bots and not others:
        others = [(f"bots {asked.bots}", base[1])]
    return [
        Trial(name, each.settings, each.content, bots, bots_of(each.settings))
        for bots, group in ((past.bots, [base]), (changed, others))
        for name, each in group
    ]


def _bots(past: Past, bots: str | None) -> Sequence[PastBot]:
    """The bots to try; the past's own if no others are asked for."""
    if bots is None:
        return past.bots
    more = _MORE.fullmatch(bots)
    other = generated.read_bots(Path(bots)) if more is None else with_more(past, int(more[1]), more[2]).bots
    return past.bots if other == past.bots else other


def _title(path: Path, policies: Collection[Path]) -> str:
    """The name of what is tried in the table: of a file its name, with its directory where that is not enough."""
    if _is_number(path):
        return f"version {path}"
    is_alone = sum(each.name == path.name for each in policies) == 1
    taken = (comparison.REAL, comparison.NOW, comparison.CONFIGURED)
    return path.name if is_alone and path.name not in taken else str(path.absolute())


def tell_progress(done: int, of: int) -> None:
    """Tell a person how far it is."""
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {of} replays" + ("\n" if done == of else ""), err=True, nl=False)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadInput("--html", f"cannot be written: {error.strerror}") from None


def _document(result: "comparison.Result") -> dict[str, object]:
    past = result.past
    real = {} if result.real is None else {comparison.REAL: asdict(result.real)}
    return {
        "since": past.since,
        "until": past.until,
        "jobs": len(past.jobs),
        "guessed": past.guessed,
        "left_out": dict(past.left_out),
        "bots_left_out": past.bots_left_out,
        "error": result.error,
        "runs": real | {name: asdict(each.replayed.measured) for name, each in result.outcomes.items()},
        "shaken": {name: [asdict(one) for one in each.shaken] for name, each in result.outcomes.items()},
        "losers": {name: [asdict(one) for one in lost] for name, lost in result.lost.items()},
    }
