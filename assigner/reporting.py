"""`leasehold report`: what the pool did, for a person and as JSON."""

from dataclasses import asdict

import click

from assigner import report
from assigner.installation import COMMAND_PATIENCE, Installation
from assigner.operate import as_json, duration, pass_installation, print_json, print_table
from assigner.report import Report
from schema.errors import BadInput

#: The longest window, seconds.
YEAR = 366 * 86400.0


@click.command("report")
@click.option("--window", default="24h", show_default=True, callback=duration, metavar="DURATION", help="How far back.")
@as_json
@pass_installation
def report_command(installation: Installation, window: float, as_json: bool) -> None:
    """Tell what the pool did: waits, throughput, fairness, efficiency, usage by hour, estimates, concentration."""
    if not 1 <= window <= YEAR:
        raise BadInput("--window", "must be between a second and 366 days")
    with installation.ready_database("report", patience=COMMAND_PATIENCE) as database:
        found = database.run(lambda connection: report.report(connection, window=window))
    if as_json:
        print_json(asdict(found))
    else:
        _tell(found)


def _tell(found: Report) -> None:
    click.echo(
        f"the last {found.seconds:,.0f} s: {found.throughput:.2f} jobs/s, fairness {_number(found.fairness)}, "
        f"efficiency {_number(found.efficiency)}"
    )
    if not found.instances:
        click.echo("no job ended")
        return
    click.echo("")
    print_table(
        ["instance", "ended", "succeeded", "failed", "wait mean", "p50", "p95", "max", "unit seconds"],
        [
            (each.name, each.ended, each.succeeded, each.failed, _seconds(each.wait_mean), _seconds(each.wait_p50),
             _seconds(each.wait_p95), _seconds(each.wait_max), f"{each.unit_seconds:,.1f}")
            for each in found.instances
        ],
    )  # fmt: skip
    click.echo("")
    print_table(
        ["day", "wait mean", "scheduled", "completed", "priority mean"],
        [
            (each.day, _seconds(each.wait_mean), each.scheduled, each.completed, f"{each.priority_mean:.1f}")
            for each in found.days
        ],
    )
    click.echo("")
    print_table(
        ["cohort", "bots", "jobs", "busiest bot", "concentration"],
        [
            (each.cohort, each.bots, each.jobs, f"{each.busiest_share:.1%}", f"{each.index:.3f}")
            for each in found.concentration
        ],
    )
    if found.estimates.jobs:
        click.echo(
            f"\n{found.estimates.jobs} jobs said how long they would run: {_seconds(found.estimates.estimated_mean)} "
            f"on average, they took {_seconds(found.estimates.actual_mean)}; actual / estimate "
            f"{_number(found.estimates.ratio_p50)} (p50), {_number(found.estimates.ratio_p95)} (p95)"
        )
    if found.hours:
        click.echo("")
        print_table(
            ["used", "hour (UTC)", "amount"], [(each.name, each.hour, f"{each.amount:g}") for each in found.hours]
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f} s"
