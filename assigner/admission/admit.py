"""Decide which constrained jobs may start now and in which order, and merge them with plain jobs. Pure."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from assigner.admission.gates import queue_admission
from assigner.admission.state import AdmissionState
from schema.picking.constrained import ConstrainedQueue, QueueHead, QueueId
from schema.picking.pick import ReadyJob

#: The rank of a queue before any of its jobs is known: lower is sooner.
Rank = tuple[int, float]


class Unread(frozenset[QueueId]):
    """The ids of queues of which more heads have to be read before it is known which head comes next."""


NONE_UNREAD = Unread()
#: Queues that hold more jobs than have been read, by id.
Cut = Mapping[QueueId, ConstrainedQueue]
NO_CUT: Cut = MappingProxyType({})


class Ordering(Protocol):
    """The order in which jobs are asked to start."""

    def sequence(
        self,
        heads: Sequence[QueueHead],
        admission_state: AdmissionState,
        *,
        until: Rank | None = None,
        cut: Cut = NO_CUT,
    ) -> Iterator[QueueHead | Unread]:
        """Yield each head once. The state changes between two of them, because a job that starts is counted before the
        next one is asked for. Heads of queues whose rank has come to lie behind `until` are left out. When the next
        head may be one that has not been read, yields the queues to read and ends."""

    def expected(
        self, queues: Sequence[ConstrainedQueue], admission_state: AdmissionState, *, free_units: int, cost: float
    ) -> Mapping[QueueId, float]:
        """Return how many jobs of each queue will probably start, if each job costs about `cost`; empty if their heads
        have to be known for that."""

    def ranked(
        self,
        queues: Sequence[ConstrainedQueue],
        admission_state: AdmissionState,
    ) -> Sequence[tuple[Rank, Sequence[ConstrainedQueue]]]:
        """Return the queues by rank; queues whose order depends on their jobs share one entry."""


class JobOrder(Protocol):
    """The order in which the jobs of one instance start."""

    def key(self, head: QueueHead, admission_state: AdmissionState) -> tuple[float, ...]:
        """Return the key by which jobs of different instances are compared: lower is sooner."""

    def sorted_heads(self, heads: Sequence[QueueHead], admission_state: AdmissionState) -> list[QueueHead]:
        """Return the jobs of one instance in their order."""


@dataclass(frozen=True)
class InstanceOrder:
    """At each step the first job of all instances, compared by the order of jobs. Instances below their minimum quota
    come first."""

    job_order: JobOrder

    def sequence(
        self,
        heads: Sequence[QueueHead],
        admission_state: AdmissionState,
        *,
        until: Rank | None = None,  # noqa: ARG002
        cut: Cut = NO_CUT,
    ) -> Iterator[QueueHead | Unread]:
        return known(self._sequence(heads, admission_state), heads, cut)

    def expected(
        self,
        queues: Sequence[ConstrainedQueue],  # noqa: ARG002
        admission_state: AdmissionState,  # noqa: ARG002
        *,
        free_units: int,  # noqa: ARG002
        cost: float,  # noqa: ARG002
    ) -> Mapping[QueueId, float]:
        return {}

    def _sequence(self, heads: Sequence[QueueHead], admission_state: AdmissionState) -> Iterator[QueueHead]:
        lanes = list(self.lanes(heads, admission_state).values())
        while lanes:
            first = min(
                lanes,
                key=lambda lane: (
                    not head_below_minimum(lane[-1], admission_state),
                    self.job_order.key(lane[-1], admission_state),
                ),
            )
            yield first.pop()
            if not first:
                lanes.remove(first)

    def ranked(
        self,
        queues: Sequence[ConstrainedQueue],
        admission_state: AdmissionState,  # noqa: ARG002
    ) -> list[tuple[Rank, list[ConstrainedQueue]]]:
        return [((0, 0.0), [*queues])]

    def lanes(self, heads: Sequence[QueueHead], admission_state: AdmissionState) -> dict[int, list[QueueHead]]:
        """Return the jobs of each instance, the next one last."""
        found: dict[int, list[QueueHead]] = defaultdict(list)
        for head in heads:
            found[head.job.instance].append(head)
        return {
            instance: self.job_order.sorted_heads(those, admission_state)[::-1] for instance, those in found.items()
        }


def known(sequence: Iterator[QueueHead], heads: Sequence[QueueHead], cut: Cut) -> Iterator[QueueHead | Unread]:
    """Yield the heads until one more of a queue that has no further head may come before all others."""
    left = Counter(head.queue.id for head in heads)
    for head in sequence:
        yield head
        left[head.queue.id] -= 1
        if not left[head.queue.id] and head.queue.id in cut:
            yield Unread(queue for queue in cut if not left[queue])
            return


def head_below_minimum(head: QueueHead, admission_state: AdmissionState) -> bool:
    """Return whether the job's instance is still below its minimum quota."""
    return queue_below_minimum(head.queue, admission_state)


def queue_below_minimum(queue: ConstrainedQueue, admission_state: AdmissionState) -> bool:
    """Return whether the instance of the queue is still below its minimum quota."""
    return bool(queue.missing_units) and queue.missing_units > admission_state.given_units(queue).used


def merge(plain: Sequence[ReadyJob], heads: Sequence[QueueHead], *, by_age: bool) -> list[ReadyJob | QueueHead]:
    """Merge plain jobs and heads that may start; each kind keeps its own order.

    At each step the first plain job is compared with the first head. A job that its instance needs to reach its minimum
    comes first, then the lower rank, then the older job; with `by_age` only the age counts.
    """
    found: list[ReadyJob | QueueHead] = []
    given: Counter[tuple[int, int]] = Counter()
    jobs, admitted = deque(plain), deque(heads)
    while jobs and admitted:
        job, head = jobs[0], admitted[0]
        instance = head.job.cohort, head.job.instance
        beyond = given[instance] >= head.queue.missing_units
        assert job.queued_at is not None
        ranks = (0.0, 0.0) if by_age else (job.priority, head.rank)
        if (beyond, ranks[1], head.queued_at, head.job.id) < (job.beyond, ranks[0], job.queued_at, job.id):
            found.append(admitted.popleft())
            given[instance] += head.job.units
        else:
            found.append(jobs.popleft())
    return [*found, *jobs, *admitted]


@dataclass(frozen=True)
class Admission:
    """heads: those that may start, in the order in which they are to be placed. left: those that were not asked.
    unread: queues of which more heads have to be read before the next one is asked; empty if none has to."""

    heads: list[QueueHead]
    left: Sequence[QueueHead] = ()
    unread: Unread = NONE_UNREAD


def admit(
    heads: Sequence[QueueHead],
    admission_state: AdmissionState,
    *,
    free_units: int,
    ordering: Ordering,
    closed: Counter[str] | None = None,
    cut: Cut = NO_CUT,
    until: Rank | None = None,
    refused: Counter[QueueId] | None = None,
) -> Admission:
    """Return up to `free_units` of the heads whose gates are open.

    What each of them takes is counted in the state, so that the next ones are judged by what is left. A job whose gate
    is closed keeps no other job waiting; `closed` counts such jobs by gate. cut: the queues that hold more jobs than
    these heads, whose place in the order is not known. until: the rank of the first queue whose heads have not been
    read. refused: counts the jobs of each queue that were asked in vain since the last one that may start.
    """
    admitted: list[QueueHead] = []
    asked, unread = set[int](), NONE_UNREAD
    refused = Counter() if refused is None else refused
    sequence = ordering.sequence(heads, admission_state, until=until, cut=cut)
    while len(admitted) < free_units and (head := next(sequence, None)) is not None:
        if isinstance(head, Unread):
            unread = head
            break
        job, queue = head.job, head.queue
        asked.add(job.id)
        admission = queue_admission(queue, admission_state)
        if not admission.units.leaves(job.units):
            refused[queue.id] += 1
        elif (found := admission.closed(head, admission_state)) is not None:
            refused[queue.id] += 1
            if closed is not None:
                closed[found[0].name] += 1
        else:
            admission.take(head)
            admitted.append(head)
            refused.pop(queue.id, None)
    return Admission(admitted, [head for head in heads if head.job.id not in asked], unread)
