"""Who ran what, and when: kept outside the database, on one monotonic clock.

It is the witness for "no job ever ran twice at the same time".
"""

import threading
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from schema import clock


@dataclass
class Execution:
    """One stretch of time during which a bot ran a job; `end` is None while it runs."""

    job: str
    fence: int
    bot: str
    begin: float
    end: float | None = None


class ExecutionLog:
    """Who ran what, and when. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Execution] = []

    def begin(self, job: str, fence: int, bot: str) -> Execution:
        with self._lock:
            entry = Execution(job, fence, bot, clock.monotonic())
            self._entries.append(entry)
            return entry

    def end(self, entry: Execution, at: float | None = None) -> None:
        with self._lock:
            if entry.end is None:
                entry.end = clock.monotonic() if at is None else max(entry.begin, at)

    def entries(self) -> list[Execution]:
        with self._lock:
            return list(self._entries)

    def overlaps(self) -> list[tuple[Execution, Execution]]:
        """Pairs of stretches in which one job ran twice at the same time (S12); must be empty at any moment."""
        by_job: dict[str, list[Execution]] = defaultdict(list)
        for entry in self.entries():
            by_job[entry.job].append(entry)
        found = []
        for entries in by_job.values():
            entries.sort(key=lambda entry: entry.begin)
            found += [
                (first, second) for first, second in pairwise(entries) if first.end is None or second.begin < first.end
            ]
        return found
