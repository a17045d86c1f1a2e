"""One assigner: pick, snapshot, choose, commit, over and over."""

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from assigner import gatehouse, metrics, snapshot
from assigner.batching import CROWD, Batch, at_once
from assigner.offers import Offers
from assigner.quotas import QuotaSettings
from assigner.reclaim import reclaim
from assigner.registry import SUCCESS, StrategySettings
from assigner.strategies import Snapshot
from assigner.turns import Turns
from schema import chores, gated, moves, platforms, ready, turns, unservable
from schema.clock import Monotonic
from schema.engine import Database
from schema.front import Front
from schema.ledger import Guard
from schema.limits import NAME
from schema.moves import Alike, Granted
from schema.ready import Order, ReadyJob, Scope
from schema.seldom import Seldom
from schema.shares import FairShareSettings
from schema.timing import Timing

#: Jobs of one kind that are postponed together when one of them cannot be placed.
POSTPONE_LIMIT = 2000
#: Picks in one cycle while each of them only found jobs to postpone: what lies behind those must not wait for the
#: next cycle, before which as many of them may have become ready again.
SWEEPS = 6
#: An assigner that keeps failing to match sleeps at most so many times its usual pause.
SLOWEST = 2.0

#: Seconds at most for which bots that others hold are waited for by who places many: taking turns is better than
#: undoing each other's choices.
PATIENCE = 0.5

NO_BOT = "no healthy bot offers what it requires"
NO_ROOM = "no bot that offers what it requires has enough free units"


class AssignerSettings(BaseModel):
    """One kind of assigner; names and defaults are BuildGrid's where it has them. Times are seconds.

    kind: `priority-age` takes the most urgent job of all; `cohort` has one thread for each cohort, which takes the most
        urgent job there. Both serve instances below their minimum quota first.
    threads: priority-age assigners in each process. Doubling it raises throughput until the database is busy.
    interval: sleep between cycles, cut short by a wake-up. Doubling it halves the idle load and doubles
        the wait of a job whose wake-up was lost.
    jitter: up to so much is added to every sleep, so that assigners do not march in step.
    busy_sleep_factor: the sleep is multiplied by this after a cycle that placed something.
    priority_percentage: how many cycles in a hundred take the most urgent job first; the others take the oldest,
        which keeps unurgent work from starving.
    failure_backoff: how long a job that no bot can take is left alone; doubled with each further failure.
    failure_backoff_cap: the longest such wait.
    batch: the most jobs placed in one transaction; it takes fewer while there is little to do. Doubling it raises
        throughput under backlog and holds locks longer.
    at_once: so many assigners of the whole pool place large batches at the same time, the others wait for their turn
        before they pick; unset means as many as this host has cores, two at least. More than the database server has
        cores look at jobs, bots and quotas that others hold. One that has waited for `lock_timeout` goes on.
    instances: serve only these and the others of their pools; unset means all.
    cohorts: of a cohort assigner, which cohorts it serves, with a thread for each; unset means all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["priority-age", "cohort"] = "priority-age"
    threads: int = Field(default=2, ge=1, le=64)
    interval: float = Field(default=1.0, gt=0, le=3600)
    jitter: float = Field(default=1.0, ge=0, le=3600)
    busy_sleep_factor: float = Field(default=0.01, ge=0, le=1)
    priority_percentage: int = Field(default=100, ge=0, le=100)
    failure_backoff: float = Field(default=5.0, ge=0, le=86400)
    failure_backoff_cap: float = Field(default=60.0, ge=0, le=86400)
    batch: int = Field(default=500, ge=1, le=5000)
    at_once: int | None = Field(default=None, ge=1, le=1000)
    instances: tuple[str, ...] | None = Field(default=None, min_length=1)
    cohorts: tuple[str, ...] | None = Field(default=None, min_length=1)
    strategy: StrategySettings = Field(default_factory=StrategySettings)

    def model_post_init(self, _context: object) -> None:
        """Refuse what no single field can show to be wrong."""
        for key, names in {"instances": self.instances, "cohorts": self.cohorts}.items():
            for name in names or ():
                if not NAME.fullmatch(name):
                    raise ValueError(f"{key}: '{name}' is not a name")
        if self.kind == "cohort" and "threads" in self.model_fields_set:
            raise ValueError("threads: a cohort assigner has one thread for each cohort")
        if self.kind != "cohort" and self.cohorts is not None:
            raise ValueError("cohorts: only an assigner of kind 'cohort' is restricted to cohorts")
        if self.failure_backoff_cap < self.failure_backoff:
            raise ValueError("failure_backoff_cap must not be less than failure_backoff")


@dataclass
class Cycle:
    """What one cycle did; it waited so many seconds for its turn."""

    picked: int = 0
    granted: list[Granted] = field(default_factory=list)
    postponed: int = 0
    lost: int = 0
    evicted: int = 0
    attempted: bool = False
    waited: float = 0.0
    gated: bool = False

    def add(self, other: "Cycle") -> None:
        """Another transaction did this as well."""
        self.picked += other.picked
        self.granted += other.granted
        self.postponed += other.postponed
        self.lost += other.lost
        self.waited += other.waited


class PriorityAgeAssigner:
    """Places queued jobs by priority and age, up to the quotas of their instances.

    Instances below their minimum come first and, only if none of them was handled, those below their effective maximum,
    each pass guarded by its limit (BuildGrid): what they get here need not be taken from others by evictions.

    Any number may run in any number of processes.

    Each holds one connection at a time and no state but its pace, so that killing it at any moment loses nothing.
    """

    def __init__(
        self,
        database: Database,
        settings: AssignerSettings,
        *,
        timing: Timing,
        chance: random.Random,
        name: str,
        now: Monotonic,
        quotas: QuotaSettings | None = None,
        cohort: int | None = None,
        fair: FairShareSettings | None = None,
    ) -> None:
        self.name = name
        self._database, self._settings, self._timing = database, settings, timing
        self._quotas, self._fair = quotas or QuotaSettings(), fair or FairShareSettings()
        self._cohorts = None if cohort is None else (cohort,)
        self._chance, self._now = chance, now
        self._batch, self._offers = Batch(), Offers()
        self._after, self._turns = gated.BEGINNING, Turns(now)
        self._forget()
        self._failures = 0
        self._next_reclaim = now()

    def reconfigure(self, settings: AssignerSettings, quotas: QuotaSettings, fair: FairShareSettings) -> None:
        """Use other settings from the next cycle on."""
        self._settings, self._quotas, self._fair = settings, quotas, fair

    def run_once(self) -> float:
        """One cycle; returns the seconds to sleep before the next one."""
        began = self._now()
        cycle = self._database.run(self._cycle, undone=self._forget)
        if cycle.gated:
            cycle.add(self._turns.run(self._database, self._gated_cycle) or Cycle())
        seconds = self._now() - began - cycle.waited
        self._batch.learn(placed=len(cycle.granted), seconds=seconds, limit=self._settings.batch)
        metrics.observe_cycle(
            seconds=seconds,
            granted=len(cycle.granted),
            postponed=cycle.postponed,
            lost=cycle.lost,
            evicted=cycle.evicted,
            strategy=self._settings.strategy.kind,
        )
        return self._pause(cycle)

    def _forget(self) -> None:
        """Nothing is known of the front; a transaction that has not happened may have seen writes of its own there."""
        self._front, self._unserved = Front(self._now), Seldom(self._now)

    def _pause(self, cycle: Cycle) -> float:
        """interval + random x jitter, times busy_sleep_factor after work, half an interval after a failed match.

        A failed match is no work: the sleep doubles while nothing matches, so that a queue that nobody can serve is
        not scanned at full speed. Losing every race to other assigners is busy.
        """
        settings = self._settings
        pause = settings.interval + self._chance.random() * settings.jitter
        if cycle.granted or cycle.lost or cycle.evicted:
            self._failures = 0
            return pause * settings.busy_sleep_factor
        if cycle.postponed:
            self._failures += 1
            return pause * min(0.5 * 2.0 ** min(self._failures - 1, 10), SLOWEST)
        self._failures = 0
        return pause

    def _cycle(self, connection: Connection) -> Cycle:
        settings, cycle = self._settings, Cycle()
        self._take_turn(connection, cycle)
        seen = chores.look(connection)
        cycle.gated = seen.gated
        if seen.rested:
            cycle.gated |= moves.promote(connection, settings.batch).gated > 0
        scope = self._scope(connection)
        urgent_first = self._chance.randint(1, 100) <= settings.priority_percentage
        order = Order.PRIORITY if urgent_first else Order.AGE
        guards = (Guard.MIN, Guard.MAX) if seen.below else (Guard.MAX,)
        for guard in guards:
            self._pass(connection, replace(scope, guard=guard), order, cycle)
            if cycle.granted:
                break
        if not cycle.picked and platforms.nobody_arrives(connection) and self._unserved.begin():
            began = self._now()
            unserved = unservable.unserved(connection, scope, limit=settings.batch)
            self._unserved.took(self._now() - began)
            alike = [Alike(queue.cohort, queue.instance, queue.platform, 1) for queue in unserved]
            self._postpone(connection, alike, NO_BOT, cycle)
        if self._quotas.preemption and seen.below and (not cycle.granted or self._now() >= self._next_reclaim):
            self._next_reclaim = self._now() + settings.interval
            cycle.evicted = reclaim(
                connection,
                scope,
                self._quotas,
                sync=self._timing.sync,
                actor=self.name,
                again=cycle.attempted,
            )
        return cycle

    def _gated_cycle(self, connection: Connection) -> Cycle:
        """Place jobs that ask for more than a place, in a transaction that a limit reached meanwhile undoes."""
        cycle = Cycle()
        self._take_turn(connection, cycle)
        batch = self._batch.size(self._settings.batch)
        admitted = gatehouse.pick(
            connection,
            self._scope(connection),
            batch=batch,
            chance=self._chance,
            after=self._after,
            fair=self._fair,
        )
        self._after = admitted.last
        if admitted.heads:
            cycle.picked = len(admitted.heads)
            self._place(connection, [head.job for head in admitted.heads], Guard.MAX, cycle)
            gatehouse.charge(connection, admitted.heads, cycle.granted, fair=self._fair)
        return cycle

    def _take_turn(self, connection: Connection, cycle: Cycle) -> None:
        if self._batch.grown:
            began = self._now()
            turns.take(connection, at_once(self._settings.at_once), chance=self._chance)
            cycle.waited = self._now() - began

    def _scope(self, connection: Connection) -> Scope:
        names = self._settings.instances
        instances = ready.instance_ids(connection, names) if names else None
        return Scope(instances, self._cohorts, cooldown=self._quotas.eviction_cooldown)

    def _pass(self, connection: Connection, scope: Scope, order: Order, cycle: Cycle) -> None:
        """Pick and place until something was placed, or nothing is left that could be postponed."""
        for _ in range(SWEEPS):
            batch = self._batch.size(self._settings.batch)
            jobs = ready.pick(connection, scope, order=order, batch=batch, chance=self._chance, line=self._front)
            cycle.picked += len(jobs)
            if not jobs:
                return
            before = cycle.postponed
            self._place(connection, jobs, scope.guard, cycle)
            if cycle.granted or cycle.postponed == before:
                return

    def _place(self, connection: Connection, jobs: list[ReadyJob], guard: Guard, cycle: Cycle) -> None:
        """Sampling rounds, then any healthy bot once, and only then backoff."""
        strategy = self._settings.strategy
        sampling = strategy.sampling
        for attempt in range(1, sampling.max_attempts + 1):
            seen = snapshot.sampled(
                connection,
                jobs,
                sample_size=sampling.sample_size,
                offers=self._offers,
                chance=self._chance,
                with_warm=strategy.strategy.wants_warm,
                with_success=strategy.wants_success,
            )
            jobs = self._commit(connection, seen, guard, cycle, round_number=attempt)
            if not jobs:
                return
        hopeless = snapshot.without_candidates(seen)
        if cycle.lost or hopeless:
            seen = snapshot.any_healthy(connection, jobs, with_success=strategy.wants_success)
            jobs = self._commit(connection, seen, guard, cycle, round_number=0)
            stuck = {job.id for job in jobs}
            hopeless = [group for group in hopeless if all(job.id in stuck for job in group.jobs)]
            self._postpone(connection, snapshot.too_large(connection, hopeless, chance=self._chance), NO_ROOM, cycle)

    def _commit(
        self, connection: Connection, seen: Snapshot, guard: Guard, cycle: Cycle, *, round_number: int
    ) -> list[ReadyJob]:
        """Grant what the choice wants; returns the jobs that are still without a bot."""
        strategy = self._settings.strategy
        how = {"strategy": strategy.kind, "round": round_number}
        placements = strategy.strategy.choose(seen, strategy, how=how)
        granted = moves.grant(
            connection,
            placements,
            assigner=self.name,
            strategy=strategy.kind,
            ack=self._timing.ack,
            guard=guard,
            again=cycle.attempted,
            cooldown=self._quotas.eviction_cooldown,
            patience=PATIENCE if len(placements) >= CROWD else 0.0,
        )
        cycle.attempted = True
        cycle.granted += granted
        cycle.lost += len(placements) - len(granted)
        placed = {lease.job_id for lease in granted}
        if strategy.kind == SUCCESS:
            metrics.observe_scores(each.decision["score"]["total"] for each in placements if each.job_id in placed)
        return [job for job in seen.jobs if job.id not in placed]

    def _postpone(self, connection: Connection, groups: list[Alike], reason: str, cycle: Cycle) -> None:
        cycle.postponed += moves.postpone(
            connection,
            groups,
            reason=reason,
            base=self._settings.failure_backoff,
            cap=self._settings.failure_backoff_cap,
            limit=POSTPONE_LIMIT,
        )
