"""Gates of jobs that ask for more than a place: judged on a working copy of what is counted, without a look anywhere.

Each gate says of a queue, for all of its jobs, or of one job, why it is closed; and what a job that goes through takes
of what is counted, so that the next one sees it. The same functions serve the cycle and `explain`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from assigner import class_limits, owners, portions
from assigner.class_limits import ClassLimit
from assigner.fitting import Resources
from assigner.owners import OwnerQuota
from assigner.portions import GraphShare, Portion
from assigner.pressure import Backpressure
from assigner.rate import Rate
from assigner.timetable import PreferredHours, Windows
from schema import rates
from schema.backpressure import Advice
from schema.counters import COST, Counter, of_instance, of_lock
from schema.gated import GatedQueue, Head
from schema.openings import Openings
from schema.rates import Bucket
from schema.shares import Shares

#: The names of counters that all jobs of the pool take of.
POOL_JOBS, POOL_COST = "pool:jobs", "pool:cost"


@dataclass
class Book:
    """A working copy of what is counted, at one moment of the database's time.

    `units`: those that each (cohort, instance) has been given since; `shares`: None where no instance is managed;
    `reserve`: an estimate has to fit into what is left of a budget; `rates`: buckets by name; `refused`: what checkers
    say of resources; `advice` and `waits`: see `Backpressure`; `portion`: of each graph; `scores`: by which jobs have
    started; `seconds`: how long jobs of a class are expected to run; `openings`: windows and what their meters say;
    `lacking`: what no bot has left, by the places of queues.
    """

    now: datetime
    counters: dict[str, Counter] = field(default_factory=dict)
    units: dict[tuple[int, int], int] = field(default_factory=dict)
    shares: Shares | None = None
    reserve: bool = True
    rates: dict[str, Bucket] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    advice: dict[str, Advice] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    portion: Portion | None = None
    scores: dict[int, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    openings: Openings = field(default_factory=Openings)
    lacking: Mapping[tuple[int, int, int, int], str] = field(default_factory=dict)

    def of(self, name: str) -> Counter:
        """The counter of that name; one that does not exist is a lock, of which there is one, or has no limit."""
        return self.counters.get(name) or Counter(0.0, 1.0 if name.startswith("lock:") else None)

    def given(self, queue: GatedQueue) -> int:
        """Units that the queue's instance has been given in its cohort since."""
        return self.units.get((queue.cohort, queue.instance), 0)

    def expected(self, head: Head) -> float | None:
        """Seconds for which the job is expected to run, None if nobody knows."""
        return self.seconds.get(head.queue.terms.get("job_class", "")) if head.seconds is None else head.seconds

    def efficiency(self, head: Head) -> float:
        """1 / (1 + the unit hours that it is expected to take), 1 if nobody knows: how little of the pool it takes."""
        seconds = self.expected(head)
        return 1.0 if seconds is None else 1.0 / (1.0 + head.job.units * seconds / 3600.0)

    def window(self, head: Head) -> float:
        """How well this hour suits it, 0 to 1: what the windows of its class have left."""
        job_class = head.queue.terms.get("job_class")
        return 1.0 if job_class is None else self.openings.spare(job_class, self.now)

    def take(self, head: Head) -> None:
        """The job starts: count what it takes."""
        quota = (head.queue.cohort, head.queue.instance)
        self.units[quota] = self.units.get(quota, 0) + head.job.units
        for name, amount in amounts(head).items():
            counter = self.of(name)
            self.counters[name] = Counter(counter.used + amount, counter.most)
        for name in rates.names(head.queue.terms):
            if name in self.rates:
                self.rates[name] = self.rates[name].less(1)


class TermsGate(Protocol):
    """One condition, and where it is closed, why."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def asks(self) -> str:
        """What has to be so."""

    def closed_to(self, queue: GatedQueue, book: Book) -> str | None:
        """Why no job of the queue may start; None if they may, or if it depends on the job."""

    def closed_for(self, head: Head, book: Book) -> str | None:
        """Why this job may not start now."""

    def amounts(self, head: Head) -> Mapping[str, float]:
        """What the job takes of counters while it runs."""


def names(queue: GatedQueue) -> list[str]:
    """The counters that jobs of the queue take of."""
    graph = portions.graph_of(queue.terms)
    return [
        *([] if graph is None else [portions.counter_of(graph)]),
        POOL_COST,
        POOL_JOBS,
        of_instance(queue.instance_name, "cost"),
        of_instance(queue.instance_name, "jobs"),
        of_instance(queue.instance_name, "slots"),
        *(of_lock(queue.instance_name, lock) for lock in queue.terms.get("locks", ())),
        *owners.names(queue),
        *class_limits.names(queue),
    ]


@dataclass(frozen=True)
class Concurrency:
    """Live leases of the pool and of an instance."""

    name: str = "concurrency"
    asks: str = "fewer jobs run than may run at once"

    def closed_to(self, queue: GatedQueue, book: Book) -> str | None:
        for counted, whose in ((POOL_JOBS, "the pool"), (of_instance(queue.instance_name, "jobs"), "its instance")):
            counter = book.of(counted)
            if not counter.leaves(1.0):
                return f"{whose} runs {counter.used:g} of at most {counter.most:g} jobs"
        return None

    def closed_for(self, head: Head, book: Book) -> str | None:
        return self.closed_to(head.queue, book)

    def amounts(self, head: Head) -> Mapping[str, float]:
        return {POOL_JOBS: 1.0, of_instance(head.queue.instance_name, "jobs"): 1.0}


@dataclass(frozen=True)
class Budget:
    """Cost of the pool and of an instance, within the rolling window or reserved for what runs."""

    name: str = "budget"
    asks: str = "what was used and what is reserved leave enough of the budget"

    def closed_to(self, queue: GatedQueue, book: Book) -> str | None:
        for counted, whose in self._counted(queue):
            counter = book.of(counted)
            if not counter.leaves(0.0):
                return f"{whose} has used {counter.used:g} of its budget of {counter.most:g}"
        return None

    def closed_for(self, head: Head, book: Book) -> str | None:
        for counted, whose in self._counted(head.queue):
            counter = book.of(counted)
            if not counter.leaves(head.estimate if book.reserve else 0.0):
                return (
                    f"{whose} has used {counter.used:g} of its budget of {counter.most:g}, "
                    f"and this job is estimated at {head.estimate:g}"
                )
        return None

    def amounts(self, head: Head) -> Mapping[str, float]:
        return {name: head.estimate for name, _ in self._counted(head.queue)}

    @staticmethod
    def _counted(queue: GatedQueue) -> tuple[tuple[str, str], ...]:
        return (POOL_COST, "the pool"), (of_instance(queue.instance_name, "cost"), "its instance")


@dataclass(frozen=True)
class Locks:
    """Named locks of an instance; each is held by so many jobs at once as it has slots, by one if nobody says."""

    name: str = "locks"
    asks: str = "the locks that it names are free"

    def closed_to(self, queue: GatedQueue, book: Book) -> str | None:
        for lock in queue.terms.get("locks", ()):
            counter = book.of(of_lock(queue.instance_name, lock))
            if not counter.leaves(1.0):
                return f"lock '{lock}' is held {counter.used:g} times of {counter.most:g}"
        return None

    def closed_for(self, head: Head, book: Book) -> str | None:
        return self.closed_to(head.queue, book)

    def amounts(self, head: Head) -> Mapping[str, float]:
        return {of_lock(head.queue.instance_name, lock): 1.0 for lock in head.queue.terms.get("locks", ())}


@dataclass(frozen=True)
class Slots:
    """Places in which an instance's jobs work, one for each; an instance for which nobody says has any number."""

    name: str = "slots"
    asks: str = "its instance has a slot free"

    def closed_to(self, queue: GatedQueue, book: Book) -> str | None:
        counter = book.of(of_instance(queue.instance_name, "slots"))
        if not counter.leaves(1.0):
            return f"its instance uses {counter.used:g} of {counter.most:g} slots"
        if counter.most is None and book.shares is not None and book.shares.slotted:
            return "its instance has no slots, while others have"
        return None

    def closed_for(self, head: Head, book: Book) -> str | None:
        return self.closed_to(head.queue, book)

    def amounts(self, head: Head) -> Mapping[str, float]:
        return {of_instance(head.queue.instance_name, "slots"): 1.0}


#: Every gate on what jobs ask for, in the order in which they are asked.
GATES: tuple[TermsGate, ...] = (
    Windows(),
    PreferredHours(),
    Budget(),
    OwnerQuota(),
    Slots(),
    Locks(),
    ClassLimit(),
    Concurrency(),
    GraphShare(),
    Resources(),
    Backpressure(),
    Rate(),
)


def amounts(head: Head) -> dict[str, float]:
    """What the job takes of counters while it runs."""
    taken: dict[str, float] = {}
    for gate in GATES:
        taken.update(gate.amounts(head))
    return taken


def closed(head: Head, book: Book) -> tuple[TermsGate, str] | None:
    """The first gate that is closed for the job, and why."""
    for gate in GATES:
        why = gate.closed_for(head, book)
        if why is not None:
            return gate, why
    return None


def shut(queue: GatedQueue, book: Book) -> TermsGate | None:
    """The first gate that closes the queue as a whole."""
    return next((gate for gate in GATES if gate.closed_to(queue, book) is not None), None)


def most(queue: GatedQueue, book: Book) -> float:
    """Jobs of the queue that may start at once, as far as tokens, caps and counters of whole jobs tell."""
    counted = [each for each in names(queue) if not each.endswith(COST)]
    left = [counter.most - counter.used for name in counted if (counter := book.of(name)).most is not None]
    left += [book.rates[name].tokens for name in rates.names(queue.terms) if name in book.rates]
    graph = portions.graph_of(queue.terms)
    if graph is not None and book.portion is not None:
        left.append(book.portion.cap - portions.running(graph, book))
    return max(0.0, min(left, default=math.inf))
