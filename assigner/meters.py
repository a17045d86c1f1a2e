"""The operator's commands for usage meters: what they stand at, how that goes over the day, when to start best."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import click
from sqlalchemy import Connection, text

from assigner import forecast
from assigner.installation import COMMAND_PATIENCE, Installation
from assigner.operate import as_json, pass_installation, print_json, print_table
from schema import hours, meters, openings
from schema.errors import BadInput, NotFound
from schema.limits import check_name, escaped

ACTOR = "local"
NOW = text("SELECT now()")

T = TypeVar("T")


def _run(installation: Installation, work: Callable[[Connection], T]) -> T:
    with installation.ready_database("meters", patience=COMMAND_PATIENCE) as database:
        return database.run(work)


def _instant(_context: click.Context, _option: click.Parameter, value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise click.BadParameter(f"'{escaped(value, 40)}' is not a time with a zone, such as 2026-11-21T20:00Z")
    return found


def _zone(_context: click.Context, _option: click.Parameter, value: str) -> ZoneInfo:
    try:
        return hours.zone(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.group("meter")
def meter_group() -> None:
    """Usage meters, which windows may go by."""


@meter_group.command("set")
@click.argument("name")
@click.option("--used", type=float, required=True, help="In a unit of the meter's own.")
@click.option("--limit", "most", type=float, required=True, help="The most there may be used, in the same unit.")
@click.option("--resets-at", callback=_instant, metavar="TIME", help="When it begins at 0 again [not known].")
@as_json
@pass_installation
def set_meter(
    installation: Installation, name: str, used: float, most: float, resets_at: datetime | None, as_json: bool
) -> None:
    """Write what a meter stands at now."""
    check_name("NAME", name)
    _run(installation, lambda c: meters.put(c, name, used=used, most=most, resets_at=resets_at))
    if as_json:
        print_json({"name": name, "used": used, "limit": most, "resets_at": resets_at})
    else:
        click.echo(f"{name} stands at {100 * used / most:.3g} % of its limit")


@meter_group.command("list")
@as_json
@pass_installation
def list_meters(installation: Installation, as_json: bool) -> None:
    """List the meters that have been read."""
    now, found = _run(installation, lambda c: (c.execute(NOW).scalar_one(), meters.meters(c)))
    if as_json:
        print_json([_shown(each) for each in found])
        return
    rows = [
        (each.name, f"{each.used:g}", f"{each.most:g}", f"{each.percent(now):.3g}",
         f"{(now - each.updated_at).total_seconds():.0f}",
         None if each.resets_at is None else hours.wall(each.resets_at, hours.zone("UTC")))
        for each in found
    ]  # fmt: skip
    print_table(["meter", "used", "limit", "percent", "seconds ago", "resets at"], rows)


@meter_group.command("rm")
@click.argument("name")
@as_json
@pass_installation
def remove_meter(installation: Installation, name: str, as_json: bool) -> None:
    """Forget a meter. Windows that go by it are closed until it is read again."""
    _run(installation, lambda c: meters.remove(c, name, actor=ACTOR))
    print_json({"name": name, "removed": True}) if as_json else click.echo(f"{name} is forgotten")


@meter_group.command("pattern")
@click.argument("name")
@click.option("--zone", callback=_zone, default="UTC", show_default=True, metavar="NAME", help="Of the hours.")
@as_json
@pass_installation
def show_pattern(installation: Installation, name: str, zone: ZoneInfo, as_json: bool) -> None:
    """Show how a meter went over the day, in the last four weeks: percent of its limit by the hour."""
    levels = _run(installation, lambda c: meters.history(c, [name]))[name]
    if not levels:
        raise NotFound(f"meter: nothing is known of '{escaped(name, 63)}'")
    found = forecast.pattern(levels, zone)
    if as_json:
        print_json(asdict(found))
        return
    print_table(
        ["hour", "percent", ""],
        [
            (f"{hour:02}", None if each is None else f"{each:.3g}", "peak" if hour in found.peak_hours else "")
            for hour, each in enumerate(found.avg_usage_by_hour)
        ],
    )
    for begin, end in found.idle_periods:
        click.echo(f"idle from {begin:02}:00 to {end:02}:00")


@meter_group.command("forecast")
@click.option("--class", "job_class", required=True, metavar="NAME", help="The class of the job.")
@click.option("--estimate", type=click.FloatRange(0, meters.MAX_AMOUNT), default=0.0, help="What it will use [0].")
@as_json
@pass_installation
def show_forecast(installation: Installation, job_class: str, estimate: float, as_json: bool) -> None:
    """Say in which window to come a job had best start: the next one of which the meter is expected to stand low
    enough."""
    check_name("--class", job_class)

    def work(connection: Connection) -> tuple[forecast.Start | None, openings.Openings]:
        found = openings.read(connection)
        if not found.windows:
            raise BadInput("windows", "there are none in the configuration")
        names = [each.settings.meter for each in found.windows if each.settings.meter is not None]
        start = forecast.best_start(
            found,
            job_class,
            estimate=estimate,
            histories=meters.history(connection, names),
            now=connection.execute(NOW).scalar_one(),
        )
        return start, found

    start, found = _run(installation, work)
    if as_json:
        print_json(None if start is None else asdict(start))
    elif start is None:
        click.echo("no suitable window")
    else:
        zone = next(each.settings.hours.zone for each in found.windows if each.settings.name == start.window)
        expected = "" if start.percent is None else f", its meter expected at {start.percent:.3g} %"
        click.echo(f"window '{start.window}' opens at {hours.wall(start.at, zone)}{expected}")


def _shown(meter: meters.Meter) -> dict[str, Any]:
    shown = asdict(meter)
    shown["limit"] = shown.pop("most")
    return shown
