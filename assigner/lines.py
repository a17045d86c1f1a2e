"""The order of the jobs of one instance: by effective priority and age, or by a score. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter

from assigner.terms import Book
from schema.gated import Ageing, Head
from schema.limits import PRIORITY_MIN

#: What a job without a prediction is expected to run, seconds, where the shortest comes first: longer than all others.
UNKNOWN = float("inf")
#: Most points that a priority counts in a score, and the wait in seconds that counts as much as any longer one.
MOST_POINTS, MOST_WAIT = 150.0, 86400.0

#: By rank, then by age: what `ByRank.key` comes to where nothing else counts, at a third of the cost.
AS_QUEUED = attrgetter("rank", "queued_at", "job.id")


def waited(head: Head, book: Book) -> float:
    """Seconds for which it has been queued."""
    return max(0.0, (book.now - head.queued_at).total_seconds())


def effective(head: Head, book: Book, ageing: Ageing | None) -> float:
    """Its priority at this moment, lower = sooner: its rank less what it has gained by waiting."""
    return head.rank - (ageing.gain(waited(head, book)) if ageing else 0.0)


@dataclass(frozen=True)
class ByRank:
    """The lowest effective priority first, then the oldest; where jobs with a deadline stand among others of the same
    rank, the earliest deadline comes first in the first of their places, so that the others keep theirs.

    `shortest_first`: within one effective priority the shortest come first, and then the oldest.
    """

    ageing: Ageing | None = None
    shortest_first: bool = False

    def key(self, head: Head, book: Book) -> tuple[float, ...]:
        """Lower is sooner."""
        seconds = book.expected(head) if self.shortest_first else 0.0
        return (
            effective(head, book, self.ageing),
            UNKNOWN if seconds is None else seconds,
            head.queued_at.timestamp(),
            head.job.id,
        )

    def arranged(self, heads: Sequence[Head], book: Book) -> list[Head]:
        """The heads in their order."""
        is_plain = self.ageing is None and not self.shortest_first
        found = sorted(heads, key=AS_QUEUED if is_plain else partial(self.key, book=book))
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
    """What each term of a score counts. `raw`: points are not brought down to 0..1; `count_age_once`: what ageing gives
    is left out while the wait has a weight."""

    priority: float = 0.4
    wait: float = 0.3
    efficiency: float = 0.2
    window: float = 0.1
    raw: bool = False
    count_age_once: bool = True


def score(
    weights: Weights, *, points: float, gained: float, wait: float, efficiency: float = 1.0, window: float = 1.0
) -> float:
    """priority x points/150 + wait x seconds/86400 + efficiency + window, each term 0..1 before its weight; higher is
    sooner (Sleepless Agent's 40/30/20/10).

    points: of the job without what it has gained by waiting. Doubling the weight of the wait lets a job overtake others
    that are worth twice as many points more.
    """
    is_once = weights.count_age_once and weights.wait > 0 and not weights.raw
    worth = points if is_once else points + gained
    if not weights.raw:
        worth = min(1.0, max(0.0, worth / MOST_POINTS))
    waited = min(1.0, wait / MOST_WAIT)
    return weights.priority * worth + weights.wait * waited + weights.efficiency * efficiency + weights.window * window


@dataclass(frozen=True)
class ByScore:
    """The highest score first, then the oldest. Jobs whose deadline is near come before all others."""

    ageing: Ageing | None = None
    weights: Weights = Weights()

    def key(self, head: Head, book: Book) -> tuple[float, ...]:
        """Lower is sooner."""
        if head.rank < PRIORITY_MIN:
            return (-1.0, head.rank, head.queued_at.timestamp(), head.job.id)
        wait = waited(head, book)
        found = score(
            self.weights,
            points=100.0 - head.rank,
            gained=self.ageing.gain(wait) if self.ageing else 0.0,
            wait=wait,
            efficiency=book.efficiency(head),
            window=book.window(head),
        )
        return (0.0, -found, head.queued_at.timestamp(), head.job.id)

    def arranged(self, heads: Sequence[Head], book: Book) -> list[Head]:
        """The heads in their order."""
        return sorted(heads, key=lambda head: self.key(head, book))
