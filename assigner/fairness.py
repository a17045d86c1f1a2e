"""Who comes first when instances share the pool: the one that has had least of what is its due. Pure.

A cycle reads once what has been used, and admission (`assigner.admission.admit`) asks here after each job that it
admits; what that job is estimated at is charged to the working copy at once, so that one instance does not take every
bot because it was behind when the cycle began.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from assigner.admission import ByInstance, owed
from assigner.terms import Book
from schema.gated import Head
from schema.shares import Share, Shares


class Fair(ByInstance):
    """Instances below their minimum quota first; then those that have not had their minimum of jobs; then the one with
    the lowest deficit. One of weight 0 gets what those of positive weight leave."""

    def first(self, heads: Sequence[Head], book: Book) -> int:
        if book.shares is None:
            return super().first(heads, book)
        shares, weighed = book.shares, weigh(book.shares, book)

        def key(nth: int) -> tuple[bool, bool, bool, float, tuple[float, ...]]:
            head = heads[nth]
            instance = head.job.instance
            share, weight = shares.of[instance], weighed.weights[instance]
            # Only one that would lack it is looked up.
            had = not weight or share.completed >= shares.guarantee or _had_with_running(share, shares.guarantee, book)
            return not owed(head, book), not weight, had, weighed.deficit(instance), self.line.key(head, book)

        return min(range(len(heads)), key=key)


@dataclass(frozen=True)
class Weighed:
    """What the instances with jobs waiting have used and weigh, by id, and the sums of which these are parts."""

    used: dict[int, float]
    weights: dict[int, float]
    all_used: float
    all_weights: float

    def deficit(self, instance: int) -> float:
        """What it has of everything that was used, without what it ought to have; below 0 it has had less than its
        due."""
        return self.used[instance] / self.all_used - self.weights[instance] / self.all_weights


def weigh(shares: Shares, book: Book) -> Weighed:
    """With what the working copy says by now.

    What all have used counts as at least 1, so that nothing is divided by zero before anything was used. Where all
    weights are zero they are equal.
    """
    used = {instance: _used(share, book) for instance, share in shares.of.items()}
    all_used = max(1.0, sum(used.values()) + (0.0 if shares.mode == "waiting" else shares.others_used))
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
