"""Fair share between graphs: a penalty for those that run more than theirs, a cap, and the order that follows.

The formulas and defaults are Marianne's; lower scores start sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from schema.picking.constrained import QueueHead

#: The urgency of a graph that names none.
PRIORITY = 5


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
