"""Processes that work on one pool at the same time, started and timed together."""

import json
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from typing import Any, Literal

from prometheus_client import Counter

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.cycle.settings import AssignerSettings
from assigner.loops import Again, Loop
from assigner.maintenance.retention import Retention
from assigner.maintenance.upkeep import UpkeepSettings
from assigner.metrics import JOBS_ASSIGNED, RACES_LOST
from assigner.process.assign import GARBAGE
from bots.protocol import LeaseReport, Outcome, Session, Sync
from bots.sync.call import NewCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from ops.bench import pgbouncer
from ops.bench.fixtures import TIMING, Shape, request
from ops.bench.measure import Stretch, cpu_seconds, metered, server_cpu_seconds
from schema import clock
from schema.gc_tuning import infrequent_gc
from schema.moves.submit import submit_at_once
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings

#: Longest pause, in seconds, of an assigner that has placed nothing, unless it waits for a slot.
LOOK_AGAIN = 0.1
#: Seconds after which a worker that has not ended fails the benchmark.
PATIENCE = 900.0
DONE = Outcome(verdict="succeeded", exit_code=0)

#: The work of one process.
Work = Callable[["Worker"], Stretch]


class Worker:
    """One worker process: its number, its database, and the count of jobs that all processes share."""

    def __init__(self, url: str, number: int, size: int, wanted: int, done: Any, barrier: Barrier) -> None:
        self.number, self.size, self.wanted = number, size, wanted
        self.chance = random.Random(number + 1)
        self.database = _opened(url, role=f"bench-{number}", chance=self.chance)
        self.statements = self.transactions = self.alone = 0
        self.ended: float | None = None
        self.counted = (0, 0, 0)
        self.cpu = 0.0
        self._done, self._barrier = done, barrier
        self._count()

    def _count(self) -> None:
        """Count what the connections of this process execute and commit."""
        worker = self
        execute, execute_later, commit = Connection.execute, Connection.execute_later, Connection.commit

        def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def executed(*arguments: Any) -> Any:
                worker.statements += 1
                return plain(*arguments)

            return executed

        def committed(connection: Connection) -> None:
            worker.transactions += 1
            commit(connection)

        replaced = {"execute": counted(execute), "execute_later": counted(execute_later), "commit": committed}
        for name, method in replaced.items():
            setattr(Connection, name, method)

    def did_alone(self) -> None:
        """Count a statement that was its own transaction; the engine, which counts the others, does not see it."""
        self.statements += 1
        self.transactions += 1
        self.alone += 1

    def ready(self) -> None:
        """Wait until all workers are ready, and set the counts to 0."""
        self._barrier.wait(PATIENCE)
        self.statements = self.transactions = self.alone = 0
        self.cpu = -cpu_seconds(os.getpid())

    def finished(self) -> None:
        """End the measured part: later statements are not counted."""
        if self.ended is None:
            self.ended, self.counted = clock.monotonic(), (self.statements, self.transactions, self.alone)
            self.cpu += cpu_seconds(os.getpid())

    def add(self, jobs: int) -> bool:
        """Count `jobs` more jobs as done. True while fewer are done than wanted."""
        with self._done.get_lock():
            self._done.value += jobs
            return bool(self._done.value < self.wanted)

    @property
    def more(self) -> bool:
        """True while fewer jobs are done than wanted."""
        return bool(self._done.value < self.wanted)

    def share(self, items: Sequence[Any]) -> list[Any]:
        """Return this process's part of the items."""
        return list(items[self.number :: self.size])


def _opened(url: str, *, role: str, chance: random.Random) -> Database:
    """The database of a worker, through a PgBouncer if the environment names the directory of its socket."""
    directory = os.environ.get(pgbouncer.DIRECTORY_VARIABLE)
    if directory is None:
        return Database(url, DatabaseSettings(), role=role, chance=chance)
    pooled = DatabaseSettings.model_validate({"pooler": "transaction", "listen_url": url})
    return Database(pgbouncer.through(directory, url), pooled, role=role, chance=chance)


def _main(work: Work, arguments: tuple[Any, ...], results: Any) -> None:
    worker = Worker(*arguments)
    try:
        with infrequent_gc(*GARBAGE):
            stretch = work(worker)
        worker.finished()
        stretch.costs.statements, stretch.costs.transactions, stretch.costs.alone = worker.counted
        stretch.cpu = worker.cpu
        results.put((worker.number, stretch, worker.ended))
    except BaseException as error:
        results.put((worker.number, f"{type(error).__name__}: {error}", clock.monotonic()))
        raise
    finally:
        worker.database.close()


def run(
    url: str,
    work: Any,
    *,
    processes: int,
    jobs: int,
    main: Callable[..., None] = _main,
    meanwhile: Callable[[Callable[[], int]], None] | None = None,
) -> Stretch:
    """Let `processes` processes do `work` until `jobs` jobs are done, and return what all of them did.

    The time runs from their common start to the end of the last one. Each process runs `main`. `meanwhile` runs in this
    process and is given a function that returns the number of jobs done; the work ends when it returns.
    """
    context = multiprocessing.get_context("spawn")
    barrier, results, done = context.Barrier(processes + 1), context.SimpleQueue(), context.Value("q", 0)
    children = [
        context.Process(target=main, args=(work, (url, number, processes, jobs, done, barrier), results))
        for number in range(processes)
    ]
    whole = Stretch(jobs=jobs)
    with metered(url) as costs:
        for child in children:
            child.start()
        with _stopped(children):
            barrier.wait(PATIENCE)
            began, cpu = clock.monotonic(), server_cpu_seconds(url)
            if meanwhile is not None:
                meanwhile(lambda: done.value)
                done.value = jobs
            ends = []
            for _ in children:
                number, stretch, ended = results.get()
                if not isinstance(stretch, Stretch):
                    raise SystemExit(f"error: worker {number}: {stretch}")
                ends.append(ended)
                whole.waits += stretch.waits
                whole.placements += stretch.placements
                whole.lost += stretch.lost
                whole.cpu += stretch.cpu
                costs.statements += stretch.costs.statements
                costs.transactions += stretch.costs.transactions
                costs.alone += stretch.costs.alone
            whole.cpu += server_cpu_seconds(url) - cpu
            for child in children:
                child.join(PATIENCE)
    whole.seconds, whole.costs, whole.jobs = max(ends) - began, costs, done.value
    return whole


@contextmanager
def _stopped(children: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for child in children:
            child.kill()
        raise


class Submitting:
    """Submit in batches of one size; 1 submits one job in a call."""

    def __init__(self, shape: Shape, batch: int) -> None:
        self.shape, self.batch = shape, batch

    def __call__(self, worker: Worker) -> Stretch:
        stretch = Stretch()
        wanted = [request(number, self.shape) for number in range(self.batch)]
        worker.database.run(lambda connection: connection.execute_sql("SELECT 1"))
        worker.ready()
        while worker.more:
            began = clock.monotonic()
            worker.database.run_alone(lambda driver: submit_at_once(driver, wanted, actor="bench"))
            worker.did_alone()
            worker.add(self.batch)
            stretch.waits.append(clock.monotonic() - began)
        return stretch


class Assigning:
    """Run an assigner that sleeps only while it waits for a slot or finds nothing to place."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __call__(self, worker: Worker) -> Stretch:
        stretch = Stretch()
        assigner = _assigner(worker, **self.settings)
        assigner.run_once()
        worker.ready()
        before = _counted(JOBS_ASSIGNED)
        while worker.more:
            began = clock.monotonic()
            pause = assigner.run_once()
            placed = _counted(JOBS_ASSIGNED)
            if placed == before:
                clock.sleep(pause if isinstance(pause, Again) else min(pause, LOOK_AGAIN))
                continue
            stretch.waits.append(clock.monotonic() - began)
            worker.add(placed - before)
            stretch.placements += placed - before
            before = placed
        stretch.lost = _counted(RACES_LOST)
        return stretch


class Cycling:
    """Bots that finish their jobs at once, with their calls settled together, and an assigner that gives them more."""

    def __init__(self, sessions: Sequence[Session], *, capacity: int, together: int, **fetch: Any) -> None:
        self.sessions, self.capacity, self.together, self.fetch = sessions, capacity, together, fetch

    def __call__(self, worker: Worker) -> Stretch:
        stretch = Stretch()
        sync_service = SyncService(
            worker.database, timing=TIMING, fetch=FetchSettings(**self.fetch), now=clock.monotonic
        )
        assigner = _assigner(worker)
        bots = [_Bot(session) for session in worker.share(self.sessions)]
        worker.ready()
        while worker.more:
            held = 0
            for start in range(0, len(bots), self.together):
                some = bots[start : start + self.together]
                began = clock.monotonic()
                answers = sync_service.answer([NewCall(bot.message(), began) for bot in some])
                stretch.waits.append(clock.monotonic() - began)
                worker.add(sum(bot.finished(answer) for bot, answer in zip(some, answers, strict=True)))
                held += sum(len(bot.held) for bot in some)
            if held < self.capacity * len(bots) and worker.more:
                assigner.run_once()
        worker.finished()
        # The bots finish the jobs that they still hold and take no new ones.
        left = bots
        while left:
            answers = sync_service.answer([NewCall(bot.message("draining"), clock.monotonic()) for bot in left])
            for bot, answer in zip(left, answers, strict=True):
                bot.finished(answer)
            left = [bot for bot in left if bot.held]
        return stretch


class Retaining:
    """Other work, while each process also deletes old jobs and keys as an assigner process does."""

    def __init__(self, work: Work, keep: float) -> None:
        self.work, self.keep = work, keep

    def __call__(self, worker: Worker) -> Stretch:
        retention = Retention(
            worker.database, UpkeepSettings(keep_succeeded=self.keep, keep_keys=self.keep), now=clock.monotonic
        )
        loop = Loop("retention", retention.run_once, chance=worker.chance)
        loop.start()
        try:
            return self.work(worker)
        finally:
            loop.stop()


class _Bot:
    """The state of a bot between two calls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seq = 1
        self.held: list[LeaseReport] = []

    def message(self, status: Literal["ok", "draining"] = "ok") -> Sync:
        """Return the next call, which reports all jobs that were given as done."""
        self.seq += 1
        session = self.session
        return Sync.model_construct(
            bot=session.bot,
            epoch=session.epoch,
            secret=session.secret,
            seq=self.seq,
            status=status,
            capacity=None,
            leases=self.held,
            wait=0.0,
        )

    def finished(self, answer: Any) -> int:
        """Take the answer to a call; return how many jobs that call has finished."""
        done = len(self.held)
        self.held = [
            LeaseReport.model_construct(
                job=work["job"], fence=work["fence"], state="completed", outcome=DONE, output=[]
            )
            for work in json.loads(answer)["leases"]
        ]
        return done


def _assigner(worker: Worker, **settings: Any) -> PriorityAgeAssigner:
    return PriorityAgeAssigner(
        worker.database,
        AssignerSettings(**settings),
        timing=TIMING,
        chance=worker.chance,
        name=f"bench-{worker.number}",
        now=clock.monotonic,
    )


def _counted(counter: Counter) -> int:
    """Return the sum of a counter of this process over all its labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))
