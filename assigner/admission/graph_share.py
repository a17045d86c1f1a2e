"""Fair share between graphs: a penalty for those that run more than theirs, a cap, and the order that follows.

The formulas and defaults are Marianne's; lower scores start sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from schema.accounting.counters import Counter
from schema.picking.constrained import GatedQueue, Head

#: The urgency of a graph that names none.
PRIORITY = 5


class Sharing(Protocol):
    """How graphs share the pool, see `OrderingSettings`."""

    @property
    def kind(self) -> str:
        """`graph`, or they do not."""

    @property
    def max_concurrent(self) -> int | None:
        """Jobs that graphs share."""

    @property
    def overage_penalty(self) -> float:
        """For each job at or above the share."""

    @property
    def max_per_graph(self) -> float:
        """Times its share."""


@dataclass(frozen=True)
class Portion:
    """What each graph may have: `share` jobs without a penalty, and never more than `cap`."""

    share: float
    cap: int
    overage: float = 20.0

    def penalty(self, running: float) -> float:
        """0 below the share, then (running - share + 1) x overage."""
        return (running - self.share + 1.0) * self.overage if running >= self.share else 0.0


def portion(settings: Sharing, *, limit: float | None, graphs: int) -> Portion | None:
    """The shares of so many graphs that wait or run; `limit` is that of the pool. None: nobody has a share."""
    most = settings.max_concurrent if settings.max_concurrent is not None else limit
    if settings.kind != "graph" or most is None:
        return None
    share = max(1.0, most / graphs) if graphs else float(most)
    return Portion(share, max(1, int(share * settings.max_per_graph)), settings.overage_penalty)


def score(*, priority: float, depth: float, retries: int, cost: float, penalty: float) -> float:
    """graph priority x 10 + depth x 1 - retries x 5 + estimated cost x 0.1 + penalty (Marianne)."""
    return priority * 10.0 + depth * 1.0 - retries * 5.0 + cost * 0.1 + penalty


def graph_of(terms: Mapping[str, object]) -> str | None:
    """The graph that jobs with these terms belong to."""
    found = terms.get("graph")
    return None if found is None else str(found)


def counter_of(graph: str) -> str:
    """The counter of the jobs that a graph runs."""
    return f"graph:{graph}:jobs"


class Shared(Protocol):
    """What the gate and the order look at."""

    @property
    def portion(self) -> Portion | None:
        """None: nobody has a share."""

    def of(self, name: str) -> Counter:
        """The counter of that name."""


def running(graph: str, book: Shared) -> float:
    """Jobs that the graph runs, with those that start now."""
    return book.of(counter_of(graph)).used


def penalty_of(head: Head, book: Shared) -> float:
    """What is added to the job's score because of what its graph runs."""
    graph = graph_of(head.queue.terms)
    return 0.0 if graph is None or book.portion is None else book.portion.penalty(running(graph, book))


def merit(head: Head) -> float:
    """The job's score without the penalty, which all jobs of its graph share."""
    terms = head.queue.terms
    return score(
        priority=terms.get("graph_priority", PRIORITY),
        depth=head.priority_inputs.get("depth", 0),
        retries=head.attempts,
        cost=head.estimate,
        penalty=0.0,
    )


@dataclass(frozen=True)
class GraphShare:
    """The cap of a graph: jobs that it runs at once, whatever its score."""

    name: str = "graph share"
    asks: str = "its graph runs less than it may have of the pool"

    def closed_to(self, queue: GatedQueue, book: Shared) -> str | None:
        graph = graph_of(queue.terms)
        if graph is None or book.portion is None or running(graph, book) < book.portion.cap:
            return None
        now = running(graph, book)
        return f"its graph runs {now:g} jobs, its share is {book.portion.share:g} and the most is {book.portion.cap}"

    def closed_for(self, head: Head, book: Shared) -> str | None:
        return self.closed_to(head.queue, book)

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        graph = graph_of(queue.terms)
        return {} if graph is None else {counter_of(graph): 1.0}
