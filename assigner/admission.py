"""Which of the jobs that ask for more than a place may start now, in which order. Pure."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from assigner import terms
from assigner.terms import Book
from schema.gated import Head, Place


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
        lanes = list(self.lanes(heads, book).values())
        while lanes:
            first = min(lanes, key=lambda lane: (not owed(lane[-1], book), self.line.key(lane[-1], book)))
            yield first.pop()
            if not first:
                lanes.remove(first)

    def lanes(self, heads: Sequence[Head], book: Book) -> dict[int, list[Head]]:
        """The jobs of each instance, the next one last."""
        found: dict[int, list[Head]] = defaultdict(list)
        for head in heads:
            found[head.job.instance].append(head)
        return {instance: self.line.arranged(those, book)[::-1] for instance, those in found.items()}


def owed(head: Head, book: Book) -> bool:
    """Whether the job's instance is still below its minimum quota."""
    return bool(head.queue.owed) and head.queue.owed > book.given(head.queue)


@dataclass(frozen=True)
class Admission:
    """`heads`: those that may start, in the order in which they are to be placed; `is_dry`: more have to be read before
    any of those that are `left` is asked."""

    heads: list[Head]
    left: Sequence[Head] = ()
    is_dry: bool = False


def admit(
    heads: Sequence[Head],
    book: Book,
    *,
    room: int,
    ordering: Ordering,
    closed: Counter[str] | None = None,
    cut: Collection[Place] = (),
) -> Admission:
    """Up to `room` of the heads that go through their gates.

    What each takes is counted in `book`, so that those behind it are judged by what is left. A job that may not start
    keeps nobody behind it waiting; in `closed` it is counted by the gate that was closed for it. `cut`: the queues that
    have more than these heads; where the last one of such a queue has been asked, nobody knows who comes next.
    """
    admitted: list[Head] = []
    asked: set[int] = set()
    unasked = Counter(head.queue.place for head in heads if head.queue.place in cut) if cut else Counter[Place]()
    sequence = ordering.sequence(heads, book)
    while room > 0 and (head := next(sequence, None)) is not None:
        if cut:
            asked.add(head.job.id)
        headroom = head.queue.headroom
        leaves = headroom is None or book.given(head.queue) + head.job.units <= headroom
        found = terms.closed(head, book) if leaves else None
        if leaves and found is None:
            room -= 1
            book.take(head)
            admitted.append(head)
        elif found is not None and closed is not None:
            closed[found[0].name] += 1
        if head.queue.place in cut:
            unasked[head.queue.place] -= 1
            if not unasked[head.queue.place]:
                left = [each for each in heads if each.job.id not in asked]
                return Admission(admitted, left, is_dry=True)
    return Admission(admitted)
