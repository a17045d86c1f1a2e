"""The caller's commands for jobs and bots. They reach the pool only through its gateway."""

import base64
import sys
from dataclasses import asdict
from typing import IO, Any

import click

from bots.cli import filters, output
from bots.cli import options as option_helpers
from bots.cli.backlog import finish
from bots.cli.filters import Chosen, choosing, filter_options
from bots.cli.options import Caller, caller_options
from bots.cli.output import Record, table
from schema import clock, validation
from schema.errors import BadInput, LeaseholdError, NotFound
from schema.filters import Direction, Sort
from schema.requests import MAX_TIMEOUT

# The command `explain`


_MARKS = {True: ("open", "green"), False: ("closed", "red"), None: ("-", "dim")}


@click.command()
@click.argument("id")
@caller_options
def explain(caller: Caller, /, id: str) -> None:
    """Explain why a job runs where it runs, or why it does not run and what would start it."""
    with caller.client() as client:
        found = client.explain(id)
    output.print_json(found) if caller.json else print_explanation(found)


def print_explanation(found: Record) -> None:
    """Print the explaining sentence, then its evidence: gates, order, changes, attempts and receipts."""
    output.line("job     ", found["id"])
    output.line("state   ", output.state(found["state"]))
    output.line("cohort  ", f"{found['cohort']}, instance {found['instance']}")
    output.line("why     ", found["sentence"])
    if found["gates"]:
        click.echo()
        table(
            ("gate", "", "evidence"), ((gate["gate"], _mark(gate["open"]), gate["sentence"]) for gate in found["gates"])
        )
    if found["order"] is not None:
        click.echo()
        order = found["order"]
        output.line("ahead   ", f"{_jobs(order['in_queue'])} like it, {_jobs(order['in_instance'])} of its instance")
    for nth, change in enumerate(found["change"]):
        output.line("starts  " if nth == 0 else "  and   ", change)
    if found["attempts"]:
        click.echo()
        table(
            ("fence", "granted", "bot", "by", "strategy", "how it went"),
            (
                (each["fence"], each["granted_at"], each["bot"], each["assigner"], each["strategy"], each["sentence"])
                for each in found["attempts"]
            ),
        )
    for receipt in found["receipts"]:
        output.line(f"{output.plain(receipt['at'])}  ", receipt["sentence"])


def _mark(is_open: bool | None) -> object:
    return output.styled(*_MARKS[is_open])


def _jobs(count: Record) -> str:
    number = f"{count['jobs']:,}"
    return f"more than {number} jobs" if count["more"] else f"{number} {'job' if count['jobs'] == 1 else 'jobs'}"


#: Seconds between two looks at a draining bot.
DRAIN_LOOK = 0.5


@click.command(cls=option_helpers.GroupedCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--file",
    cls=option_helpers.GroupedOption,
    group="What to run",
    type=click.File("rb"),
    help="Submit the jobs of a file of JSON lines, one request each, instead of a command; - reads standard input.",
)
@option_helpers.asking
@click.option("--wait", is_flag=True, help="Wait until all jobs are final; exit 0 only if all succeeded.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@caller_options
def submit(caller: Caller, /, file: IO[bytes] | None, wait: bool, command: tuple[str, ...], **options: Any) -> None:
    """Submit one job (-- COMMAND…), or one for each line of a file. Prints the ids.

    Each option in a group sets one field of the request. With --file each line holds these fields.

    \b
    leasehold submit --property os=linux -- make test
    leasehold submit --file jobs.jsonl --wait
    """
    if (file is None) == (not command):
        raise click.UsageError("give exactly one of: a command after --, or --file")
    lines: list[int] = []
    if file is not None:
        _refuse_options_of_one_job(options)
        source = file.readlines()
        jobs = option_helpers.read_lines(source, name=file.name)
        lines = option_helpers.line_numbers(source)
    else:
        jobs = [_one_job(command, options)]
    with caller.client() as client:
        try:
            taken = client.submit(jobs)
        except BadInput as refused:
            raise (option_helpers.place_in_file(refused, lines, name=file.name) if file else _plain(refused)) from None
        for job in taken:
            if job.advice is not None:
                click.echo(f"advice: job {output.plain(job.id)}: {output.plain(job.advice)}", err=True)
        if wait:
            if not caller.json:
                click.echo("\n".join(job.id for job in taken))
            finish(client, [job.id for job in taken], caller=caller, timeout=None)
        elif caller.json:
            output.print_json([{"id": job.id, "created": job.created} for job in taken])
        else:
            click.echo("\n".join(job.id for job in taken))


@click.command()
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@click.option(
    "--timeout",
    type=click.FloatRange(0, MAX_TIMEOUT),
    metavar="SECONDS",
    help="Give up after this time [default: never].",
)
@caller_options
def wait(caller: Caller, /, ids: tuple[str, ...], timeout: float | None) -> None:
    """Wait until the jobs are final. Exit 0 only if all of them succeeded."""
    with caller.client() as client:
        finish(client, list(dict.fromkeys(ids)), caller=caller, timeout=timeout)


@click.command()
@click.argument("id")
@caller_options
def show(caller: Caller, /, id: str) -> None:
    """Show one job and its history."""
    with caller.client() as client:
        job = client.show(id)
    output.print_json(job) if caller.json else output.print_job(job)


@click.command("list")
@filter_options
@click.option(
    "--sort",
    type=click.Choice([sort.value for sort in Sort]),
    help="Sort by this [default: the end if the filter names it, else the submit].",
)
@click.option(
    "--order",
    type=click.Choice([each.value for each in Direction]),
    help="[default: the newest, or the most urgent, first].",
)
@click.option("--limit", type=click.IntRange(1, validation.MAX_LIST), default=50, show_default=True)
@click.option("--before", metavar="ID", help="Jobs submitted before this one.")
@click.option("--cursor", metavar="TEXT", help="The next page: what the one before printed on standard error.")
@caller_options
def list_jobs(caller: Caller, /, *, where: Record, limit: int, cursor: str | None, **asked: str | None) -> None:
    """List the jobs that pass all filters, by default the newest first.

    The options from --state to --ended-before are filters. A TIME has its zone, such as 2026-03-01T12:00:00Z.

    \b
    leasehold list --state running --sort started --order asc
    leasehold list --meta build=1234 --state failed
    """
    with caller.client() as client:
        found = client.list(limit=limit, cursor=cursor, **where, **asked)
    output.print_json(found.jobs) if caller.json else output.list_jobs(found.jobs)
    if found.next is not None:
        click.echo(f"next page: --cursor {found.next}", err=True)


@click.command()
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is final.")
@caller_options
def logs(caller: Caller, /, id: str, follow: bool) -> None:
    """Write the job's output, byte for byte.

    With --json each piece of output is one object on one line: `data` in base64, `start` and `next` (the offset of its
    first byte and of the byte after it, counted from 0 in each attempt), `attempt`, the job's `state`, and `final`,
    which is true if no output follows. The last line may have no data.
    """
    with caller.client() as client:
        for piece in client.follow(id) if follow else client.written(id):
            if caller.json:
                output.print_json(asdict(piece) | {"data": base64.b64encode(piece.data).decode()})
            else:
                sys.stdout.buffer.write(piece.data)
            sys.stdout.flush()


@click.command()
@choosing
@click.option("--all-submissions", is_flag=True, help="Also cancel jobs that other submissions share; for operators.")
@caller_options
def cancel(caller: Caller, /, chosen: Chosen, all_submissions: bool) -> None:
    """Cancel jobs: queued ones at once, running ones by stopping them on their bot.

    A job that others joined with --dedup-key goes on for them.

    \b
    leasehold cancel ID…
    leasehold cancel --all --meta build=1234
    """
    with caller.client() as client:
        answers = client.cancel(chosen.jobs, all_submissions=all_submissions)
    absent = [job["id"] for job in answers if job["state"] is None]
    if caller.json:
        output.print_json(answers)
    else:
        for job in answers:
            if job["state"] is not None:
                click.echo(f"{job['id']} {job['state']}{'' if job['changed'] else ' (unchanged)'}")
    if absent:
        raise NotFound(f"id: there is no job '{absent[0]}'")


@click.command()
@click.option(
    "--meta", multiple=True, metavar="KEY=VALUE", help="Sum up the jobs with this value instead. [repeatable]"
)
@click.option("--instance", metavar="NAME", help="With --meta: the jobs of this instance.")
@caller_options
def status(caller: Caller, /, meta: tuple[str, ...], instance: str | None) -> None:
    """Show an overview of the pool, or of all jobs with some metadata: how many, since when, and what is left."""
    if meta:
        wanted = filters.checked({"metadata": meta} | ({} if instance is None else {"instance": instance}))
        with caller.client() as client:
            found = client.summary(wanted["metadata"], instance=instance)
        output.print_json(found) if caller.json else output.show_summary(found)
        return
    if instance is not None:
        raise BadInput("--instance", "goes with --meta")
    with caller.client() as client:
        found = client.status()
    output.print_json(found) if caller.json else output.show_status(found)


@click.command()
@click.argument("key")
@click.option("--contains", metavar="TEXT", help="Values with this text in them, in whatever case.")
@click.option("--instance", metavar="NAME", help="Values of jobs of this instance.")
@click.option("--limit", type=click.IntRange(1), default=validation.MAX_LIST, show_default=True)
@caller_options
def metadata(caller: Caller, /, key: str, contains: str | None, instance: str | None, limit: int) -> None:
    """List the values that jobs have for a KEY of metadata."""
    validation.check_metadata_key("KEY", key)
    with caller.client() as client:
        found = client.values(key, contains=contains, instance=instance, limit=limit)
    if caller.json:
        output.print_json(found)
    else:
        for value in found:
            click.echo(output.plain(value))
    if len(found) == limit:
        click.echo("there may be more values: give a larger --limit, or --contains", err=True)


@click.group()
def bots() -> None:
    """The bots of the pool."""


@bots.command("list")
@caller_options
def list_bots(caller: Caller, /) -> None:
    """List the bots."""
    with caller.client() as client:
        found = client.bots()
    output.print_json(found) if caller.json else output.list_bots(found)


@bots.command("show")
@click.argument("name")
@caller_options
def show_bot(caller: Caller, /, name: str) -> None:
    """Show a bot: its leases, its success rate, and whether it is on probation."""
    validation.check_name("NAME", name)
    with caller.client() as client:
        found = client.bot(name)
    output.print_json(found) if caller.json else output.show_bot(found)


@bots.command()
@click.argument("name")
@click.option("--undo", is_flag=True, help="End the drain: the bot takes work again.")
@click.option(
    "--deadline",
    type=click.FloatRange(0, MAX_TIMEOUT),
    metavar="SECONDS",
    help="Stop running jobs after this time [default: never].",
)
@click.option("--wait", is_flag=True, help="Wait until the bot holds no lease; Ctrl-C ends only the wait.")
@click.option("--reason", metavar="TEXT", help="Kept in the audit log.")
@caller_options
def drain(caller: Caller, /, name: str, undo: bool, deadline: float | None, wait: bool, reason: str | None) -> None:
    """Let a bot finish its jobs and take no more. Jobs stopped at the deadline are queued again."""
    validation.check_name("NAME", name)
    if undo and (wait or deadline is not None):
        raise BadInput("--undo", "cannot be combined with --wait or --deadline")
    with caller.client() as client:
        answer = client.drain(name, draining=not undo, reason=reason, deadline=deadline)
        while wait and (bot := client.bot(name))["leases"]:
            if not bot["draining"]:
                raise LeaseholdError(f"bot '{name}' is no longer draining: another operator ended the drain")
            clock.sleep(DRAIN_LOOK)
    if caller.json:
        output.print_json(answer)
    else:
        click.echo(f"{name} {'takes work again' if undo else 'holds nothing' if wait else 'takes no more work'}")


COMMANDS: tuple[click.Command, ...] = (
    submit,
    wait,
    show,
    explain,
    list_jobs,
    logs,
    cancel,
    metadata,
    status,
    bots,
)


def _refuse_options_of_one_job(options: dict[str, Any]) -> None:
    for field in option_helpers.FIELDS:
        if option_helpers.is_given(options[option_helpers.parameter(field)]):
            raise BadInput(
                option_helpers.option_name(field), "describes one job; with --file, set it in the lines of the file"
            )


def _one_job(command: tuple[str, ...], options: dict[str, Any]) -> option_helpers.Request:
    try:
        return option_helpers.check({option_helpers.COMMAND: list(command), **option_helpers.asked(options)})
    except BadInput as refused:
        raise option_helpers.as_option(refused) from None


def _plain(refused: BadInput) -> BadInput:
    """Return the refusal of the only job without its place in the request."""
    field = refused.field.removeprefix("jobs.0").removeprefix(".").removeprefix("jobs.")
    return option_helpers.as_option(BadInput(field or "job", refused.reason))
