"""Thread pools of the gateway with a bound on waiting work, and the batches of calls of bots.

Calls of bots that wait at the same moment are settled together in one transaction. A call is settled at once while
nothing else is. When a thread becomes free, it takes all calls that have arrived. A second thread works beside it only
while half a batch waits, or if the first takes long: batches that are too small cost more than what is gained when one
thread computes while the other waits for the database.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import anyio
import anyio.to_thread
import structlog
from leasehold.errors import BadInput, NotReady

from bots.protocol import OpenSession, Session
from bots.sync import sessions
from schema import clock
from schema.diagnostics.tracing import AttemptTracer
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.standby import StandbyReads
from schema.timing import Timing

T = TypeVar("T")
#: A call of a bot, and its answer.
C = TypeVar("C")
A = TypeVar("A")

#: Threads of a pool that parse bodies. They compute, so more of them would only delay the event loop.
READERS = 2


class Busy(NotReady):
    """Too much work waits in the gateway; it did nothing for this request."""

    code = "busy"


class Slots:
    """How many pieces of work there may be at once, waiting or running. Only the event loop's thread may use it.

    `with slots:` counts one piece of work until the block ends, and raises Busy if there are too many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    @property
    def full(self) -> bool:
        """True if a new piece of work would be refused."""
        return self.taken >= self._most

    def __enter__(self) -> None:
        if self.full:
            raise Busy("the gateway has too much to do")
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.taken -= 1


class WorkerPool:
    """A thread pool with as many threads as its connection pool has connections, so that no thread waits for one.

    threads: connections of the connection pool. queue: how many pieces of work may wait for a thread. More work is
    refused at once: under overload it is better to answer few callers in time than all of them too late. urgent: True
    if `run` uses the reserved connections.
    """

    def __init__(self, database: Database, *, threads: int, queue: int, urgent: bool = False) -> None:
        self._database, self._urgent = database, urgent
        self.threads = threads
        self._limiter: anyio.CapacityLimiter | None = None
        self._readers: anyio.CapacityLimiter | None = None
        self._asked = 0
        #: Work that waits for a thread, or has one.
        self.slots = Slots(threads + queue)

    async def run(
        self, work: Callable[[Connection], T], *, kept_plans: bool = False, on: StandbyReads | None = None
    ) -> T:
        """Run `work` in one transaction on a thread. kept_plans: as of `Database.run`. on: where to read, None = on the
        primary. Raises Busy if too much work waits.
        """
        if on is not None:
            return await self.call(lambda: on.run(work, kept_plans=kept_plans))
        return await self.call(lambda: self._database.run(work, urgent=self._urgent, kept_plans=kept_plans))

    async def call(self, function: Callable[[], T]) -> T:
        """Call `function`, which may block, on a thread. Raises Busy if too much work waits."""
        with self.slots:
            return await self.run_unbounded(function)

    async def run_unbounded(self, function: Callable[[], T]) -> T:
        """Call `function`, which may block, on a thread, even if too much work waits.

        For work whose slots are already reserved, and for work that must not be refused.
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self.threads)
        self._asked += 1
        try:
            return await anyio.to_thread.run_sync(function, limiter=self._limiter)
        finally:
            self._asked -= 1

    @property
    def is_awaited(self) -> bool:
        """True if work waits for a thread of this pool. Any thread may ask."""
        return self._asked > self.threads

    async def read(self, function: Callable[[], T]) -> T:
        """Call `function`, which only computes, on a thread without a connection. Raises Busy if too much work waits.

        Separate threads let the gateway refuse a bad body even while the database hangs.
        """
        if self._readers is None:
            self._readers = anyio.CapacityLimiter(READERS)
        with self.slots:
            return await anyio.to_thread.run_sync(function, limiter=self._readers)


@dataclass(frozen=True)
class WorkerPools:
    """The thread pools of one gateway.

    Bots have a pool of their own, on the reserved connections, so that no bot loses its session because many callers
    are waiting.
    """

    callers: WorkerPool
    bots: WorkerPool


def worker_pools(database: Database, *, queue: int) -> WorkerPools:
    """Make the thread pools of one gateway. `queue`: how many pieces of work may wait for each of them."""
    return WorkerPools(
        callers=WorkerPool(database, threads=database.work.size, queue=queue),
        bots=WorkerPool(database, threads=database.reserve.size, queue=queue, urgent=True),
    )


# Batches: calls of different bots that are settled in one transaction


#: Calls settled in one transaction; if more than twice as many wait, half of them, up to `LARGEST`. With 200 busy bots
#: this settles 5 to 15 % more calls. Doubling both makes many calls cheaper, and each of them slower.
#:
#: A second thread takes part while half of `BATCH` wait, which 50 busy bots reach. Of 50 bots of capacity 1 the gateway
#: then settles 687 calls/s, and 559 without it, for the same processor time of each call; of 200 bots of capacity 4 482
#: and 477 (medians of 25 and 20 pairs of blocks in turns, on a busy machine).
BATCH, LARGEST = 32, 64
#: Seconds after which another thread takes the calls that wait while a batch is settled: longer than most batches take.
#: So a batch that waits for a lock does not hold up the calls of all other bots.
HELP_AFTER = 0.05

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Place(Generic[C, A]):
    """A call that waits to be settled, its bot and the future of its answer."""

    call: C
    bot: str
    answer: asyncio.Future[A]


@dataclass(eq=False, slots=True)
class _Worker:
    """A thread that settles batches, or the wish for one. began: the monotonic time at which its batch began."""

    began: float


class Batcher(Generic[C, A]):
    """Settles calls of bots in batches, each in one transaction on a thread of a worker pool.

    settle: returns the answer, or an error, of each of these calls; no two are of one bot.
    threads: the most threads that settle batches at the same time, None = all of the pool.
    slots: bounds the calls that wait or are being settled, None = those of the pool.
    most: the calls in one batch, or half of those that wait, up to `LARGEST`. observe: is told the size of each batch.
    help_after: seconds after which a batch counts as slow; calls do not wait for it.
    """

    def __init__(
        self,
        settle: Callable[[Sequence[C]], Sequence[A | Exception]],
        worker_pool: WorkerPool,
        *,
        threads: int | None = None,
        slots: Slots | None = None,
        most: int = BATCH,
        observe: Callable[[int], None] | None = None,
        help_after: float = HELP_AFTER,
    ) -> None:
        self._settle, self._worker_pool, self._most, self._observe = settle, worker_pool, most, observe
        self._help_after = help_after
        self._threads, self.slots = threads or worker_pool.threads, slots or worker_pool.slots
        self._places: deque[_Place[C, A]] = deque()
        self._at_work: set[str] = set()
        self._workers: set[_Worker] = set()
        #: Guards the three above: threads take batches by themselves. The number of places is also read without it.
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._help: asyncio.TimerHandle | None = None

    async def answer(self, call: C, *, bot: str) -> A:
        """Return the answer to this call of a bot, or raise its error. Raises Busy if too much work waits."""
        with self.slots:
            place: _Place[C, A] = _Place(call, bot, asyncio.get_running_loop().create_future())
            with self._lock:
                self._places.append(place)
                is_wanted = self._are_many or not self._is_another_quick()
            if is_wanted:
                self._start_worker()
            if self._help is None:
                self._help = asyncio.get_running_loop().call_later(self._help_after, self._help_out)
            return await place.answer

    @property
    def _are_many(self) -> bool:
        """True if enough calls wait for a second worker to be worthwhile."""
        return len(self._places) >= self._most // 2

    def _is_another_quick(self, but: _Worker | None = None) -> bool:
        """Return whether a worker, other than `but`, will soon take the calls that wait. A slow one will not."""
        slow = clock.monotonic() - self._help_after
        return any(worker.began > slow for worker in self._workers if worker is not but)

    def _start_worker(self) -> None:
        worker = _Worker(clock.monotonic())
        with self._lock:
            if len(self._workers) == self._threads:
                return
            self._workers.add(worker)
        task = asyncio.create_task(self._work(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _help_out(self) -> None:
        """Let another thread take the calls that still wait behind a batch, and ask again while calls wait."""
        self._help = None
        with self._lock:
            is_wanted = bool(self._places)
        if is_wanted:
            self._start_worker()
            self._help = asyncio.get_running_loop().call_later(self._help_after, self._help_out)

    async def _work(self, worker: _Worker) -> None:
        """Settle batches on threads until the worker has ended. If no thread can be had, the calls that wait fail."""
        failure: Exception | None = None
        try:
            while not await self._worker_pool.run_unbounded(partial(self._serve, worker)):
                pass
        except Exception as error:
            failure = error
        finally:
            with self._lock:
                self._workers.discard(worker)
                left = [] if failure is None else list(self._places)
                if left:
                    self._places.clear()
        if failure is not None:
            _hand_out(left, [failure] * len(left))

    def _serve(self, worker: _Worker) -> bool:
        """Settle batches on a thread. Returns whether the worker has ended; otherwise it goes on with a new thread.

        The next batch does not wait until the event loop has handed out the answers of the one before. If a whole batch
        waits, the event loop is what bots wait for: it gets time to take in more calls, and the next batch is larger.
        Other work that waits for the thread comes first.
        """
        while batch := self._take(worker):
            if self._observe is not None:
                self._observe(len(batch))
            answers = self._settled([place.call for place in batch])
            # Before the bots may be taken again, so that the answers of one bot keep their order.
            batch[0].answer.get_loop().call_soon_threadsafe(_hand_out, batch, answers)
            with self._lock:
                self._at_work.difference_update(place.bot for place in batch)
            if self._worker_pool.is_awaited or len(self._places) >= self._most:
                return False
        return True

    def _take(self, worker: _Worker) -> list[_Place[C, A]]:
        """Take the calls that waited longest: at most one of each bot, none of a bot in another batch.

        If there are none, or only a few that another worker will soon take, this worker ends.
        """
        batch, later = list[_Place[C, A]](), list[_Place[C, A]]()
        with self._lock:
            are_taken = self._are_many or not self._is_another_quick(worker)
            most = max(self._most, min(len(self._places) // 2, LARGEST))
            while are_taken and self._places and len(batch) < most:
                place = self._places.popleft()
                if place.answer.done():
                    continue
                if place.bot in self._at_work:
                    later.append(place)
                else:
                    self._at_work.add(place.bot)
                    batch.append(place)
            self._places.extendleft(reversed(later))
            worker.began = clock.monotonic()
            if not batch:
                self._workers.discard(worker)
        return batch

    def _settled(self, calls: Sequence[C]) -> Sequence[A | Exception]:
        """Settle the calls, on a thread; after a failure settle each call alone, so that one cannot fail the others."""
        try:
            return self._settle(calls)
        except Exception as error:
            if isinstance(error, NotReady) or len(calls) == 1:
                return [error] * len(calls)
            _log.warning("calls are settled one by one", calls=len(calls), kind=type(error).__name__)
            return [self._settled([call])[0] for call in calls]


def _hand_out(batch: Sequence[_Place[C, A]], answers: Sequence[A | Exception]) -> None:
    for place, answer in zip(batch, answers, strict=True):
        if place.answer.done():
            continue  # its caller has gone
        if isinstance(answer, Exception):
            place.answer.set_exception(answer)
        else:
            place.answer.set_result(answer)


class SessionOpener:
    """Opens sessions in batches, on at most half of the threads, so that syncs go on while hundreds of bots return.

    Openings have a queue of their own, of the same length as that of the pool. A bot repeats an opening that takes too
    long; the repetition gets the answer to the one that waits.
    """

    def __init__(
        self,
        database: Database,
        worker_pool: WorkerPool,
        *,
        queue: int,
        timing: Timing,
        tracer: AttemptTracer | None = None,
    ) -> None:
        def settle(requests: Sequence[OpenSession]) -> list[Session | BadInput]:
            return sessions.open_sessions(database, requests, timing=timing, tracer=tracer)

        threads = max(1, worker_pool.threads // 2)
        self._batcher = Batcher[OpenSession, Session](
            settle, worker_pool, threads=threads, slots=Slots(threads * BATCH + queue)
        )
        self._unanswered: dict[Hashable, asyncio.Task[Session]] = {}

    @property
    def slots(self) -> Slots:
        """The openings that wait or run."""
        return self._batcher.slots

    async def open(self, request: OpenSession) -> Session:
        """Open a session. Raises BadInput as `sessions.open_sessions`, and Busy if too many bots wait for theirs."""
        key = (request.bot, request.secret or object())
        task = self._unanswered.get(key)
        if task is None:
            task = asyncio.create_task(self._batcher.answer(request, bot=request.bot))
            self._unanswered[key] = task
            task.add_done_callback(lambda _: self._unanswered.pop(key))
        return await asyncio.shield(task)
