"""Which of the jobs that ask for more than a place may start now, in which order. Pure."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from assigner.admission.state import Book
from schema.picking.constrained import GatedQueue, Head, Place

#: Where queues stand before any of their jobs is known: lower is sooner.
Rank = tuple[int, float]


class Ordering(Protocol):
    """In which order jobs are asked to start."""

    def sequence(self, heads: Sequence[Head], book: Book, *, until: Rank | None = None) -> Iterator[Head]:
        """Each of the heads once. Between two of them `book` changes: who starts is counted before the next is asked
        for. Those of queues that have come to stand behind `until` are left out."""

    def ranked(self, queues: Sequence[GatedQueue], book: Book) -> Sequence[tuple[Rank, Sequence[GatedQueue]]]:
        """The queues in the order of their ranks, those together between which only their jobs tell."""


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

    def sequence(self, heads: Sequence[Head], book: Book, *, until: Rank | None = None) -> Iterator[Head]:  # noqa: ARG002
        lanes = list(self.lanes(heads, book).values())
        while lanes:
            first = min(lanes, key=lambda lane: (not owed(lane[-1], book), self.line.key(lane[-1], book)))
            yield first.pop()
            if not first:
                lanes.remove(first)

    def ranked(self, queues: Sequence[GatedQueue], book: Book) -> list[tuple[Rank, list[GatedQueue]]]:  # noqa: ARG002
        return [((0, 0.0), [*queues])]

    def lanes(self, heads: Sequence[Head], book: Book) -> dict[int, list[Head]]:
        """The jobs of each instance, the next one last."""
        found: dict[int, list[Head]] = defaultdict(list)
        for head in heads:
            found[head.job.instance].append(head)
        return {instance: self.line.arranged(those, book)[::-1] for instance, those in found.items()}


def owed(head: Head, book: Book) -> bool:
    """Whether the job's instance is still below its minimum quota."""
    return is_owed(head.queue, book)


def is_owed(queue: GatedQueue, book: Book) -> bool:
    """Whether the instance of the queue is still below its minimum quota."""
    return bool(queue.owed) and queue.owed > book.given(queue).used


@dataclass(frozen=True)
class Admission:
    """`heads`: those that may start, in the order in which they are to be placed; `left`: those that were not asked;
    `is_dry`: more have to be read before any of these is."""

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
    until: Rank | None = None,
) -> Admission:
    """Up to `room` of the heads that go through their gates.

    What each takes is counted in `book`, so that those behind it are judged by what is left. A job that may not start
    keeps nobody behind it waiting; in `closed` it is counted by the gate that was closed for it. `cut`: the queues that
    have more than these heads; where the last one of such a queue has been asked, nobody knows who comes next.
    `until`: where the first of those queues stands of which no heads have been read.
    """
    admitted: list[Head] = []
    asked: list[Head] = []
    unasked = (
        {queue: n for queue, n in Counter(head.queue for head in heads).items() if queue.place in cut} if cut else {}
    )
    sequence = ordering.sequence(heads, book, until=until)
    while room > 0 and (head := next(sequence, None)) is not None:
        asked.append(head)
        queue = head.queue
        tab = book.tab(queue)
        if tab.units.leaves(head.job.units):
            found = tab.closed(head)
            if found is None:
                room -= 1
                tab.take(head)
                admitted.append(head)
            elif closed is not None:
                closed[found[0].name] += 1
        if queue in unasked:
            unasked[queue] -= 1
            if not unasked[queue]:
                return Admission(admitted, _without(heads, asked), is_dry=True)
    return Admission(admitted, _without(heads, asked))


def _without(heads: Sequence[Head], asked: Sequence[Head]) -> list[Head]:
    known = {each.job.id for each in asked}
    return [each for each in heads if each.job.id not in known]
