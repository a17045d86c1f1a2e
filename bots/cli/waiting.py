"""Waiting for submitted jobs: the output of one command as it is written, the progress of many jobs, Ctrl-C.

Standard output receives the output of the command, or the endings of named jobs. Progress, outcome and hints go to
standard error, so that `$(leasehold submit --wait -- COMMAND)` is the output of COMMAND.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import click
from leasehold import wire
from leasehold.client import Client, Output
from leasehold.errors import LeaseholdError, TimedOut
from leasehold.states import FINAL, WAITING, JobState

from bots.cli import output
from bots.cli.caller import Caller
from bots.cli.output import Record
from schema import clock, readable
from schema.readable import divided, going_on, plural, tell

if TYPE_CHECKING:
    from rich.progress import TaskID

#: Seconds after which a person at a terminal is told for the first time what the job waits for.
HINT_AFTER = 2.0
#: Seconds between two lines on what a job waits for, and of silence before a line of progress without a terminal; this
#: time doubles with each such line.
SILENCE = 10.0
#: The most jobs without success that are named after the progress of many.
NAMED = 20


def interruptible(jobs: Collection[str], *, of: str = "") -> AbstractContextManager[None]:
    """Say that these jobs go on and how to follow or cancel them, whatever ends the wait for them; see `going_on`.

    jobs: the caller takes those out that have ended. of: the options of the filter by which they were found; empty =
    they were named.
    """

    def hint() -> str | None:
        ids = list(jobs)
        if not ids:
            return None
        if len(ids) == 1:
            return f"job {ids[0]} goes on: `leasehold logs --follow {ids[0]}`, or `leasehold cancel {ids[0]}`"
        listed = f"`leasehold list {of or f'--limit {min(len(ids), wire.MAX_LIST)}'}` shows them"
        which = f"--all {of}" if of else "ID…"
        others = f"`leasehold wait {which}` waits again, `leasehold cancel {which}` cancels"
        return f"{len(ids):,} jobs go on, from {ids[0]} to {ids[-1]}: {listed}, {others}"

    return going_on(hint)


def follow_command(client: Client, id: str, *, caller: Caller, quiet: bool) -> int:
    """Write the output of a job's command as it is written, then one line of outcome. Returns the exit code.

    The exit code is that of the command, 128 + N if signal N ended it, and 1 if the job did not succeed for another
    reason. Until a bot has the job, it is told every 10 seconds what it waits for. quiet: neither this nor the output
    is written. With `caller.json` the only output is the ended job.
    """
    reasons = Reasons(client)
    with interruptible([id]):
        if not (quiet or caller.json):
            _stream(client, id, reasons)
        elif not quiet:
            while not client.look([id], wait=SILENCE):
                reasons.tell(id)
        (job,) = client.wait([id])
    if caller.json:
        readable.print_json([job])
    else:
        more = ", output cut" if (job.get("result") or {}).get("output_truncated") else ""
        more += f"; `leasehold show {id}` tells more" if job["state"] == JobState.DEAD else ""
        tell(output.ending(job) + more)
    return exit_code(job)


class Reasons:
    """Tells on standard error what a job waits for, while no bot has it."""

    def __init__(self, client: Client, say: Callable[[str], object] | None = None) -> None:
        self._client, self._say = client, say or tell
        self._began = self._said = clock.monotonic()

    def tell(self, id: str, *, at_once: bool = False) -> None:
        """Say what the job waits for, if it does and that was not said within the last seconds."""
        now = clock.monotonic()
        if not at_once and now - self._said < 0.9 * SILENCE:
            return
        self._said = now
        try:
            found = self._client.explain(id)
        except LeaseholdError:
            return  # what is waited for is told of anyway, by the call that waits
        if found["state"] in WAITING:
            starts = f"; what would start it: {', '.join(found['change'])}" if found["change"] else ""
            waited = output.seconds(now - self._began)
            self._say(output.plain(f"job {id} is {found['state']}, for {waited} now: {found['sentence']}{starts}"))


def _stream(client: Client, id: str, reasons: Reasons) -> None:
    if output.terminal() and client.output(id, wait=HINT_AFTER).state in WAITING:
        reasons.tell(id, at_once=True)
    for piece in as_written(id, client.follow(id, poll=SILENCE, idle=True)):
        if not piece.data and piece.state in WAITING:
            reasons.tell(id)


def as_written(id: str, pieces: Iterable[Output]) -> Iterator[Output]:
    """Write each piece of a job's output and yield it. Say on standard error what a new attempt or a lost bot means."""
    attempt, lost = 0, False
    for piece in pieces:
        if attempt not in (0, piece.attempt):
            tell(f"job {id} runs again, attempt {piece.attempt}")
        attempt, lost = piece.attempt, piece.lost
        sys.stdout.buffer.write(piece.data)
        sys.stdout.flush()
        yield piece
    if lost:
        said = "its bot was lost before the end; what the bot had sent by then is all there is"
        tell(f"job {id}, attempt {attempt}: {said}")


def exit_code(job: Record) -> int:
    """Return the exit code, 0 to 255, that stands for a final job; 0 only if it succeeded."""
    if job["state"] == JobState.SUCCEEDED:
        return 0
    code = (job.get("result") or {}).get("exit_code")
    if job["state"] != JobState.FAILED or code is None:
        return 1
    return (128 - code if code < 0 else code) & 0xFF or 1


# Many jobs


class Tally:
    """Ended jobs by state, of `total`. ended: those that had ended before, which do not count for the rate.

    has_rate: False until `begin`, if it is not known yet which had ended before.
    """

    def __init__(self, total: int, ended: Counter[str] | None = None) -> None:
        self.total = total
        self.ended = Counter[str](ended)
        self._before = self.ended.total()
        self.has_rate = True
        #: What running jobs say of their progress, by id, the latest last.
        self.told: dict[str, Record] = {}
        self._began = clock.monotonic()

    def begin(self) -> None:
        """Count only what ends from now on for the rate."""
        self._before, self._began, self.has_rate = self.ended.total(), clock.monotonic(), True

    @property
    def done(self) -> int:
        return self.ended.total()

    @property
    def share(self) -> float:
        """Jobs that have ended, and what the running ones say that they have done."""
        return self.done + sum(float(told["share"]) for told in self.told.values())

    @property
    def _latest(self) -> str:
        """What the job that told last is doing."""
        if not self.told:
            return ""
        told = list(self.told.values())[-1]
        return f"; {told['share']:.0%} {wire.printable(told['text'], 60)}".rstrip()

    @property
    def seconds(self) -> float:
        return clock.monotonic() - self._began

    def __str__(self) -> str:
        """The counts, the mean rate so far, and the time that is left at this rate."""
        states = ", ".join(f"{number:,} {name}" for name, number in self.ended.most_common())
        told = f"{self.done:,} of {plural(self.total, 'job')} ended" + (f": {states}" if states else "")
        return f"{told}; {self._pace(' a second')}"

    def brief(self) -> str:
        """The same in fewer words, for a narrow terminal: of the states only what is not well."""
        others = [each for each in self.ended.most_common() if each[0] != JobState.SUCCEEDED]
        told = f"{self.done:,} of {self.total:,}" + "".join(f", {number:,} {name}" for name, number in others)
        return f"{told}; {self._pace('/s')}"

    def _pace(self, a_second: str) -> str:
        rate = (self.done - self._before) / max(self.seconds, 0.001) if self.has_rate else 0.0
        if not rate:
            return f"{output.seconds(self.seconds)}{self._latest}"
        if self.done == self.total:
            return f"in {output.seconds(self.seconds)}, {rate:.1f}{a_second}"
        return f"{rate:.1f}{a_second}, {output.seconds((self.total - self.done) / rate)} left{self._latest}"


class Display(Protocol):
    """Shows a tally while it grows."""

    def update(self) -> None:
        """Show the present numbers, if it is time to."""

    def say(self, text: str) -> None:
        """Tell something beside the tally."""

    def put(self, text: str) -> None:
        """Write a line to standard output, as the command does without a display."""

    def close(self) -> None:
        """Leave what was shown as it is."""


#: Columns of a bar.
BAR = 20


class Bar:
    """A bar on a terminal, drawn again in place. That of a single job appears when the job tells its progress."""

    def __init__(self, tally: Tally) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(BAR), TextColumn("{task.description}", markup=False))
        self._tally = tally
        self._progress: Progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: TaskID = self._progress.add_task(self._told(), total=tally.total)
        self.update()

    def update(self) -> None:
        if self._tally.total > 1 or self._tally.told:
            self._progress.start()
        self._progress.update(self._task, completed=self._tally.share, description=self._told())

    def _told(self) -> str:
        """What stands beside the bar: all of it, or what is brief enough for this terminal."""
        told = str(self._tally)
        return told if len(told) < self._progress.console.width - BAR else self._tally.brief()

    def say(self, text: str) -> None:
        console = self._progress.console
        for line in divided(text, console):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def put(self, text: str) -> None:
        # The cursor stands behind the bar.
        if sys.stdout.isatty():
            self._progress.stop()
        click.echo(text)
        self.update()

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """A line on standard error for each tenth of the jobs, and after a silence that doubles each time."""

    def __init__(self, tally: Tally) -> None:
        self._tally, self._tenths, self._silence = tally, 0, SILENCE
        self._said = clock.monotonic()

    def update(self) -> None:
        tenths = self._tally.done * 10 // self._tally.total
        is_silent = clock.monotonic() - self._said >= self._silence
        if self._tally.done == self._tally.total or not (tenths > self._tenths or is_silent):
            return  # the end is told by the caller
        if tenths == self._tenths:
            self._silence *= 2
        self._tenths, self._said = tenths, clock.monotonic()
        tell(str(self._tally))

    def say(self, text: str) -> None:
        tell(text)

    def put(self, text: str) -> None:
        click.echo(text)

    def close(self) -> None:
        pass


class Silent:
    """No display."""

    def update(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def put(self, text: str) -> None:
        click.echo(text)

    def close(self) -> None:
        pass


def finish(client: Client, ids: Sequence[str], *, caller: Caller, timeout: float | None, of: str = "") -> None:
    """Wait for named jobs and print how each ended. Raises LeaseholdError unless all succeeded.

    timeout: seconds after which this gives up; None = never. of: as of `interruptible`.
    """
    tally = Tally(len(ids))
    display = Bar(tally) if output.terminal() else Silent()
    pending, ended = dict.fromkeys(ids), list[Record]()
    with interruptible(pending, of=of):
        for job in _ended(client, pending, tally=tally, display=display, timeout=timeout, are_new=False):
            ended.append(job)
            if not caller.json:
                display.put(output.ending(job))
    if caller.json:
        readable.print_json(ended)
    if pending:
        raise TimedOut(list(pending), timeout or 0.0)
    _require_success(ended)


def finish_file(client: Client, ids: Sequence[str], *, caller: Caller, quiet: bool) -> None:
    """Wait for the jobs of a file: progress, at most NAMED jobs without success, and the sum.

    Raises LeaseholdError unless all succeeded. quiet: no progress. With `caller.json` all ended jobs are printed.
    """
    tally = Tally(len(ids))
    display: Display = Silent() if quiet else Bar(tally) if output.terminal() else Lines(tally)
    pending = dict.fromkeys(ids)
    with interruptible(pending):
        ended = list(_ended(client, pending, tally=tally, display=display, timeout=None, are_new=True))
    if caller.json:
        readable.print_json(ended)
    else:
        bad = [job for job in ended if job["state"] != JobState.SUCCEEDED]
        for job in bad[:NAMED]:
            tell(output.ending(job))
        if len(bad) > NAMED:
            tell(f"and {len(bad) - NAMED:,} more that did not succeed")
        tell(str(tally))
    _require_success(ended)


@contextmanager
def graph_progress() -> Iterator[Callable[[Record], None]]:
    """Show how many nodes of a graph have ended; gives what takes the graph each time that it was looked at.

    Says that the graph goes on, whatever ends the wait; see `going_on`.
    """
    seen: list[tuple[Record, Tally, Display]] = []

    def hint() -> str | None:
        ids = [graph["id"] for graph, _, _ in seen]
        return (
            f"graph {ids[0]} goes on: `leasehold graph wait {ids[0]}`, or `leasehold graph cancel {ids[0]}`"
            if ids
            else None
        )

    def told(graph: Record) -> None:
        ended = Counter({state: graph[state] for state in map(str, FINAL) if graph[state]})
        if not seen:
            tally = Tally(graph["nodes"], ended)
            seen.append((graph, tally, Bar(tally) if output.terminal() else Lines(tally)))
        for _, tally, display in seen:
            tally.ended = ended
            display.update()

    try:
        with going_on(hint):
            yield told
    finally:
        for _, _, display in seen:
            display.close()


def _require_success(ended: Sequence[Record]) -> None:
    bad = [job for job in ended if job["state"] != JobState.SUCCEEDED]
    if len(ended) == 1 == len(bad):
        raise LeaseholdError("the job did not succeed")
    if bad:
        raise LeaseholdError(
            f"{len(bad):,} of {plural(len(ended), 'job')} did not succeed; the first: {output.ending(bad[0])}"
        )


def _ended(
    client: Client, pending: dict[str, None], *, tally: Tally, display: Display, timeout: float | None, are_new: bool
) -> Iterator[Record]:
    """Take each job out of `pending` and yield it when it has ended, and keep the display up to date.

    This ends after `timeout` seconds. are_new: none can have ended before; of others the first look does not count for
    the rate.

    If none has ended for 10 seconds, the display is told what the first of those that are left waits for.
    """
    reasons = Reasons(client, display.say)
    deadline = None if timeout is None else clock.monotonic() + timeout

    def told(job: Record) -> None:
        if tally.told.get(job["id"]) != job["progress"]:
            tally.told.pop(job["id"], None)
            tally.told[job["id"]] = job["progress"]
        display.update()

    wants = None if isinstance(display, Silent) else told
    is_first = wants is not None and not are_new
    tally.has_rate = not is_first
    try:
        while pending:
            left = SILENCE if deadline is None else max(0.0, min(SILENCE, deadline - clock.monotonic()))
            left = 0.0 if is_first else left
            before = len(pending)
            for job in client.wait(list(pending), timeout=left, told=wants):
                pending.pop(job["id"], None)
                tally.told.pop(job["id"], None)
                tally.ended[job["state"]] += 1
                display.update()
                yield job
            if is_first:
                tally.begin()
            display.update()
            if len(pending) == before and not (is_first or isinstance(display, Silent)):
                reasons.tell(next(iter(pending)))
            if deadline is not None and clock.monotonic() >= deadline:
                return
            is_first = False
    finally:
        display.close()
