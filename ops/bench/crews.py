"""Processes that work on one pool at the same time, started together and timed together."""

import json
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from typing import Any, Literal

from meters import Stretch, metered
from pools import TIMING, Shape, request
from prometheus_client import Counter
from sqlalchemy import Connection, event

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.cycle.settings import AssignerSettings
from assigner.loops import Again
from assigner.metrics import JOBS_ASSIGNED, RACES_LOST
from assigner.process.assign import GARBAGE
from bots.protocol import LeaseReport, Outcome, Session, Sync
from bots.sync.call import NewCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.gc_tuning import infrequent_gc
from schema.moves import submit as submit_moves
from schema.moves.submit import submit_alone
from schema.postgres.engine import Database, DatabaseSettings

#: Seconds at most after which who has placed nothing, but for want of a turn, looks whether there is more to do.
LOOK_AGAIN = 0.1
#: Seconds after which a worker that does not come to its end fails the benchmark.
PATIENCE = 900.0
DONE = Outcome(verdict="succeeded", exit_code=0)

#: Work of one process: its number, its way to the database, the jobs that all processes still have to do.
Work = Callable[["Worker"], Stretch]


class Worker:
    """One process of a crew."""

    def __init__(self, url: str, number: int, crew: int, wanted: int, done: Any, barrier: Barrier) -> None:
        self.number, self.crew, self.wanted = number, crew, wanted
        self.chance = random.Random(number + 1)
        self.database = Database(url, DatabaseSettings(), role=f"bench-{number}", chance=self.chance)
        self.statements = self.transactions = self.alone = 0
        self.ended: float | None = None
        self.counted = (0, 0, 0)
        self._done, self._barrier = done, barrier
        for engine in (self.database.engine, self.database.reserve):
            event.listen(engine, "before_cursor_execute", self._executed)
            event.listen(engine, "begin", self._began)

    def _executed(self, *_: object) -> None:
        self.statements += 1

    def _began(self, _: Connection) -> None:
        self.transactions += 1

    def did_alone(self) -> None:
        """One statement more was a transaction of its own; they do not pass the engine, which counts the others."""
        self.statements += 1
        self.transactions += 1
        self.alone += 1

    def ready(self) -> None:
        """Wait for the others. What was counted before does not count."""
        self._barrier.wait(PATIENCE)
        self.statements = self.transactions = self.alone = 0

    def finished(self) -> None:
        """The measured part is over; what is done after it does not count."""
        if self.ended is None:
            self.ended, self.counted = clock.monotonic(), (self.statements, self.transactions, self.alone)

    def add(self, jobs: int) -> bool:
        """So many more are done; whether there is more to do for anybody."""
        with self._done.get_lock():
            self._done.value += jobs
            return bool(self._done.value < self.wanted)

    @property
    def more(self) -> bool:
        """Whether there is more to do."""
        return bool(self._done.value < self.wanted)

    def share(self, items: Sequence[Any]) -> list[Any]:
        """This process's part of them."""
        return list(items[self.number :: self.crew])


def _main(work: Work, arguments: tuple[Any, ...], results: Any) -> None:
    worker = Worker(*arguments)
    try:
        with infrequent_gc(*GARBAGE):
            stretch = work(worker)
        worker.finished()
        stretch.costs.statements, stretch.costs.transactions, stretch.costs.alone = worker.counted
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
    """Let so many processes do `work` until so many jobs are done; the time runs from their common start to the last
    one's end. `main` is what each process runs. `meanwhile` runs here, and can ask how many jobs are done; when it is
    over, so is the work."""
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
            began = clock.monotonic()
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
                costs.statements += stretch.costs.statements
                costs.transactions += stretch.costs.transactions
                costs.alone += stretch.costs.alone
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
    """Submits in batches of this size; 1 is one by one."""

    def __init__(self, shape: Shape, batch: int) -> None:
        self.shape, self.batch = shape, batch

    def __call__(self, worker: Worker) -> Stretch:
        stretch = Stretch()
        wanted = [request(number, self.shape) for number in range(self.batch)]
        worker.database.run(lambda connection: connection.exec_driver_sql("SELECT 1"))
        worker.ready()
        submit = self._alone if self.batch == 1 else self._together
        while worker.more:
            began = clock.monotonic()
            submit(worker, wanted)
            worker.add(self.batch)
            stretch.waits.append(clock.monotonic() - began)
        return stretch

    def _together(self, worker: Worker, wanted: Sequence[dict[str, object]]) -> None:
        worker.database.run(lambda connection: submit_moves.submit(connection, wanted, actor="bench"))

    def _alone(self, worker: Worker, wanted: Sequence[dict[str, object]]) -> None:
        worker.database.run_alone(lambda driver: submit_alone(driver, wanted[0], actor="bench"))
        worker.did_alone()


class Assigning:
    """Assigners that never sleep but for their turn while there is something to place."""

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
    """Bots that finish at once what they are given, their calls settled together, and an assigner that fills them."""

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
        # What is still held is finished, and nothing new is taken.
        left = bots
        while left:
            answers = sync_service.answer([NewCall(bot.message("draining"), clock.monotonic()) for bot in left])
            for bot, answer in zip(left, answers, strict=True):
                bot.finished(answer)
            left = [bot for bot in left if bot.held]
        return stretch


class _Bot:
    """What a bot remembers between two calls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seq = 0
        self.held: list[LeaseReport] = []

    def message(self, status: Literal["ok", "draining"] = "ok") -> Sync:
        """The next call: everything that was given is done."""
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
        """Take an answer; how many jobs the call that it answers has finished."""
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
    """A counter of this process, all of its labels together."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))
