"""The configured orders in which constrained jobs start: of instances, and of the jobs of one instance."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Literal

from leasehold.wire import escaped, suggestion
from pydantic import BaseModel, ConfigDict, Field, field_validator

from assigner.admission import graph_share
from assigner.admission.admit import Ordering, Rank, head_below_minimum, until_used_up
from assigner.admission.fair_share import DeficitOrder
from assigner.admission.graph_share import GraphShare
from assigner.admission.state import AdmissionState
from schema.picking.constrained import Ageing, ConstrainedQueue, QueueHead, QueueId
from schema.validation import PRIORITY_MIN

# The order of the jobs of one instance: by effective priority and age, or by a score. Pure.


#: Seconds that stand for an unknown run time where the shortest jobs come first: longer than all others.
UNKNOWN = float("inf")
#: The most points that count in a score, and the longest wait that counts, seconds.
MOST_POINTS, MOST_WAIT = 150.0, 86400.0

#: By rank, then by age: what `RankOrder.key` comes to where nothing else counts, at a third of the cost.
AS_QUEUED = attrgetter("rank", "queued_at", "job.id")


def waited_seconds(head: QueueHead, admission_state: AdmissionState) -> float:
    """Return the seconds for which the job has been queued."""
    return max(0.0, (admission_state.now - head.queued_at).total_seconds())


def effective_priority(head: QueueHead, admission_state: AdmissionState, ageing: Ageing | None) -> float:
    """Return the priority of the job now, lower = sooner: its rank less what it has gained by waiting."""
    return head.rank - (ageing.gain(waited_seconds(head, admission_state)) if ageing else 0.0)


@dataclass(frozen=True)
class RankOrder:
    """The lowest effective priority first, then the oldest.

    Jobs with a deadline swap places among themselves within one rank, the earliest deadline first, so that the other
    jobs keep their places. shortest_first: within one effective priority the shortest come first, then the oldest.
    """

    ageing: Ageing | None = None
    shortest_first: bool = False

    def key(self, head: QueueHead, admission_state: AdmissionState) -> tuple[float, ...]:
        """Return the sort key of the job; lower is sooner."""
        seconds = admission_state.expected(head) if self.shortest_first else 0.0
        return (
            effective_priority(head, admission_state, self.ageing),
            UNKNOWN if seconds is None else seconds,
            head.queued_at.timestamp(),
            head.job.id,
        )

    def sorted_heads(self, heads: Sequence[QueueHead], admission_state: AdmissionState) -> list[QueueHead]:
        """Return the heads in their order."""
        if len(heads) == 1:
            return [*heads]
        is_plain = self.ageing is None and not self.shortest_first
        found = sorted(heads, key=AS_QUEUED if is_plain else partial(self.key, admission_state=admission_state))
        places: dict[float, list[int]] = {}
        for place, head in enumerate(found):
            if head.deadline is not None:
                places.setdefault(head.rank, []).append(place)
        for taken in places.values():
            dated = [(found[place].deadline, place, found[place]) for place in taken]
            for place, (_, _, head) in zip(taken, sorted(dated, key=itemgetter(0, 1)), strict=True):
                found[place] = head
        return found


@dataclass(frozen=True)
class Weights:
    """The weights of the terms of a score. raw: points are not scaled to 0..1. count_age_once: points gained by ageing
    do not count if the wait has a weight and the score is not raw."""

    priority: float = 0.4
    wait: float = 0.3
    efficiency: float = 0.2
    window: float = 0.1
    raw: bool = False
    count_age_once: bool = True


def score(
    weights: Weights, *, points: float, gained: float, wait: float, efficiency: float = 1.0, window: float = 1.0
) -> float:
    """Sum of weight x term: points/150, wait/86400, efficiency and window, each 0..1 (`raw`: points unscaled).

    Higher is sooner. The default weights are Sleepless Agent's 40/30/20/10.
    points: those of the job without the ones that it has `gained` by waiting. wait: seconds. With twice the weight of
    the wait, the same wait makes up for twice as many points.
    """
    is_once = weights.count_age_once and weights.wait > 0 and not weights.raw
    worth = points if is_once else points + gained
    if not weights.raw:
        worth = min(1.0, max(0.0, worth / MOST_POINTS))
    waited = min(1.0, wait / MOST_WAIT)
    return weights.priority * worth + weights.wait * waited + weights.efficiency * efficiency + weights.window * window


@dataclass(frozen=True)
class ScoreOrder:
    """The highest score first, then the oldest. Jobs whose deadline is near come before all others."""

    ageing: Ageing | None = None
    weights: Weights = Weights()

    def key(self, head: QueueHead, admission_state: AdmissionState) -> tuple[float, ...]:
        """Return the sort key of the job; lower is sooner."""
        if head.rank < PRIORITY_MIN:
            return (-1.0, head.rank, head.queued_at.timestamp(), head.job.id)
        wait = waited_seconds(head, admission_state)
        found = score(
            self.weights,
            points=100.0 - head.rank,
            gained=self.ageing.gain(wait) if self.ageing else 0.0,
            wait=wait,
            efficiency=admission_state.efficiency(head),
            window=admission_state.window(head),
        )
        return (0.0, -found, head.queued_at.timestamp(), head.job.id)

    def sorted_heads(self, heads: Sequence[QueueHead], admission_state: AdmissionState) -> list[QueueHead]:
        """Return the heads in their order."""
        return sorted(heads, key=lambda head: self.key(head, admission_state))


# The order of jobs by the scores of their graphs. Pure.


Score = tuple[bool, float, tuple[float, float, int]]


class GraphOrder:
    """Instances below their minimum quota first, then the lowest score, then rank and age.

    Every job that starts adds to the penalty of its graph. Scores never fall while jobs start, so that only the first
    job has to be compared again.
    """

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
        lanes: dict[tuple[int, str | None], list[QueueHead]] = defaultdict(list)
        for head in reversed(self.within_queue(heads, admission_state)):
            lanes[head.job.instance, graph_share.graph_of(head.queue.constraints)].append(head)
        front = [(graph_score(lane[-1], admission_state), lane) for lane in lanes.values()]
        heapq.heapify(front)
        while front:
            seen, lane = front[0]
            now = graph_score(lane[-1], admission_state)
            if now > seen:
                heapq.heapreplace(front, (now, lane))
                continue
            admission_state.scores[lane[-1].job.id] = now[1]
            yield lane.pop()
            if lane:
                heapq.heapreplace(front, (graph_score(lane[-1], admission_state), lane))
            else:
                heapq.heappop(front)

    @staticmethod
    def within_queue(
        heads: Sequence[QueueHead],
        _state: AdmissionState,
    ) -> list[QueueHead]:
        """Return jobs of one graph in their order: the penalty is the same for all of them."""
        return sorted(heads, key=lambda each: (graph_share.unpenalised_score(each), rank_and_age(each)))

    def ranked(
        self,
        queues: Sequence[ConstrainedQueue],
        admission_state: AdmissionState,  # noqa: ARG002
    ) -> list[tuple[Rank, list[ConstrainedQueue]]]:
        """Return all queues in one entry, because the order of graphs depends on their jobs."""
        return [((0, 0.0), [*queues])]


def graph_score(head: QueueHead, admission_state: AdmissionState) -> Score:
    """Return the sort key of the job; lower is sooner."""
    graph, share = graph_share.graph_of(head.queue.constraints), admission_state.graph_share
    penalty = 0.0 if graph is None or share is None else share.penalty(admission_state.running_jobs(graph))
    return (
        not head_below_minimum(head, admission_state),
        graph_share.unpenalised_score(head) + penalty,
        rank_and_age(head),
    )


def rank_and_age(head: QueueHead) -> tuple[float, float, int]:
    """Return the rank and the age as a sort key; lower is sooner."""
    return head.rank, head.queued_at.timestamp(), head.job.id


class OrderingSettings(BaseModel):
    """The order of constrained jobs.

    kind: `rank` takes the lowest effective priority, then the oldest; `score` takes the highest weighted sum; `graph`
        takes the lowest graph score, so that graphs share the pool:
        graph priority x 10 + depth - retries x 5 + estimated cost x 0.1 + penalty.
    ageing_rate: points that a job gains with every hour that it waits; 0 = none, which is the default. Doubling it lets
        a job make up for twice as many points by the same wait.
    ageing_cap: the most points that a job gains so.
    shortest_first: jobs of one effective priority start in the order of their expected run times, the shortest first.
        Then more of them end in the same time, and long ones wait.
    weight_priority, weight_wait, weight_efficiency, weight_window: the weights, 0 to 1, of the terms of a score, each
        0 to 1: points / 150; the wait / a day; 1 / (1 + the unit hours that the job is expected to take), 1 if these
        are unknown; the largest share of its meter's threshold that an open window of its class has left, 1 without
        windows.
    score_mode: `normalised`, or `raw` for a sum in which points are not divided by 150.
    count_age_once: leaves the points of ageing out of a normalised score that has a weight for the wait.
    max_concurrent: with `graph`, the most jobs that all graphs run together; the share of each is this / graphs that
        wait or run, at least 1. Unset: as many as the pool may run at once; without such a limit no graph has
        a share. Doubling it doubles what graphs take of the pool beside other work.
    overage_penalty: added for each job that a graph runs at or above its share. Doubling it makes each of
        these jobs weigh as much as twice the points of graph priority.
    max_per_graph: a graph runs at most so many times its share, whatever waits. Doubling it lets one graph take twice
        as much of an idle pool, and keep it while others come.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str = "rank"
    ageing_rate: float = Field(default=0.0, ge=0, le=1000)
    ageing_cap: float = Field(default=20.0, ge=0, le=50)
    shortest_first: bool = False
    weight_priority: float = Field(default=0.4, ge=0, le=1)
    weight_wait: float = Field(default=0.3, ge=0, le=1)
    weight_efficiency: float = Field(default=0.2, ge=0, le=1)
    weight_window: float = Field(default=0.1, ge=0, le=1)
    score_mode: Literal["normalised", "raw"] = "normalised"
    count_age_once: bool = True
    max_concurrent: int | None = Field(default=None, ge=1, le=1_000_000)
    overage_penalty: float = Field(default=20.0, ge=0, le=1e6)
    max_per_graph: float = Field(default=2.0, gt=0, le=1e6)

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, kind: str) -> str:
        if kind not in KINDS:
            listed = ", ".join(f"'{name}'" for name in sorted(KINDS))
            raise ValueError(f"'{escaped(kind, 80)}' is not an order: there are {listed}{suggestion(kind, KINDS)}")
        return kind

    @property
    def ageing(self) -> Ageing | None:
        """Return how waiting makes jobs more urgent; None if it does not."""
        return Ageing(self.ageing_rate, self.ageing_cap) if self.ageing_rate and self.ageing_cap else None

    @property
    def chosen_kind(self) -> str | None:
        """Return the name of the order if jobs of a queue start in another order than by rank and age; else None."""
        if self.policy().within is None:
            return None
        return "shortest_first" if self.kind == "rank" else self.kind

    def graph_share(self, *, limit: float | None, graphs: int) -> GraphShare | None:
        """Return what each graph may run; None if graphs have no shares.

        limit: the jobs that the pool may run at once. graphs: how many graphs wait or run.
        """
        most = self.max_concurrent if self.max_concurrent is not None else limit
        if self.kind != "graph" or most is None:
            return None
        share = max(1.0, most / graphs) if graphs else float(most)
        return GraphShare(share, max(1, int(share * self.max_per_graph)), self.overage_penalty, self.max_concurrent)

    def policy(self) -> "OrderingPolicy":
        """Return the order that `kind` names."""
        return KINDS[self.kind](self)


#: Sorts jobs of one queue into the order in which they start.
OrderWithinQueue = Callable[[Sequence[QueueHead], AdmissionState], list[QueueHead]]


@dataclass(frozen=True)
class OrderingPolicy:
    """The order of instances and of their jobs, and the ageing of jobs.

    within: the order of the jobs of one queue; None = that in which they are read.
    """

    ordering: Ordering
    ageing: Ageing | None = None
    within: OrderWithinQueue | None = None


def _rank_policy(settings: OrderingSettings) -> OrderingPolicy:
    line = RankOrder(settings.ageing, shortest_first=settings.shortest_first)
    return OrderingPolicy(DeficitOrder(line), settings.ageing, line.sorted_heads if settings.shortest_first else None)


def _score_policy(settings: OrderingSettings) -> OrderingPolicy:
    weights = Weights(
        settings.weight_priority,
        settings.weight_wait,
        settings.weight_efficiency,
        settings.weight_window,
        raw=settings.score_mode == "raw",
        count_age_once=settings.count_age_once,
    )
    line = ScoreOrder(settings.ageing, weights)
    return OrderingPolicy(DeficitOrder(line), settings.ageing, line.sorted_heads)


def _graph_policy(_settings: OrderingSettings) -> OrderingPolicy:
    return OrderingPolicy(GraphOrder(), within=GraphOrder.within_queue)


KINDS: dict[str, Callable[[OrderingSettings], OrderingPolicy]] = {
    "rank": _rank_policy,
    "score": _score_policy,
    "graph": _graph_policy,
}
