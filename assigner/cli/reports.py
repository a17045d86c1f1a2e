"""Commands that print reports: pool report, usage, accuracy of estimates, meter patterns and forecasts."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import click
from leasehold.errors import BadInput
from leasehold.wire import MAX_LIST
from pydantic import TypeAdapter

from assigner.cli.output import Caller, Calling, duration
from assigner.queries.demand import MAX_BOTS, MAX_UNITS
from assigner.queries.report import MAX_WINDOW, EstimateReport, Report
from schema import readable
from schema.accounting import accounts
from schema.policy import time_windows
from schema.policy.meters import MAX_AMOUNT
from schema.readable import Column, Group, print_json, table
from schema.validation import check_name, load_zone

#: Longest time that the gateway may take for a report, seconds.
LONG = 60.0


def report(calling: Calling) -> click.Command:
    """Make the command `report`."""

    @click.command("report")
    @click.option(
        "--window",
        default="24h",
        show_default=True,
        callback=duration,
        metavar="DURATION",
        help="Span of time, back from now.",
    )
    @calling
    def command(caller: Caller, /, window: float) -> None:
        """Report on the pool: waits, throughput, fairness, efficiency, utilisation, usage, estimates, concentration."""
        if not 1 <= window <= MAX_WINDOW:
            raise BadInput("--window", "must be between a second and 366 days")
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/report", query={"window": window}, held=LONG)
        print_json(found) if caller.json else _tell(TypeAdapter(Report).validate_python(found))

    return command


def _tell(found: Report) -> None:
    click.echo(
        f"the last {readable.duration(found.seconds)}: {found.throughput:,.2f} jobs/s, "
        f"fairness {_number(found.fairness)}, efficiency {_number(found.efficiency)}"
    )
    if found.resources:
        click.echo("")
        table(
            ["resource", "used (mean)", "declared (mean)", "utilisation"],
            [(each.name, f"{each.used:,.0f}", f"{each.declared:,.0f}", f"{each.utilisation:.1%}")
             for each in found.resources],
        )  # fmt: skip
    if found.meters:
        click.echo("")
        table(
            ["meter", "mean (%)", "busiest hour (%)"],
            [(each.name, f"{each.mean:.3g}", f"{each.busiest_hour:.3g}") for each in found.meters],
        )
    if found.waiting:
        click.echo("")
        table(
            ["instance", "waiting now", "oldest"],
            [(each.name, each.jobs, readable.duration(each.oldest)) for each in found.waiting],
        )
    if not found.instances:
        click.echo("no job ended")
        return
    click.echo("")
    table(
        ["instance", "ended", "succeeded", "failed", "wait mean", "p50", "p95", "max", "unit seconds"],
        [
            (each.name, each.ended, each.succeeded, each.failed, _seconds(each.wait_mean), _seconds(each.wait_p50),
             _seconds(each.wait_p95), _seconds(each.wait_max), f"{each.unit_seconds:,.1f}")
            for each in found.instances
        ],
    )  # fmt: skip
    click.echo("")
    table(
        ["day", "wait mean", "scheduled", "completed", "priority mean"],
        [
            (each.day, _seconds(each.wait_mean), each.scheduled, each.completed, _mean(each.priority_mean))
            for each in found.days
        ],
    )
    click.echo("")
    table(
        ["cohort", "bots", "jobs", "busiest bot", "concentration"],
        [
            (each.cohort, each.bots, each.jobs, f"{each.busiest_share:.1%}", f"{each.index:.3f}")
            for each in found.concentration
        ],
    )
    if found.estimates.jobs:
        _tell_estimates(found.estimates)
    if found.hours:
        click.echo("")
        table(["used", "hour (UTC)", "amount"], [(each.name, each.hour, each.amount) for each in found.hours])


def _tell_estimates(found: EstimateReport) -> None:
    click.echo(
        f"\n{readable.plural(found.jobs, 'job')} said how long they would run: {_seconds(found.estimated_mean)} "
        f"on average, they took {_seconds(found.actual_mean)}; actual / estimate {_number(found.ratio_p50)} (p50), "
        f"{_number(found.ratio_p95)} (p95)"
    )


def _mean(value: float) -> str:
    return f"{round(value, 1) or 0.0:.1f}"  # which is never -0.0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else readable.duration(value)


def demand(calling: Calling) -> click.Command:
    """Make the command `demand`."""

    @click.command("demand")
    @click.option("--min", "least", type=click.IntRange(0, MAX_BOTS), default=0, help="Fewest bots to suggest [0].")
    @click.option("--max", "most", type=click.IntRange(0, MAX_BOTS), default=100, help="Most bots to suggest [100].")
    @click.option(
        "--units-per-bot",
        type=click.IntRange(1, MAX_UNITS),
        metavar="UNITS",
        help="Units of one further bot [those of the largest healthy bot that could serve the jobs].",
    )
    @calling
    def command(caller: Caller, /, least: int, most: int, units_per_bot: int | None) -> None:
        """Show how many jobs wait, by cohort and by what they require, and how many bots are suggested for them."""
        if least > most:
            raise BadInput("--min", f"{least} is more than --max, {most}")
        size = {} if units_per_bot is None else {"units_per_bot": units_per_bot}
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/demand", query={"min": least, "max": most} | size, held=LONG)
        if caller.json:
            print_json(found)
            return
        rows = [
            (each["cohort"], _properties(each["properties"]), f"{each['queued']:,}{'+' * each['at_least']}",
             each["ready"], each["limited"], each["retrying"], each["units"], _seconds(each["oldest_seconds"]),
             each["bots"], each["free_units"], each["would_start_with_one_more_bot"], each["suggested_bots"])
            for each in found["demand"]
        ]  # fmt: skip
        if not rows:
            click.echo("no job waits for a bot")
            return
        leaving = {"units": 1, "retrying": 2, "limited": 3, "oldest": 4}
        columns = ["cohort", "requires", "queued", "ready", "limited", "retrying", "units", "oldest", "bots"]
        columns += ["free units", "start with one more bot", "suggested bots"]
        table([Column(each, leaving.get(each, 0)) for each in columns], rows)
        if found["at_least"]:
            click.echo("more queues wait than were read")

    return command


def forecasts(calling: Calling) -> click.Command:
    """Make the command `forecast`."""

    @click.command("forecast")
    @calling
    def command(caller: Caller, /) -> None:
        """Show when waiting jobs will start, by instance and class, and how good forecasts of the last day were."""
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/forecasts", held=LONG)
        if caller.json:
            print_json(found)
            return
        rows = [
            (each["instance"], each["job_class"] or None, each["cohort"], each["jobs"],
             each["forecast"]["sentence"])
            for each in found["waiting"]
        ]  # fmt: skip
        columns = ("instance", "class", Column("cohort", 1), "waiting", Column("the last of them", folds=True))
        table(columns, rows) if rows else click.echo("no job is ready and waits")
        judged = [each for each in found["kept"] if each["jobs"]]
        click.echo("")
        if not judged:
            click.echo("no forecast of the last day can be judged yet")
            return
        table(
            ["instance", "judged", "in time", "median error", "median promise"],
            [
                (each["instance"] or "all", each["jobs"], f"{each['coverage']:.1%}", _seconds(each["error"]),
                 _seconds(each["width"]))
                for each in judged
            ],
        )  # fmt: skip

    return command


def preemptions(calling: Calling) -> click.Command:
    """Make the group `preemptions`."""

    @click.group("preemptions", cls=Group)
    def group() -> None:
        """Jobs that were evicted so that an instance gets its minimum."""

    @group.command("list")
    @click.option("--limit", type=click.IntRange(1, MAX_LIST), default=50, show_default=True, help="The most jobs.")
    @click.option("--before", type=int, metavar="ID", help="Only those logged before this one: the next page.")
    @calling
    def listing(caller: Caller, /, limit: int, before: int | None) -> None:
        """List the jobs that were evicted, the newest first, with whose minimum they were evicted for."""
        query = {"limit": limit} | ({} if before is None else {"before": before})
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/preemptions", query=query)["preemptions"]
        if caller.json:
            print_json(found)
            return
        ids = readable.short_ids([each["job"] or "deleted" for each in found])
        columns = (
            "id",
            "at",
            "job",
            "instance",
            "for",
            "minimum",
            Column("bot", 2),
            Column("cohort", 1),
            Column("policy", 1),
            "rule",
        )
        rows = (
            (str(each["id"]), readable.moment(each["at"]), short, each["instance"], each["preemptor_instance"],
             _minimum(each["receipt"]), each["bot"], each["cohort"],
             each["receipt"].get("policy") and str(each["receipt"]["policy"]), each["rule"])
            for each, short in zip(found, ids, strict=True)
        )  # fmt: skip
        table(columns, rows)

    return group


def _minimum(receipt: Mapping[str, Any]) -> str | None:
    """Tell the use and the minimum of the instance that got the units, as they were then."""
    preemptor = receipt.get("preemptor")
    return preemptor and f"{preemptor['usage']:,} of {preemptor['min_quota']:,}"


def _properties(properties: Mapping[str, Sequence[str]]) -> str:
    return " ".join(f"{key}={value}" for key, values in sorted(properties.items()) for value in values)


def show_usage(calling: Calling) -> click.Command:
    """Make the command `instance usage`."""

    @click.command("usage")
    @click.option(
        "--hours",
        type=click.FloatRange(0, accounts.MAX_HOURS),
        default=24.0,
        show_default=True,
        help="Hours back from now.",
    )
    @calling
    def command(caller: Caller, /, hours: float) -> None:
        """Show the usage that bots reported for constrained jobs, by instance and unit."""
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/usage", query={"hours": hours})["usage"]
        names = ("instance", "unit", "amount", "jobs")
        print_json(found) if caller.json else table(names, [[each[name] for name in names] for each in found])

    return command


def class_report(calling: Calling) -> click.Command:
    """Make the command `class report`."""

    @click.command("report")
    @calling
    def command(caller: Caller, /) -> None:
        """Compare estimated with actual run times, for the latest ended jobs of each class."""
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/class-report", held=LONG)["classes"]
        names = ("name", "jobs", "estimated", "ratio", "dated", "late")
        heads = ("class", "jobs", "estimated", "ran / estimate", "with a deadline", "late")
        print_json(found) if caller.json else table(heads, [[each[name] for name in names] for each in found])

    return command


def _zone(_context: click.Context, _option: click.Parameter, value: str) -> ZoneInfo:
    try:
        return load_zone(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def pattern(calling: Calling) -> click.Command:
    """Make the command `meter pattern`."""

    @click.command("pattern")
    @click.argument("name")
    @click.option(
        "--zone", callback=_zone, default="UTC", show_default=True, metavar="NAME", help="Time zone of the hours."
    )
    @calling
    def command(caller: Caller, /, name: str, zone: ZoneInfo) -> None:
        """Show a meter's daily pattern over the last four weeks: percent of its limit by the hour."""
        check_name("NAME", name)
        with caller.client() as gateway:
            found = gateway.call("GET", f"/v1/meters/{name}/pattern", query={"zone": zone.key})
        if caller.json:
            print_json(found)
            return
        rows = [
            (f"{hour:02}", None if each is None else f"{each:.3g}", "peak" if hour in found["peak_hours"] else " ")
            for hour, each in enumerate(found["avg_usage_by_hour"])
        ]
        table(["hour", "percent", ""], rows)
        for begin, end in found["idle_periods"]:
            click.echo(f"idle from {begin:02}:00 to {end:02}:00")

    return command


def forecast(calling: Calling) -> click.Command:
    """Make the command `meter forecast`."""

    @click.command("forecast")
    @click.option("--class", "job_class", required=True, metavar="NAME", help="The class of the job.")
    @click.option(
        "--estimate",
        type=click.FloatRange(0, MAX_AMOUNT),
        default=0.0,
        help="Estimated cost of the job in the unit of the meter [0].",
    )
    @calling
    def command(caller: Caller, /, job_class: str, estimate: float) -> None:
        """Show when windows next let a job of the class start, with their meters below the threshold."""
        check_name("--class", job_class)
        with caller.client() as gateway:
            found = gateway.call("GET", "/v1/forecast", query={"class": job_class, "estimate": estimate})
        if caller.json:
            print_json(None if found["at"] is None else {key: found[key] for key in ("now", "window", "at", "percent")})
        elif found["at"] is None:
            click.echo("no suitable window")
        elif found["window"] is None:
            click.echo("now: there are no windows")
        elif found["now"]:
            level = "" if found["percent"] is None else f", its meter at {found['percent']:.3g} %"
            click.echo(f"now: window '{found['window']}' is open{level}")
        else:
            percent = found["percent"]
            expected = "" if percent is None else f", its meter expected at {percent:.3g} %"
            opens = time_windows.local_time(datetime.fromisoformat(found["at"]), load_zone(found["zone"]))
            click.echo(f"window '{found['window']}' opens at {opens}{expected}")

    return command
