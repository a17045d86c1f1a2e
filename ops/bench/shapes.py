"""What is measured: each shape fills a fresh database, lets processes work on it, and checks every invariant."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from crews import Assigning, Cycling, Submitting, run
from meters import Costs, Stretch, checked
from pools import Shape, empty, fill, opened, settle, submit

from schema.postgres.engine import Database

#: Seconds between two looks at the invariants while a watched run goes on.
LOOK = 0.25
PROCESSES = 2
#: Bots whose calls are settled together: what a gateway that is busy does.
TOGETHER = 25


@dataclass(frozen=True)
class Measurement:
    """One row of the table: `work` does so many jobs on the server and says what they cost."""

    name: str
    work: Callable[[str, bool], Stretch]


def submitting(batch: int, jobs: int, *, processes: int = PROCESSES) -> Callable[[str, bool], Stretch]:
    """Submits of so many jobs each, until so many are queued."""

    def work(server: str, watched: bool) -> Stretch:
        with empty(server, "bench") as url, opened(url) as database:
            fill(database, Shape(bots=0))
            with _watching(database, watched):
                stretch = run(url, Submitting(Shape(), batch), processes=processes, jobs=jobs)
            checked(database)
        return stretch

    return work


def assigning(shape: Shape, jobs: int, *, processes: int = PROCESSES) -> Callable[[str, bool], Stretch]:
    """Assigners that place so many of the queued jobs, with sampling, scoring, quotas and history."""

    def work(server: str, watched: bool) -> Stretch:
        with empty(server, "bench") as url, opened(url) as database:
            fill(database, shape)
            with _watching(database, watched):
                stretch = run(url, Assigning(), processes=processes, jobs=jobs)
            checked(database)
        return stretch

    return work


def cycling(shape: Shape, jobs: int, *, together: int = TOGETHER) -> Callable[[str, bool], Stretch]:
    """Submit, assign, lease, finish, at the functions that the gateway calls: so many jobs are submitted in bulk, then
    bots work until they are done. The costs of both halves add up."""

    def work(server: str, watched: bool) -> Stretch:
        with empty(server, "bench") as url, opened(url) as database:
            sessions = fill(database, shape)
            with _watching(database, watched):
                first = run(url, Submitting(shape, 1000), processes=PROCESSES, jobs=jobs)
                settle(database)
                # Some more, so that nobody's bots run dry before the last job that counts.
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
    """Look at the invariants again and again, if this run is a watched one."""
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
