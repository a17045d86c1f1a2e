"""Gates of jobs that ask for more than a place: judged on a working copy of what is counted, without a look anywhere.

Each gate says of a queue, for all of its jobs, or of one job, why it is closed; and what a job that goes through takes
of what is counted, so that the next one sees it. The same functions serve the cycle and `explain`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from assigner.admission import gates, graph_share
from assigner.admission.gates import (
    POOL_COST,
    POOL_JOBS,
    Backpressure,
    Budget,
    ClassLimit,
    Concurrency,
    Locks,
    OwnerQuota,
    PreferredHours,
    Rate,
    Slots,
    Windows,
)
from assigner.admission.graph_share import GraphShare, Portion
from assigner.placement.resources import Resources
from schema.accounting import rates as rates_accounting
from schema.accounting.counters import Counter, of_instance, of_lock
from schema.accounting.fair_share import Shares
from schema.accounting.rates import Advice, Bucket
from schema.picking.constrained import GatedQueue, Head, Place
from schema.policy.time_windows import Openings


@dataclass
class Book:
    """A working copy of what is counted, at one moment of the database's time.

    `units`: those that each (cohort, instance) has been given since, of those that its quota leaves; `shares`: None
    where no instance is managed; `reserve`: an estimate has to fit into what is left of a budget; `rates`: buckets by
    name; `refused`: what checkers say of resources; `advice` and `waits`: see `Backpressure`; `portion`: of each graph;
    `scores`: by which jobs have started; `seconds`: how long jobs of a class are expected to run; `openings`: windows
    and what their meters say; `lacking`: what no bot has left, by the places of queues; `tabs`: what `tab` has found.
    """

    now: datetime
    counters: dict[str, Counter] = field(default_factory=dict)
    units: dict[tuple[int, int], Counter] = field(default_factory=dict)
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
    lacking: Mapping[Place, str] = field(default_factory=dict)
    tabs: dict[GatedQueue, "Tab"] = field(default_factory=dict)

    def of(self, name: str) -> Counter:
        """The counter of that name; one that does not exist is a lock, of which there is one, or has no limit."""
        return self.counters.get(name) or Counter(0.0, 1.0 if name.startswith("lock:") else None)

    def counter(self, name: str) -> Counter:
        """The same, to count in it."""
        found = self.counters.get(name)
        if found is None:
            found = self.counters[name] = self.of(name)
        return found

    def given(self, queue: GatedQueue) -> Counter:
        """The units that the queue's instance has been given in its cohort since, to count in."""
        return self.units.setdefault((queue.cohort, queue.instance), Counter(0.0, queue.headroom))

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

    def tab(self, queue: GatedQueue) -> "Tab":
        """What is looked at for each job of the queue."""
        found = self.tabs.get(queue)
        if found is None:
            found = self.tabs[queue] = Tab(queue, self)
        return found


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

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        """What a job of the queue takes of counters while it runs, None for what it is estimated at."""


def names(queue: GatedQueue) -> list[str]:
    """The counters that jobs of the queue take of."""
    graph = graph_share.graph_of(queue.terms)
    return [
        *([] if graph is None else [graph_share.counter_of(graph)]),
        POOL_COST,
        POOL_JOBS,
        of_instance(queue.instance_name, "cost"),
        of_instance(queue.instance_name, "jobs"),
        of_instance(queue.instance_name, "slots"),
        *(of_lock(queue.instance_name, lock) for lock in queue.terms.get("locks", ())),
        *gates.owner_counters(queue),
        *gates.class_counters(queue),
    ]


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


class Tab:
    """What has to be looked at for each job of a queue, found once for all of them.

    `shut`: the gate that closed the queue as a whole when nothing had been taken yet; `units`: see `Book.given`;
    `counters`: those that a job takes of, with the amount, None for what it is estimated at; `buckets`: those that it
    takes a token of, where they exist.
    """

    def __init__(self, queue: GatedQueue, book: Book) -> None:
        self._book, self.shut = book, shut(queue, book)
        self._takes: dict[str, float | None] = {}
        for gate in GATES:
            self._takes.update(gate.takes(queue))
        self.units = book.given(queue)
        self.buckets = rates_accounting.names(queue.terms)
        self.counters = [(book.counter(name), amount) for name, amount in self._takes.items()]
        self._limited = [(counter, amount) for counter, amount in self.counters if counter.most is not None]
        # What closes a gate beside the limits of counters is so from the beginning, or has to be asked each time.
        self._is_asked = (
            any(name in book.rates for name in self.buckets)
            or (book.portion is not None and graph_share.graph_of(queue.terms) is not None)
            or self.shut is not None
        )
        self._amounts: dict[float, Mapping[str, float]] = {}

    def closed(self, head: Head) -> tuple["TermsGate", str] | None:
        """The first gate that is closed for the job, and why."""
        if not self._is_asked:
            for counter, amount in self._limited:
                if not counter.leaves(head.estimate if amount is None else amount):
                    break
            else:
                return None
        for gate in GATES:
            why = gate.closed_for(head, self._book)
            if why is not None:
                return gate, why
        return None

    @property
    def left(self) -> Iterator[float]:
        """What each of the counters of whole jobs still leaves."""
        return ((counter.most or 0.0) - counter.used for counter, amount in self._limited if amount is not None)

    def take(self, head: Head) -> None:
        """The job starts: count what it takes."""
        self.units.used += head.job.units
        for counter, amount in self.counters:
            counter.used += head.estimate if amount is None else amount
        for name in self.buckets:
            if name in self._book.rates:
                self._book.rates[name] = self._book.rates[name].less(1)

    def amounts(self, estimate: float) -> Mapping[str, float]:
        """What a job of that estimate takes of counters while it runs; the same object for each of them."""
        found = self._amounts.get(estimate)
        if found is None:
            taken = {name: estimate if amount is None else amount for name, amount in self._takes.items()}
            found = self._amounts[estimate] = taken
        return found


def amounts(head: Head, book: Book) -> Mapping[str, float]:
    """What the job takes of counters while it runs."""
    return book.tab(head.queue).amounts(head.estimate)


def closed(head: Head, book: Book) -> tuple[TermsGate, str] | None:
    """The first gate that is closed for the job, and why."""
    return book.tab(head.queue).closed(head)


def shut(queue: GatedQueue, book: Book) -> TermsGate | None:
    """The first gate that closes the queue as a whole."""
    return next((gate for gate in GATES if gate.closed_to(queue, book) is not None), None)


def most(queue: GatedQueue, book: Book) -> float:
    """Jobs of the queue that may start at once, as far as tokens, caps and counters of whole jobs tell."""
    left = [*book.tab(queue).left]
    left += [book.rates[name].tokens for name in rates_accounting.names(queue.terms) if name in book.rates]
    graph = graph_share.graph_of(queue.terms)
    if graph is not None and book.portion is not None:
        left.append(book.portion.cap - graph_share.running(graph, book))
    return max(0.0, min(left, default=math.inf))
