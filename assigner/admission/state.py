"""What the gates on constrained jobs are judged by: a working copy of what is counted, at one moment."""

from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
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
    """A working copy of what is counted, at one moment: a job that starts is counted in it at once."""

    #: That moment, by the database's clock.
    now: datetime
    counters: dict[str, Counter] = field(default_factory=dict)
    #: Units that each (cohort, instance) has been given since, with those that its quota leaves as the limit.
    units: dict[tuple[int, int], Counter] = field(default_factory=dict)
    #: Shares of instances; None if no instance is managed.
    shares: Shares | None = None
    #: An estimate has to fit into what is left of a budget.
    reserve: bool = True
    #: Buckets of rates, by name.
    rates: dict[str, Bucket] = field(default_factory=dict)
    #: The smallest number of slots that waiting jobs give a lock themselves, by counter.
    lock_numbers: Mapping[str, float] = field(default_factory=dict)
    #: Resources that a checker refuses, with the reason.
    refused: dict[str, str] = field(default_factory=dict)
    #: Advice of backpressure, and the seconds that are left of its pauses, by resource class.
    advice: dict[str, Advice] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    #: What each graph may have of the pool.
    graph_share: GraphShare | None = None
    #: The score with which each job of a graph started.
    scores: dict[int, float] = field(default_factory=dict)
    #: Expected run time of jobs of each class, in seconds.
    seconds: Mapping[str, float] = field(default_factory=dict)
    #: Windows and their meters.
    openings: WindowSchedule = field(default_factory=WindowSchedule)
    #: The resource that no bot has left, by queue.
    lacking: Mapping[QueueId, str] = field(default_factory=dict)
    #: Jobs that are kept for each class.
    reserves: Mapping[str, int] = field(default_factory=dict)
    #: What `queue_charges` has found out, in this cycle or an earlier one.
    charges: MutableMapping[Hashable, Any] = field(default_factory=dict)
    #: What `queue_admission` has found out: of each queue, and of queues that differ only in their keys.
    queue_admissions: dict[ConstrainedQueue, Any] = field(default_factory=dict)
    shared_admissions: dict[Any, Any] = field(default_factory=dict)
    #: Gates that may be closed for a queue none of whose counters is used up; empty until they are needed.
    asked_gates: Sequence[Any] = ()
    #: What instances had used before anything started, in the fair share mode `literal`.
    first_used: dict[int, float] = field(default_factory=dict)
    #: What the instances with these shares have had; see `fair_share`.
    standing: tuple[Shares | None, Any] = (None, None)

    def copy(self) -> "AdmissionState":
        """Return a working copy of its own, in which other jobs may start. Nothing has started in this one yet."""
        return replace(
            self,
            counters={name: Counter(each.used, each.most, each.limited_by) for name, each in self.counters.items()},
            units={},
            scores={},
            queue_admissions={},
            shared_admissions={},
            asked_gates=(),
            first_used={},
            standing=(None, None),
        )

    def judge_again(self) -> None:
        """Forget what queues were judged by, because gates may have been closed since."""
        self.queue_admissions.clear()
        self.shared_admissions.clear()
        self.asked_gates = ()

    def of(self, name: str) -> Counter:
        """Return the counter of that name. One that does not exist has no limit."""
        return self.counters.get(name) or Counter()

    def counter(self, name: str) -> Counter:
        """Return the same counter, to count in it."""
        found = self.counters.get(name)
        if found is None:
            found = self.counters[name] = Counter()
        return found

    def given_units(self, queue: ConstrainedQueue) -> Counter:
        """Return the units that the queue's instance has been given in its cohort, to count in them."""
        place = queue.cohort, queue.instance
        found = self.units.get(place)
        if found is None:
            found = self.units[place] = Counter(0.0, queue.headroom)
        return found

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
