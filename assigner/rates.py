"""The operator's commands for how fast jobs may start: rates, and advice to hold back."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

import click
from sqlalchemy import Connection

from assigner.drains import reason_option
from assigner.installation import COMMAND_PATIENCE, Installation
from assigner.operate import as_json, pass_installation, print_json, print_table
from schema import backpressure, rates

ACTOR = "local"

T = TypeVar("T")


def _run(installation: Installation, work: Callable[[Connection], T]) -> T:
    with installation.ready_database("rates", patience=COMMAND_PATIENCE) as database:
        return database.run(work)


@click.group("rate")
def rate_group() -> None:
    """How many jobs of a resource class, or of a model of it, start in a second."""


@rate_group.command("set")
@click.argument("resource", metavar="CLASS[/MODEL]")
@click.option("--per-second", type=float, required=True, metavar="JOBS", help="In the long run; may be below 1.")
@click.option("--burst", type=int, default=1, show_default=True, metavar="JOBS", help="At once, after a quiet time.")
@reason_option
@as_json
@pass_installation
def set_rate(
    installation: Installation, resource: str, per_second: float, burst: int, reason: str, as_json: bool
) -> None:
    """Set a rate. No span of S seconds sees more than BURST + PER_SECOND x S starts, whoever places them."""
    _run(
        installation,
        lambda c: rates.set_rate(c, resource, per_second=per_second, burst=burst, actor=ACTOR, reason=reason),
    )
    if as_json:
        print_json({"resource": resource, "per_second": per_second, "burst": burst})
    else:
        click.echo(f"{resource} starts {per_second:g} jobs per second, {burst} at once")


@rate_group.command("list")
@as_json
@pass_installation
def list_rates(installation: Installation, as_json: bool) -> None:
    """List the rates, and the jobs that may start at once now."""
    found = _run(installation, rates.rates)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    rows = [(each.resource, f"{each.per_second:g}", each.burst, f"{each.tokens:.1f}") for each in found]
    print_table(["resource", "per second", "burst", "now"], rows)


@rate_group.command("rm")
@click.argument("resource", metavar="CLASS[/MODEL]")
@reason_option
@as_json
@pass_installation
def remove_rate(installation: Installation, resource: str, reason: str, as_json: bool) -> None:
    """Let jobs start at any rate."""
    _run(installation, lambda c: rates.remove_rate(c, resource, actor=ACTOR, reason=reason))
    print_json({"resource": resource, "removed": True}) if as_json else click.echo(f"{resource} has no rate")


@click.group("backpressure")
def backpressure_group() -> None:
    """Advice to hold back jobs that ask for more than a place, of one resource class or all."""


@backpressure_group.command("set")
@click.argument("resource_class", metavar="[CLASS]", required=False)
@click.option("--stop", is_flag=True, help="Start none.")
@click.option("--delay", type=float, default=0.0, metavar="SECONDS", help="Wait so long after some have started.")
@click.option("--for", "seconds", type=float, metavar="SECONDS", help="For so long [until it is taken back].")
@reason_option
@as_json
@pass_installation
def set_advice(
    installation: Installation,
    resource_class: str | None,
    stop: bool,
    delay: float,
    seconds: float | None,
    reason: str,
    as_json: bool,
) -> None:
    """Advise assigners to start no jobs, or to wait between starts. What runs goes on."""
    if stop == bool(delay):
        raise click.UsageError("give exactly one of: --stop, --delay")
    _run(
        installation,
        lambda c: backpressure.advise(
            c, resource_class, allowed=not stop, delay=delay, seconds=seconds, actor=ACTOR, reason=reason
        ),
    )
    if as_json:
        print_json({"resource_class": resource_class, "allowed": not stop, "delay": delay, "seconds": seconds})
    else:
        told = "start no jobs" if stop else f"wait {delay:g} s after a start"
        click.echo(f"assigners {told} of {resource_class or 'any class'}")


@backpressure_group.command("list")
@as_json
@pass_installation
def list_advice(installation: Installation, as_json: bool) -> None:
    """List what is advised now."""
    found = _run(installation, backpressure.standing)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    rows = [
        (each.resource_class or "all", "yes" if each.allowed else "no", f"{each.delay:g}", each.until) for each in found
    ]
    print_table(["class", "allowed", "delay", "until"], rows)


@backpressure_group.command("rm")
@click.argument("resource_class", metavar="[CLASS]", required=False)
@reason_option
@as_json
@pass_installation
def remove_advice(installation: Installation, resource_class: str | None, reason: str, as_json: bool) -> None:
    """Take advice back."""
    _run(installation, lambda c: backpressure.take_back(c, resource_class, actor=ACTOR, reason=reason))
    if as_json:
        print_json({"resource_class": resource_class, "removed": True})
    else:
        click.echo(f"nothing is advised for {resource_class or 'all jobs'}")
