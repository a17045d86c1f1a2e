"""The operator's commands that take an instance or an assigner process out of service, and back into it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import click

from assigner.installation import COMMAND_PATIENCE, Installation
from assigner.operate import as_json, duration, pass_installation, print_json, print_table
from schema import clock, drains
from schema.engine import Database
from schema.errors import LeaseholdError, NotFound
from schema.limits import MAX_REASON, check_name, check_text, escaped

#: Seconds between two looks at whether a drain is done.
LOOK = 0.5
#: What `--wait` waits for in an assigner process.
OUT_OF_SERVICE = ("drained", "stopped", "dead")

F = TypeVar("F", bound=Callable[..., Any])


def _reason(_context: click.Context, _option: click.Parameter, value: str) -> str:
    return check_text("--reason", value, MAX_REASON)


reason_option = click.option("--reason", default="", callback=_reason, metavar="TEXT", help="Kept in the audit log.")


@contextmanager
def _database(installation: Installation) -> Iterator[Database]:
    with installation.ready_database("drain", patience=COMMAND_PATIENCE) as database:
        yield database


def _told(name: str, *, draining: bool, done: str, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "draining": draining})
    else:
        click.echo(f"{name} {done}")


@click.command("drain")
@click.argument("name")
@click.option(
    "--deadline",
    callback=duration,
    metavar="TIME",
    help="Stop what still runs after seconds, or like 15m or 2h [never].",
)
@click.option("--wait", is_flag=True, help="Wait until it runs nothing; Ctrl-C ends the waiting only.")
@reason_option
@as_json
@pass_installation
def drain_instance(
    installation: Installation, name: str, deadline: float | None, wait: bool, reason: str, as_json: bool
) -> None:
    """Start no more jobs of an instance. Its jobs stay queued; what runs may end, or is queued again."""
    check_name("NAME", name)
    drains.check_deadline("--deadline", deadline, draining=True)
    with _database(installation) as database:
        database.run(
            lambda connection: drains.drain_instance(
                connection, name, draining=True, actor="local", reason=reason, deadline=deadline
            )
        )
        while wait and (leases := database.run(lambda connection: drains.instance_leases(connection, name))) != 0:
            if leases is None:
                raise LeaseholdError(f"instance '{name}' is drained no more: somebody has taken that back")
            clock.sleep(LOOK)
    _told(name, draining=True, done="runs nothing any more" if wait else "starts no more jobs", as_json=as_json)


@click.command("undrain")
@click.argument("name")
@reason_option
@as_json
@pass_installation
def undrain_instance(installation: Installation, name: str, reason: str, as_json: bool) -> None:
    """Start jobs of an instance again."""
    check_name("NAME", name)
    with _database(installation) as database:
        database.run(
            lambda connection: drains.drain_instance(connection, name, draining=False, actor="local", reason=reason)
        )
    _told(name, draining=False, done="starts jobs again", as_json=as_json)


@click.group("assigners", invoke_without_command=True)
@as_json
@click.pass_context
def assigners_group(context: click.Context, as_json: bool) -> None:
    """List the assigner processes of the last day, or take one of them out of service."""
    if context.invoked_subcommand is not None:
        return
    installation: Installation = context.obj
    with _database(installation) as database:
        found = database.run(drains.assigners)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    times = [
        [time.isoformat(sep=" ", timespec="seconds") for time in (each.started_at, each.seen_at)] for each in found
    ]
    rows = [(each.name, each.state, *shown) for each, shown in zip(found, times, strict=True)]
    print_table(["name", "state", "started", "seen"], rows)


@assigners_group.command("drain")
@click.argument("name")
@click.option("--wait", is_flag=True, help="Wait until it places nothing; Ctrl-C ends the waiting only.")
@reason_option
@as_json
@pass_installation
def drain_assigner(installation: Installation, name: str, wait: bool, reason: str, as_json: bool) -> None:
    """Let an assigner process place no more jobs; its upkeep goes on. It obeys within seconds."""
    _wish(installation, name, draining=True, reason=reason, wait=wait)
    _told(name, draining=True, done="places nothing any more" if wait else "is asked to place nothing", as_json=as_json)


@assigners_group.command("undrain")
@click.argument("name")
@reason_option
@as_json
@pass_installation
def undrain_assigner(installation: Installation, name: str, reason: str, as_json: bool) -> None:
    """Let an assigner process place jobs again."""
    _wish(installation, name, draining=False, reason=reason, wait=False)
    _told(name, draining=False, done="may place jobs again", as_json=as_json)


def _wish(installation: Installation, name: str, *, draining: bool, reason: str, wait: bool) -> None:
    with _database(installation) as database:
        database.run(
            lambda connection: drains.drain_assigner(connection, name, draining=draining, actor="local", reason=reason)
        )
        while wait and _state(database, name) not in OUT_OF_SERVICE:
            clock.sleep(LOOK)


def _state(database: Database, name: str) -> str:
    """Raises LeaseholdError if the drain was taken back."""
    found = database.run(lambda connection: drains.assigners(connection, name))
    if not found:
        raise NotFound(f"assigner: no assigner process '{escaped(name, 63)}'")
    if not found[0].draining:
        raise LeaseholdError(f"assigner '{escaped(name, 63)}' is drained no more: somebody has taken that back")
    return found[0].state
