"""What the gates on constrained jobs are judged by: a working copy of what is counted, at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from assigner.admission.graph_share import GraphShare, graph_counter
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
    queue_admissions: dict[ConstrainedQueue, Any] = field(default_factory=dict)

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

    def running_jobs(self, graph: str) -> float:
        """Jobs that the graph runs, with those that start now."""
        return self.of(graph_counter(graph)).used
