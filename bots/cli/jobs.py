"""The caller's commands for single jobs, bots and the whole pool. They reach the pool only through its gateway.

They import no model of requests or filters, which takes longer than the rest of such a command.
"""

import base64
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any

import click
from leasehold.client import Client
from leasehold.errors import BadInput, LeaseholdError

from bots.cli import output, times
from bots.cli.caller import Caller, caller_options, whole_id, whole_ids
from bots.cli.output import Record
from bots.cli.waiting import as_written, finish, interruptible
from bots.cli.watching import Named, shown, watch_option
from schema import clock, readable, validation
from schema.readable import Column, Group, going_on, plural, table, tell

# The command `explain`


_MARKS = {True: ("open", "green"), False: ("closed", "red"), None: ("-", "dim")}


@click.command()
@click.argument("id")
@click.option("--all", "every", is_flag=True, help="Also show the gates that are open, and those that were not asked.")
@watch_option
@caller_options
def explain(caller: Caller, /, id: str, every: bool, watch: float | None) -> None:
    """Explain why a job runs where it runs, or why it does not run and what would start it.

    ID: whole, or in short as lists show it, or @last or @failed.
    """
    whole = Named(id)

    def look(client: Client) -> None:
        found = client.explain(whole.of(client))
        readable.print_json(found) if caller.json else print_explanation(found, every=every)

    shown(caller, watch, look)


OUTCOMES = {
    "new": "a job would be made",
    "join": "job {job} would be joined",
    "replace": "job {job} would be replaced",
    "known": "job {job} would be the answer, because it has the key",
}


def print_plan(found: Record) -> None:
    """Print what would become of one request, and why its job would wait."""
    output.line("outcome  ", OUTCOMES[found["outcome"]].format(**found))
    if found["explanation"] is not None:
        print_explanation(found["explanation"], every=False)
    if found["bot"] is not None:
        output.line("bot      ", found["bot"]["sentence"])


def print_explanation(found: Record, *, every: bool) -> None:
    """Print the explaining sentence, then its evidence: closed gates or all, order, changes, attempts and receipts."""
    if "id" in found:
        output.line("job      ", found["id"])
    output.line("state    ", output.state(found["state"]))
    output.line("cohort   ", f"{found['cohort']}, instance {found['instance']}")
    output.line("why      ", found["sentence"])
    shown = [gate for gate in found["gates"] if every or gate["open"] is False]
    left = len(found["gates"]) - len(shown)
    if found["gates"]:
        click.echo()
    if shown:
        rows = ((gate["gate"], _mark(gate["open"]), gate["sentence"]) for gate in shown)
        table(("gate", "", Column("evidence", folds=True)), rows)
    if left:
        hint = ": --all shows them" if "id" in found else ""
        further = "further gate" if shown else "gate"
        click.echo(f"{plural(left, further)} {'is' if left == 1 else 'are'} not closed{hint}")
    if found["order"] is not None:
        click.echo()
        order = found["order"]
        output.line("ahead    ", f"{_jobs(order['in_queue'])} like it, {_jobs(order['in_instance'])} of its instance")
    if (stopped := found.get("preemption")) is not None:
        output.line("minimum  ", stopped["sentence"])
        for job in stopped["jobs"]:
            output.line("         ", f"job {job}")
    if found.get("forecast") is not None:
        output.line("when     ", found["forecast"]["sentence"])
    for nth, change in enumerate(found["change"]):
        output.line("starts   " if nth == 0 else "  and    ", change)
    if found["attempts"]:
        click.echo()
        table(
            (
                Column("fence", leaves=1),
                "granted",
                "bot",
                Column("by", leaves=3),
                Column("strategy", leaves=2),
                Column("policy", leaves=1),
                Column("how it went", folds=True),
            ),
            (
                (
                    str(each["fence"]),
                    output.moment(each["granted_at"]),
                    each["bot"],
                    each["assigner"],
                    each["strategy"],
                    None if each.get("policy") is None else str(each["policy"]),
                    each["sentence"],
                )
                for each in found["attempts"]
            ),
        )
    for receipt in found["receipts"]:
        output.line(f"{output.moment(receipt['at'])}  ", receipt["sentence"])


def _mark(is_open: bool | None) -> object:
    return output.styled(*_MARKS[is_open])


def _jobs(count: Record) -> str:
    return f"more than {count['jobs']:,} jobs" if count["more"] else plural(count["jobs"], "job")


#: Seconds between two looks at a draining bot.
DRAIN_LOOK = 0.5


class _Wait(click.Command):
    """The command `wait`, which has the options of a filter only where more than ids and its other options is given.

    They come from a model, whose import takes nearly as long as all else of a wait for ids.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._only_ids = False
        super().__init__(*args, **keywords)

    @property
    def params(self) -> list[click.Parameter]:
        return self._own if self._only_ids else self._all

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:
        self._own = own

    @cached_property
    def _all(self) -> list[click.Parameter]:
        from bots.cli.filters import choice_parameters

        return [*choice_parameters(), *self._own[1:]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for each in self._own for name in each.opts}
        options = [each.partition("=")[0] for each in args if each.startswith("-")]
        self._only_ids = bool(args) and known.issuperset(options)
        try:
            return super().parse_args(ctx, args)
        finally:
            self._only_ids = False


@click.command(cls=_Wait)
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@click.option(
    "--timeout",
    type=times.Duration(0, validation.YEAR),
    metavar="DURATION",
    help="Give up after this time: seconds, or such as 90m [default: never].",
)
@caller_options
def wait(caller: Caller, /, ids: tuple[str, ...], timeout: float | None, **choice: Any) -> None:
    """Wait until the jobs are final. Exit 0 only if all of them succeeded.

    --all waits for those that pass the filter when the wait begins, final ones too; it is an error if there are none.
    ID: whole, or in short as lists show it, or @last or @failed.

    \b
    leasehold wait ID…
    leasehold wait --all --meta build=1234
    """
    chosen = None
    if choice:
        from bots.cli import filters

        chosen = filters.choice(ids, choice)
    with caller.client() as client:
        jobs = whole_ids(client, ids) if chosen is None else chosen.found(client)
        finish(client, jobs, caller=caller, timeout=timeout, of="" if chosen is None else chosen.filter)


@click.command()
@click.argument("id")
@watch_option
@caller_options
def show(caller: Caller, /, id: str, watch: float | None) -> None:
    """Show one job and its history.

    ID: whole, or in short as lists show it, or @last or @failed.
    """
    named = Named(id)

    def look(client: Client) -> None:
        whole = named.of(client)
        job = client.show(whole, forecast=True)
        left = [client.result(whole)] if job["has_result"] and not caller.json else []
        readable.print_json(job) if caller.json else output.print_job(job, left)

    shown(caller, watch, look)


@click.command()
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@click.option("--lines", is_flag=True, help="One object on a line, also of a single job.")
@caller_options
def result(caller: Caller, /, ids: tuple[str, ...], lines: bool) -> None:
    """Print the result of a job: the JSON that its command left.

    The command has written it to the file that its variable LEASEHOLD_RESULT names. Of several jobs there is one object
    on each line: `id`, `state`, `exit_code`, `reason`, `has_result`, and `result`, which is null while `has_result` is
    false. Of a single job that has none the command ends with exit code 2.

    ID: whole, or in short as lists show it, or @last or @failed.
    """
    with caller.client() as client:
        if len(ids) == 1 and not lines:
            readable.print_json(client.result(whole_id(client, ids[0])))
            return
        for found in client.results(whole_ids(client, ids)):
            readable.print_json(found)


@click.command()
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is final.")
@click.option(
    "--attempt",
    type=click.IntRange(1),
    metavar="N",
    help="The output of this attempt, the first is 1 [default: the newest].",
)
@caller_options
def logs(caller: Caller, /, id: str, follow: bool, attempt: int | None) -> None:
    """Write the job's output, byte for byte.

    If the bot was lost before the end, what it had sent by then is kept, and standard error says so.

    Of more than 1 MiB the first and the last 512 KiB are kept, with a line in between. What comes after the first
    512 KiB is there once the attempt has ended.

    With --json each piece of output is one object on one line: `data` in base64, `start` and `next` (the offset of its
    first byte and of the byte after it, counted from 0 in each attempt), `attempt`, the job's `state`, `final`, which
    is true if no output follows, and `lost`, if the bot was lost before the end. The last line may have no data.

    ID: whole, or in short as lists show it, or @last or @failed.
    """
    if follow and attempt is not None:
        raise BadInput("--attempt", "does not go with --follow, which follows the newest attempt")
    with caller.client() as client:
        job, last = whole_id(client, id), None
        with interruptible([job]) if follow else nullcontext():
            pieces = client.follow(job) if follow else client.written(job, attempt=attempt)
            for last in pieces if caller.json else as_written(job, pieces):
                if caller.json:
                    readable.print_json(asdict(last) | {"data": base64.b64encode(last.data).decode()})
                    sys.stdout.flush()
    if last is not None and last.attempt > 1 and attempt is None and not caller.json:
        hint = f"`leasehold logs {id} --attempt {last.attempt - 1}` shows that of the attempt before"
        tell(f"this is the output of attempt {last.attempt}; {hint}")


@click.command()
@click.option(
    "--meta", multiple=True, metavar="KEY=VALUE", help="Sum up the jobs with this value instead. [repeatable]"
)
@click.option("--instance", metavar="NAME", help="With --meta: the jobs of this instance.")
@watch_option
@caller_options
def status(caller: Caller, /, meta: tuple[str, ...], instance: str | None, watch: float | None) -> None:
    """Show an overview of the pool, or of all jobs with some metadata: how many, since when, and what is left."""
    if meta:
        from bots.cli import filters  # it imports the model, which takes longer than to ask for the overview

        wanted = filters.checked({"metadata": meta} | ({} if instance is None else {"instance": instance}))

        def sum_up(client: Client) -> None:
            found = client.summary(wanted["metadata"], instance=instance)
            readable.print_json(found) if caller.json else output.show_summary(found)

        shown(caller, watch, sum_up)
        return
    if instance is not None:
        raise BadInput("--instance", "goes with --meta")

    def look(client: Client) -> None:
        found = client.status()
        readable.print_json(found) if caller.json else output.show_status(found)

    shown(caller, watch, look)


@click.group(cls=Group)
def bots() -> None:
    """The bots of the pool."""


@bots.command("list")
@watch_option
@caller_options
def list_bots(caller: Caller, /, watch: float | None) -> None:
    """List the bots."""

    def look(client: Client) -> None:
        found = client.bots()
        readable.print_json(found) if caller.json else output.list_bots(found)

    shown(caller, watch, look)


@bots.command("show")
@click.argument("name")
@watch_option
@caller_options
def show_bot(caller: Caller, /, name: str, watch: float | None) -> None:
    """Show a bot: its leases, its success rate, and whether it is on probation."""
    validation.check_name("NAME", name)

    def look(client: Client) -> None:
        found = client.bot(name)
        readable.print_json(found) if caller.json else output.show_bot(found)

    shown(caller, watch, look)


@bots.command()
@click.argument("name")
@click.option("--undo", is_flag=True, help="End the drain: the bot takes work again.")
@click.option(
    "--deadline",
    type=times.Duration(0, validation.YEAR),
    metavar="DURATION",
    help="Stop running jobs after this time: seconds, or such as 90m [default: never].",
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
        answer, bot = client.drain(name, draining=not undo, reason=reason, deadline=deadline), None
        with going_on(lambda: f"the drain goes on: `leasehold bots drain {name} --undo` ends it"):
            while wait and (bot := client.bot(name))["leases"] and bot["draining"]:
                clock.sleep(DRAIN_LOOK)
    if bot is not None and bot["leases"]:
        raise LeaseholdError(f"bot '{name}' is no longer draining: another operator ended the drain")
    if caller.json:
        readable.print_json(answer)
    else:
        click.echo(f"{name} {'takes work again' if undo else 'holds nothing' if wait else 'takes no more work'}")


COMMANDS: tuple[click.Command, ...] = (
    wait,
    show,
    result,
    explain,
    logs,
    status,
    bots,
)
