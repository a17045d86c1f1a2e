"""`leasehold policy`: the versions of what decides who starts when, and which one is in force."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from leasehold.errors import BadInput
from leasehold.wire import escaped
from pydantic_core import to_jsonable_python

from assigner.cli import names
from assigner.cli.output import Caller, Calling, is_version, reason_option
from assigner.cli.policy import canary
from assigner.cli.policy.shadow import add_shadow, tell
from schema.policy import versions
from schema.readable import Column, Group, moment, plural, print_json, table

#: Stands for the version in force.
ACTIVE = "active"
#: The most versions of one list, as at the gateway.
MAX_LISTED = 200


def policy(calling: Calling) -> click.Command:
    """Make the group `policy`."""

    @click.group("policy", cls=Group)
    def group() -> None:
        """Versions of what decides which job starts when: what changed, by whom, and which one is in force."""

    @group.command("list")
    @click.option(
        "--limit", type=click.IntRange(1, MAX_LISTED), default=20, show_default=True, help="The most versions."
    )
    @click.option("--before", type=click.IntRange(1), metavar="VERSION", help="Only those with lower numbers.")
    @calling
    def listing(caller: Caller, /, limit: int, before: int | None) -> None:
        """List the versions, the newest first, and which live processes work by another one than that in force."""
        query = {"limit": limit} | ({} if before is None else {"before": before})
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/policies", query=query)
            active = None if before is None else gateway.call("GET", f"/v1/policies/{ACTIVE}")["id"]
        if caller.json:
            print_json(found)
            return
        columns = ("version", "made", Column("author", 1, least=12), "changes", Column("reason", least=10))
        rows = (
            (_numbered(each), moment(each["made_at"]), each["author"], each["changed"], each["reason"])
            for each in found["policies"]
        )
        table(columns, rows)
        active = next((each["id"] for each in found["policies"] if each["in_force"]), active)
        _tell_runners(found["processes"], active)

    _add_readers(group, calling)
    _add_writers(group, calling)
    _add_draft(group, calling)
    canary.add(group, calling)
    add_shadow(group, calling)
    return group


def _add_readers(group: click.Group, calling: Calling) -> None:
    @group.command("show")
    @click.argument("version", metavar="[VERSION]", default=ACTIVE, callback=_number)
    @calling
    def show(caller: Caller, /, version: str) -> None:
        """Show a version, the one in force unless another is given: what it changed, and all that it says."""
        with caller.client() as gateway:
            found = gateway.call("GET", f"/v1/policies/{version}")
        if caller.json:
            print_json(found)
            return
        told = ("id", "digest", "in_force", "drafted", "made_at", "author", "reason", "parent")
        table(("of the version", "value"), [(name.replace("_", " "), _named(found[name])) for name in told])
        if found.get("shadow") is not None:
            click.echo()
            tell(found["shadow"])
        if found["changes"]:
            click.echo(f"\n{plural(found['changed'], 'change')} from version {found['parent']}:")
            _print(found["changes"], "before", "after")
        click.echo("\nWhat it says:")
        said = versions.differences({}, found["content"])
        table(("what", "field", "value"), [(each.what, each.field, each.after) for each in said])

    @group.command("diff")
    @click.argument("version", callback=_number)
    @click.argument("other", metavar="[OTHER]", default=ACTIVE, callback=_number)
    @calling
    def diff(caller: Caller, /, version: str, other: str) -> None:
        """Tell what differs between a version and another one, which is the one in force unless it is given."""
        with caller.client() as gateway:
            found = gateway.call("GET", f"/v1/policies/{version}/diff", query={"other": other})
        if caller.json:
            print_json(found)
        elif not found["changes"]:
            click.echo(f"versions {found['before']} and {found['after']} say the same")
        else:
            _print(found["changes"], f"version {found['before']}", f"version {found['after']}")
            if found["left_out"]:
                click.echo(f"and {found['left_out']:,} more")


def _add_writers(group: click.Group, calling: Calling) -> None:
    @group.command("activate")
    @click.argument("version", callback=_number)
    @click.option("--stale", is_flag=True, help="Also a draft made while another version was in force.")
    @reason_option
    @calling
    def activate(caller: Caller, /, version: str, stale: bool, reason: str) -> None:
        """Put a version into force: limits become as they were, and every process works by it within 2 seconds."""
        with caller.client() as gateway:
            body = {"reason": reason, **({"stale": True} if stale else {})}
            done = gateway.call("POST", f"/v1/policies/{version}/activate", body=body)
        _tell(caller, done)

    @group.command("rollback")
    @reason_option
    @calling
    def rollback(caller: Caller, /, reason: str) -> None:
        """Put the version into force that was so before the present one."""
        with caller.client() as gateway:
            now = gateway.call("GET", f"/v1/policies/{ACTIVE}")["id"]
            done = gateway.call("POST", "/v1/policies/rollback", body={"reason": reason, "from": now})
        _tell(caller, done)


def _add_draft(group: click.Group, calling: Calling) -> None:
    @group.command("draft")
    @click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
    @reason_option
    @calling
    def draft(caller: Caller, /, file: Path, reason: str) -> None:
        """Make a version of what FILE says that is not in force: to try it, to compare, or to activate it later.

        FILE is a configuration. What it does not say of limits stays as it is in force.
        """
        from assigner.config import loading
        from assigner.process.policies import deciding, declared_limits

        sections = click.get_current_context().meta[names.SECTIONS]()
        try:
            settings = loading.load(file, sections, os.environ)
        except loading.InvalidConfiguration as invalid:
            where, why = invalid.problems[0]
            raise BadInput(where, why) from None
        limits = {name: items for name, items in declared_limits(settings).items() if items}
        body = {"settings": to_jsonable_python(deciding(settings)), "limits": limits, "reason": reason}
        with caller.client() as gateway:
            made = gateway.call("POST", "/v1/policies", body=body)
        if caller.json:
            print_json(made)
            return
        click.echo(f"version {made['id']} is a draft with {plural(made['changed'], 'change')}: "
                   f"`leasehold policy diff {made['id']}` shows them")  # fmt: skip


def _named(value: object) -> object:
    """Return what a table shows of a version: its number is a name, without separators."""
    return str(value) if type(value) is int else value


def _numbered(version: Mapping[str, Any]) -> str:
    return f"{version['id']} in force" if version["in_force"] else str(version["id"])


def _number(_context: click.Context, _argument: click.Parameter, value: str) -> str:
    if value != ACTIVE and not is_version(value):
        raise BadInput("VERSION", f"must be the number of a version, or '{ACTIVE}', not '{escaped(value, 40)}'")
    return value


def _tell(caller: Caller, done: Mapping[str, Any]) -> None:
    if caller.json:
        print_json(done)
        return
    click.echo(f"version {done['id']} is in force; all processes work by it within 2 seconds")
    for each in done["kept"]:
        click.echo(f"stays as it is: {each}")


def _print(changes: Sequence[Mapping[str, Any]], before: str, after: str) -> None:
    table(("what", "field", before, after), [[each[name] for name in ("what", "field", "before", "after")]
                                             for each in changes])  # fmt: skip


def _tell_runners(processes: Sequence[Mapping[str, Any]], active: int | None) -> None:
    """Tell who works by the version in force, and name everybody who does not."""
    others = [each for each in processes if each["policy"] != active]
    if processes:
        follow = len(processes) - len(others)
        click.echo(f"\n{follow} of {len(processes)} live processes work by the version in force.")
    for each in others:
        by = "no version yet" if each["policy"] is None else f"version {each['policy']}"
        click.echo(f"{each['kind']} {each['name']} works by {by}")
