"""Decide which constrained jobs may start now and in which order, and merge them with plain jobs. Pure."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from assigner.admission.judging import queue_admission
from assigner.admission.state import AdmissionState
from schema.picking.constrained import ConstrainedQueue, QueueHead, QueueId
from schema.picking.pick import ReadyJob

#: The rank of a queue before any of its jobs is known: lower is sooner.
Rank = tuple[int, float]

#: Heads of a queue that are refused in a row before the queue is given up for this cycle: the next ones are probably
#: refused too.
PATIENCE = 8


class Ordering(Protocol):
    """The order in which jobs are asked to start."""

    def sequence(
        self,
        heads: Sequence[QueueHead],
        admission_state: AdmissionState,
        *,
        until: Rank | None = None,
        cut: Collection[QueueId] = (),
    ) -> Iterator[QueueHead | None]:
        """Yield each head once, or None and end if the next job may be one of a `cut` queue that has not been read.

        The state changes between two of them, because a job that starts is counted before the next one is asked for.
        Heads of queues whose rank has come to lie behind `until` are left out.
        """

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
        cut: Collection[QueueId] = (),
    ) -> Iterator[QueueHead | None]:
        return until_used_up(self._sequence(heads, admission_state), heads, cut)

    def _sequence(self, heads: Sequence[QueueHead], admission_state: AdmissionState) -> Iterator[QueueHead]:
        lanes = list(self.lanes(heads, admission_state).values())
        while len(lanes) > 1:
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
        for lane in lanes:
            yield from reversed(lane)

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


def until_used_up(
    sequence: Iterator[QueueHead], heads: Sequence[QueueHead], cut: Collection[QueueId]
) -> Iterator[QueueHead | None]:
    """Yield these heads until all of a cut queue have been asked, whose next job may then come before all others."""
    if not cut:
        yield from sequence
        return
    left = Counter(head.queue.id for head in heads)
    for head in sequence:
        yield head
        left[head.queue.id] -= 1
        if not left[head.queue.id] and head.queue.id in cut:
            yield None
            return


def head_below_minimum(head: QueueHead, admission_state: AdmissionState) -> bool:
    """Return whether the job's instance is still below its minimum quota."""
    return queue_below_minimum(head.queue, admission_state)


def queue_below_minimum(queue: ConstrainedQueue, admission_state: AdmissionState) -> bool:
    """Return whether the instance of the queue is still below its minimum quota."""
    return bool(queue.missing_units) and queue.missing_units > admission_state.given_units(queue).used


def place_of(job: ReadyJob, *, by_age: bool) -> tuple[bool, float, datetime, int]:
    """Return the key by which plain jobs are picked: lower is sooner. by_age: only the age counts."""
    assert job.queued_at is not None
    return job.beyond, 0.0 if by_age else job.priority, job.queued_at, job.id


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
        rank = 0.0 if by_age else head.rank
        if (beyond, rank, head.queued_at, head.job.id) < place_of(job, by_age=by_age):
            found.append(admitted.popleft())
            given[instance] += head.job.units
        else:
            found.append(jobs.popleft())
    return [*found, *jobs, *admitted]


@dataclass(frozen=True)
class Admission:
    """What one walk along the heads has come to."""

    #: Those that may start, in the order in which they are to be placed.
    heads: list[QueueHead]
    #: Those that were not asked.
    left: list[QueueHead]
    #: The walk ended because the next job may be one that has not been read.
    is_blocked: bool


@dataclass(frozen=True)
class AdmissionInput:
    """What an admission was made from, so that it can be made once more: the heads that were read, and the state before
    any of them was counted."""

    heads: Sequence[QueueHead]
    state: AdmissionState
    free_units: int

    def again(self, ordering: Ordering) -> list[QueueHead]:
        """Return the heads that may start in this order, as often as it is asked for."""
        return admit(self.heads, self.state.copy(), free_units=self.free_units, ordering=ordering).heads


def admit(
    heads: Sequence[QueueHead],
    admission_state: AdmissionState,
    *,
    free_units: int,
    ordering: Ordering,
    closed: Counter[str] | None = None,
    cut: MutableMapping[QueueId, ConstrainedQueue] | None = None,
    until: Rank | None = None,
    refused: Counter[QueueId] | None = None,
) -> Admission:
    """Return up to `free_units` of the heads whose gates are open.

    What each of them takes is counted in the state, so that the next ones are judged by what is left. A job whose gate
    is closed keeps no other job waiting.

    closed: counts the jobs that are refused, by gate.
    cut: the queues that hold more jobs than these heads. The walk ends where the next job may be one of those. A queue
        is given up, and taken out of `cut`, if nothing is left for it or if `PATIENCE` heads in a row were refused.
    until: the rank of the first queue whose heads have not been read.
    refused: counts the heads of each queue that were refused since the last one that may start.
    """
    admitted: list[QueueHead] = []
    asked, is_blocked = set[int](), False
    refused, cut = Counter() if refused is None else refused, {} if cut is None else cut
    sequence = ordering.sequence(heads, admission_state, until=until, cut=cut)
    for head in sequence if free_units > 0 else ():
        if head is None:
            is_blocked = True
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
        if queue.id in cut and (refused[queue.id] >= PATIENCE or not admission.leaves(0.0)):
            del cut[queue.id]
        if len(admitted) == free_units:
            break
    return Admission(admitted, [head for head in heads if head.job.id not in asked], is_blocked)
