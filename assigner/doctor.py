"""`leasehold db doctor`: is the database fit for the pool, and what to do where it is not."""

from collections.abc import Sequence
from dataclasses import asdict

import click

from assigner.cli_output import as_json, print_json
from assigner.installation import COMMAND_PATIENCE, Installation
from assigner.operate import db_group, pass_installation
from schema import doctor
from schema.doctoring.findings import Check, Verdict
from schema.errors import LeaseholdError

__all__ = ["db_group"]

_COLOURS = {Verdict.OK: "green", Verdict.UNKNOWN: "cyan", Verdict.WARNING: "yellow", Verdict.BAD: "red"}


@db_group.command("doctor")
@as_json
@pass_installation
def examine_database(installation: Installation, as_json: bool) -> None:
    """Check what makes a pool slow or unsafe: wake-ups, old snapshots, indexes, vacuum, durability. Writes nothing.

    Exit 1 if anything is bad; warnings, and checks that could not be made, are only shown.
    """
    with installation.database("doctor", patience=COMMAND_PATIENCE) as database:
        checks = doctor.examine(database)
    bad = [check.name for check in checks if check.verdict is Verdict.BAD]
    if as_json:
        print_json({"ok": not bad, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    if bad:
        raise LeaseholdError(f"{len(bad)} of {len(checks)} checks are bad: {', '.join(bad)}")


def _print(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = click.style(f"{check.verdict:<7}", fg=_COLOURS[check.verdict])
        click.echo(f"{verdict}  {check.name:<{width}}  {check.found}")
        if check.remedy is not None:
            click.echo(f"{'':7}  {'':{width}}  do: {check.remedy}")
