"""`leasehold policy shadow`: a version decides beside the one in force, and what came of it is told."""

import math
from collections.abc import Mapping
from typing import Any

import click
from leasehold.errors import BadInput
from leasehold.wire import escaped

from assigner.cli.output import Caller, Calling, duration, reason_option, version_number
from schema.readable import Column, moment, plural, print_json, table
from schema.readable import duration as in_words

#: Words for what is counted, as of an instance.
DECIDED = {"bots": "other bot", "orders": "other order", "victims": "other victims"}
#: The most instances, and the most values without effect, that are printed.
MOST = 20


def add_shadow(group: click.Group, calling: Calling) -> None:
    """Add the command to the group `policy`."""

    @group.command("shadow")
    @click.argument("version", metavar="[VERSION]", required=False, callback=version_number)
    @click.option("--share", metavar="PERCENT", callback=_share, help="Of the cycles, such as 0.5%. By default 1%.")
    @click.option(
        "--for", "time", metavar="DURATION", callback=duration, help="It ends by itself then. By default 24h."
    )
    @click.option("--stop", is_flag=True, help="End the shadow; what it has counted stays.")
    @reason_option
    @calling
    def shadow(
        caller: Caller, /, version: int | None, share: float | None, time: float | None, stop: bool, reason: str
    ) -> None:
        """Let a version decide beside the one in force, without any effect, and count where it decides otherwise.

        Without a version, show what came of the shadow that goes on, or of the last one.
        """
        if stop and version is not None:
            raise BadInput("VERSION", "goes not with --stop: at most one version is the shadow")
        if version is None and (share is not None or time is not None):
            raise BadInput("VERSION", "is missing: --share and --for start a shadow")
        with caller.client() as gateway:
            if stop:
                found = gateway.call("POST", "/v1/policies/shadow/stop", body={"reason": reason})
            elif version is not None:
                given = {"share": share, "seconds": time, "reason": reason}
                body = {name: value for name, value in given.items() if value is not None}
                found = gateway.call("POST", f"/v1/policies/{version}/shadow", body=body)
            else:
                found = gateway.call("GET", "/v1/policies/shadow")["shadow"]
        if caller.json:
            print_json(found)
        elif found is None:
            click.echo("no version is the shadow, and none was")
        else:
            tell(found)


def tell(shadow: Mapping[str, Any]) -> None:
    """Print a shadow and what came of it."""
    part, began = f"{100 * shadow['share']:.4g} % of the cycles", moment(shadow["began_at"])
    if shadow["ended"] is None:
        click.echo(
            f"version {shadow['policy']} is the shadow in {part}, from {began} until {moment(shadow['ends_at'])}"
        )
    else:
        ended = f"{moment(shadow['ended_at'])}, when " if shadow["ended_at"] else "when "
        click.echo(f"version {shadow['policy']} was the shadow in {part}, from {began} until {ended}{shadow['ended']}")
    total = shadow["total"]
    for kind, words in DECIDED.items():
        click.echo(f"{words}: {_part(total, kind)}")
    if shadow["starts"]:
        part = shadow["fetched"] / shadow["starts"]
        click.echo(
            f"fetched by bots, beside the shadow: {shadow['fetched']:,} of {shadow['starts']:,} starts ({part:.0%})"
        )
    if found := [each for each in shadow["instances"] if each["instance"] is not None]:
        click.echo()
        table(
            ("instance", *DECIDED.values()),
            [(each["instance"], *(_part(each, kind) for kind in DECIDED)) for each in found[:MOST]],
        )
    if shadow["processes"]:
        click.echo()
        did = ("process", "compared", "skipped", "failed")
        table(
            (*did, "processor time", Column("not compared there", least=10)),
            [(*map(each.get, did), in_words(each["seconds"]), each["reason"]) for each in shadow["processes"]],
        )
    if left := shadow["not_compared"]:
        click.echo(f"\n{plural(len(left), 'value')} of this version cannot show in a shadow: {', '.join(left[:MOST])}"
                   + (", ..." if len(left) > MOST else ""))  # fmt: skip


def _part(counts: Mapping[str, Any], kind: str) -> str:
    of, other = counts[kind], counts[f"other_{kind}"]
    return f"{other:,} of {of:,}" + (f" ({other / of:.1%})" if of else "")


def _share(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        percent = float(value[:-1]) if value.endswith("%") else math.nan
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise BadInput(
            "--share", f"must be a percentage above 0% and up to 100%, such as 1%, not '{escaped(value, 40)}'"
        )
    return percent / 100
