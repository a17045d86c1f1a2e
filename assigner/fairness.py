"""Who comes first when instances share the pool: the one that has had least of what is its due. Pure.

A cycle reads once what has been used, and admission (`assigner.admission.admit`) asks here after each job that it
admits; what that job is estimated at is charged to the working copy at once, so that one instance does not take every
bot because it was behind when the cycle began.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from assigner.admission import ByInstance, owed
from assigner.terms import Book
from schema.gated import Head
from schema.shares import Share, Shares


class Fair(ByInstance):
    """Instances below their minimum quota first; then those that have not had their minimum of jobs; then the one with
    the lowest deficit. One of weight 0 gets what those of positive weight leave."""

    def sequence(self, heads: Sequence[Head], book: Book) -> Iterator[Head]:
        if book.shares is None:
            yield from super().sequence(heads, book)
            return
        weighed, guarantee = weigh(book.shares, book), book.shares.guarantee
        key = partial(self.line.key, book=book)
        lanes = [
            _Lane(lane, book.shares.of[instance], weighed.weights[instance], weighed.target(instance), key)
            for instance, lane in self.lanes(heads, book).items()
        ]
        for lane in lanes:
            lane.look(guarantee, book)
        all_used = weighed.all_used
        while lanes:
            first = _first(lanes, 1.0 / max(1.0, all_used))
            yield first.heads.pop()
            # What starts changes nothing for the others but the sum.
            before = first.used
            if first.heads:
                first.look(guarantee, book)
            else:
                first.used = _used(first.share, book)
                lanes.remove(first)
            all_used += first.used - before


def _first(lanes: Sequence["_Lane"], scale: float) -> "_Lane":
    """The least by what it is behind, then by its deficit, then by its next job: written out, because this is done for
    each job that starts."""
    first, behind, least = lanes[0], lanes[0].behind, lanes[0].used * scale - lanes[0].target
    for lane in lanes:
        if lane.behind > behind or lane is first:
            continue
        deficit = lane.used * scale - lane.target
        if lane.behind < behind or deficit < least or (deficit == least and lane.key() < first.key()):
            first, behind, least = lane, lane.behind, deficit
    return first


class _Lane:
    """The jobs of one instance that wait, the next one last, and by what it is compared with the others."""

    __slots__ = ("_key", "behind", "heads", "share", "target", "used", "weight")

    def __init__(
        self,
        heads: list[Head],
        share: Share,
        weight: float,
        target: float,
        key: Callable[[Head], tuple[float, ...]],
    ) -> None:
        self.heads, self.share, self.weight, self.target, self._key = heads, share, weight, target, key

    def look(self, guarantee: int, book: Book) -> None:
        """What the working copy says by now."""
        head, share = self.heads[-1], self.share
        # Only one that would lack it is looked up.
        had = not self.weight or share.completed >= guarantee or _had_with_running(share, guarantee, book)
        # Of these the first that differs decides.
        self.behind = 4 * (not owed(head, book)) + 2 * (not self.weight) + had
        self.used = _used(share, book)

    def key(self) -> tuple[float, ...]:
        """By which its next job is compared with another's, where nothing else tells."""
        return self._key(self.heads[-1])


@dataclass(frozen=True)
class Weighed:
    """What the instances with jobs waiting have used and weigh, by id, and the sums of which these are parts. What all
    have used counts as at least 1, so that nothing is divided by zero before anything was used."""

    used: dict[int, float]
    weights: dict[int, float]
    all_used: float
    all_weights: float

    def target(self, instance: int) -> float:
        """Its part of everything that is used."""
        return self.weights[instance] / self.all_weights


def weigh(shares: Shares, book: Book) -> Weighed:
    """With what the working copy says by now. Where all weights are zero they are equal."""
    used = {instance: _used(share, book) for instance, share in shares.of.items()}
    all_used = sum(used.values()) + (0.0 if shares.mode == "waiting" else shares.others_used)
    weights = {instance: share.weight for instance, share in shares.of.items()}
    others = (shares.others, shares.others_weight) if shares.mode == "demand" else (0, 0.0)
    all_weights = sum(weights.values()) + others[1]
    if all_weights <= 0:
        weights = dict.fromkeys(weights, 1.0)
        all_weights = float(len(weights) + others[0])
    return Weighed(used, weights, all_used, all_weights)


def index(shares: Shares, book: Book) -> float | None:
    """How evenly the instances that have jobs waiting have been served for their weights; None if nobody is to be."""
    return jain(_used(share, book) / share.weight for share in shares.of.values() if share.weight > 0)


def jain(values: Iterable[float]) -> float | None:
    """Jain's index of fairness: 1 = all have the same, 1/n = one has everything; None of nothing."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares > 0 else None


def _used(share: Share, book: Book) -> float:
    counter = book.counters.get(share.cost)
    return share.lift if counter is None else counter.used + share.lift


def _had_with_running(share: Share, guarantee: int, book: Book) -> bool:
    return share.completed + book.of(share.jobs).used >= guarantee
