"""The operator's commands for what jobs are worth: classes, service levels, and what holds for all of them."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import click
from sqlalchemy import Connection

from assigner.installation import COMMAND_PATIENCE, Installation
from assigner.operate import as_json, duration, pass_installation, print_json, print_table
from schema import audit, classes, counters, moves, predictions
from schema.engine import Database
from schema.errors import BadInput
from schema.limits import check_name, escaped
from schema.moves.repricing import BEGINNING

ACTOR = "local"
#: Jobs that get another priority in one transaction.
LIMIT = 500

T = TypeVar("T")


def _run(installation: Installation, work: Callable[[Connection], T]) -> T:
    with installation.ready_database("policies", patience=COMMAND_PATIENCE) as database:
        return database.run(work)


def _apply(installation: Installation, work: Callable[[Connection], None]) -> int:
    """Change what jobs are worth, then, in batches, those that wait; returns how many."""
    with installation.ready_database("policies", patience=COMMAND_PATIENCE) as database:
        database.run(work)
        return reprice(database, actor=ACTOR)


def reprice(database: Database, *, actor: str) -> int:
    """Give all waiting jobs the priority that their points come to now, a batch at a time; returns how many changed."""
    changed = 0
    after: tuple[object, ...] | None = BEGINNING
    while after is not None:
        done = database.run(partial(moves.reprice, after=after, limit=LIMIT, actor=actor))
        changed, after = changed + done.changed, done.after
    return changed


def _told(done: str, changed: int, *, as_json: bool, **fields: object) -> None:
    if as_json:
        print_json({**fields, "repriced": changed})
    else:
        click.echo(f"{done}; {changed} waiting job{'' if changed == 1 else 's'} changed")


def _limit(installation: Installation, counter: str, most: float | None) -> None:
    def work(connection: Connection) -> None:
        counters.limit(connection, counter, most)
        audit.write(connection, "limit.set", actor=ACTOR, subject=counter, details={"most": most})

    _run(installation, work)


def _seconds(context: click.Context, option: click.Parameter, value: str | None) -> float | str | None:
    """A duration, or `none`."""
    return value if value == "none" else duration(context, option, value)


def _number(_context: click.Context, option: click.Parameter, value: str | None) -> float | str | None:
    """A number of 0 or more, or `none`."""
    if value is None or value == "none":
        return value
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1e12:
        raise BadInput(f"--{option.name}", f"'{escaped(value, 40)}' is neither a number of 0 or more nor 'none'")
    return found


def _jobs(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    """A number of jobs, or `none`."""
    found = _number(context, option, value)
    return int(found) if isinstance(found, float) else found


@click.group("class")
def class_group() -> None:
    """Classes of jobs, and what each is worth in points: more are more urgent."""


@class_group.command("list")
@as_json
@pass_installation
def list_classes(installation: Installation, as_json: bool) -> None:
    """List the classes, the most urgent first, with how long their jobs lately ran."""
    found, policy = _run(installation, lambda connection: (classes.classes(connection), classes.policy(connection)))
    shown = [asdict(each) | {"priority": 100 - each.points, "level": policy.level(100 - each.points)} for each in found]
    if as_json:
        print_json(shown)
        return
    columns = ["name", "points", "priority", "level", "seconds", "seconds_high"]
    heads = ["class", "points (higher = sooner)", "priority (lower = sooner)", "level", "seconds", "nine of ten"]
    print_table(heads, [tuple(each[column] for column in columns) for each in shown])


@class_group.command("set")
@click.argument("name")
@click.argument("points", type=click.IntRange(classes.LEAST_POINTS, classes.MOST_POINTS))
@as_json
@pass_installation
def set_class(installation: Installation, name: str, points: int, as_json: bool) -> None:
    """Make a class, or change its points. Its waiting jobs change with it; the pool goes on meanwhile."""
    changed = _apply(installation, lambda c: classes.put_class(c, name, points=points, actor=ACTOR))
    _told(
        f"{name} is worth {points} points: priority {100 - points}", changed, as_json=as_json, name=name, points=points
    )


@class_group.command("limit")
@click.argument("name")
@click.argument("jobs", callback=_jobs)
@as_json
@pass_installation
def limit_class(installation: Installation, name: str, jobs: int | str, as_json: bool) -> None:
    """Set how many jobs of a class may run at once, which keeps the rest for others; none = any number."""
    check_name("NAME", name)
    most = None if isinstance(jobs, str) else jobs
    _limit(installation, f"class:{name}:jobs", most)
    done = f"{name} may run {'any number of' if most is None else most} jobs at once"
    print_json({"name": name, "jobs": most}) if as_json else click.echo(done)


@class_group.command("report")
@as_json
@pass_installation
def report_classes(installation: Installation, as_json: bool) -> None:
    """Compare what was estimated with what was, for the jobs of each class that ended last."""
    found = _run(installation, predictions.accuracy)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    rows = [(each.name, each.jobs, each.estimated, each.ratio, each.dated, each.late) for each in found]
    print_table(["class", "jobs", "estimated", "ran / estimate", "with a deadline", "late"], rows)


@click.group("service-level")
def level_group() -> None:
    """Service levels: the points and the timeout that their jobs get."""


@level_group.command("list")
@as_json
@pass_installation
def list_levels(installation: Installation, as_json: bool) -> None:
    """List the service levels, the most urgent first."""
    found = _run(installation, classes.service_levels)
    if as_json:
        print_json([asdict(each) | {"priority": 100 - each.points} for each in found])
        return
    rows = [(each.name, each.points, 100 - each.points, each.timeout_seconds) for each in found]
    print_table(["level", "points (higher = sooner)", "priority (lower = sooner)", "timeout"], rows)


@level_group.command("set")
@click.argument("name")
@click.option("--points", type=click.IntRange(classes.LEAST_POINTS, classes.MOST_POINTS), required=True)
@click.option("--timeout", callback=duration, metavar="TIME", required=True, help="Seconds, or like 15m or 2h.")
@as_json
@pass_installation
def set_level(installation: Installation, name: str, points: int, timeout: float, as_json: bool) -> None:
    """Make a service level, or change it. Waiting jobs get its points; their timeout stays."""
    changed = _apply(
        installation, lambda c: classes.put_service_level(c, name, points=points, timeout=timeout, actor=ACTOR)
    )
    done = f"{name} is worth {points} points: priority {100 - points}, timeout {timeout:g} s"
    _told(done, changed, as_json=as_json, name=name, points=points, timeout_seconds=timeout)


@click.group("scheduling")
def scheduling_group() -> None:
    """What holds for all classes: points of projects and users, levels, starvation, overflow."""


@scheduling_group.command("show")
@as_json
@pass_installation
def show_scheduling(installation: Installation, as_json: bool) -> None:
    """Show it."""
    found = asdict(_run(installation, classes.policy))
    print_json(found) if as_json else print_table(["setting", "value"], list(found.items()))


@scheduling_group.command("set")
@click.option("--project-points", type=click.IntRange(-100, 100), help="Of a job that belongs to a project [10].")
@click.option("--user-points", type=click.IntRange(-100, 100), help="For each step of its user's priority [5].")
@click.option("--critical", type=int, metavar="PRIORITY", help="The largest effective priority of the level [0].")
@click.option("--high", type=int, metavar="PRIORITY", help="Of the next [40].")
@click.option("--normal", type=int, metavar="PRIORITY", help="And of the next [60]; what is above is low.")
@click.option(
    "--starvation",
    "starvation_seconds",
    callback=_seconds,
    metavar="TIME",
    help="In one level, until it moves up; or none [1h].",
)
@click.option("--max-queue-size", callback=_jobs, metavar="JOBS", help="That may wait; none = any number [none].")
@as_json
@pass_installation
def set_scheduling(installation: Installation, /, as_json: bool, **options: Any) -> None:
    """Change it; what is not given stays."""
    wanted: dict[str, Any] = {
        name: None if value == "none" else value for name, value in options.items() if value is not None
    }
    if not wanted:
        raise click.UsageError("give at least one setting")

    def work(connection: Connection) -> None:
        policy = replace(classes.policy(connection), **wanted)
        classes.put_policy(connection, policy, actor=ACTOR)

    _told("done", _apply(installation, work), as_json=as_json, **wanted)


def _cost_command(kind: str, whose: str) -> click.Command:
    @click.command(kind, help=f"Set how much the jobs of {whose} may cost within the window; none = any amount.")
    @click.argument("instance")
    @click.argument("name")
    @click.argument("cost", callback=_number)
    @as_json
    @pass_installation
    def command(installation: Installation, instance: str, name: str, cost: float | str, as_json: bool) -> None:
        check_name("INSTANCE", instance)
        check_name("NAME", name)
        most = None if isinstance(cost, str) else cost
        _limit(installation, f"{kind}:{instance}:{name}:cost", most)
        if as_json:
            print_json({"instance": instance, kind: name, "cost": most})
        else:
            click.echo(f"{kind} {name} of {instance} may cost {'any amount' if most is None else f'{most:g}'}")

    return command


set_owner_quota = _cost_command("owner", "one owner")
set_project_quota = _cost_command("project", "one project")
