"""What the gates on constrained jobs are judged by: a working copy of what is counted, at one moment."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from assigner.admission.graph_share import ALL_GRAPHS, GraphShare, graph_counter, graph_of
from schema.accounting.counters import Counter
from schema.accounting.fair_share import Shares
from schema.accounting.rates import Advice, Bucket
from schema.picking.constrained import ConstrainedQueue, QueueHead, QueueId
from schema.policy.time_windows import WindowSchedule

#: The names of counters that all jobs of the pool take of.
POOL_JOBS, POOL_COST = "pool:jobs", "pool:cost"


@dataclass
class AdmissionState:
    """A working copy of what is counted, at one moment of the database's time.

    units: units that each (cohort, instance) has been given since, with those that its quota leaves as the limit.
    shares: shares of instances; None if no instance is managed. reserve: an estimate has to fit into what is left of a
    budget. rates: buckets by name. refused: resources that a checker refuses, with the reason. advice, waits: advice of
    backpressure, and seconds that are left of its pauses, by resource class. graph_share: what each graph may have.
    scores: the score with which each job started. seconds: expected run time of jobs of each class. openings: windows
    and their meters. lacking: the resource that no bot has left, by queue. reserves: jobs that are kept for classes.
    queue_admissions, charges: see `queue_admission` and `queue_charges`. asked_gates: those that may be closed for a
    queue none of whose counters is used up; empty until they are needed. first_used: what instances had used before
    anything started, in the fair share mode `literal`. standing: what the instances with these shares have had; see
    `fair_share`.
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
    reserves: Mapping[str, int] = field(default_factory=dict)
    queue_admissions: dict[ConstrainedQueue, Any] = field(default_factory=dict)
    charges: MutableMapping[tuple[int, int], Any] = field(default_factory=dict)
    asked_gates: Sequence[Any] = ()
    first_used: dict[int, float] = field(default_factory=dict)
    standing: tuple[Shares | None, Any] = (None, None)

    def of(self, name: str) -> Counter:
        """Return the counter of that name. One that does not exist has no limit, or the limit 1 if it is a lock."""
        return self.counters.get(name) or Counter(0.0, 1.0 if name.startswith("lock:") else None)

    def counter(self, name: str) -> Counter:
        """Return the same counter, to count in it."""
        found = self.counters.get(name)
        if found is None:
            found = self.counters[name] = self.of(name)
        return found

    def given_units(self, queue: ConstrainedQueue) -> Counter:
        """Return the units that the queue's instance has been given in its cohort, to count in them."""
        return self.units.setdefault((queue.cohort, queue.instance), Counter(0.0, queue.headroom))

    def expected(self, head: QueueHead) -> float | None:
        """Return the seconds for which the job is expected to run; None if that is unknown."""
        return self.seconds.get(head.queue.constraints.get("job_class", "")) if head.seconds is None else head.seconds

    def efficiency(self, head: QueueHead) -> float:
        """Return 1 / (1 + the unit hours that the job is expected to take), or 1 if these are unknown."""
        seconds = self.expected(head)
        return 1.0 if seconds is None else 1.0 / (1.0 + head.job.units * seconds / 3600.0)

    def window(self, head: QueueHead) -> float:
        """Return how much the windows of its class have left, 0 to 1."""
        job_class = head.queue.constraints.get("job_class")
        return 1.0 if job_class is None else self.openings.spare(job_class, self.now)

    def limit_graphs(self, share: GraphShare | None, queues: Iterable[ConstrainedQueue]) -> None:
        """Give each graph of these queues this share of the pool, with its cap as the limit of its counter, and all
        graphs together the limit that they have."""
        self.graph_share = share
        if share is not None:
            self.counter(ALL_GRAPHS).most = share.together
            for graph in {graph_of(queue.constraints) for queue in queues} - {None}:
                self.counter(graph_counter(str(graph))).most = share.cap

    def running_jobs(self, graph: str) -> float:
        """Return the number of jobs that the graph runs, including those that start now."""
        return self.of(graph_counter(graph)).used
