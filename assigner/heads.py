"""The first jobs of queues whose gates are open, locked: first about as many as will start, then more of those queues
that turn out to have more to start."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from sqlalchemy import Connection

from assigner.ordering import Arrangement
from schema import gated
from schema.gated import GatedQueue, Head, Place

#: Heads that are read, and locked, for each job that may be placed, where any of them may start first; from each queue
#: `LEAST` are read.
SPARE, LEAST = 4.0, 8
#: Where those that are read first also start first, more can be read when they are used up: so many for each job that
#: is expected to start, and up to a few.
EXACT, FEW = 1.2, 3


class Heads:
    """`cut`: the places of those queues that have more than has been read.

    `usual`: which part of what started each queue had when it was looked at before; one that is not there is expected
    to have as much as any other.
    """

    def __init__(
        self,
        connection: Connection,
        arrangement: Arrangement,
        *,
        room: int,
        now: datetime,
        usual: Mapping[Place, float] = MappingProxyType({}),
    ) -> None:
        """`room` jobs can start."""
        self._connection, self._arrangement, self._now = connection, arrangement, now
        self._queues, self._bounds = dict[Place, GatedQueue](), dict[Place, int]()
        self._room, self._usual = room, usual
        self._read, self._known = Counter[Place](), set[int]()
        self.cut: set[Place] = set()

    def first(self, queues: Sequence[GatedQueue], most: Sequence[float] | None = None) -> list[Head]:
        """Of these queues so many that `room` can be filled, as far as one can tell before any has started. Of each
        `most` jobs can start at once, where it is given."""
        for queue, each in zip(queues, most or [math.inf] * len(queues), strict=True):
            self._queues[queue.place] = queue
            self._bounds[queue.place] = int(min(self._room, LEAST + SPARE * each))
        places = [queue.place for queue in queues]
        even = 1.0 / max(1, len(places))
        if self._arrangement.exact:
            found = self._next({place: _with_spare(self._room * self._usual.get(place, even)) for place in places})
            # Where jobs have deadlines, some of those behind may come before those in front.
            dated = {head.queue.place for head in found if head.deadline is not None} & self.cut
            return found + self._next(dict.fromkeys(sorted(dated), math.ceil(SPARE * self._room * even)))
        return self._next(dict.fromkeys(places, max(LEAST, math.ceil(SPARE * self._room * even))))

    def more(self, left: Sequence[Head], started: Mapping[Place, int]) -> list[Head]:
        """Those that come next in the queues of which not enough are `left`, if it goes on as it has gone so far: so
        many of each have `started`. Of a queue that is used up at least as many as have been read; none of one of which
        some were asked and none has started."""
        unasked = Counter(head.queue.place for head in left)
        admitted = sum(started.values())
        pace = (self._room - admitted) / max(1, admitted)
        wanted = dict[Place, int]()
        for place in sorted(self.cut):
            asked, has_started = self._read[place] - unasked[place], started.get(place, 0)
            if asked >= LEAST and not has_started:
                self.cut.discard(place)
                continue
            count = _with_spare(has_started * pace) - unasked[place]
            if not unasked[place]:
                # Where none has started, all those that are asked before it is given up at once.
                count = max(count, self._read[place], 0 if has_started else LEAST - self._read[place])
            if count > 0:
                wanted[place] = count
        return self._next(wanted)

    def _next(self, wanted: Mapping[Place, int]) -> list[Head]:
        places = list(wanted)
        limits = [min(wanted[place], self._bounds[place] - self._read[place]) for place in places]
        found = gated.heads(
            self._connection,
            [self._queues[place] for place in places],
            limits=limits,
            skips=[self._read[place] for place in places],
            now=self._now,
            ageing=self._arrangement.ageing,
        )
        got = Counter(head.queue.place for head in found)
        # Where others have let go of rows in front since, some of those behind are the ones that were read before.
        found = [head for head in found if head.job.id not in self._known]
        self._known.update(head.job.id for head in found)
        for place, limit in zip(places, limits, strict=True):
            self._read[place] += got[place]
            has_more = got[place] == limit and self._read[place] < self._bounds[place]
            (self.cut.add if has_more and self._arrangement.exact else self.cut.discard)(place)
        return found


def _with_spare(expected: float) -> int:
    return math.ceil(EXACT * expected) + min(FEW, math.ceil(expected))
