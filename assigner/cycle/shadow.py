"""A shadow: another version of the policy decides again, after the commit, on what a cycle had in memory.

It changes nothing and reads nothing. Each kind of decision is compared by itself, with all others as they were made:
the bot of each job in the order of the cycle, the order of the jobs that the cycle had read, the victims on the bots
that it had looked at. So a difference in one does not count again in the others. The functions that decide are those
of the cycle, and what was left to chance is as it fell there.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from assigner.admission.admit import AdmissionInput, Ordering, merge, place_of
from assigner.admission.ordering import OrderingSettings
from assigner.admission.state import AdmissionState
from assigner.cycle.settings import AssignerSettings
from assigner.placement.registry import StrategySettings
from assigner.placement.strategy import Snapshot
from assigner.preemption.plan import Eviction, QuotaSettings, plan
from schema.clock import Monotonic
from schema.moves.grant import Placement
from schema.picking.constrained import QueueHead
from schema.picking.pick import Order, ReadyJob
from schema.picking.preemption import OccupiedBot, StarvedJob

log = structlog.get_logger()

#: The most of an assigner's processor time that its shadow takes.
PROCESSOR_SHARE = 0.05
#: Seconds of an assigner's processor time over which that holds: what is older counts half, and half of that again.
PROCESSOR_WINDOW = 10.0
#: The settings that a shadow compares, as names of versions tell them; of an entry also its strategy.
COMPARED_OF_ENTRY = "priority_percentage"
COMPARED_OF_QUOTAS = frozenset({"preemption", "preemption_delay", "max_evictions", "min_run_time"})


@dataclass(frozen=True)
class Decider:
    """The settings by which one assigner decides, as far as a shadow compares them."""

    settings: AssignerSettings
    quotas: QuotaSettings
    ordering: OrderingSettings

    def placements(self, seen: Snapshot) -> list[Placement]:
        """Return the bots that the strategy chooses."""
        policy = self.settings.strategy
        return seen.chosen_by(policy.chooser[0], policy, how={})

    def victims(self, starved: StarvedJob, bots: Sequence[OccupiedBot], now: datetime) -> Eviction | None:
        """Return what would be evicted for a job."""
        if not self.quotas.preemption or starved.waited < self.quotas.preemption_delay:
            return None
        return plan(starved, bots, self.quotas, now=now)


@dataclass
class Tally:
    """What the shadows of one process have counted. Any thread may call it.

    jobs: by instance and by what is counted: `bots`, `orders` and `victims` are decisions that were compared,
    `other_bots`, `other_orders` and `other_victims` those that were different.
    cycles: by what became of the sampled ones: `compared`, `skipped` for the sake of processor time, or `failed`.
    seconds: of processor time that the shadows took.
    reasons: why something cannot be compared here.
    """

    jobs: Counter[tuple[int, str]] = field(default_factory=Counter)
    cycles: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    reasons: dict[str, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(
        self, cycle: str, jobs: Counter[tuple[int, str]] | None = None, seconds: float = 0.0, reason: str | None = None
    ) -> None:
        """Count a sampled cycle."""
        with self._lock:
            self.cycles[cycle] += 1
            self.jobs.update(jobs or {})
            self.seconds += seconds
            if reason is not None:
                self.reasons[reason] = None

    def take(self) -> "Tally":
        """Return what was counted since the last call, with all reasons."""
        with self._lock:
            taken = Tally(self.jobs, self.cycles, self.seconds, dict(self.reasons))
            self.jobs, self.cycles, self.seconds = Counter(), Counter(), 0.0
        return taken

    def forget_reasons(self) -> None:
        """Forget why something could not be compared, because the version in force is another one now."""
        with self._lock:
            self.reasons.clear()

    def give_back(self, taken: "Tally") -> None:
        """Count once more what could not be stored."""
        with self._lock:
            self.jobs.update(taken.jobs)
            self.cycles.update(taken.cycles)
            self.seconds += taken.seconds


class ProcessorBudget:
    """Keeps something below a part of the processor time of one thread, by the clock of that time."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._seen: float | None = None
        self._total = self._spent = self._most = self._untold = 0.0

    def allows(self) -> bool:
        """Return whether there is room for the most that was lately spent at once; nothing is known of it at first."""
        now = self._now()
        self._total += 0.0 if self._seen is None else now - self._seen
        self._seen = now
        while self._total > PROCESSOR_WINDOW:
            self._total, self._spent, self._most = self._total / 2, self._spent / 2, self._most / 2
        return self._spent + self._most <= PROCESSOR_SHARE * self._total

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the processor time of the block as spent."""
        began = self._now()
        try:
            yield
        finally:
            took = self._now() - began
            self._spent, self._untold, self._most = self._spent + took, self._untold + took, max(self._most, took)

    def told(self) -> float:
        """Return the seconds that were spent since the last call."""
        untold, self._untold = self._untold, 0.0
        return untold


class Shadow:
    """The shadow of one assigner. It belongs to the assigner's thread.

    candidate: by what the shadow decides. share: the part of the cycles that it looks at, 0 to 1. processor: the clock
    of the thread's processor time.
    """

    def __init__(
        self, candidate: Decider, *, share: float, tally: Tally, chance: random.Random, processor: Monotonic
    ) -> None:
        self.candidate, self.tally, self.budget = candidate, tally, ProcessorBudget(processor)
        self._share, self._chance = share, chance

    def begin(self, decider: Decider) -> "Trace | None":
        """Return what keeps the decisions of a cycle, if it is one of those that are looked at. decider: its own."""
        if self._chance.random() >= self._share:
            return None
        if self.budget.allows():
            return Trace(self, decider)
        self.tally.add("skipped")
        return None


@dataclass
class Trace:
    """The decisions of one cycle, and what each was made from."""

    shadow: Shadow
    decider: Decider
    #: The number that was drawn for the order of plain jobs.
    roll: int = 100
    chosen: list[tuple[Snapshot, Sequence[Placement]]] = field(default_factory=list)
    merged: list[tuple[Sequence[ReadyJob], AdmissionInput | None]] = field(default_factory=list)
    plans: list[tuple[StarvedJob, Sequence[OccupiedBot], datetime, Eviction | None]] = field(default_factory=list)

    def chose(self, seen: Snapshot, placements: Sequence[Placement]) -> None:
        """Keep a choice of bots."""
        self.chosen.append((seen, placements))

    def merges(self, plain: Sequence[ReadyJob], made_from: AdmissionInput | None) -> None:
        """Keep the plain jobs as they were picked, and what constrained jobs were admitted from, if some were."""
        self.merged.append((plain, made_from))

    def planned(
        self, starved: StarvedJob, bots: Sequence[OccupiedBot], now: datetime, eviction: Eviction | None
    ) -> None:
        """Keep a plan of an eviction."""
        self.plans.append((starved, bots, now, eviction))

    def copy(self, state: AdmissionState) -> AdmissionState:
        """Return a copy of a state of admission, before anything is counted in it."""
        with self.shadow.budget.spending():
            return state.copy()

    def compare(self) -> None:
        """Let the candidate decide, and count. A fault in it is counted and told, and harms nothing else."""
        if not (self.chosen or self.merged or self.plans):
            return
        shadow, jobs, reason, became = self.shadow, Counter[tuple[int, str]](), None, "compared"
        with shadow.budget.spending():
            try:
                jobs, reason = self._differences()
            except Exception as error:  # a strategy of somebody else may raise anything
                jobs, reason, became = Counter(), f"it fails here: {type(error).__name__}: {error}"[:300], "failed"
                if reason not in shadow.tally.reasons:
                    log.exception("a shadow fails, which changes nothing else")
        shadow.tally.add(became, jobs, shadow.budget.told(), reason)

    def _differences(self) -> tuple[Counter[tuple[int, str]], str | None]:
        own, other = self.decider, self.shadow.candidate
        found = Counter[tuple[int, str]]()
        blind = unseen_inputs(own.settings.strategy, other.settings.strategy)
        for seen, placements in self.chosen if blind is None else ():
            _count(found, "bots", *_other_bots(seen, placements, other.placements(seen)))
        reads_otherwise = other_reading(own.ordering, other.ordering)
        for plain, made_from in self.merged:
            if made_from is None or reads_otherwise is None:
                orders = [_order(plain, made_from, self._order_of(each), each.ordering) for each in (own, other)]
                _count(found, "orders", *_other_orders(*orders))
        for starved, bots, now, eviction in self.plans:
            again = other.victims(starved, bots, now)
            if eviction or again:
                _count(found, "victims", [starved.instance], [starved.instance] if _of(eviction) != _of(again) else [])
        return found, blind or reads_otherwise

    def _order_of(self, decider: Decider) -> tuple[Order, Order]:
        """Return the order in which the plain jobs are, and that in which this decider has them."""
        return self.decider.settings.order(self.roll), decider.settings.order(self.roll)


def is_compared(what: str, field: str) -> bool:
    """Return whether a value that differs between two versions can show in a shadow. what, field: as of a `Change`.

    Everything else decides what a cycle reads, or is a limit that holds as it is in force.
    """
    if what.startswith("assigner "):
        of_strategy = field.startswith("strategy.") and not field.startswith("strategy.sampling.")
        return of_strategy or field == COMPARED_OF_ENTRY
    return what == "[ordering]" or (what == "[quotas]" and field in COMPARED_OF_QUOTAS)


def unseen_inputs(own: StrategySettings, other: StrategySettings) -> str | None:
    """Return why the other strategy cannot choose among the bots that this one has read; None if it can."""
    if own.sampling.enabled != other.sampling.enabled:
        return "bots are not compared: one of the versions samples bots and the other does not"
    if missing := sorted(other.inputs - own.inputs):
        return f"bots are not compared: its strategy goes by what is not read now: {', '.join(missing)}"
    return None


def other_reading(own: OrderingSettings, other: OrderingSettings) -> str | None:
    """Return why the other order cannot be applied to what this one has read; None if it can."""
    if (own.kind == "graph") != (other.kind == "graph"):
        return "the order of constrained jobs is not compared: only one of the versions goes by graphs"
    return None


def _order(
    plain: Sequence[ReadyJob], made_from: AdmissionInput | None, order: tuple[Order, Order], settings: OrderingSettings
) -> list[ReadyJob]:
    """Return the jobs that a decider would place, in its order. order: that of the plain jobs, and its own."""
    by_age = order[1] is Order.AGE
    if order[0] is not order[1]:
        plain = sorted(plain, key=lambda job: place_of(job, by_age=by_age))
    if made_from is None:
        return [*plain]
    ordering: Ordering = settings.policy().ordering
    merged = merge(plain, made_from.again(ordering), by_age=by_age)[: made_from.free_units]
    return [each.job if isinstance(each, QueueHead) else each for each in merged]


def _count(found: Counter[tuple[int, str]], what: str, compared: Sequence[int], different: Sequence[int]) -> None:
    """Count decisions, each given by its instance."""
    found.update((instance, what) for instance in compared)
    found.update((instance, f"other_{what}") for instance in different)


def _other_bots(seen: Snapshot, ours: Sequence[Placement], theirs: Sequence[Placement]) -> tuple[list[int], list[int]]:
    """Return the instances of the jobs for which either has a bot, and of those for which the bots differ."""
    one, other = ({each.job_id: each.bot_id for each in placements} for placements in (ours, theirs))
    compared = [job for job in seen.jobs if job.id in one or job.id in other]
    different = [job for job in compared if one.get(job.id) != other.get(job.id)]
    return [job.instance for job in compared], [job.instance for job in different]


def _other_orders(ours: Sequence[ReadyJob], theirs: Sequence[ReadyJob]) -> tuple[list[int], list[int]]:
    """Return the instances of the jobs that either places, and of those that have another place among the jobs of both,
    or that only one of them places."""
    instances = {job.id: job.instance for job in (*ours, *theirs)}
    both = {job.id for job in ours} & {job.id for job in theirs}
    one, other = ([job.id for job in jobs if job.id in both] for jobs in (ours, theirs))
    different = {mine for mine, its in zip(one, other, strict=True) if mine != its} | (instances.keys() - both)
    return list(instances.values()), [instances[each] for each in different]


def _of(eviction: Eviction | None) -> tuple[int, frozenset[int]] | None:
    return None if eviction is None else (eviction.bot.id, frozenset(each.job_id for each in eviction.victims))
