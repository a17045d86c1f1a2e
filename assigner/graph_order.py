"""The order of jobs by the scores of their graphs. Pure."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence

from assigner import portions
from assigner.admission import Rank, owed
from assigner.terms import Book
from schema.gated import GatedQueue, Head

Score = tuple[bool, float, tuple[float, float, int]]


class ByGraph:
    """Instances below their minimum quota first, then the lowest score, then rank and age.

    Every job that starts adds to the penalty of its graph, so that scores are those of the moment at each pick. They
    never fall while jobs start: only the one in front has to be looked at again, not all that wait.
    """

    def sequence(self, heads: Sequence[Head], book: Book, *, until: Rank | None = None) -> Iterator[Head]:  # noqa: ARG002
        lanes: dict[tuple[int, str | None], list[Head]] = defaultdict(list)
        for head in sorted(heads, key=lambda each: (portions.merit(each), order(each)), reverse=True):
            lanes[head.job.instance, portions.graph_of(head.queue.terms)].append(head)
        front = [(scored(lane[-1], book), lane) for lane in lanes.values()]
        heapq.heapify(front)
        while front:
            seen, lane = front[0]
            now = scored(lane[-1], book)
            if now > seen:
                heapq.heapreplace(front, (now, lane))
                continue
            book.scores[lane[-1].job.id] = now[1]
            yield lane.pop()
            if lane:
                heapq.heapreplace(front, (scored(lane[-1], book), lane))
            else:
                heapq.heappop(front)

    def ranked(self, queues: Sequence[GatedQueue], book: Book) -> list[tuple[Rank, list[GatedQueue]]]:  # noqa: ARG002
        """All at once: which graph comes first depends on its jobs."""
        return [((0, 0.0), [*queues])]


def scored(head: Head, book: Book) -> Score:
    """Lower starts sooner."""
    return not owed(head, book), portions.merit(head) + portions.penalty_of(head, book), order(head)


def order(head: Head) -> tuple[float, float, int]:
    """Lower is sooner: rank, then age."""
    return head.rank, head.queued_at.timestamp(), head.job.id
