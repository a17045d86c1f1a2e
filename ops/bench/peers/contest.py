"""What the scripts of all peers share: command line, common start, costs, and the result as a line of JSON.

It runs in the environments of the peers, so it needs only the standard library. A peer's script gives the function that
reads the server's counters, with the driver of that peer.
"""

import argparse
import json
import multiprocessing
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as first_of
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

#: A script has the name of its peer's package and would hide it, so this directory is searched last.
HERE = str(Path(__file__).parent)
sys.path.remove(HERE)
sys.path.append(HERE)

#: Seconds within which all workers must be ready, and within which a measurement must end.
READY_WITHIN, DONE_WITHIN = 60.0, 1800.0
#: Latency: first samples that are not counted; least and most seconds between two samples.
WARM_UP, PAUSE = 5, (0.1, 0.2)
COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
#: A backend reports its transactions when it ends, at the latest.
OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""

#: Runs one statement in a connection of its own (URL, SQL) and gives the first column of the first row, if any.
Ask = Callable[[str, str], Any]


class Failed(Exception):
    """A measurement is not valid; the message says why."""


@dataclass(frozen=True)
class Settings:
    """The command line. `threads` are clients or concurrent tasks of a process if the peer has no threads."""

    shape: str
    dsn: str
    jobs: int
    processes: int
    threads: int
    bots: int
    capacity: int
    queued: int
    sample: int
    plain: int = 0

    def shares(self, whole: int) -> list[int]:
        """Divide `whole` evenly among the processes."""
        return [whole // self.processes + (number < whole % self.processes) for number in range(self.processes)]


@dataclass(frozen=True)
class Done:
    """Jobs that one worker has done; `last` is when the last one was committed, in monotonic seconds."""

    jobs: int
    last: float


@dataclass(frozen=True)
class Run:
    """Result of one measurement. `cpu_seconds`: of the workers since the start, without the server."""

    jobs: int
    seconds: float
    cpu_seconds: float | None = None


@dataclass
class Start:
    """Common start: each thread of each worker calls it when ready; the clock runs when it returns."""

    ready: Barrier
    go: Barrier
    #: CPU seconds of this process when its clock started.
    cpu: float = 0.0

    def __call__(self) -> None:
        self.ready.wait(READY_WITHIN)
        self.go.wait(READY_WITHIN)
        self.cpu = time.process_time()

    def abort(self) -> None:
        self.ready.abort()
        self.go.abort()


class Samples:
    """Samples of a latency measurement; each starts after the queue has been idle for a while."""

    def __init__(self, wanted: int, started: Connection) -> None:
        self._wanted, self._started = wanted, started
        self._waits: list[float] = []
        self._chance = random.Random(1)

    def rounds(self) -> Iterator[None]:
        """Yield once for each sample; the loop body submits one job. The first samples are not counted."""
        for number in range(-WARM_UP, self._wanted):
            time.sleep(self._chance.uniform(*PAUSE))
            submitting = time.monotonic()
            yield
            if not self._started.poll(READY_WITHIN):
                raise Failed(f"a job has not started within {READY_WITHIN:.0f} s")
            if number >= 0:
                self._waits.append(self._started.recv() - submitting)
            else:
                self._started.recv()

    def percentiles(self) -> dict[str, float]:
        """Return percentiles in milliseconds, by nearest rank."""
        ordered = sorted(self._waits)
        return {
            f"p{percent}_ms": round(ordered[-(-percent * len(ordered) // 100) - 1] * 1000, 3)
            for percent in (50, 95, 99)
        }


class Track:
    """The database of a measurement, and the costs of the work on it so far."""

    def __init__(self, dsn: str, ask: Ask) -> None:
        self.transactions = self.wal_bytes = 0
        self._dsn, self._ask = dsn, ask

    def race(self, work: Callable[..., Done], arguments: Sequence[tuple[Any, ...]], *, threads: int = 1) -> Run:
        """Run `work(start, *arguments)` in one process for each item of `arguments`, with a common start.

        threads: number of threads of each process that call `start`.
        """
        context = multiprocessing.get_context("spawn")
        parties = len(arguments) * threads + 1
        start = Start(context.Barrier(parties), context.Barrier(parties))
        pipes = [context.Pipe(duplex=False) for _ in arguments]
        crew = [
            context.Process(target=_work, args=(work, start, theirs, given), daemon=True)
            for (_, theirs), given in zip(pipes, arguments, strict=True)
        ]
        with self._counted() as stop:
            for process in crew:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            began = _begin(start, [ours for ours, _ in pipes])
            done = _results([ours for ours, _ in pipes])
            stop()
            for process in crew:
                process.join()
        return Run(
            sum(each.jobs for each, _ in done),
            max(each.last for each, _ in done) - began,
            sum(cpu for _, cpu in done),
        )

    def latency(
        self,
        settings: Settings,
        consume: Callable[[Settings, Connection], None],
        produce: Callable[[Settings, "Samples"], None],
    ) -> dict[str, Any]:
        """Measure how long a job waits in an idle queue until it starts.

        consume: the worker, in a process of its own; sends the monotonic time at which each job starts.
        produce: submits one job for each sample.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=consume, args=(settings, theirs), daemon=True)
        samples = Samples(settings.jobs, ours)
        with self._counted() as stop:
            worker.start()
            theirs.close()
            began = time.monotonic()
            produce(settings, samples)
            run = Run(settings.jobs, time.monotonic() - began)
            stop()
            worker.terminate()
            worker.join()
        return self.as_result(run, **samples.percentiles())

    def as_result(self, run: Run, **more: Any) -> dict[str, Any]:
        """The run as a shape gives it, with the cost of all races so far."""
        return {**asdict(run), "transactions": self.transactions, "wal_bytes": self.wal_bytes, **more}

    @contextmanager
    def _counted(self) -> Iterator[Callable[[], None]]:
        """Add the costs of the block; WAL is counted until the function that it yields is called."""
        self._quiet()
        commits, wal = self._ask(self._dsn, COMMITS), self._ask(self._dsn, WAL)
        ends: list[int] = []
        yield lambda: ends.append(self._ask(self._dsn, WAL))
        self._quiet()
        self.transactions += self._ask(self._dsn, COMMITS) - commits
        self.wal_bytes += ends[0] - wal

    def _quiet(self) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while self._ask(self._dsn, OTHERS):
            if time.monotonic() > deadline:
                raise Failed("somebody else is connected to the database")
            time.sleep(0.02)


def _work(work: Callable[..., Done], start: Start, results: Connection, given: tuple[Any, ...]) -> None:
    try:
        done = work(start, *given)
        results.send((done, time.process_time() - start.cpu))
    except BaseException:
        results.send(traceback.format_exc())
        start.abort()
        sys.exit(1)


def _begin(start: Start, workers: list[Connection]) -> float:
    try:
        start.ready.wait(READY_WITHIN)
        began = time.monotonic()
        start.go.wait(READY_WITHIN)
        return began
    except threading.BrokenBarrierError:
        _results(workers)
        raise Failed(f"the workers were not ready within {READY_WITHIN:.0f} s") from None


def _results(workers: list[Connection]) -> list[tuple[Done, float]]:
    """Return what each worker has done and its CPU seconds. Raises Failed with the first failure."""
    results: list[tuple[Done, float]] = []
    waiting, deadline = list(workers), time.monotonic() + DONE_WITHIN
    while waiting:
        ended = first_of(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise Failed(f"not done within {DONE_WITHIN:.0f} s")
        for worker in ended:
            waiting.remove(worker)
            try:
                result = worker.recv()
            except EOFError:
                raise Failed("a worker died without a word") from None
            if isinstance(result, str):
                raise Failed(result)
            results.append(result)
    return results


def main(peer: str, shapes: dict[str, Callable[[Settings], dict[str, Any]]]) -> None:
    """Run the shape that the command line names and print its result as one line of JSON.

    A shape returns at least `jobs`, `seconds`, `transactions` and `wal_bytes`. On failure the reason is written to
    stderr, and the exit code is 1.
    """
    settings = _settings(peer, list(shapes))
    try:
        measured = shapes[settings.shape](settings)
    except Failed as reason:
        sys.exit(f"error: {peer} {settings.shape}: {reason}")
    given = {name: value for name, value in asdict(settings).items() if name not in ("dsn", "shape", "jobs")}
    head = {"peer": peer, "version": version(peer), "shape": settings.shape}
    print(json.dumps({**head, **measured, "settings": given}))


def _settings(peer: str, shapes: list[str]) -> Settings:
    parser = argparse.ArgumentParser(prog=f"{peer}.py", description=f"One measurement of {peer}.")
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("--jobs", type=int, help="jobs (default: 5000), or samples of latency (default: 200)")
    parser.add_argument("--dsn", required=True, help="URL of an empty database; it is filled and left as it is.")
    for name, default, meaning in (
        ("processes", 1, "processes that work side by side"),
        ("threads", 1, "threads, or clients, of each process"),
        ("bots", 50, "registered bots"),
        ("capacity", 0, "jobs that a bot holds at once; 0 is more than enough for all"),
        ("queued", 0, "jobs in the queue at the start, where that is more than --jobs"),
        ("sample", 0, "bots that are sampled for a job; 0 looks at all"),
        ("plain", 0, "1: jobs are plain functions, not coroutines, in PgQueuer and Procrastinate"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    given = vars(parser.parse_args())
    if given["jobs"] is None:
        given["jobs"] = 200 if given["shape"] == "latency" else 5000
    for name, least in (("jobs", 1), ("processes", 1), ("threads", 1), ("bots", 1), ("capacity", 0), ("queued", 0)):
        if given[name] < least:
            parser.error(f"--{name}: must be at least {least}")
    return Settings(**given)
