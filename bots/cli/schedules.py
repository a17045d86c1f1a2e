"""The commands on schedules: list, add, apply, show, enable, disable, run-now and rm."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from leasehold.errors import BadInput, LeaseholdError

from bots.cli import output
from bots.cli.caller import Caller, caller_options
from bots.cli.output import Record
from schema import readable
from schema.readable import Column, table

if TYPE_CHECKING:
    from leasehold.tasks.periodic import AppliedSchedule, AppRegistry

#: Terms of a schedule that have an option: field → option.
TERMS = {
    "cron": "--cron",
    "zone": "--zone",
    "catch_up": "--catch-up",
    "catch_up_most": "--catch-up-most",
    "catch_up_seconds": "--catch-up-seconds",
    "overlap": "--overlap",
}
_take_over = click.option("--take-over", is_flag=True, help="Also change what an app declares; it loses it.")
_instance = click.option("--instance", metavar="NAME", help="Instance of the schedule [that of the token, or default].")


class Group(readable.Group):
    """The group, which imports the models of jobs only for `add`, because they take longer than a command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "add"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "add" and cmd_name not in self.commands:
            self.add_command(_add())
        return super().get_command(ctx, cmd_name)


@click.group(cls=Group)
def schedule() -> None:
    """Schedules: jobs that are submitted again and again, at the ticks of a cron expression."""


def _add() -> click.Command:
    from bots.cli import options as job_options

    @click.command("add", cls=job_options.GroupedCommand)
    @click.argument("name")
    @click.option(
        "--cron",
        required=True,
        metavar="EXPRESSION",
        help="Minute, hour, day, month and day of the week, such as '0 3 * * *'.",
    )
    @click.option("--zone", metavar="ZONE", help="Time zone of the expression, such as Europe/Berlin [UTC].")
    @click.option(
        "--catch-up",
        type=click.Choice(["skip", "all", "none"]),
        help="Missed ticks that are made up for: the newest one (skip), all up to a bound, or none [skip].",
    )
    @click.option("--catch-up-most", type=click.IntRange(1, 1000), metavar="N", help="The bound of `all` [10].")
    @click.option(
        "--catch-up-seconds", type=click.FloatRange(0), metavar="SECONDS", help="The oldest tick of `skip` [86400]."
    )
    @click.option(
        "--overlap",
        type=click.Choice(["allow", "skip"]),
        help="What to do about a tick while the previous job has not ended [allow].",
    )
    @click.option("--disabled", is_flag=True, help="Do not enable it yet.")
    @click.option("--plan", is_flag=True, help="Only tell its next ticks and its job, or why it is refused.")
    @_take_over
    @job_options.asking
    @click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
    @caller_options
    def add(caller: Caller, /, name: str, plan: bool, command: tuple[str, ...], **options: Any) -> None:
        """Make the schedule NAME, or replace it (-- COMMAND…). The options in groups are those of `submit`.

        \b
        leasehold schedule add nightly --cron '0 3 * * *' -- make nightly
        """
        terms = {"enabled": not options.pop("disabled")} | ({"take_over": True} if options.pop("take_over") else {})
        try:
            fields = job_options.asked(options)
            instance = fields.pop("instance", None)
            job = job_options.check({job_options.COMMAND: list(command), **fields})
        except BadInput as refused:
            raise job_options.as_option(refused) from None
        terms |= {field: options[field] for field in TERMS if field != "cron"}
        with caller.client() as client, _by_option():
            call = client.schedules.plan if plan else client.schedules.put
            done = call(name, options["cron"], job, **terms, instance=instance)
        if plan:
            _planned(caller, done, job)
        else:
            _told(caller, done, "made" if done["created"] else "set")

    return add


@contextmanager
def _by_option() -> Iterator[None]:
    """Name the option of a term, or of the job, that the gateway refuses."""
    from bots.cli import options as job_options

    try:
        yield
    except BadInput as refused:
        field = refused.field.removeprefix("job.")
        if field in TERMS:
            raise BadInput(TERMS[field], refused.reason) from None
        raise job_options.as_option(BadInput(field, refused.reason)) from None


def _planned(caller: Caller, found: Record, job: Record) -> None:
    """Print what `schedule add` would make."""
    if caller.json:
        readable.print_json({**found, "job": job})
        return
    would = "would be replaced" if found["exists"] else "would be made"
    output.line(f"{found['name']} of {found['instance']} {would}; its next ticks: ", "")
    for tick in found["ticks"]:
        output.line("  ", readable.tick(tick))
    _print_facts(_job_facts(job))


@schedule.command()
@click.argument("app", metavar="MODULE:POOL")
@click.option("--prune", is_flag=True, help="Remove what the app declared before and declares no longer.")
@click.option("--take-over", is_flag=True, help="Also change what commands have set and other apps declare.")
@caller_options
def apply(caller: Caller, /, app: str, prune: bool, take_over: bool) -> None:
    """Make the schedules of an app those that its code declares with @POOL.periodic.

    All are applied or none. The module is imported from this directory, PYTHONPATH or what is installed.

    \b
    leasehold schedule apply shop:pool --prune
    """
    from leasehold.tasks import periodic

    pool = _imported(app)
    with caller.client() as client:
        done = periodic.apply(pool, client, prune=prune, take_over=take_over)
    if caller.json:
        readable.print_json(
            [{**vars(each), "next_tick": each.next_tick and each.next_tick.isoformat()} for each in done]
        )
        return
    if not done:
        click.echo(output.plain(f"the app '{periodic.app_of(pool)}' declares no schedules"))
    several = len({each.instance for each in done}) > 1
    for each in done:
        name = f"{each.instance}/{each.name}" if several else each.name
        click.echo(output.plain(f"{name} is {each.outcome}{_following(each)}"))


def _imported(app: str) -> "AppRegistry":
    """Import the pool of an app as a bot does. What the module prints goes to the standard error."""
    from leasehold.runtime.task_runner import import_failure, load

    sys.path.insert(0, str(Path.cwd()))
    try:
        with redirect_stdout(sys.stderr):
            return load(app)
    except LeaseholdError:
        raise
    except (Exception, SystemExit) as error:
        raise LeaseholdError(f"the app '{app}' cannot be imported: {import_failure(error)}") from None


def _following(done: "AppliedSchedule") -> str:
    match done.outcome:
        case "removed":
            return ""
        case "left":
            return " as it is, but declared no longer: --prune removes it"
        case _ if done.next_tick is None:
            return ", disabled"
        case _:
            return f"; the next tick is {readable.tick(done.next_tick)}"


@schedule.command("list")
@click.option("--instance", metavar="NAME", help="Only those of this instance.")
@caller_options
def list_schedules(caller: Caller, /, instance: str | None) -> None:
    """List the schedules, by instance and name."""
    with caller.client() as client:
        found = client.schedules.list(instance=instance)
    if caller.json:
        readable.print_json(found)
        return
    columns = (
        Column("instance", leaves=7),
        "name",
        "cron",
        Column("zone", leaves=4),
        "next tick",
        Column("last tick", leaves=5),
        Column("last job", leaves=6),
        "state",
        Column("left out", leaves=1),
        Column("failures", leaves=2),
        Column("declared by", leaves=3),
    )
    table(
        columns,
        (
            (
                each["instance"],
                each["name"],
                each["cron"],
                each["zone"],
                readable.tick(each["next_tick"]) if each["next_tick"] else _disabled(each),
                readable.tick(each["last_tick"]) if each["last_tick"] else "-",
                *readable.short_ids([each["last_job"] or "-"]),
                output.state(each["last_state"]) if each["last_state"] else "-",
                each["left_out"],
                each["failures"],
                each["declared_by"] or "-",
            )
            for each in found
        ),
    )


@schedule.command()
@click.argument("name")
@_instance
@caller_options
def show(caller: Caller, /, name: str, instance: str | None) -> None:
    """Show one schedule, with its job, its next tick and its last error."""
    with caller.client() as client:
        found = client.schedules.show(name, instance=instance)
    if caller.json:
        readable.print_json(found)
        return
    job, left_out, since = found.pop("job"), found.pop("left_out"), found.pop("left_out_since")
    if left_out:
        found["left_out"] = f"{left_out} since {output.moment(since)}, because job {found['last_job']} had not ended"
    if not output.between(found["next_tick"], found["due_at"]):
        del found["due_at"]  # only after a refusal it is another time than the tick
    facts = [
        (field.replace("_", " "), _fact(field, value)) for field, value in found.items() if value not in (None, "")
    ]
    _print_facts([*facts, *_job_facts(job)])


def _job_facts(job: Record) -> list[tuple[str, str]]:
    return [(f"job: {field.replace('_', ' ')}", _fact(field, value)) for field, value in job.items()]


def _print_facts(facts: Sequence[tuple[str, str]]) -> None:
    width = max(len(title) for title, _ in facts)
    for title, value in facts:
        output.line(f"{title:<{width}}  ", value)


def _fact(field: str, value: Any) -> str:
    """Format a field of a schedule or of its job."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return readable.figure(value)
        case str() if field.endswith("_tick") or field == "due_at":
            return readable.tick(value)
        case str() if field.endswith("_at"):
            return output.moment(value)
        case list() if field == "command":
            return shlex.join(value)
        case list() | dict():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)


@schedule.command()
@click.argument("name")
@_instance
@caller_options
def enable(caller: Caller, /, name: str, instance: str | None) -> None:
    """Enable a schedule: its next tick is the first one from now on."""
    with caller.client() as client:
        _told(caller, client.schedules.enable(name, instance=instance), "enabled")


@schedule.command()
@click.argument("name")
@_instance
@caller_options
def disable(caller: Caller, /, name: str, instance: str | None) -> None:
    """Disable a schedule. What it misses is not made up for."""
    with caller.client() as client:
        _told(caller, client.schedules.enable(name, enabled=False, instance=instance), "disabled")


@schedule.command("run-now")
@click.argument("name")
@click.option("--key", metavar="TEXT", help="The same key never makes a second job.")
@_instance
@caller_options
def run_now(caller: Caller, /, name: str, key: str | None, instance: str | None) -> None:
    """Submit the job of a schedule now, beside its ticks. Prints its id."""
    with caller.client() as client:
        taken = client.schedules.run_now(name, key=key, instance=instance)
    if caller.json:
        readable.print_json({"id": taken.id, "created": taken.created})
    else:
        click.echo(taken.id)


@schedule.command("rm")
@click.argument("name")
@_take_over
@_instance
@caller_options
def remove(caller: Caller, /, name: str, take_over: bool, instance: str | None) -> None:
    """Remove a schedule. Its jobs stay."""
    with caller.client() as client:
        client.schedules.remove(name, instance=instance, take_over=take_over)
    if caller.json:
        readable.print_json({"name": name, "removed": True})
    else:
        click.echo(f"{output.plain(name)} is removed")


def _told(caller: Caller, done: Record, verb: str) -> None:
    if caller.json:
        readable.print_json(done)
        return
    following = f"; the next tick is {readable.tick(done['next_tick'])}" if done["next_tick"] else ", disabled"
    click.echo(output.plain(f"{done['name']} is {verb}{following if verb != 'disabled' else ''}"))


def _disabled(schedule: output.Record) -> str:
    """Say that a schedule makes no jobs, and why if somebody has said so."""
    return f"disabled: {output.plain(schedule['paused'])}" if schedule.get("paused") else "disabled"
