"""Operators' commands that set no resource: drains and assigner processes; also the place of each report command."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
from leasehold.errors import LeaseholdError
from leasehold.wire import escaped

from assigner.cli import reports
from assigner.cli.output import Caller, Calling, duration, reason_option
from assigner.cli.policy import versions
from assigner.cli.resources import group
from assigner.operator_resources.declaration import Resource
from assigner.operator_resources.registry import RESOURCES
from schema import clock
from schema.readable import Column, Group, going_on, moment, print_json, table
from schema.tenancy import drains
from schema.validation import check_name

if TYPE_CHECKING:
    from leasehold.client import Client

#: Seconds between two checks whether a drain is complete.
LOOK = 0.5
#: States of an assigner process that end `--wait`.
OUT_OF_SERVICE = ("drained", "stopped", "dead")


#: Groups of resources that few pools use.
GROUPS: Mapping[str, str] = {
    "limit": "Limits of classes, owners, projects, reports and instances, and on run times.",
    "rule": "Rules on what starts when, and what is submitted: windows, meters, advice, service levels, submits.",
}


def command(name: str, calling: Calling) -> click.Command | None:
    """Return the operator's command of this name that calls a gateway, or None."""
    if name in COMMANDS:
        return COMMANDS[name](calling)
    if name in GROUPS:
        made: click.Group = Group(name, help=GROUPS[name])
        for each in RESOURCES:
            if each.words.startswith(f"{name} "):
                made.add_command(_of_resource(each, calling))
        return made
    found = next((each for each in RESOURCES if each.words == name), None)
    return None if found is None else _of_resource(found, calling)


def _of_resource(resource: Resource[Any], calling: Calling) -> click.Group:
    made = group(resource, calling)
    for extra in EXTRAS.get(resource.name, ()):
        made.add_command(extra(calling))
    return made


def names() -> list[str]:
    """Return the names of the operator's commands that call a gateway."""
    return [*COMMANDS, *GROUPS, *(each.words for each in RESOURCES if each.words and " " not in each.words)]


def _drain_instance(calling: Calling) -> click.Command:
    @click.command("drain")
    @click.argument("name")
    @click.option(
        "--deadline",
        callback=duration,
        metavar="DURATION",
        help="Stop running jobs after this time: seconds, or 15m, 2h [never].",
    )
    @click.option("--wait", is_flag=True, help="Wait until it runs no job; Ctrl-C ends only the wait.")
    @reason_option
    @calling
    def command(caller: Caller, /, name: str, deadline: float | None, wait: bool, reason: str) -> None:
        """Start no more jobs of an instance. Queued jobs stay; running jobs may end, or are stopped at the deadline."""
        check_name("NAME", name)
        drains.check_deadline("--deadline", deadline, draining=True)
        wish = {"draining": True, "reason": reason} | ({} if deadline is None else {"deadline": deadline})
        with caller.client() as gateway:
            gateway.call("POST", f"/v1/instances/{name}/drain", body=wish)
            leases: int | None = 0
            with going_on(lambda: f"the drain goes on: `leasehold instance undrain {name}` ends it"):
                while wait and (leases := gateway.call("GET", f"/v1/instances/{name}/drain")["leases"]):
                    clock.sleep(LOOK)
        if leases is None:
            raise LeaseholdError(f"instance '{name}' is no longer draining: another operator ended the drain")
        _told(caller, name, draining=True, done="runs no more jobs" if wait else "starts no more jobs")

    return command


def _undrain_instance(calling: Calling) -> click.Command:
    @click.command("undrain")
    @click.argument("name")
    @reason_option
    @calling
    def command(caller: Caller, /, name: str, reason: str) -> None:
        """Start jobs of an instance again."""
        check_name("NAME", name)
        with caller.client() as gateway:
            gateway.call("POST", f"/v1/instances/{name}/drain", body={"draining": False, "reason": reason})
        _told(caller, name, draining=False, done="starts jobs again")

    return command


def assigners(calling: Calling) -> click.Command:
    """Make the group `assigners`."""

    @click.group("assigners", cls=Group, invoke_without_command=True)
    @click.pass_context
    @calling
    def group(caller: Caller, context: click.Context, /) -> None:
        """List the assigner processes of the last day, or drain one."""
        if context.invoked_subcommand is None:
            _list_assigners(caller)

    @group.command("list")
    @calling
    def listing(caller: Caller, /) -> None:
        """List the assigner processes of the last day."""
        _list_assigners(caller)

    @group.command("show")
    @click.argument("name")
    @calling
    def show(caller: Caller, /, name: str) -> None:
        """Show one assigner process."""
        with caller.client() as gateway:
            found = gateway.call("GET", _assigner(name))
        if caller.json:
            print_json(found)
            return
        table(["setting", "value"], list((found | {"policy": _version(found)}).items()))

    @group.command("drain")
    @click.argument("name")
    @click.option("--wait", is_flag=True, help="Wait until it places no jobs; Ctrl-C ends only the wait.")
    @reason_option
    @calling
    def drain(caller: Caller, /, name: str, wait: bool, reason: str) -> None:
        """Ask an assigner process to place no more jobs; its upkeep goes on. It follows within seconds."""
        with caller.client() as gateway:
            gateway.call("POST", _assigner(name) + "/drain", body={"draining": True, "reason": reason})
            with going_on(lambda: f"the drain goes on: `leasehold assigners undrain {name}` ends it"):
                while wait and _state(gateway, name) not in OUT_OF_SERVICE:
                    clock.sleep(LOOK)
        done = "places nothing any more" if wait else "is asked to place nothing"
        _told(caller, name, draining=True, done=done)

    @group.command("undrain")
    @click.argument("name")
    @reason_option
    @calling
    def undrain(caller: Caller, /, name: str, reason: str) -> None:
        """Let an assigner process place jobs again."""
        with caller.client() as gateway:
            gateway.call("POST", _assigner(name) + "/drain", body={"draining": False, "reason": reason})
        _told(caller, name, draining=False, done="may place jobs again")

    return group


def _list_assigners(caller: Caller) -> None:
    with caller.client() as gateway:
        found = gateway.call("GET", "/v1/assigners")["assigners"]
    if caller.json:
        print_json(found)
        return
    rows = [
        (each["name"], each["state"], _version(each), *(moment(each[time]) for time in ("started_at", "seen_at")))
        for each in found
    ]
    table(["name", "state", Column("policy", leaves=2), Column("started", leaves=1), "seen"], rows)


def _version(row: Mapping[str, Any]) -> str | None:
    """Return the number of the version by which a process works: a name, and so without separators."""
    return None if row.get("policy") is None else str(row["policy"])


def _assigner(name: str) -> str:
    return "/v1/assigners/" + quote(name, safe="").replace(".", "%2E")


def _state(gateway: "Client", name: str) -> str:
    """Return the state of an assigner process. Raises LeaseholdError if its drain was ended."""
    found = gateway.call("GET", _assigner(name))
    if not found["draining"]:
        raise LeaseholdError(f"assigner '{escaped(name, 63)}' is no longer draining: another operator ended the drain")
    return str(found["state"])


def _told(caller: Caller, name: str, *, draining: bool, done: str) -> None:
    print_json({"name": name, "draining": draining}) if caller.json else click.echo(f"{name} {done}")


#: Further commands in the groups of resources.
EXTRAS: Mapping[str, Sequence[Callable[[Calling], click.Command]]] = {
    "instance": (_drain_instance, _undrain_instance, reports.show_usage),
    "class": (reports.class_report,),
    "meter": (reports.pattern, reports.forecast),
}
#: Commands outside the groups of resources.
COMMANDS: Mapping[str, Callable[[Calling], click.Command]] = {
    "assigners": assigners,
    "demand": reports.demand,
    "forecast": reports.forecasts,
    "policy": versions.policy,
    "preemptions": reports.preemptions,
    "report": reports.report,
}
