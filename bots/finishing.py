"""Waiting on the command line until jobs are final, and how each of them ended."""

from collections.abc import Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bots import printing, stories
from bots.caller import Caller
from bots.client import LONG_POLL, Client
from schema.errors import LeaseholdError
from schema.states import JobState


def finish(client: Client, ids: list[str], *, caller: Caller, timeout: float | None) -> None:
    """Wait for the jobs and print how each ended; raises LeaseholdError unless all succeeded."""
    ended: dict[str, printing.Record] = {}
    poll = LONG_POLL if len(ids) == 1 else 1.0
    for job in _watched(client.wait(ids, timeout=timeout, poll=poll), total=len(ids)):
        ended[job["id"]] = job
        if not caller.json:
            click.echo(stories.ending(job))
    if caller.json:
        printing.print_json(list(ended.values()))
    open_still = [job for job in ids if job not in ended]
    if open_still:
        others = f" and {len(open_still) - 1} more" if len(open_still) > 1 else ""
        raise LeaseholdError(f"not final after {timeout:g} s: {open_still[0]}{others}")
    bad = [job for job in ended.values() if job["state"] != JobState.SUCCEEDED]
    if bad:
        raise LeaseholdError(f"{len(bad)} of {len(ids)} jobs did not succeed; the first: {stories.ending(bad[0])}")


def _watched(jobs: Iterator[printing.Record], *, total: int) -> Iterator[printing.Record]:
    """The same jobs, counted on the terminal while they come in, if there is one and more than one job."""
    if not printing.terminal() or total < 2:
        yield from jobs
        return
    columns = (TextColumn("waiting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("jobs", total=total)
        for job in jobs:
            progress.advance(task)
            yield job
