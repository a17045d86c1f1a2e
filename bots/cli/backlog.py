"""The commands that act on jobs given by ids or a filter: cancel, hold, release, requeue, priority, reschedule."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from leasehold.calls.backlog import Jobs
from leasehold.client import Client
from leasehold.errors import Conflict, LeaseholdError, NotFound
from leasehold.states import WAITING

from bots.cli import output, times
from bots.cli.caller import Caller, caller_options
from bots.cli.filters import Chosen, choosing
from bots.cli.output import Record
from bots.cli.waiting import SILENCE, finish
from schema import clock, readable, validation
from schema.readable import plural, tell

#: After more lines than these, their number is told too, because the first ones have left the screen.
SCREEN = 20
_reason = click.option("--reason", metavar="TEXT", help="Kept in the jobs' history and the audit log.")


@contextmanager
def acting(client: Client, chosen: Chosen) -> Iterator[tuple[Jobs, Callable[[int], None]]]:
    """Give the jobs for one act of this client, and what takes how many it has changed so far.

    Of a long act that is told, and so on Ctrl-C.
    """
    so_far, said = 0, clock.monotonic()

    def part(changed: int) -> None:
        nonlocal so_far, said
        so_far = changed
        if clock.monotonic() - said >= SILENCE:
            said = clock.monotonic()
            tell(f"{plural(changed, 'job')} changed so far")

    jobs = chosen.jobs(client)
    try:
        yield jobs, part
    except KeyboardInterrupt:
        if isinstance(jobs, Mapping):
            others = "of those that pass the filter, some more may be"
        else:
            others = "the given one may be" if len(jobs) == 1 else "of the given ones, some more may be"
        tell(f"\n{plural(so_far, 'job')} changed before; {others}")
        raise click.Abort from None


@click.command()
@choosing
@click.option("--all-submissions", is_flag=True, help="Also cancel jobs that other submissions share; for operators.")
@caller_options
def cancel(caller: Caller, /, chosen: Chosen, all_submissions: bool) -> None:
    """Cancel jobs: queued ones at once, running ones by stopping them on their bot.

    A job that others joined with --dedup-key goes on for them. ID: whole, or in short as lists show it, or @last or
    @failed.

    \b
    leasehold cancel ID…
    leasehold cancel --all --meta build=1234
    """
    with caller.client() as client, acting(client, chosen) as (jobs, told):
        answers = client.cancel(jobs, all_submissions=all_submissions, told=told)
    if caller.json:
        readable.print_json(answers)
    else:
        _print(answers, _state)
    _refuse_absent(answers)


@click.command()
@choosing
@_reason
@caller_options
def hold(caller: Caller, /, chosen: Chosen, reason: str | None) -> None:
    """Hold queued jobs aside until they are released. For operators."""
    with caller.client() as client, acting(client, chosen) as (jobs, told):
        answers = client.backlog.hold(jobs, reason=reason, told=told)
    _print_results(caller, answers, _state)


@click.command()
@choosing
@_reason
@caller_options
def release(caller: Caller, /, chosen: Chosen, reason: str | None) -> None:
    """Return held jobs to the queue with the age that they had. For operators."""
    with caller.client() as client, acting(client, chosen) as (jobs, told):
        answers = client.backlog.release(jobs, reason=reason, told=told)
    _print_results(caller, answers, _state)


@click.command()
@choosing
@click.option("--key", metavar="TEXT", help="The same key never makes a second copy of a job.")
@_reason
@click.option("--wait", is_flag=True, help="Wait until the queued jobs are final; exit 0 only if all succeeded.")
@caller_options
def requeue(caller: Caller, /, chosen: Chosen, key: str | None, reason: str | None, wait: bool) -> None:
    """Queue jobs again: release held ones, and submit a copy of each one that failed, died or was cancelled.

    --all leaves out what was requeued before. For operators.
    """
    with caller.client() as client:
        with acting(client, chosen) as (given, told):
            answers = client.backlog.requeue(given, key=key, reason=reason, told=told)
        if left_out := [job for job in answers if job.get("left_out")]:
            was = "was" if len(left_out) == 1 else "were"
            again = "`leasehold requeue ID` copies one again"
            tell(f"{plural(len(left_out), 'job')} {was} left out: requeued before; {again}")
        if not wait:
            _print_results(caller, answers, _successor)
            return
        _refuse_if_over(answers)
        if not caller.json:
            _print(answers, _successor)
        _refuse_absent(answers)
        jobs = [job["job"] for job in answers if job["job"] is not None and not job.get("left_out")]
        if not jobs:
            raise LeaseholdError("there is nothing to wait for: no job is to be run again")
        finish(client, jobs, caller=caller, timeout=None)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("number", metavar="N", type=click.IntRange(validation.PRIORITY_MIN, validation.PRIORITY_MAX))
@choosing
@_reason
@caller_options
def priority(caller: Caller, /, number: int, chosen: Chosen, reason: str | None) -> None:
    """Give waiting jobs the priority N; lower = sooner. A submitter cannot change jobs that others share.

    \b
    leasehold priority -5 ID…
    leasehold priority 10 --instance ci --label nightly --all
    """
    answers: Sequence[Record] | None = None
    with caller.client() as client, acting(client, chosen) as (jobs, told):
        if not chosen.where or chosen.where.keys() - {"instance", "label"}:
            answers = client.backlog.prioritise(jobs, number, reason=reason, told=told)
        else:
            changed = client.backlog.prioritise_all(number, **chosen.where, reason=reason, told=told)
    if answers is not None:
        _print_results(caller, answers, _priority)
    elif caller.json:
        readable.print_json({"changed": changed})
    else:
        click.echo(f"{plural(changed, 'job')} now {'has' if changed == 1 else 'have'} the priority {number}")


@click.command()
@choosing
@click.option("--at", metavar="TIME", help=f"Start at this time: {times.EXAMPLES}.")
@click.option("--in", "delay", metavar="DURATION", help="Start after this time from now, such as 90m; 45 is seconds.")
@click.option("--now", is_flag=True, help="Start at once.")
@_reason
@caller_options
def reschedule(
    caller: Caller, /, chosen: Chosen, at: str | None, delay: str | None, now: bool, reason: str | None
) -> None:
    """Change the earliest start of waiting jobs. A submitter cannot change jobs that others share.

    \b
    leasehold reschedule ID --at '2026-12-01 10:00'
    leasehold reschedule --all --label nightly --now
    """
    if [at is not None, delay is not None, now].count(True) != 1:
        raise click.UsageError("give exactly one of: --at, --in, --now")
    starts = None if at is None else times.moment(at, option="--at")
    seconds = 0.0 if now else None if delay is None else times.seconds(delay, option="--in")
    with caller.client() as client, acting(client, chosen) as (jobs, told):
        answers = client.backlog.reschedule(jobs, schedule_after=starts, delay=seconds, reason=reason, told=told)
    if starts is not None and not caller.json and any(job["changed"] for job in answers):
        tell(times.of_start(starts))
    _print_results(caller, answers, _start)


COMMANDS: tuple[click.Command, ...] = (cancel, hold, release, requeue, priority, reschedule)


def _print_results(caller: Caller, answers: Sequence[Record], story: Callable[[Record], str]) -> None:
    """Print each job's answer; raise NotFound if a job does not exist."""
    if caller.json:
        readable.print_json(answers)
    _refuse_if_over(answers)
    if not caller.json:
        _print(answers, story)
    _refuse_absent(answers)


def _print(answers: Sequence[Record], story: Callable[[Record], str]) -> None:
    if not answers:
        tell("no job that this could change passes the filter")
    told = [job for job in answers if job["state"] is not None and not job.get("left_out")]
    names = [job["id"] for job in told]
    if story is _successor and sys.stdout.isatty():
        names = readable.short_ids(names)  # so that two ids have room in a line
    for name, job in zip(names, told, strict=True):
        output.line("", f"{name} {story(job)}")
    if len(told) > SCREEN:
        tell(f"{plural(len(told), 'job')} in all")


def _refuse_absent(answers: Sequence[Record]) -> None:
    absent = [job["id"] for job in answers if job["state"] is None]
    if absent:
        raise NotFound(f"id: there is no job '{absent[0]}'")


def _refuse_if_over(answers: Sequence[Record]) -> None:
    """Raise Conflict if all the jobs exist, none waits and so none was changed. A repeat of a change is no conflict."""
    rest = [job for job in answers if job["state"] in (None, *WAITING) or job["changed"] or job.get("job")]
    if answers and not rest:
        first = answers[0]
        why = output.plain(first.get("why") or "it does not wait")  # a gateway of an older version does not say it
        nothing = "nothing" if len(answers) == 1 else f"none of the {len(answers)} jobs"
        raise Conflict("already_final", f"job '{first['id']}' is {first['state']}: {why}; {nothing} was changed")


def _state(job: Record) -> str:
    return f"{job['state']}{_unchanged(job)}"


def _successor(job: Record) -> str:
    new: Any = job["job"]
    if new is None or new == job["id"]:
        return _state(job)
    return f"{job['state']}, again as {new}{_unchanged(job)}"


def _priority(job: Record) -> str:
    if job["priority"] is None:
        return _state(job)
    return f"{job['state']} with priority {job['priority']}{_unchanged(job)}"


def _start(job: Record) -> str:
    starts = "" if job["starts_at"] is None else f", starts at {output.moment(job['starts_at'])}"
    return f"{job['state']}{starts}{_unchanged(job)}"


def _unchanged(job: Record) -> str:
    if job["changed"]:
        return ""
    why = job.get("why")  # a gateway of an older version does not say it
    return f" (unchanged: {output.plain(why)})" if why else " (unchanged)"
