"""The shapes of work: each fills a fresh database, lets processes work on it, and checks every invariant."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from ops.bench.fixtures import Shape, empty, fill, opened, settle, submit
from ops.bench.measure import Costs, Stretch, checked
from ops.bench.workers import Assigning, Cycling, Submitting, run
from schema.postgres.engine import Database

#: Seconds between two checks of the invariants during a watched run.
LOOK = 0.25
PROCESSES = 2
#: Bots whose calls are settled together, as a busy gateway does it.
TOGETHER = 25


@dataclass(frozen=True)
class Measurement:
    """One row of the table. `work` runs on the server with that URL, watched or not, and returns rate and costs."""

    name: str
    work: Callable[[str, bool], Stretch]


def submitting(batch: int, jobs: int, *, processes: int = PROCESSES) -> Callable[[str, bool], Stretch]:
    """Submit `batch` jobs in a call until `jobs` jobs are queued."""

    def work(server: str, watched: bool) -> Stretch:
        with empty(server, "bench") as url, opened(url) as database:
            fill(database, Shape(bots=0))
            with _watching(database, watched):
                stretch = run(url, Submitting(Shape(), batch), processes=processes, jobs=jobs)
            checked(database)
        return stretch

    return work


def assigning(shape: Shape, jobs: int, *, processes: int = PROCESSES) -> Callable[[str, bool], Stretch]:
    """Let assigners place `jobs` of the queued jobs, with sampling, scoring, quotas and history."""

    def work(server: str, watched: bool) -> Stretch:
        with empty(server, "bench") as url, opened(url) as database:
            fill(database, shape)
            with _watching(database, watched):
                stretch = run(url, Assigning(), processes=processes, jobs=jobs)
            checked(database)
        return stretch

    return work


def cycling(shape: Shape, jobs: int, *, together: int = TOGETHER) -> Callable[[str, bool], Stretch]:
    """Submit `jobs` jobs in bulk, then let bots work until they are done; the costs of both halves are added up.

    Works at the level of the functions that the gateway calls.
    """

    def work(server: str, watched: bool) -> Stretch:
        with empty(server, "bench") as url, opened(url) as database:
            sessions = fill(database, shape)
            with _watching(database, watched):
                first = run(url, Submitting(shape, 1000), processes=PROCESSES, jobs=jobs)
                settle(database)
                # Some more jobs, so that no bot is without one before the last job that counts is done.
                submit(database, shape, 2 * shape.bots * shape.capacity)
                work = Cycling(sessions, capacity=shape.capacity, together=together)
                then = run(url, work, processes=PROCESSES, jobs=jobs)
            checked(database)
        return _together(first, then)

    return work


def _together(first: Stretch, then: Stretch) -> Stretch:
    both = Costs(**{name: getattr(first.costs, name) + getattr(then.costs, name) for name in vars(first.costs)})
    share = then.jobs / max(1, first.jobs)
    return Stretch(then.jobs, first.seconds * share + then.seconds, both, then.placements, then.lost, then.waits)


@contextmanager
def _watching(database: Database, watched: bool) -> Iterator[None]:
    """Check the invariants again and again during a watched run."""
    with _Watch(database) if watched else nullcontext():
        yield


class _Watch(threading.Thread):
    def __init__(self, database: Database) -> None:
        super().__init__(name="watch", daemon=True)
        self._database, self._over = database, threading.Event()
        self._failure: SystemExit | None = None

    def __enter__(self) -> "_Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        while not self._over.wait(LOOK):
            try:
                checked(self._database)
            except SystemExit as failure:
                self._failure = failure
                return
