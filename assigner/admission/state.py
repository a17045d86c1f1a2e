"""Gates of jobs that ask for more than a place: judged on a working copy of what is counted, without a look anywhere.

Each gate says of a queue, for all of its jobs, or of one job, why it is closed; and what a job that goes through takes
of what is counted, so that the next one sees it. The same functions serve the cycle and `explain`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from assigner.admission import gates
from assigner.admission import graph_share as graph_shares
from assigner.admission.gates import (
    POOL_COST,
    POOL_JOBS,
    BackpressureGate,
    BudgetGate,
    ClassLimitGate,
    ConcurrencyGate,
    LocksGate,
    OwnerQuotaGate,
    PreferredHoursGate,
    RateGate,
    SlotsGate,
    WindowsGate,
)
from assigner.admission.graph_share import GraphShare, GraphShareGate
from assigner.placement.resources import ResourcesGate
from schema.accounting import rates as rate_rows
from schema.accounting.counters import Counter, instance_counter, lock_counter
from schema.accounting.fair_share import Shares
from schema.accounting.rates import Advice, Bucket
from schema.picking.constrained import ConstrainedQueue, QueueHead, QueueId
from schema.policy.time_windows import WindowSchedule


@dataclass
class AdmissionState:
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
    graph_share: GraphShare | None = None
    scores: dict[int, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    openings: WindowSchedule = field(default_factory=WindowSchedule)
    lacking: Mapping[QueueId, str] = field(default_factory=dict)
    queue_admissions: dict[ConstrainedQueue, "QueueAdmission"] = field(default_factory=dict)

    def of(self, name: str) -> Counter:
        """The counter of that name; one that does not exist is a lock, of which there is one, or has no limit."""
        return self.counters.get(name) or Counter(0.0, 1.0 if name.startswith("lock:") else None)

    def counter(self, name: str) -> Counter:
        """The same, to count in it."""
        found = self.counters.get(name)
        if found is None:
            found = self.counters[name] = self.of(name)
        return found

    def given_units(self, queue: ConstrainedQueue) -> Counter:
        """The units that the queue's instance has been given in its cohort since, to count in."""
        return self.units.setdefault((queue.cohort, queue.instance), Counter(0.0, queue.headroom))

    def expected(self, head: QueueHead) -> float | None:
        """Seconds for which the job is expected to run, None if nobody knows."""
        return self.seconds.get(head.queue.constraints.get("job_class", "")) if head.seconds is None else head.seconds

    def efficiency(self, head: QueueHead) -> float:
        """1 / (1 + the unit hours that it is expected to take), 1 if nobody knows: how little of the pool it takes."""
        seconds = self.expected(head)
        return 1.0 if seconds is None else 1.0 / (1.0 + head.job.units * seconds / 3600.0)

    def window(self, head: QueueHead) -> float:
        """How well this hour suits it, 0 to 1: what the windows of its class have left."""
        job_class = head.queue.constraints.get("job_class")
        return 1.0 if job_class is None else self.openings.spare(job_class, self.now)

    def queue_admission(self, queue: ConstrainedQueue) -> "QueueAdmission":
        """What is looked at for each job of the queue."""
        found = self.queue_admissions.get(queue)
        if found is None:
            found = self.queue_admissions[queue] = QueueAdmission(queue, self)
        return found


class Gate(Protocol):
    """One condition, and where it is closed, why."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def requirement(self) -> str:
        """What has to be so."""

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: AdmissionState) -> str | None:
        """Why no job of the queue may start; None if they may, or if it depends on the job."""

    def closed_for_job(self, head: QueueHead, admission_state: AdmissionState) -> str | None:
        """Why this job may not start now."""

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        """What a job of the queue takes of counters while it runs, None for what it is estimated at."""


def queue_counters(queue: ConstrainedQueue) -> list[str]:
    """The counters that jobs of the queue take of."""
    graph = graph_shares.graph_of(queue.constraints)
    return [
        *([] if graph is None else [graph_shares.graph_counter(graph)]),
        POOL_COST,
        POOL_JOBS,
        instance_counter(queue.instance_name, "cost"),
        instance_counter(queue.instance_name, "jobs"),
        instance_counter(queue.instance_name, "slots"),
        *(lock_counter(queue.instance_name, lock) for lock in queue.constraints.get("locks", ())),
        *gates.owner_counters(queue),
        *gates.class_counters(queue),
    ]


#: Every gate on what jobs ask for, in the order in which they are asked.
GATES: tuple[Gate, ...] = (
    WindowsGate(),
    PreferredHoursGate(),
    BudgetGate(),
    OwnerQuotaGate(),
    SlotsGate(),
    LocksGate(),
    ClassLimitGate(),
    ConcurrencyGate(),
    GraphShareGate(),
    ResourcesGate(),
    BackpressureGate(),
    RateGate(),
)


class QueueAdmission:
    """What has to be looked at for each job of a queue, found once for all of them.

    `shut`: the gate that closed the queue as a whole when nothing had been taken yet; `units`: see `Book.given`;
    `counters`: those that a job takes of, with the amount, None for what it is estimated at; `buckets`: those that it
    takes a token of, where they exist.
    """

    def __init__(self, queue: ConstrainedQueue, admission_state: AdmissionState) -> None:
        self._state, self.shut = admission_state, closing_gate(queue, admission_state)
        self._charges: dict[str, float | None] = {}
        for gate in GATES:
            self._charges.update(gate.charges(queue))
        self.units = admission_state.given_units(queue)
        self.buckets = rate_rows.bucket_names(queue.constraints)
        self.counters = [(admission_state.counter(name), amount) for name, amount in self._charges.items()]
        self._limited = [(counter, amount) for counter, amount in self.counters if counter.most is not None]
        # What closes a gate beside the limits of counters is so from the beginning, or has to be asked each time.
        self._is_asked = (
            any(name in admission_state.rates for name in self.buckets)
            or (admission_state.graph_share is not None and graph_shares.graph_of(queue.constraints) is not None)
            or self.shut is not None
        )
        self._amounts: dict[float, Mapping[str, float]] = {}

    def closed(self, head: QueueHead) -> tuple["Gate", str] | None:
        """The first gate that is closed for the job, and why."""
        if not self._is_asked:
            for counter, amount in self._limited:
                if not counter.leaves(head.estimate if amount is None else amount):
                    break
            else:
                return None
        for gate in GATES:
            why = gate.closed_for_job(head, self._state)
            if why is not None:
                return gate, why
        return None

    @property
    def left(self) -> Iterator[float]:
        """What each of the counters of whole jobs still leaves."""
        return ((counter.most or 0.0) - counter.used for counter, amount in self._limited if amount is not None)

    def take(self, head: QueueHead) -> None:
        """The job starts: count what it takes."""
        self.units.used += head.job.units
        for counter, amount in self.counters:
            counter.used += head.estimate if amount is None else amount
        for name in self.buckets:
            if name in self._state.rates:
                self._state.rates[name] = self._state.rates[name].minus(1)

    def amounts(self, estimate: float) -> Mapping[str, float]:
        """What a job of that estimate takes of counters while it runs; the same object for each of them."""
        found = self._amounts.get(estimate)
        if found is None:
            taken = {name: estimate if amount is None else amount for name, amount in self._charges.items()}
            found = self._amounts[estimate] = taken
        return found


def job_charges(head: QueueHead, admission_state: AdmissionState) -> Mapping[str, float]:
    """What the job takes of counters while it runs."""
    return admission_state.queue_admission(head.queue).amounts(head.estimate)


def first_closed_gate(head: QueueHead, admission_state: AdmissionState) -> tuple[Gate, str] | None:
    """The first gate that is closed for the job, and why."""
    return admission_state.queue_admission(head.queue).closed(head)


def closing_gate(queue: ConstrainedQueue, admission_state: AdmissionState) -> Gate | None:
    """The first gate that closes the queue as a whole."""
    return next((gate for gate in GATES if gate.closed_for_queue(queue, admission_state) is not None), None)


def max_starts(queue: ConstrainedQueue, admission_state: AdmissionState) -> float:
    """Jobs of the queue that may start at once, as far as tokens, caps and counters of whole jobs tell."""
    left = [*admission_state.queue_admission(queue).left]
    left += [
        admission_state.rates[name].tokens
        for name in rate_rows.bucket_names(queue.constraints)
        if name in admission_state.rates
    ]
    graph = graph_shares.graph_of(queue.constraints)
    if graph is not None and admission_state.graph_share is not None:
        left.append(admission_state.graph_share.cap - graph_shares.running_jobs(graph, admission_state))
    return max(0.0, min(left, default=math.inf))
