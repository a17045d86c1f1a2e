"""Which of the jobs that ask for more than a place may start now, in which order. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from assigner import terms
from assigner.terms import Book
from schema.gated import Head


class Ordering(Protocol):
    """In which order jobs start: each time the instance that comes first, and of its jobs the first that may."""

    def first(self, heads: Sequence[Head], book: Book) -> int:
        """Which of the heads, one of each instance, comes first: its index."""


class ByRank:
    """Instances below their minimum quota first, then whatever job has the lowest rank, then the oldest."""

    def first(self, heads: Sequence[Head], book: Book) -> int:
        return min(
            range(len(heads)),
            key=lambda nth: (heads[nth].queue.owed <= book.given(heads[nth].queue), order(heads[nth])),
        )


def order(head: Head) -> tuple[float, float, int]:
    """Lower is sooner: rank, then age."""
    return head.rank, head.queued_at.timestamp(), head.job.id


def admit(heads: Sequence[Head], book: Book, *, room: int, ordering: Ordering) -> list[Head]:
    """Up to `room` of the heads that go through their gates, in the order in which they are to be placed.

    What each takes is counted in `book`, so that those behind it are judged by what is left. A job that may not start
    keeps nobody behind it waiting.
    """
    waiting: dict[int, list[Head]] = defaultdict(list)
    for head in sorted(heads, key=order, reverse=True):
        waiting[head.job.instance].append(head)
    admitted: list[Head] = []
    while room > 0 and waiting:
        instances = list(waiting)
        instance = instances[ordering.first([waiting[each][-1] for each in instances], book)]
        head = waiting[instance].pop()
        if not waiting[instance]:
            del waiting[instance]
        headroom = head.queue.headroom
        leaves = headroom is None or book.given(head.queue) + head.job.units <= headroom
        if leaves and terms.closed(head, book) is None:
            room -= 1
            book.take(head)
            admitted.append(head)
    return admitted
