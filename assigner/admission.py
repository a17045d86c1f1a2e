"""Which of the jobs that ask for more than a place may start now, in which order. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from assigner import terms
from assigner.terms import Book
from schema.gated import Head


class Ordering(Protocol):
    """In which order jobs are asked to start."""

    def sequence(self, heads: Sequence[Head], book: Book) -> Iterator[Head]:
        """Each of the heads once. Between two of them `book` changes: who starts is counted before the next is asked
        for."""


class Line(Protocol):
    """In which order the jobs of one instance start."""

    def key(self, head: Head, book: Book) -> tuple[float, ...]:
        """By which jobs of different instances are compared: lower is sooner."""

    def arranged(self, heads: Sequence[Head], book: Book) -> list[Head]:
        """The jobs of one instance in their order."""


@dataclass(frozen=True)
class ByInstance:
    """Each time the instance that comes first, and of its jobs the one that comes first in its line. Instances below
    their minimum quota come first, then whatever job comes first in its line."""

    line: Line

    def sequence(self, heads: Sequence[Head], book: Book) -> Iterator[Head]:
        of_instances: dict[int, list[Head]] = defaultdict(list)
        for head in heads:
            of_instances[head.job.instance].append(head)
        waiting = {instance: self.line.arranged(those, book)[::-1] for instance, those in of_instances.items()}
        while waiting:
            instances = list(waiting)
            instance = instances[self.first([waiting[each][-1] for each in instances], book)]
            yield waiting[instance].pop()
            if not waiting[instance]:
                del waiting[instance]

    def first(self, heads: Sequence[Head], book: Book) -> int:
        """Which of the heads, one of each instance, comes first: its index."""
        return min(range(len(heads)), key=lambda nth: (not owed(heads[nth], book), self.line.key(heads[nth], book)))


def owed(head: Head, book: Book) -> bool:
    """Whether the job's instance is still below its minimum quota."""
    return head.queue.owed > book.given(head.queue)


def admit(
    heads: Sequence[Head], book: Book, *, room: int, ordering: Ordering, closed: Counter[str] | None = None
) -> list[Head]:
    """Up to `room` of the heads that go through their gates, in the order in which they are to be placed.

    What each takes is counted in `book`, so that those behind it are judged by what is left. A job that may not start
    keeps nobody behind it waiting; in `closed` it is counted by the gate that was closed for it.
    """
    admitted: list[Head] = []
    for head in ordering.sequence(heads, book):
        if room <= 0:
            break
        headroom = head.queue.headroom
        leaves = headroom is None or book.given(head.queue) + head.job.units <= headroom
        if not leaves:
            continue
        found = terms.closed(head, book)
        if found is None:
            room -= 1
            book.take(head)
            admitted.append(head)
        elif closed is not None:
            closed[found[0].name] += 1
    return admitted
