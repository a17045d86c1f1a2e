"""The deficit order: the instance that has received least compared with its share comes first. Pure.

A cycle reads the usage once. Admission (`assigner.admission.admit`) asks for the next job after each job that it
admits. The estimate of an admitted job is charged to the working copy at once. So an instance that was behind when the
cycle began does not take every bot. In the mode `literal` it does, as with AgentQueue: the order goes by the usage with
which the cycle began. Limits are charged at once in every mode.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from assigner.admission.admit import InstanceOrder, Rank, queue_below_minimum
from assigner.admission.state import AdmissionState
from schema.accounting.fair_share import Share, Shares, jain_index
from schema.picking.constrained import ConstrainedQueue, QueueHead, QueueId


class DeficitOrder(InstanceOrder):
    """Instances below their minimum quota come first, then those below their guaranteed number of jobs, then the one
    with the lowest deficit. Instances of weight 0 get what the others leave."""

    def sequence(
        self,
        heads: Sequence[QueueHead],
        admission_state: AdmissionState,
        *,
        until: Rank | None = None,
        cut: Collection[QueueId] = (),
    ) -> Iterator[QueueHead | None]:
        if admission_state.shares is None:
            yield from super().sequence(heads, admission_state, cut=cut)
            return
        weighed = weigh_usage(admission_state.shares, admission_state)
        key = partial(self.job_order.key, admission_state=admission_state)
        lacking = {head.queue.instance for head in heads if head.queue.missing_units}
        lanes = [
            InstanceLane(
                of_instance,
                weighed.standing[instance],
                weighed,
                key,
                admission_state,
                instance=instance,
                may_be_owed=instance in lacking,
            )
            for instance, of_instance in self.lanes(heads, admission_state).items()
        ]
        all_used, front = weighed.all_used, None
        unasked = Counter(head.queue.id for head in heads)
        while front is not None or (lanes := [lane for lane in lanes if lane.heads or lane.is_unread]):
            front = front or DeficitHeap(lanes, all_used)
            first = front.first
            if until is not None and (first.behind, first.used / max(1.0, all_used) - first.target) > until:
                return
            if first.is_unread:
                yield None
                return
            head = first.heads.pop()
            yield head
            unasked[head.queue.id] -= 1
            # Only now, because the queue may have been given up for this head.
            first.is_unread = not unasked[head.queue.id] and head.queue.id in cut
            before, behind = first.used, first.behind
            first.refresh()
            # A start changes only the sum for the other instances.
            all_used += first.used - before
            if (first.heads or first.is_unread) and first.behind == behind:
                front.refresh(all_used)
                continue
            front = None if front.drop(all_used) or first.behind < behind else front

    def ranked(
        self, queues: Sequence[ConstrainedQueue], admission_state: AdmissionState
    ) -> list[tuple[Rank, list[ConstrainedQueue]]]:
        if admission_state.shares is None:
            return super().ranked(queues, admission_state)
        weighed = weigh_usage(admission_state.shares, admission_state)
        scale = 1.0 / max(1.0, weighed.all_used)
        of = defaultdict[int, list[ConstrainedQueue]](list)
        owed = set[int]()
        for queue in queues:
            of[queue.instance].append(queue)
            if queue.missing_units and queue_below_minimum(queue, admission_state):
                owed.add(queue.instance)
        weights, standing, found = weighed.weights, weighed.standing, []
        for instance, those in of.items():
            weight = weights[instance]
            had = not weight or standing[instance].has_had_minimum
            behind = _behind(is_owed=instance in owed, weight=weight, had=had)
            found.append(((behind, weighed.used[instance] * scale - weighed.target(instance)), those))
        return sorted(found, key=itemgetter(0))


class Standing:
    """What one instance has had, as counters of the working copy.

    cost: what it has used. jobs: what it runs. lift: see `Share`. missing_jobs: jobs that it has to run to have had its
    guaranteed number; in the mode `literal` only completed jobs count, as with AgentQueue.
    """

    __slots__ = ("cost", "jobs", "lift", "missing_jobs")

    def __init__(self, share: Share, shares: Shares, admission_state: AdmissionState) -> None:
        self.cost, self.jobs = admission_state.counter(share.cost), admission_state.counter(share.jobs)
        self.lift, missing = share.lift, float(shares.guarantee - share.completed)
        self.missing_jobs = math.inf if missing > 0 and shares.mode == "literal" else missing

    @property
    def has_had_minimum(self) -> bool:
        """Return whether the instance has had its guaranteed number of jobs."""
        return self.jobs.used >= self.missing_jobs


class InstanceLane:
    """The waiting jobs of one instance, the next one last, and the numbers by which instances are compared.

    is_unread: its next job may be one that has not been read.
    """

    __slots__ = (
        "_cost",
        "_key",
        "_known_key",
        "_lift",
        "_may_be_owed",
        "_may_gain",
        "_queue",
        "_standing",
        "_state",
        "behind",
        "heads",
        "is_unread",
        "target",
        "used",
        "weight",
    )

    def __init__(
        self,
        heads: list[QueueHead],
        standing: Standing,
        weighed: "WeightedUsage",
        key: Callable[[QueueHead], tuple[float, ...]],
        admission_state: AdmissionState,
        *,
        instance: int,
        may_be_owed: bool,
    ) -> None:
        self.heads, self._standing, self._key, self._state = heads, standing, key, admission_state
        self.weight = weighed.weights[instance]
        self.target, self.used = weighed.target(instance), weighed.used[instance]
        # In the mode `literal` its usage stays as it was.
        self._cost, self._lift = standing.cost if weighed.is_charged else None, standing.lift
        self._may_gain, self._may_be_owed, self.is_unread = True, may_be_owed, False
        # The key of its next job, once it was asked for.
        self._known_key: tuple[float, ...] | None = None
        self._find_behind()

    def refresh(self) -> None:
        """Take the current numbers from the working copy, because a job of it has been asked."""
        self._known_key = None
        if self._cost is not None:
            self.used = self._cost.used + self._lift
        if self._may_gain and (self.heads or self.is_unread):
            self._find_behind()

    def _find_behind(self) -> None:
        had = not self.weight or self._standing.has_had_minimum
        # While its next job is not known, it is judged by the last one.
        if self.heads:
            self._queue = self.heads[-1].queue
        is_owed = self._may_be_owed and queue_below_minimum(self._queue, self._state)
        self.behind = _behind(is_owed=is_owed, weight=self.weight, had=had)
        # What it has had it keeps.
        self._may_gain = not had or self._may_be_owed

    def __lt__(self, other: "InstanceLane") -> bool:
        """Return whether its next job comes before the other's; this decides among equal instances."""
        if self.is_unread or other.is_unread:
            return self.is_unread
        return self._next_key() < other._next_key()

    def _next_key(self) -> tuple[float, ...]:
        if self._known_key is None:
            self._known_key = self._key(self.heads[-1])
        return self._known_key


#: All of n instances are compared anew after n / RENEWED starts.
RENEWED = 4


class DeficitHeap:
    """A heap that gives the instance with the lowest deficit.

    Compared is the deficit times the usage of all: what the instance has used less its target's part. While others
    start jobs it falls by its target's part of what they take, which moves all instances a little. It is found anew for
    an instance when a job of it starts, for all of them after a number of starts, and at each start for those whose
    part of these starts is a job or more. So an instance is early or late by less than one start.

    first: the lane with the lowest deficit; among equals its next job decides.
    """

    def __init__(self, lanes: Sequence[InstanceLane], all_used: float) -> None:
        behind = min(lane.behind for lane in lanes)
        compared = [lane for lane in lanes if lane.behind == behind]
        self._interval = max(1, len(compared) // RENEWED)
        self._large = [lane for lane in compared if lane.target * self._interval >= 1.0]
        self._heap = [(0.0, lane) for lane in compared if lane.target * self._interval < 1.0]
        self._renew(all_used)

    def _renew(self, all_used: float) -> None:
        self._total = total = max(1.0, all_used)
        self._heap = [(lane.used - lane.target * total, lane) for _, lane in self._heap]
        heapq.heapify(self._heap)
        self._starts = self._interval
        self._choose()

    def _choose(self) -> None:
        if self._large:
            values = [(lane.used - lane.target * self._total, lane) for lane in self._large]
            self.first = min(self._heap[:1] + values)[1]
        else:
            self.first = self._heap[0][1]

    def refresh(self, all_used: float) -> None:
        """Take the current usage of the first lane, after one of its jobs has started."""
        self._starts -= 1
        if not self._starts:
            self._renew(all_used)
            return
        self._total, lane = max(1.0, all_used), self.first
        if self._heap and self._heap[0][1] is lane:
            heapq.heapreplace(self._heap, (lane.used - lane.target * self._total, lane))
        self._choose()

    def drop(self, all_used: float) -> bool:
        """Remove the lane that came first, after its last job has started; returns true if it was the only one."""
        if self._heap and self._heap[0][1] is self.first:
            heapq.heappop(self._heap)
        else:
            self._large.remove(self.first)
        if not self._heap and not self._large:
            return True
        self._starts -= 1
        if self._starts:
            self._total = max(1.0, all_used)
            self._choose()
        else:
            self._renew(all_used)
        return False


@dataclass(frozen=True)
class WeightedUsage:
    """Usage and weights of the instances with waiting jobs, by id, and their sums. The sum of usage is at least 1, so
    that nothing is divided by zero. is_charged: what starts counts as usage at once."""

    used: dict[int, float]
    weights: dict[int, float]
    all_used: float
    all_weights: float
    standing: Mapping[int, Standing]
    is_charged: bool = True

    def target(self, instance: int) -> float:
        """Return the instance's share of all usage by its weight."""
        return self.weights[instance] / self.all_weights


def weigh_usage(shares: Shares, admission_state: AdmissionState) -> WeightedUsage:
    """Read usage and weights from the working copy. If all weights are zero, they count as equal.

    In the mode `literal` the usage is that of the first call.
    """
    standing, is_charged = _standing(shares, admission_state), shares.mode != "literal"
    used = {instance: each.cost.used + each.lift for instance, each in standing.of.items()}
    if not is_charged:
        used = {instance: admission_state.first_used.setdefault(instance, each) for instance, each in used.items()}
    all_used = sum(used.values()) + (0.0 if shares.mode == "waiting" else shares.others_used)
    return WeightedUsage(used, standing.weights, all_used, standing.all_weights, standing.of, is_charged)


def fairness_index(shares: Shares, admission_state: AdmissionState) -> float | None:
    """Return how evenly the instances with waiting jobs have been served for their weights; None without any."""
    standing = _standing(shares, admission_state)
    levels = [
        (each.cost.used + each.lift) / share.weight
        for each, share in zip(standing.of.values(), shares.of.values(), strict=True)
        if share.weight > 0
    ]
    return jain_index(levels)


class Standings:
    """What the instances with these shares have had, and their weights, by id and in the order of the shares.
    all_weights: their sum, in the mode `demand` with that of the others."""

    __slots__ = ("all_weights", "of", "weights")

    def __init__(self, shares: Shares, admission_state: AdmissionState) -> None:
        self.of = {instance: Standing(share, shares, admission_state) for instance, share in shares.of.items()}
        self.weights = {instance: share.weight for instance, share in shares.of.items()}
        others = (shares.others, shares.others_weight) if shares.mode == "demand" else (0, 0.0)
        self.all_weights = sum(self.weights.values()) + others[1]
        if self.all_weights <= 0:
            self.weights = dict.fromkeys(self.weights, 1.0)
            self.all_weights = float(len(self.weights) + others[0])


def _standing(shares: Shares, admission_state: AdmissionState) -> Standings:
    """Return what the instances have had. It is looked up once for these shares, because a cycle reads it often."""
    known, found = admission_state.standing
    if known is not shares:
        found = Standings(shares, admission_state)
        admission_state.standing = shares, found
    standings: Standings = found
    return standings


def _behind(*, is_owed: bool, weight: float, had: bool) -> int:
    """Return the sort key of the instance; lower comes sooner."""
    return 4 * (not is_owed) + 2 * (not weight) + had
