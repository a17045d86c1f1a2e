"""The demo's results: counts, waits, locality hits, and the progress display."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Self

from leasehold.client import Client
from leasehold.states import JobState
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from bots.demo import workload
from bots.demo.workload import Module
from schema import clock

#: The number of last hints for which a bot counts as warm.
LATELY = 10


@dataclass(frozen=True)
class Result:
    """The result of one job.

    granted_at: the time of its first grant. placed_at: the time of its last grant, to `bot`. strategy: the strategy
    that chose the bot; `proactive` = the bot received the job when it finished another one.
    """

    id: str
    module: Module
    state: str
    submitted_at: datetime
    granted_at: datetime | None
    placed_at: datetime | None
    finished_at: datetime | None
    bot: str | None
    strategy: str | None
    retries: int
    verified: bool

    @property
    def waited(self) -> float | None:
        """Milliseconds from the job's submit to its first grant."""
        return None if self.granted_at is None else (self.granted_at - self.submitted_at).total_seconds() * 1000


@dataclass(frozen=True)
class Share:
    """The part of the jobs of one instance or one bot. Times are in milliseconds.

    A locality hit is a job whose bot had recently finished a job of the same package.
    """

    jobs: int
    verified: int
    wait_p50_ms: float | None
    wait_p99_ms: float | None
    locality_hits: int


@dataclass(frozen=True)
class Report:
    """The demo's report.

    jobs: succeeded + failed + lost. seconds: the duration of the demo. jobs_per_second: the pool's rate from the first
    submit to the last end of a job. bots: the number of bots that ran a job.
    """

    jobs: int
    succeeded: int
    failed: int
    lost: int
    verified: int
    seconds: float
    jobs_per_second: float
    wait_p50_ms: float | None
    wait_p99_ms: float | None
    locality_hits: int
    retries: int
    by_strategy: dict[str, int]
    bots: int
    by_instance: dict[str, Share]
    by_bot: dict[str, Share]
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True if every job returned the right result."""
        return self.verified == self.jobs


def read_result(client: Client, id: str, module: Module) -> Result:
    """Read one final job from the gateway and compare its output with the expected one."""
    job = client.show(id)
    grants = [event for event in job["events"] if event["move"] == "grant"]
    decision = (grants[-1].get("details") or {}) if grants else {}
    written = b"".join(piece.data for piece in client.written(id))
    return Result(
        id=id,
        module=module,
        state=job["state"],
        submitted_at=datetime.fromisoformat(job["created_at"]),
        granted_at=datetime.fromisoformat(grants[0]["at"]) if grants else None,
        placed_at=datetime.fromisoformat(grants[-1]["at"]) if grants else None,
        finished_at=datetime.fromisoformat(job["finished_at"]) if job["finished_at"] else None,
        bot=job["bot"],
        strategy=decision.get("strategy"),
        retries=max(0, len(grants) - 1),
        verified=job["state"] == JobState.SUCCEEDED and written == workload.expected_output(module),
    )


def locality_hits(results: Iterable[Result]) -> frozenset[str]:
    """Return the ids of jobs granted to a bot that had recently finished a job of the same package."""
    events: dict[str, list[tuple[datetime, bool, Result]]] = defaultdict(list)
    for result in results:
        if result.bot is not None and result.placed_at is not None:
            events[result.bot].append((result.placed_at, True, result))
            if result.finished_at is not None:
                events[result.bot].append((result.finished_at, False, result))
    hits = set()
    for each in events.values():
        lately: list[str] = []
        for _, granted, result in sorted(each, key=lambda event: event[:2]):
            package = result.module.package
            if granted and package in lately[-LATELY:]:
                hits.add(result.id)
            elif not granted:
                lately = [known for known in lately if known != package] + [package]
    return frozenset(hits)


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the nearest-rank percentile: the smallest value that `share` (0 to 1) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def report(results: Sequence[Result], *, missing: Sequence[Module], seconds: float) -> Report:
    """Make the report from the results. `missing`: modules of lost jobs. `seconds`: the duration of the demo."""
    warm = locality_hits(results)
    states = Counter(result.state for result in results)
    instances = [name for name in workload.PRIORITIES if any(result.module.instance == name for result in results)]
    bots = sorted({result.bot for result in results if result.bot is not None})
    total = _share(results, warm)
    wrong = [f"{result.module.name} ({result.state}, {result.id})" for result in results if not result.verified]
    return Report(
        jobs=len(results) + len(missing),
        succeeded=states[JobState.SUCCEEDED],
        failed=len(results) - states[JobState.SUCCEEDED],
        lost=len(missing),
        verified=total.verified,
        seconds=round(seconds, 3),
        jobs_per_second=_rate(results),
        wait_p50_ms=total.wait_p50_ms,
        wait_p99_ms=total.wait_p99_ms,
        locality_hits=total.locality_hits,
        retries=sum(result.retries for result in results),
        by_strategy=dict(Counter(result.strategy for result in results if result.strategy is not None)),
        bots=len(bots),
        by_instance={name: _share([r for r in results if r.module.instance == name], warm) for name in instances},
        by_bot={name: _share([r for r in results if r.bot == name], warm) for name in bots},
        wrong=wrong + [f"{module.name} (lost)" for module in missing],
    )


def _share(results: Sequence[Result], warm: frozenset[str]) -> Share:
    waits = [result.waited for result in results if result.waited is not None]
    return Share(
        jobs=len(results),
        verified=sum(result.verified for result in results),
        wait_p50_ms=_rounded(percentile(waits, 0.50)),
        wait_p99_ms=_rounded(percentile(waits, 0.99)),
        locality_hits=sum(result.id in warm for result in results),
    )


def _rate(results: Sequence[Result]) -> float:
    ends = [result.finished_at for result in results if result.finished_at is not None]
    if not ends:
        return 0.0
    span = (max(ends) - min(result.submitted_at for result in results)).total_seconds()
    return round(len(ends) / max(span, 0.001), 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


# The progress display: bars and bots on a terminal, a line every few seconds elsewhere


#: Seconds between two lines without a terminal.
LINE_EVERY = 5.0


class Board:
    """Counts finished jobs by instance and bot, and shows them. `shares`: the number of jobs of each instance."""

    def __init__(self, shares: Mapping[str, int], *, console: Console) -> None:
        self._shares, self._console = dict(shares), console
        self._done: Counter[str] = Counter()
        self._bots: Counter[str] = Counter()
        self._wrong = 0
        self._began = self._printed_at = clock.monotonic()
        self._progress = Progress(
            TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(name, total=total) for name, total in self._shares.items()
        }
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=5)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        elif error is None:
            self._print_progress()

    def say(self, line: str) -> None:
        """Print one line, above the bars if there are any."""
        self._console.print(line, soft_wrap=True)

    def finished(self, instance: str, bot: str | None, *, right: bool) -> None:
        """Count one more final job. `right`: its result was the expected one."""
        self._done[instance] += 1
        self._bots[bot or "nobody"] += 1
        self._wrong += not right
        self._progress.advance(self._tasks[instance])
        if not self._console.is_terminal and clock.monotonic() - self._printed_at >= LINE_EVERY:
            self._print_progress()

    def _print_progress(self) -> None:
        self._printed_at = clock.monotonic()
        parts = [f"{name} {self._done[name]}/{total}" for name, total in self._shares.items()]
        seconds = self._printed_at - self._began
        self._console.print(
            f"{seconds:6.1f} s  {', '.join(parts)}; {self._rate():.1f} jobs/s on {len(self._bots)} bots, "
            f"{self._wrong} wrong",
            soft_wrap=True,
        )

    def _rate(self) -> float:
        return self._done.total() / max(clock.monotonic() - self._began, 0.001)

    def _picture(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name in sorted(self._bots):
            table.add_row(name, f"{self._bots[name]} jobs", f"{self._bots[name] / self._elapsed():.1f}/s")
        summary = f"{self._done.total()} results checked, {self._wrong} wrong, {self._rate():.1f} jobs/s"
        return Group(self._progress, table, summary)

    def _elapsed(self) -> float:
        return max(clock.monotonic() - self._began, 0.001)
