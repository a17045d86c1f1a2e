"""The loop of a simulated pool: what the processes of a pool do, in one thread, from one event to the next.

At each instant callers act first, then bots whose calls are due, then upkeep; and until nothing more is announced, held
calls that have news are answered and the assigners run. Then the clock jumps to the next time at which anything can
happen. Nothing takes virtual time but the runs of jobs and the pauses of loops.
"""

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.maintenance.retention import Retention
from assigner.maintenance.schedules import POLL_INTERVAL, Schedules
from assigner.maintenance.upkeep import EVER, HOUR, Upkeep
from assigner.process.assign import declare, foreseen
from assigner.process.threads import rules_from
from assigner.settings import PoolSettings
from assigner.simulation.clock import TOPICS, VirtualClock, VirtualSessions, make
from schema import clock
from schema.picking.queues import PendingWork, pending_work
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.notify import Channel
from schema.postgres.statements import Row, Statement
from schema.sql import LIVE
from schema.tenancy.cohorts import cohorts
from schema.tenancy.drains import tick

#: The most rounds of one instant. A pool that announces something for ever has a defect.
MOST_ROUNDS = 10_000

# The earliest time at which a duty of upkeep has something to do, as far as a row says when; and at which a schedule is
# due. Each is found in an index. What was due long before the last round has been looked at, and is left as it is: such
# as the deadline of a drain whose bot is idle.
_DUE = {
    "leases": ("due_at", f"{LIVE} AND due_at IS NOT NULL"),
    "jobs": ("queue_deadline", "state = 'queued' AND queue_deadline IS NOT NULL"),
    "job_constraints": ("watch_at", "watch_at IS NOT NULL"),
    "bots b": ("kept_until", "kept_units > 0"),
    "bots d": ("drain_deadline", "draining AND drain_deadline IS NOT NULL"),
    "bots p": ("probation_until", "probation_until IS NOT NULL"),
    "instances": ("drain_deadline", "draining AND drain_deadline IS NOT NULL"),
}
_NEXT = Statement(
    "SELECT extract(epoch FROM least("
    + ", ".join(
        f"(SELECT min({column}) FROM {table} WHERE {among} AND {column} > to_timestamp(:since))"
        for table, (column, among) in _DUE.items()
    )
    + "))::double precision AS upkeep,"
    " (SELECT extract(epoch FROM min(due_at)) FROM schedules WHERE due_at IS NOT NULL)::double precision AS schedules"
)
#: The most items of callers that are handed over together.
TOGETHER = 1000
#: Rounds of upkeep that a row gets, once it is due.
TRIES = 5


class Bots(Protocol):
    """The bots of a simulated pool."""

    @property
    def next_at(self) -> float:
        """The virtual time of their next call."""

    @property
    def expires_at(self) -> float:
        """When the next session of a lost bot expires."""

    def step(self, news: Collection[str] | None) -> bool:
        """Make the calls that are due, and those that news brings; returns whether any was made."""


B = TypeVar("B", bound=Bots)


@dataclass
class Counts:
    """What the loop has done: events of callers, cycles of assigners, rounds of upkeep, and jumps of the clock."""

    events: int = 0
    cycles: int = 0
    rounds: int = 0
    jumps: int = 0


@dataclass(frozen=True)
class _Arrivals:
    """Items that arrive at one time, and what takes them together with others that come right after them."""

    take: Callable[[Sequence[Any]], object]
    items: Sequence[Any]


@dataclass
class _Assigner:
    assigner: PriorityAgeAssigner
    due: float


@dataclass
class SimulatedPool:
    """A pool on a virtual clock. `bots` are set before `run`, because they need the database as well.

    upkeep_every: seconds between two rounds of upkeep while no row says that one is due earlier. The pool's own
        `timing.reap` is the most faithful; an hour lets months pass in seconds.
    step: seconds. The clock stops only at multiples of it, and what happens in between is done together. 0 = it stops
        at each event.
    foresees: tell of waiting jobs when they will start, by which nothing is decided.
    """

    database: Database
    clock: VirtualClock
    sessions: VirtualSessions
    settings: PoolSettings
    seed: int
    upkeep_every: float
    step: float = 0.0
    foresees: bool = True
    bots: Bots = field(init=False)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        settings, now = self.settings, self.clock
        self._events: list[tuple[float, int, Callable[[], object] | _Arrivals]] = []
        self._serial = 0
        declare(self.database, settings)
        self._assigners = [*self._made()]
        self._upkeep = Upkeep(
            self.database,
            settings.upkeep,
            timing=settings.timing,
            name="simulated",
            now=now,
            fair=settings.fair_share,
            foresee=(lambda connection, jobs: foreseen(connection, jobs, settings)) if self.foresees else None,
        )
        self._retention = Retention(self.database, settings.upkeep, now=now)
        level, estimate = settings.service_levels.default, settings.estimates.estimate
        self._schedules = Schedules(self.database, level=level, estimate=estimate)
        self._upkeep_at = self._retention_at = self._schedules_at = now()
        self._upkeep_ran = -math.inf
        #: An assigner has run since somebody looked whether all may sleep.
        self._acted = False
        # Nobody would be woken if nobody slept.
        self._flags = self.database.listen()
        for topic in TOPICS:
            Channel(self._flags).raise_flag(topic)

    def _made(self) -> Iterator[_Assigner]:
        """Make one assigner for each entry of the settings, or for each cohort of an entry that has one for each.

        The threads of an entry are one here: nothing that they would do at once takes time.
        """
        found = self.database.run(cohorts)
        for nth, entry in enumerate(self.settings.assigners):
            served = [each.id for each in found if entry.cohorts is None or each.name in entry.cohorts]
            for cohort in served if entry.kind == "cohort" else [None]:
                name = f"simulated/{nth}" if cohort is None else f"simulated/{nth}.{cohort}"
                assigner = PriorityAgeAssigner(
                    self.database,
                    entry,
                    timing=self.settings.timing,
                    chance=random.Random(f"{self.seed} {name}"),
                    name=name,
                    now=self.clock,
                    quotas=self.settings.quotas,
                    cohorts=None if cohort is None else (cohort,),
                    rules=rules_from(self.settings),
                )
                yield _Assigner(assigner, self.clock.now)

    def close(self) -> None:
        """Close its connections but those of the database."""
        self._flags.close()

    def at(self, time: float, act: Callable[[], object]) -> None:
        """Let a caller or an operator act at a virtual time, in seconds since 1970, after those of the same time."""
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, act))

    def arrive(self, time: float, items: Sequence[Any], take: Callable[[Sequence[Any]], object]) -> None:
        """Let `take` have the items at a virtual time, with those for it that follow at the same stop of the clock.

        One submit of many jobs does what one submit of each would have done, in a fraction of the time.
        """
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, _Arrivals(take, items)))

    def run(self, until: float) -> None:
        """Let the pool live until a virtual time. Raises what an act or a part of the pool raises."""
        while True:
            self._instant()
            at = self._next_time()
            if self.step and at < math.inf:
                at = max(at, math.ceil(at / self.step - 1e-6) * self.step)
            if at > until:
                self.clock.advance(until)
                return
            self.clock.advance(max(at, self.clock.now))
            self.counts.jumps += 1

    def _next_time(self) -> float:
        since = {"since": max(0.0, self._upkeep_ran - TRIES * self.settings.timing.reap)}

        def look(connection: Connection) -> tuple[Row, PendingWork | None]:
            row = connection.execute_later(_NEXT, since)
            pending = pending_work(connection, quiet=True) if self._acted else None
            return row.result().one(), pending

        row, pending = self.database.run(look, kept_plans=True)
        if pending is not None:
            self._let_rest(pending)
            self._acted = False
        due = min(math.inf if row.upkeep is None else row.upkeep, self.bots.expires_at)
        # What was due may not be any more: such as the acknowledgement of a lease.
        reap, every = self.settings.timing.reap, max(self.upkeep_every, self.settings.timing.reap)
        self._upkeep_at = max(self.clock.now, self._upkeep_ran + min(every, max(due + 1e-3 - self._upkeep_ran, reap)))
        if row.schedules is not None:
            self._schedules_at = min(self._schedules_at, max(row.schedules, self.clock.now + 1e-3))
        times = [self._upkeep_at, self._retention_at, self._schedules_at, self.bots.next_at]
        times += [each.due for each in self._assigners]
        if self._events:
            times.append(self._events[0][0])
        return min(times)

    def _instant(self) -> None:
        """Do all that is due now, and what follows from it now."""
        now = self.clock.now
        while self._events and self._events[0][0] <= now:
            act = heapq.heappop(self._events)[2]
            if isinstance(act, _Arrivals):
                self._take(act, now)
            else:
                act()
            self.counts.events += 1
        for _ in range(MOST_ROUNDS):
            if not self._round(now):
                return
        raise RuntimeError(f"the pool does not come to rest at {now}")

    def _take(self, first: _Arrivals, now: float) -> None:
        items = [*first.items]
        while self._events and self._events[0][0] <= now:
            following = self._events[0][2]
            if not isinstance(following, _Arrivals) or following.take is not first.take:
                break
            if len(items) + len(following.items) > TOGETHER:
                break
            heapq.heappop(self._events)
            items += following.items
        first.take(items)

    def _round(self, now: float) -> bool:
        news = self.sessions.news()
        moved = self.bots.step(news.get("bots"))
        # What these calls have announced wakes the assigners together with what callers have.
        news = {**news, **self.sessions.news()}
        if self._upkeep_at <= now:
            self._keep_up(now)
            moved = True
        if self._schedules_at <= now or "schedules" in news:
            pause = self._schedules.run_once()
            self._schedules_at = now + pause if 0 < pause < POLL_INTERVAL else math.inf
            moved = True
        if self._retention_at <= now:
            self._retention_at = now + max(self._retention.run_once(), self.upkeep_every, HOUR)
        for each in self._assigners:
            if each.due <= now or "jobs" in news:
                each.due = now + max(each.assigner.run_once(), 1e-3)
                self.counts.cycles += 1
                moved = self._acted = True
        return moved

    def _keep_up(self, now: float) -> None:
        """Run upkeep once. The rounds that were left out because they had nothing to do would have left a tick."""
        self.database.run(lambda connection: tick(connection, "reaper", gap=EVER, grace=0.0))
        self._upkeep.run_once()
        self._upkeep_ran, self._upkeep_at = now, now + self.upkeep_every
        self.counts.rounds += 1

    def _let_rest(self, pending: PendingWork) -> None:
        """Let the assigners sleep until a wake-up, or until a job has rested, while no job is ready.

        The polls of a real assigner find work whose wake-up was lost. No wake-up is lost here.
        """
        now = self.clock.now
        if not pending.is_any:
            rest = math.inf if pending.rest_seconds is None else now + pending.rest_seconds
            for each in self._assigners:
                each.due = max(rest, now + 1e-3)


@contextmanager
def living(
    url: str,
    settings: PoolSettings,
    bots: Callable[[Database], B],
    *,
    start: float,
    seed: int,
    upkeep_every: float = HOUR,
    step: float = 0.0,
    foresees: bool = True,
    prepare: Callable[[Connection], None] | None = None,
) -> Iterator[tuple[SimulatedPool, B]]:
    """Make a pool in the empty database of `url`, and let this process live in its time until the block ends.

    start: the virtual time at first, in seconds since 1970. seed: everything that chance decides follows from it.
    prepare: fills tables before the configuration is declared. bots: makes the pool's bots.
    """
    now = VirtualClock(start)
    with clock.replaced(now):
        database, sessions = make(url, now, seed=seed)
        try:
            if prepare is not None:
                database.run(prepare)
            pool = SimulatedPool(database, now, sessions, settings, seed, upkeep_every, step, foresees)
            try:
                pool.bots = made = bots(database)
                yield pool, made
            finally:
                pool.close()
        finally:
            database.close()
