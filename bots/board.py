"""What the demo shows while it runs: bars and bots on a terminal, a line now and then anywhere else."""

from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from schema import clock

#: Seconds between two lines where there is no terminal.
LINE_EVERY = 5.0


class Board:
    """Counts finished jobs by instance and bot, and shows them. `shares`: jobs expected of each instance."""

    def __init__(self, shares: Mapping[str, int], *, console: Console) -> None:
        self._shares, self._console = dict(shares), console
        self._done: Counter[str] = Counter()
        self._bots: Counter[str] = Counter()
        self._wrong = 0
        self._began = self._told = clock.monotonic()
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
            self._tell()

    def say(self, line: str) -> None:
        """Print one line, above the bars if there are any."""
        self._console.print(line, soft_wrap=True)

    def finished(self, instance: str, bot: str | None, *, right: bool) -> None:
        """One more job is final."""
        self._done[instance] += 1
        self._bots[bot or "nobody"] += 1
        self._wrong += not right
        self._progress.advance(self._tasks[instance])
        if not self._console.is_terminal and clock.monotonic() - self._told >= LINE_EVERY:
            self._tell()

    def _tell(self) -> None:
        self._told = clock.monotonic()
        parts = [f"{name} {self._done[name]}/{total}" for name, total in self._shares.items()]
        seconds = self._told - self._began
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
