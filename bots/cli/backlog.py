"""The commands on waiting jobs: hold, release, requeue, priority; and waiting for jobs to end."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from bots.cli import output
from bots.cli.filters import Chosen, choosing
from bots.cli.options import Caller, caller_options
from bots.cli.output import Record
from bots.client.client import LONG_POLL, Client
from schema import validation
from schema.errors import LeaseholdError, NotFound
from schema.states import JobState


def finish(client: Client, ids: list[str], *, caller: Caller, timeout: float | None) -> None:
    """Wait for the jobs and print how each ended. Raises LeaseholdError unless all succeeded."""
    ended: dict[str, output.Record] = {}
    poll = LONG_POLL if len(ids) == 1 else 1.0
    for job in _with_progress(client.wait(ids, timeout=timeout, poll=poll), total=len(ids)):
        ended[job["id"]] = job
        if not caller.json:
            click.echo(output.ending(job))
    if caller.json:
        output.print_json(list(ended.values()))
    open_still = [job for job in ids if job not in ended]
    if open_still:
        others = f" and {len(open_still) - 1} more" if len(open_still) > 1 else ""
        raise LeaseholdError(f"not final after {timeout:g} s: {open_still[0]}{others}")
    bad = [job for job in ended.values() if job["state"] != JobState.SUCCEEDED]
    if bad:
        raise LeaseholdError(f"{len(bad)} of {len(ids)} jobs did not succeed; the first: {output.ending(bad[0])}")


def _with_progress(jobs: Iterator[output.Record], *, total: int) -> Iterator[output.Record]:
    """Yield the same jobs; with a terminal and more than one job, show a progress bar."""
    if not output.terminal() or total < 2:
        yield from jobs
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("waiting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("jobs", total=total)
        for job in jobs:
            progress.advance(task)
            yield job


_reason = click.option("--reason", metavar="TEXT", help="Kept in the jobs' history and the audit log.")


@click.command()
@choosing
@_reason
@caller_options
def hold(caller: Caller, /, chosen: Chosen, reason: str | None) -> None:
    """Hold queued jobs aside until they are released. For operators."""
    with caller.client() as client:
        _print_results(caller, client.backlog.hold(chosen.jobs, reason=reason), _state)


@click.command()
@choosing
@_reason
@caller_options
def release(caller: Caller, /, chosen: Chosen, reason: str | None) -> None:
    """Return held jobs to the queue with the age that they had. For operators."""
    with caller.client() as client:
        _print_results(caller, client.backlog.release(chosen.jobs, reason=reason), _state)


@click.command()
@choosing
@click.option("--key", metavar="TEXT", help="The same key never makes a second copy of a job.")
@_reason
@click.option("--wait", is_flag=True, help="Wait until the queued jobs are final; exit 0 only if all succeeded.")
@caller_options
def requeue(caller: Caller, /, chosen: Chosen, key: str | None, reason: str | None, wait: bool) -> None:
    """Queue jobs again: release held ones, and submit a copy of each one that failed, died or was cancelled.

    For operators.
    """
    with caller.client() as client:
        answers = client.backlog.requeue(chosen.jobs, key=key, reason=reason)
        if not wait:
            _print_results(caller, answers, _successor)
            return
        if not caller.json:
            _print(answers, _successor)
        _refuse_absent(answers)
        jobs = [job["job"] for job in answers if job["job"] is not None]
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
    with caller.client() as client:
        if not chosen.where or chosen.where.keys() - {"instance", "label"}:
            _print_results(caller, client.backlog.prioritise(chosen.jobs, number, reason=reason), _priority)
            return
        changed = client.backlog.prioritise_all(number, **chosen.where, reason=reason)
    if caller.json:
        output.print_json({"changed": changed})
    else:
        click.echo(f"{changed} jobs now have the priority {number}")


COMMANDS: tuple[click.Command, ...] = (hold, release, requeue, priority)


def _print_results(caller: Caller, answers: Sequence[Record], story: Callable[[Record], str]) -> None:
    """Print each job's answer; raise NotFound if a job does not exist."""
    if caller.json:
        output.print_json(answers)
    else:
        _print(answers, story)
    _refuse_absent(answers)


def _print(answers: Sequence[Record], story: Callable[[Record], str]) -> None:
    for job in answers:
        if job["state"] is not None:
            click.echo(f"{job['id']} {story(job)}")


def _refuse_absent(answers: Sequence[Record]) -> None:
    absent = [job["id"] for job in answers if job["state"] is None]
    if absent:
        raise NotFound(f"id: there is no job '{absent[0]}'")


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


def _unchanged(job: Record) -> str:
    return "" if job["changed"] else " (unchanged)"
