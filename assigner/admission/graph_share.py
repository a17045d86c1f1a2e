"""Fair share between graphs: a penalty for those that run more than theirs, a cap, and the order that follows.

The formulas and defaults are Marianne's; lower scores start sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from schema.picking.constrained import QueueHead

#: The urgency of a graph that names none.
PRIORITY = 5


class Sharing(Protocol):
    """How graphs share the pool, see `OrderingSettings`."""

    @property
    def kind(self) -> str:
        """`graph`, or they do not."""

    @property
    def max_concurrent(self) -> int | None:
        """Jobs that all graphs may run together."""

    @property
    def overage_penalty(self) -> float:
        """For each job at or above the share."""

    @property
    def max_per_graph(self) -> float:
        """Times its share."""


@dataclass(frozen=True)
class GraphShare:
    """What each graph may have: `share` jobs without a penalty, and never more than `cap`. together: the most jobs of
    all graphs; None = as many as the pool may run."""

    share: float
    cap: int
    overage: float = 20.0
    together: int | None = None

    def penalty(self, running: float) -> float:
        """0 below the share, then (running - share + 1) x overage."""
        return (running - self.share + 1.0) * self.overage if running >= self.share else 0.0


def graph_share(settings: Sharing, *, limit: float | None, graphs: int) -> GraphShare | None:
    """The shares of so many graphs that wait or run; `limit` is that of the pool. None: nobody has a share."""
    most = settings.max_concurrent if settings.max_concurrent is not None else limit
    if settings.kind != "graph" or most is None:
        return None
    share = max(1.0, most / graphs) if graphs else float(most)
    cap = max(1, int(share * settings.max_per_graph))
    return GraphShare(share, cap, settings.overage_penalty, settings.max_concurrent)


def score(*, priority: float, depth: float, retries: int, cost: float, penalty: float) -> float:
    """graph priority x 10 + depth x 1 - retries x 5 + estimated cost x 0.1 + penalty (Marianne)."""
    return priority * 10.0 + depth * 1.0 - retries * 5.0 + cost * 0.1 + penalty


def graph_of(constraints: Mapping[str, object]) -> str | None:
    """The graph that jobs with these terms belong to."""
    found = constraints.get("graph")
    return None if found is None else str(found)


#: The counter of the jobs that all graphs run together.
ALL_GRAPHS = "graphs:jobs"


def graph_counter(graph: str) -> str:
    """The counter of the jobs that a graph runs."""
    return f"graph:{graph}:jobs"


def unpenalised_score(head: QueueHead) -> float:
    """The job's score without the penalty, which all jobs of its graph share."""
    constraints = head.queue.constraints
    return score(
        priority=constraints.get("graph_priority", PRIORITY),
        depth=head.priority_inputs.get("depth", 0),
        retries=head.attempts,
        cost=head.estimate,
        penalty=0.0,
    )
