"""The journal: what was asked of the pool, what it acknowledged and which commands were killed, kept outside of it."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ops.chaos import records
from schema import clock


@dataclass(frozen=True)
class Acknowledged:
    """A submit that the pool has acknowledged: its key, the id of the job, and when, on the monotonic clock."""

    key: str
    job: str
    at: float


@dataclass(frozen=True)
class Submits:
    """What a journal holds.

    asked: every key that was ever sent, with the time of its first request.
    cancelled, killed: jobs that a caller wanted cancelled, and jobs whose commands a fault has killed.
    """

    asked: Mapping[str, float] = field(default_factory=dict)
    acknowledged: tuple[Acknowledged, ...] = ()
    cancelled: frozenset[str] = frozenset()
    killed: frozenset[str] = frozenset()


class Journal:
    """Writes a journal; several threads may share it. What is done is noted before it is done, an answer at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = records.Appender(path)
        self._lock = threading.Lock()
        self._jobs: dict[str, str] = {}

    def ask(self, key: str) -> None:
        """Note that a request with this key is about to be sent."""
        self._file.write("ask", key, f"{clock.monotonic():.3f}")

    def acknowledge(self, key: str, job: str) -> None:
        """Note the job's id, which the pool has just answered."""
        self._file.write("ack", key, job, f"{clock.monotonic():.3f}")
        with self._lock:
            self._jobs[key] = job

    def cancel(self, job: str) -> None:
        """Note that a request to cancel this job is about to be sent."""
        self._file.write("cancel", job)

    def kill(self, job: str) -> None:
        """Note that the command of this job is about to be killed."""
        self._file.write("kill", job)

    @property
    def jobs(self) -> dict[str, str]:
        """Acknowledged keys and the ids of their jobs."""
        with self._lock:
            return dict(self._jobs)

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Submits:
    """Read a journal that may still be written."""
    asked: dict[str, float] = {}
    acknowledged: list[Acknowledged] = []
    cancelled: set[str] = set()
    killed: set[str] = set()
    for words in records.lines(path):
        match words:
            case ["ask", key, at]:
                asked.setdefault(key, float(at))
            case ["ack", key, job, at]:
                acknowledged.append(Acknowledged(key, job, float(at)))
            case ["cancel", job]:
                cancelled.add(job)
            case ["kill", job]:
                killed.add(job)
            case _:
                raise ValueError(f"{path}: a line is no entry of a journal: {words}")
    return Submits(asked, tuple(acknowledged), frozenset(cancelled), frozenset(killed))
