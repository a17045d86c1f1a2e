"""The command `submit`, whose options `bots/cli/options.py` derives from the model of a request."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import click
from leasehold.client import Client, Job
from leasehold.errors import KEY_TAKEN, BadInput, Conflict

from bots.cli import options as option_helpers
from bots.cli import output, times
from bots.cli.caller import Caller, caller_options
from bots.cli.jobs import print_plan
from bots.cli.waiting import NAMED, finish_file, follow_command
from schema import readable
from schema.readable import plural, tell


@click.command(cls=option_helpers.GroupedCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--file",
    cls=option_helpers.GroupedOption,
    group="What to run",
    type=click.File("rb"),
    help="Submit the jobs of a file of JSON lines, one request each, instead of a command; - reads standard input.",
)
@option_helpers.asking
@click.option(
    "--then-on",
    type=click.Choice(["done", "succeeded", "failed"]),
    help="With --file, run the command once all its jobs have ended: whatever became of them, if all succeeded, or if "
    "at least one did not. The options describe the command, except --key, --instance and --priority. Prints the id of "
    "a graph.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until all jobs are final. A command's output is written, and its exit code is that of `submit`; with "
    "--file, exit 0 only if all succeeded.",
)
@click.option(
    "--plan",
    is_flag=True,
    help="Submit nothing; tell what would become of the job, or of up to 100 jobs of a file: whether it joins another, "
    "which bot would take it now, or what it would wait for.",
)
@click.option("-q", "--quiet", is_flag=True, help="With --wait: neither the command's output nor progress.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@caller_options
def submit(
    caller: Caller,
    /,
    file: IO[bytes] | None,
    then_on: str | None,
    wait: bool,
    plan: bool,
    quiet: bool,
    command: tuple[str, ...],
    **options: Any,
) -> int:
    """Submit one job (-- COMMAND…), or one for each line of a file. Prints the ids, or waits.

    Each option in a group sets one field of the request. With --file each line holds these fields. With --wait the
    standard output of a command is its output alone; how it ended is said on standard error.

    \b
    leasehold submit --property os=linux -- make test
    leasehold submit --file jobs.jsonl --wait
    leasehold submit --file jobs.jsonl --then-on failed -- ./tell-somebody
    """
    if plan and (wait or then_on is not None):
        raise BadInput("--plan", "submits nothing: it goes with neither --wait nor --then-on")
    if then_on is not None:
        if file is None or not command:
            raise click.UsageError("--then-on needs both --file and a command after --")
        if quiet:
            raise BadInput("--quiet", "has no meaning with --then-on")
        _with_callback(caller, file, command, options, then_on=then_on, wait=wait)
        return 0
    if (file is None) == (not command):
        raise click.UsageError("give exactly one of: a command after --, or --file")
    if quiet and not wait:
        raise BadInput("--quiet", "goes with --wait")
    lines: list[int] = []
    if file is not None:
        _refuse_options_of_one_job(options)
        source = file.readlines()
        jobs = option_helpers.read_lines(source, name=file.name)
        lines = option_helpers.line_numbers(source)
    else:
        jobs = [_one_job(command, options)]
    with caller.client() as client:
        with _refusals(lines, file):
            if plan:
                _print_plans(client.plan(jobs) if file else [client.plan_one(jobs[0])], lines, caller=caller)
                return 0
            taken = _submit_file(client, jobs, lines) if file else [client.submit_one(jobs[0])]
        for job in taken:
            if file is None and jobs[0].get("schedule_after") and not caller.json:
                tell(times.of_start(jobs[0]["schedule_after"]))
            if file is None and not job.created and jobs[0].get("dedup_key") and not caller.json:
                tell(f"no new job: a job with this key is there already: `leasehold show {job.id}`")
            if job.advice is not None:
                tell(f"advice: job {output.plain(job.id)}: {output.plain(job.advice)}")
        ids = [job.id for job in taken]
        if wait and file is None:
            return follow_command(client, ids[0], caller=caller, quiet=quiet)
        if caller.json and not wait:
            readable.print_json([{"id": job.id, "created": job.created} for job in taken])
        elif not caller.json and not (wait and sys.stdout.isatty() and len(ids) > NAMED):
            click.echo("\n".join(ids))
        if wait:
            finish_file(client, list(dict.fromkeys(ids)), caller=caller, quiet=quiet)
    return 0


def _submit_file(client: Client, jobs: Sequence[Mapping[str, Any]], lines: Sequence[int]) -> list[Job]:
    """Submit the jobs of a file. Of one that is sent in parts, tell how far it is, also if that is all on Ctrl-C."""
    so_far: list[Job] = []

    def part(submitted: list[Job]) -> None:
        so_far[:] = submitted
        tell(f"{len(submitted):,} of {plural(len(jobs), 'job')} are submitted")

    try:
        return client.submit(jobs, told=part)
    except KeyboardInterrupt:
        if so_far:
            ends = f"from {so_far[0].id} to {so_far[-1].id}, that of line {lines[len(so_far) - 1]:,}"
            tell(f"\n{plural(len(so_far), 'job')} are submitted and go on, {ends}; those of the next lines may be, too")
        else:
            tell("\nthe jobs may be submitted or not: `leasehold list` shows the newest")
        raise click.Abort from None


@contextmanager
def _refusals(lines: Sequence[int], file: IO[bytes] | None) -> Iterator[None]:
    """Name the option, or the line of the file, where a refusal of the gateway names the place in the request."""
    try:
        yield
    except BadInput as refused:
        raise _named(refused, lines, file) from None
    except Conflict as refused:
        if refused.code != KEY_TAKEN:
            raise
        field, _, reason = str(refused).partition(": ")
        raise Conflict(refused.code, str(_named(BadInput(field, reason), lines, file))) from None


def _named(refused: BadInput, lines: Sequence[int], file: IO[bytes] | None) -> BadInput:
    if file is None:
        return option_helpers.as_option(refused)
    return option_helpers.place_in_file(refused, lines, name=file.name)


def _print_plans(found: Sequence[Mapping[str, Any]], lines: Sequence[int], *, caller: Caller) -> None:
    """Print what would become of the jobs; lines: of the file that holds them, empty for one job."""
    if caller.json:
        readable.print_json(found)
        return
    for nth, each in enumerate(found):
        if lines:
            output.line("line    ", str(lines[nth]))
        print_plan(each)
        click.echo()
    click.echo("nothing was submitted")


def _with_callback(
    caller: Caller, file: IO[bytes], command: tuple[str, ...], options: dict[str, Any], *, then_on: str, wait: bool
) -> None:
    """Submit the jobs of the file and a command that runs once they have ended."""
    source = file.readlines()
    jobs = option_helpers.read_lines(source, name=file.name)
    lines = option_helpers.line_numbers(source)
    callback = _one_job(command, options)
    of_graph = {field: callback.pop(field, None) for field in ("key", "instance", "priority")}
    with caller.client() as client:
        try:
            taken = client.submit_with_callback(jobs, callback, on=then_on, **of_graph)
        except BadInput as refused:
            field = refused.field.removeprefix("callback.")
            if field == refused.field:
                raise option_helpers.place_in_file(refused, lines, name=file.name) from None
            raise option_helpers.as_option(BadInput(field, refused.reason)) from None
        if wait:
            from bots.cli.graphs import finish as finish_graph

            finish_graph(client, taken["graph"], None, caller=caller, timeout=None)
        elif caller.json:
            readable.print_json(taken)
        else:
            click.echo(taken["graph"])


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
