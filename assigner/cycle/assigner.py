"""One assigner: in each cycle it picks jobs, reads candidate bots, chooses, and grants.

One module because a cycle is one transaction, whose steps share what the steps before them have found.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import ceil

from assigner import metrics
from assigner.admission.admit import merge
from assigner.admission.controller import AdmissionController, AdmissionResult, Keep
from assigner.admission.rules import RULES, Rules
from assigner.cycle.memory import Memory
from assigner.cycle.pacing import concurrent_batches
from assigner.cycle.settings import AssignerSettings
from assigner.cycle.shadow import Decider, Shadow, Trace
from assigner.loops import Again, More
from assigner.placement import resources
from assigner.placement import sampling as samples
from assigner.placement.decision_sample import DecisionRecorder, DecisionSample, sample_decision
from assigner.placement.fleet import SMALL, Part
from assigner.placement.registry import SUCCESS
from assigner.placement.room import WaitingDemand
from assigner.placement.strategy import Group, Input, QuotaCopy, Snapshot
from assigner.preemption.plan import QuotaSettings
from assigner.preemption.reclaim import BATCH, OnPlan, reclaim
from schema.accounting.held_rows import HeldRows, other_instances
from schema.clock import Monotonic
from schema.moves.grant import PREEMPTION, Amounts, Granted, Placement, grant, lock_bots
from schema.moves.waiting.backoff import promote, rest_queues, stop_preferring, wake_queues, wake_served
from schema.moves.waiting.pause import set_aside
from schema.picking import preemption, queues, ready
from schema.picking.constrained import QueueHead, QueueScan
from schema.picking.pick import Order, ReadyJob
from schema.picking.preemption import StarvedJob
from schema.picking.queues import PendingWork
from schema.picking.ready import Scope
from schema.postgres import advisory
from schema.postgres.connection import Connection, commit_lazily
from schema.postgres.engine import Database
from schema.postgres.notify import wake
from schema.timing import Timing


@dataclass
class CycleResult:
    """What one cycle has done so far."""

    #: Units that bots kept for instances before it.
    kept_units: int = 0
    #: Jobs picked, and those of them that have a lease now.
    picked: int = 0
    granted: list[Granted] = field(default_factory=list)
    #: Queues that rest now.
    rested: int = 0
    #: A label or a task is paused; jobs that were set aside because of that.
    paused: bool = False
    set_aside: int = 0
    #: Jobs for which a bot was chosen that others were faster to fill.
    lost: int = 0
    #: Jobs that were asked to stop for an instance below its minimum.
    evicted: int = 0
    #: Of each bot the kept units that waiting jobs will fill, so that no others are evicted for them.
    used_kept: Counter[int] = field(default_factory=Counter)
    #: Its transaction may hold locks on quotas.
    holds_quotas: bool = False
    #: Seconds from its begin until a job that rests may start; None if none does, or one may start already.
    rest_seconds: float | None = None
    #: It was put off, because other assigners have all slots.
    deferred: bool = False
    #: The part of the fleet where it places a large batch.
    part: Part | None = None
    #: What the quotas of the picked jobs' instances still leave.
    quotas: QuotaCopy = field(default_factory=QuotaCopy)
    #: What admission has picked; None if no constrained job was looked at.
    admitted: AdmissionResult | None = None
    #: What picked jobs with constraints take of counters, without resources of bots.
    amounts: dict[int, Amounts] = field(default_factory=dict)
    #: What their leases have taken, with these.
    taken: list[tuple[int, Amounts]] = field(default_factory=list)
    #: Jobs whose rate others have used up since it was read; None until the rates are locked.
    without_token: set[int] | None = None
    #: One of its decisions, for operators.
    sample: DecisionSample | None = None
    #: All of its decisions, for a shadow; None if no shadow looks at this cycle.
    trace: Trace | None = None

    @property
    def on_plan(self) -> OnPlan | None:
        """What is told of each plan of an eviction."""
        return None if self.trace is None else self.trace.planned

    def may_still_start(self, job: ReadyJob) -> bool:
        """Return whether the quota of its instance and its rates still let the job start, on another bot."""
        return job.id not in (self.without_token or ()) and self.quotas.allows(job)


#: The most picks in one cycle. A pick is repeated if it only found queues that have to rest now. Jobs behind these must
#: not wait for the next cycle, because as many queues may have rested enough by then.
MAX_PICKS = 6
#: The fleet is divided into at least this many parts, where they are large enough. A large batch goes to one of them,
#: because fewer bots then have to be written.
PARTS = 4
#: Seconds for which what waiting jobs take is remembered; longer if reading them takes more than a tenth of that.
WAITING_SECONDS = 1.0
#: Seconds, half of them more or less, after which an assigner without a slot asks for one again.
RETRY_SECONDS = 0.5
#: Seconds after which a bot that came or became free while a queue was put to rest has surely committed that. And the
#: most queues that are looked at again, those that have rested the shortest.
LOOK_AGAIN_SECONDS, LOOK_AGAIN_AT = 2.0, 100

#: Jobs for which a cycle has chosen bots, up to which the pool counts as quiet: the next cycle looks for ready jobs
#: before it picks.
QUIET = 8
#: Seconds that such a look may take. A pick that finds nothing takes less.
QUICK_LOOK = 0.005
#: The same, up to which the next cycle uses the plans that the server keeps: to make them takes longer than they save.
FEW = 64

NO_BOT = "no healthy bot offers what it requires"
NO_ROOM = "no bot that offers what it requires has enough free units"


class PriorityAgeAssigner:
    """Places queued jobs by priority and age, up to the quotas of their instances.

    With `minimums_first`, jobs that an instance needs to reach its minimum come first. This is the only difference
    between BuildGrid's cohort assigner and its priority-age assigner.

    Any number of assigners may run in any number of processes. An assigner with `cohorts` serves the bots and jobs of
    these alone. Cohorts share neither bots nor queues, so that assigners of different ones do not compete.

    An assigner holds one connection at a time. Between cycles it has nothing but its `Memory`, so that a kill at any
    moment loses nothing.
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
        cohorts: Sequence[int] | None = None,
        rules: Rules = RULES,
        recorder: DecisionRecorder | None = None,
        policy: int | None = None,
    ) -> None:
        self.name, self._recorder, self._policy = name, recorder, policy
        self._database, self._settings, self._timing = database, settings, timing
        self._quotas, self._ordering = quotas or QuotaSettings(), rules.ordering
        self._shadow: Shadow | None = None
        self._cohorts = self._next_cohorts = cohorts
        self._chance, self._now = chance, now
        self._memory = Memory(now, chance)
        self._admission = AdmissionController(rules, self._memory.admission, name=name, now=now)

    def reconfigure(
        self,
        settings: AssignerSettings,
        quotas: QuotaSettings,
        rules: Rules = RULES,
        *,
        policy: int | None = None,
        cohorts: Sequence[int] | None = None,
    ) -> None:
        """Use other settings from the next cycle on. policy: the version that they are of, which leases name."""
        self._settings, self._quotas, self._ordering = settings, quotas, rules.ordering
        self._policy, self._next_cohorts = policy, cohorts
        self._admission.reconfigure(rules)

    def shadow_by(self, shadow: Shadow | None) -> None:
        """Let this shadow look at cycles from the next one on; None = no shadow any more."""
        self._shadow = shadow

    def run_once(self) -> float:
        """Run one cycle; returns the seconds to sleep before the next one."""
        began = self._now()
        if self._cohorts != self._next_cohorts:
            # What it remembers of the fronts is of the cohorts that it served.
            self._cohorts = self._next_cohorts
            self._memory.undone()
        cycle = self._memory.conflicts.run(
            self._database, self._cycle, undone=self._memory.undone, kept_plans=self._memory.chosen <= FEW
        ) or CycleResult(lost=1)
        self._memory.rotation.keep()
        if cycle.sample is not None and self._recorder is not None:
            self._recorder.keep(cycle.sample)
        if cycle.deferred:
            return Again(self._chance.uniform(0.5, 1.5) * RETRY_SECONDS)
        if cycle.admitted is not None:
            admitted = cycle.admitted
            self._admission.after_commit(admitted)
            metrics.observe_gates(
                queues=admitted.closed_queues,
                jobs=admitted.closed_jobs,
                picked=len(admitted.heads),
                empty=admitted.empty,
            )
        seconds = self._now() - began
        was_full = cycle.picked >= self._memory.batch.size(self._settings.batch)
        self._memory.chosen = len(cycle.granted) + cycle.lost
        self._memory.batch.learn(chosen=self._memory.chosen, seconds=seconds, limit=self._settings.batch)
        metrics.observe_cycle(
            seconds=seconds,
            granted=len(cycle.granted),
            rested=cycle.rested,
            lost=cycle.lost,
            evicted=cycle.evicted,
            strategy=self._settings.strategy.chooser[1],
        )
        if cycle.trace is not None and cycle.trace.decider.settings is self._settings:  # not reconfigured meanwhile
            cycle.trace.compare()
        busy = bool(cycle.granted or cycle.lost or cycle.evicted or cycle.set_aside)
        returns = None if cycle.admitted is None else cycle.admitted.returns
        pause = self._memory.pace.pause(self._settings, busy=busy, failed=bool(cycle.rested), returns=returns)
        if cycle.rest_seconds is not None:
            pause = min(pause, max(0.0, cycle.rest_seconds - seconds))
        if cycle.rested and self._database.run(self._wake_rested):
            pause = 0.0
        return More(pause) if busy and was_full else pause

    def _cycle(self, connection: Connection) -> CycleResult:
        pending = self._pending_work(connection)
        cycle = CycleResult(kept_units=pending.kept_units, paused=pending.paused)
        if pending.rest_seconds is not None and not pending.has_rested:
            cycle.rest_seconds = pending.rest_seconds
        if not pending.is_any or not self._take_slot(connection, cycle):
            return cycle
        if (shadow := self._shadow) is not None:
            cycle.trace = shadow.begin(Decider(self._settings, self._quotas, self._ordering))
        self._wake_rested(connection)
        pending = self._bring_back(connection, pending)
        if pending.constrained and not self._memory.conflicts.may_charge(connection):
            pending = pending.without_constrained()
        held = self._memory.conflicts.held_rows(connection)
        self._memory.admission.held = None if held is None else held.names
        scope = self._scope(connection, held)
        # Before the pick, because a pick lets queues rest whose jobs find no room.
        self._reclaim_for_constrained(connection, scope, pending, cycle)
        self._pick_and_place(connection, scope, pending, cycle)
        if not cycle.picked:
            self._rest_unserved(connection, scope, cycle)
        self._reclaim_for_plain(connection, scope, pending, cycle)
        if cycle.granted and not cycle.evicted:
            # Before a bot is told, the gateway's commit waits for the disk. A crash earlier leaves the job queued.
            commit_lazily(connection)
        return cycle

    def _wake_rested(self, connection: Connection) -> int:
        """Wake queues that it has put to rest lately, and that some bot could serve by now; returns how many.

        A bot that came or became free during that transaction found no queue at rest that it could wake. Others are
        told, because one that picks at this moment has not seen that the queues wait, and may keep this one from it.
        Where bots are of very many kinds the look takes long; it is made seldom then, and the queues are kept for it.
        """
        memory, now = self._memory, self._now()
        if not (memory.rested and memory.look_again.try_begin()):
            return 0
        newest = [*memory.rested.items()][-LOOK_AGAIN_AT:]
        woken = wake_served(connection, [queue for queue, _ in newest])
        memory.look_again.finished(self._now() - now)
        if woken:
            wake(connection, "jobs")
        memory.rested = {queue: at for queue, at in newest if now - at < LOOK_AGAIN_SECONDS}
        return woken

    def _pending_work(self, connection: Connection) -> PendingWork:
        """Return whether there is anything to do. On a quiet pool a look for ready jobs comes before the pick, unless
        such a look took long: then the pick, which remembers where the front begins, is quicker."""
        memory, began = self._memory, self._now()
        quiet = memory.chosen <= QUIET and memory.quiet_look.try_begin()
        pending = queues.pending_work(connection, quiet=quiet)
        if quiet:
            memory.quiet_look.finished(self._now() - began, quick=QUICK_LOOK)
        return pending

    def _bring_back(self, connection: Connection, pending: PendingWork) -> PendingWork:
        """Make jobs ready whose backoff is over, and let jobs go to any bot that have waited long enough for one that
        they prefer. Returns what is pending then.

        Such jobs may be of an instance below its minimum. The search for starved jobs finds out.
        """
        if not (pending.has_rested or pending.preference_elapsed):
            return pending
        ready_now = [promote(connection, self._settings.batch)]
        if pending.preference_elapsed:
            ready_now.append(stop_preferring(connection, self._settings.batch))
        return pending.with_ready(constrained=any(each.constrained for each in ready_now))

    def _reclaim_for_constrained(
        self, connection: Connection, scope: Scope, pending: PendingWork, cycle: CycleResult
    ) -> None:
        """Evict for constrained jobs of instances below their minimum, if their gates are open now.

        A gate may have closed again when the room is free; then another job of the instance gets it.
        """
        memory, settings = self._memory, self._quotas
        if not (
            settings.preemption and pending.constrained_below_minimum and self._now() >= memory.admitted_reclaim_due
        ):
            return
        memory.admitted_reclaim_due = self._now() + self._settings.interval
        most, delay = BATCH + cycle.kept_units, settings.preemption_delay
        heads = self._admission.pick_below_minimum(connection, scope, most=most, delay=delay)
        ids = [head.job.id for head in heads]
        paused = self._set_paused_aside(connection, ids, cycle)
        if ids := [each for each in ids if each not in paused]:
            starved = preemption.starved_among(connection, scope, ids, delay=delay, sync=self._timing.sync)
            self._reclaim(connection, starved, cycle)
            cycle.holds_quotas = True

    def _reclaim_for_plain(
        self, connection: Connection, scope: Scope, pending: PendingWork, cycle: CycleResult
    ) -> None:
        """Evict for plain jobs of instances below their minimum: in each cycle that has granted nothing, otherwise once
        in each interval."""
        memory, settings = self._memory, self._quotas
        is_due = not cycle.granted or self._now() >= memory.reclaim_due
        if not (settings.preemption and pending.below_minimum and is_due):
            return
        memory.reclaim_due = self._now() + self._settings.interval
        delay, sync = settings.preemption_delay, self._timing.sync
        starved = preemption.starved_jobs(connection, scope, delay=delay, sync=sync, limit=BATCH)
        self._reclaim(connection, starved, cycle)

    def _rest_unserved(self, connection: Connection, scope: Scope, cycle: CycleResult) -> None:
        """Let queues rest whose jobs no bot can take."""
        if not self._memory.unserved.try_begin():
            return
        began = self._now()
        unserved = ready.unserved_queues(connection, scope, limit=self._settings.batch)
        self._memory.unserved.finished(self._now() - began)
        self._rest(connection, unserved, NO_BOT, cycle)

    def _reclaim(
        self, connection: Connection, starved: tuple[Sequence[StarvedJob], datetime | None], cycle: CycleResult
    ) -> None:
        waiting, now = starved
        cycle.evicted += reclaim(
            connection,
            waiting,
            now,
            self._quotas,
            sync=self._timing.sync,
            actor=self.name,
            again=cycle.holds_quotas,
            used=cycle.used_kept,
            policy=self._policy,
            on_plan=cycle.on_plan,
        )

    def _take_slot(self, connection: Connection, cycle: CycleResult) -> bool:
        """Take a slot and a part of the fleet, if the batch is large. False if other assigners hold all slots.

        These place the same jobs, so that no job waits for this assigner.
        """
        if self._memory.batch.grown:
            slots = concurrent_batches(self._settings.at_once, bots=len(self._memory.fleet))
            slot = advisory.try_take_slot(connection, slots, chance=self._chance, among=self._served)
            cycle.deferred, cycle.part = slot is None, None if slot is None else self._part_of(slot, slots)
        return not cycle.deferred

    def _part_of(self, slot: int, slots: int) -> Part:
        """Return a part of the fleet that belongs to the slot, where all assigners know of equally many slots."""
        of_each = max(1, min(ceil(PARTS / slots), len(self._memory.fleet) // (SMALL * slots)))
        return Part(slot + slots * self._chance.randrange(of_each), slots * of_each)

    @property
    def _served(self) -> str:
        """A name for the set of jobs that it places, the same for all assigners with this set; empty for all jobs."""
        return " ".join([*map(str, self._cohorts or ()), *sorted(self._settings.instances or ())])

    def _scope(self, connection: Connection, held: HeldRows | None) -> Scope:
        names = self._settings.instances
        instances = ready.instance_ids(connection, names) if names else None
        return Scope(
            other_instances(connection, held, instances),
            self._cohorts,
            cooldown=self._quotas.of_evictions,
            minimums_first=self._settings.serves_minimums_first,
        )

    def _pick_and_place(self, connection: Connection, scope: Scope, pending: PendingWork, cycle: CycleResult) -> None:
        """Pick and place until something is placed, or until a pick finds no further queue that has to rest."""
        settings = self._settings
        batch = self._memory.batch.size(settings.batch)
        roll = self._chance.randint(1, 100)
        order = settings.order(roll)
        if cycle.trace is not None:
            cycle.trace.roll = roll
        heads: Sequence[QueueHead] = ()
        if pending.constrained:
            keep = None if cycle.trace is None else cycle.trace.copy
            minimums = pending.constrained_below_minimum
            cycle.admitted = self._admit(connection, scope, batch=batch, minimums=minimums, keep=keep)
            heads, cycle.amounts = cycle.admitted.heads, self._admission.amounts(cycle.admitted)
        for _ in range(MAX_PICKS):
            jobs: Sequence[ReadyJob] = ()
            if pending.plain:
                jobs = ready.pick(connection, scope, order=order, batch=batch, cursor=self._memory.head_cursor)
            cycle.picked += len(jobs) + len(heads)
            if not jobs and not heads:
                return
            ids = [*(job.id for job in jobs), *(head.job.id for head in heads)]
            if paused := self._set_paused_aside(connection, ids, cycle):
                jobs = [job for job in jobs if job.id not in paused]
                heads = [head for head in heads if head.job.id not in paused]
                if not jobs and not heads:
                    continue
            cycle.quotas = QuotaCopy.of([*jobs, *(head.job for head in heads)])
            before = cycle.rested
            self._place_merged(connection, jobs, heads, cycle, by_age=order is Order.AGE)
            if cycle.granted or cycle.rested == before:
                break
            heads = ()
        if cycle.admitted is not None and cycle.taken:
            self._admission.charge(connection, cycle.admitted, cycle.taken)

    def _set_paused_aside(self, connection: Connection, job_ids: Sequence[int], cycle: CycleResult) -> Collection[int]:
        """Set those of these locked jobs aside whose label or task is paused; returns their ids."""
        if not (cycle.paused and job_ids):
            return ()
        paused = set_aside(connection, job_ids)
        cycle.set_aside += len(paused)
        return paused

    def _admit(
        self, connection: Connection, scope: Scope, *, batch: int, minimums: bool, keep: Keep | None
    ) -> AdmissionResult:
        """Lock constrained jobs that may start: of the front if enough of it may, otherwise of all queues in turn.

        minimums: an instance is below its minimum, so that its jobs come before the front. keep: copies what it
        is made from, which is then told.
        """
        admission, cursor = self._admission, self._memory.constrained_cursor
        front = None if minimums else admission.read_front(connection, scope, cursor, batch=batch)
        if front is not None:
            admitted = self._pick_of(connection, front.scan, batch=batch, heads=front.heads, keep=keep)
            if admission.suffices(front, cursor, admitted):
                return admitted
        found = admission.read_queues(connection, scope, batch=batch)
        return self._pick_of(connection, found, batch=batch, keep=keep)

    def _pick_of(
        self,
        connection: Connection,
        found: QueueScan,
        *,
        batch: int,
        keep: Keep | None,
        heads: Sequence[QueueHead] | None = None,
    ) -> AdmissionResult:
        lacking = resources.lacking_by_queue(connection, self._memory.fleet, found.queues, chance=self._chance)
        if heads is None:
            # Of instances that are equal in the order chance decides which ones are looked at.
            found = replace(found, queues=self._chance.sample(found.queues, len(found.queues)))
        pace = self._settings.interval
        return self._admission.pick(connection, found, lacking=lacking, batch=batch, pace=pace, heads=heads, keep=keep)

    def _place_merged(
        self,
        connection: Connection,
        jobs: Sequence[ReadyJob],
        heads: Sequence[QueueHead],
        cycle: CycleResult,
        *,
        by_age: bool,
    ) -> None:
        """Place plain jobs and constrained jobs that may start, in one order, and no more jobs than there are free
        units."""
        if cycle.trace is not None:
            cycle.trace.merges(jobs, cycle.admitted.made_from if heads and cycle.admitted else None)
        if not heads or cycle.admitted is None:
            self._place(connection, jobs, cycle)
            return
        merged = merge(jobs, heads, by_age=by_age)[: cycle.admitted.free_units]
        needy, others = resources.split_by_resources(merged)
        if needy:
            self._place_needy(connection, needy, cycle)
        if others:
            self._place(connection, others, cycle)

    def _place_needy(self, connection: Connection, needy: Sequence[QueueHead], cycle: CycleResult) -> None:
        """Place jobs that take resources of bots: those that prefer some bots on these first, then all that are
        left."""
        strategy = self._settings.strategy
        preferring = [head for head in needy if head.job.preferred not in (None, head.queue.platform)]
        done: set[int] = set()
        for heads in (resources.as_preferring(preferring), needy):
            found = [head for head in heads if head.job.id not in done]
            if not found:
                continue
            seen = resources.read_resource_snapshot(
                connection,
                self._memory.fleet,
                found,
                strategy.sampled,
                chance=self._chance,
                inputs=strategy.inputs,
            )
            left = self._choose_and_grant(connection, seen, cycle, round_number=1, needy=found)
            done |= {head.job.id for head in found} - {job.id for job in left}

    def _place(self, connection: Connection, jobs: Sequence[ReadyJob], cycle: CycleResult) -> None:
        """Place on kept units first, then by samples if there is sampling, then once on any healthy bot.

        The last step is left out if each job found candidates and none lost a race, and where turns count: then jobs
        wait for the next cycle, and the bot whose turn it is. A queue rests if no bot is large enough for any of its
        jobs.
        """
        strategy = self._settings.strategy
        hopeless: Sequence[Group] = ()
        if cycle.kept_units:
            jobs = self._place_on_kept(connection, jobs, cycle)
        if jobs and strategy.sampled.enabled:
            jobs, hopeless = self._place_by_samples(connection, jobs, cycle)
            if not (cycle.lost or hopeless):
                return
        if jobs and Input.TURNS not in strategy.inputs:
            jobs, unserved = self._place_anywhere(connection, jobs, cycle)
            hopeless = hopeless if strategy.sampled.enabled else unserved
        if jobs:
            self._rest_too_large(connection, jobs, hopeless, cycle)

    def _place_on_kept(
        self, connection: Connection, jobs: Sequence[ReadyJob], cycle: CycleResult
    ) -> Sequence[ReadyJob]:
        """Place on units that bots keep for instances; returns the jobs that are left and have a token."""
        placements = samples.place_on_kept(connection, jobs)
        placed = self._grant(connection, jobs, placements, cycle, strategy=PREEMPTION, on_kept=True)
        gone = placed | (cycle.without_token or set())
        return [job for job in jobs if job.id not in gone]

    def _place_by_samples(
        self, connection: Connection, jobs: Sequence[ReadyJob], cycle: CycleResult
    ) -> tuple[Sequence[ReadyJob], Sequence[Group]]:
        """Place by samples, up to `max_attempts` times. Returns the jobs that are left, and those groups for which the
        last sample held no bot.

        If jobs lost a race in the last sample, they get one more: a lost race tells nothing of the fleet, and any bot
        would not be as likely as any other.
        """
        strategy = self._settings.strategy
        attempt, attempts = 0, strategy.sampled.max_attempts
        while True:
            attempt, lost = attempt + 1, cycle.lost
            seen = samples.sample_snapshot(
                connection,
                jobs,
                sample_size=strategy.sampled.sample_size,
                fleet=self._memory.fleet,
                part=cycle.part,
                wait_for_turn=self._turn(connection, cycle),
                chance=self._chance,
                inputs=strategy.inputs,
            )
            jobs = self._choose_and_grant(connection, seen, cycle, round_number=attempt)
            if not jobs or attempt > attempts or (attempt == attempts and cycle.lost == lost):
                return jobs, samples.without_candidates(seen)

    def _turn(self, connection: Connection, cycle: CycleResult) -> Callable[[str], None] | None:
        """Return what waits for the turn among these kinds of bots; None where the one whose turn it is could wait for
        this transaction, or where somebody holds a row."""
        if cycle.holds_quotas or cycle.without_token is not None or self._memory.conflicts.is_hindered:
            return None
        return lambda kinds: advisory.wait_for_turn(connection, among=f"{self._served}/{kinds}")

    def _place_anywhere(
        self, connection: Connection, jobs: Sequence[ReadyJob], cycle: CycleResult
    ) -> tuple[Sequence[ReadyJob], Sequence[Group]]:
        """Place on the first healthy bots that nobody else has locked. Returns the jobs that are left, and the groups
        for which there was no bot."""
        strategy = self._settings.strategy
        of_all = not strategy.sampled.enabled
        seen = samples.healthy_snapshot(
            connection, jobs, fleet=self._memory.fleet, of_all=of_all, inputs=strategy.inputs
        )
        left = self._choose_and_grant(connection, seen, cycle, round_number=0)
        return left, samples.without_candidates(seen)

    def _rest_too_large(
        self, connection: Connection, jobs: Sequence[ReadyJob], hopeless: Sequence[Group], cycle: CycleResult
    ) -> None:
        """Let the queues of these jobs rest if they need more units than any free bot has.

        hopeless: groups for which no bot was found. A group counts only if this cycle has placed no job of it.
        """
        placed = {lease.job_id for lease in cycle.granted}
        hopeless = [group for group in hopeless if placed.isdisjoint(job.id for job in group.jobs)]
        too_large = {job.queue for group in samples.groups_too_large(connection, hopeless) for job in group.jobs}
        self._rest(connection, too_large & {job.queue for job in jobs}, NO_ROOM, cycle)

    def _choose_and_grant(
        self,
        connection: Connection,
        seen: Snapshot,
        cycle: CycleResult,
        *,
        round_number: int,
        needy: Sequence[QueueHead] = (),
    ) -> list[ReadyJob]:
        """Grant what the strategy chooses; returns the jobs that are still without a bot and that may still start.

        needy: those of the jobs that take resources of bots.
        """
        policy = self._settings.strategy
        strategy, name = policy.chooser
        seen = replace(seen, headrooms=cycle.quotas.left, turns=self._memory.rotation.last)
        if Input.WAITING in policy.inputs:
            seen = replace(seen, waiting=self._waiting_demand(connection))
        placements = chosen = seen.chosen_by(strategy, policy, how={"strategy": name, "round": round_number})
        if cycle.trace is not None:
            # Quotas and turns go on to change in this cycle.
            kept = replace(seen, headrooms=dict(seen.headrooms), turns=dict(seen.turns))
            cycle.trace.chose(kept, chosen)
        amounts = cycle.amounts
        if needy:
            placements = lock_bots(connection, chosen)
            charges = resources.resource_charges(connection, needy, placements)
            placements = [each for each in placements if each.job_id not in charges.lost]
            # A job that is not granted may be placed on another bot later, and takes nothing of this one.
            of_bots = {job_id: {**amounts[job_id], **more} for job_id, more in charges.amounts.items()}
            amounts = {**amounts, **of_bots}
            cycle.lost += len(chosen) - len(placements)
        placed = self._grant(connection, seen.jobs, placements, cycle, strategy=name, amounts=amounts)
        if placed and self._recorder is not None and cycle.sample is None and self._recorder.is_due():
            cycle.sample = sample_decision(seen, [each for each in placements if each.job_id in placed], policy)
        if name == SUCCESS:
            metrics.observe_scores(each.decision["score"]["total"] for each in placements if each.job_id in placed)
        return [job for job in seen.jobs if job.id not in placed and cycle.may_still_start(job)]

    def _waiting_demand(self, connection: Connection) -> Mapping[int, WaitingDemand]:
        """Return what waiting jobs take, by cohort. It is read again once in a while."""
        began = self._now()
        if began >= self._memory.waiting_due:
            self._memory.waiting = resources.read_waiting_demand(connection)
            self._memory.waiting_due = self._now() + max(WAITING_SECONDS, 10 * (self._now() - began))
        return self._memory.waiting

    def _grant(
        self,
        connection: Connection,
        jobs: Sequence[ReadyJob],
        placements: Sequence[Placement],
        cycle: CycleResult,
        *,
        strategy: str,
        amounts: Mapping[int, Amounts] | None = None,
        on_kept: bool = False,
    ) -> set[int]:
        """Grant these placements of the jobs; returns the ids of the jobs that have a lease now.

        amounts: what the jobs take of counters, if it is more than what the cycle knows.

        The first call locks the rates. So late, because others wait for them until this transaction ends, and before
        any quota is locked, in the order of locks.
        """
        if placements and cycle.admitted is not None and cycle.admitted.heads and cycle.without_token is None:
            wait = not cycle.holds_quotas
            cycle.without_token = self._admission.without_token(connection, cycle.admitted, wait=wait)
        if cycle.without_token:
            placements = [each for each in placements if each.job_id not in cycle.without_token]
        if not placements:
            return set()
        amounts = cycle.amounts if amounts is None else amounts
        granted = grant(
            connection,
            placements,
            assigner=self.name,
            strategy=strategy,
            ack=self._timing.ack,
            again=cycle.holds_quotas,
            cooldown=self._quotas.of_evictions,
            taken=amounts,
            on_kept=on_kept,
            policy=self._policy,
        )
        cycle.taken += [(lease.job_id, taken) for lease in granted if (taken := amounts.get(lease.job_id))]
        cycle.holds_quotas = True
        cycle.granted += granted
        cycle.lost += len(placements) - len(granted)
        placed = {lease.job_id for lease in granted}
        if Input.TURNS in self._settings.strategy.inputs and not on_kept:
            self._memory.rotation.give([each.bot_id for each in placements if each.job_id in placed])
        for job in jobs:
            if job.id in placed:
                cycle.quotas.take(job)
        metrics.observe_phases(
            str(each.decision["phase"]) for each in placements if each.job_id in placed and "phase" in each.decision
        )
        wake_queues(connection, {job.queue for job in jobs if job.tried and job.id in placed})
        return placed

    def _rest(self, connection: Connection, queues: Collection[int], reason: str, cycle: CycleResult) -> None:
        rested = rest_queues(
            connection,
            queues,
            reason=reason,
            base=self._settings.failure_backoff,
            cap=self._settings.failure_backoff_cap,
        )
        self._memory.rested |= dict.fromkeys(rested, self._now())
        cycle.rested += len(rested)
