"""The first jobs of constrained queues, read and locked.

Where jobs start in the order in which they are read, the first read takes of each queue about its equal part of the
free units, and further reads take more of the queues that turn out to need more. Where another order chooses
(`OrderingPolicy.within`), a window in front of each queue is read once, and the jobs of it that come first are locked.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter

from assigner.admission.admit import PATIENCE
from assigner.admission.ordering import OrderingPolicy, OrderWithinQueue
from assigner.admission.state import AdmissionState
from schema.picking import constrained
from schema.picking.constrained import NO_HEADS, ConstrainedQueue, QueueHead, QueueId, ReadHeads
from schema.postgres.connection import Connection

#: Heads read for each job that is expected to start.
READ = 1.25
#: Heads read, and then tried, for each job that is expected to start, where the order tells only afterwards which ones
#: do: deadlines change the order of reading, and of a window others may have locked some.
SPARE, TRIED = 4, 8
#: Reads of further heads that take them only of the queues that seem to need them.
SPARING = 1


class Heads:
    """The heads of queues that one cycle reads.

    cut: the queues that hold more jobs than have been read, by id.
    """

    def __init__(
        self, connection: Connection, policy: OrderingPolicy, admission_state: AdmissionState, *, free_units: int
    ) -> None:
        """Prepare to read; at most `free_units` jobs can start."""
        self._connection, self._policy, self._state = connection, policy, admission_state
        self._free_units = free_units
        self._bounds, self._read, self._known = dict[QueueId, int](), dict[QueueId, ReadHeads](), set[int]()
        self.cut = dict[QueueId, ConstrainedQueue]()
        self._further = 0

    def first(self, queues: Sequence[ConstrainedQueue], startable: Sequence[float] | None = None) -> list[QueueHead]:
        """Read the first heads of these queues, probably enough to fill the free units if each has an equal part.

        startable: for each queue the number of its jobs that can start at once; without it any number.
        """
        for queue, jobs in zip(queues, startable or [math.inf] * len(queues), strict=True):
            self._bounds[queue.id] = int(min(self._free_units, jobs)) + PATIENCE
        part = self._free_units / max(1, len(queues))
        if self._policy.within is not None:
            return self._first_of_windows(queues, self._policy.within, max(PATIENCE, math.ceil(SPARE * part)))
        # One more tells whether a queue ends there.
        found = self._next(dict.fromkeys(queues, int(READ * part) + 2))
        dated = dict.fromkeys(head.queue for head in found if head.deadline is not None and head.queue.id in self.cut)
        return found + self._next(dict.fromkeys(dated, math.ceil(SPARE * part)))

    def more(
        self, left: Sequence[QueueHead], *, started: Mapping[QueueId, int], refused: Mapping[QueueId, int]
    ) -> list[QueueHead]:
        """Read further heads: of each queue as many as it needs if the free units are filled like those before.

        Of a queue whose heads are used up some are read in any case: enough to give it up, if they were refused. After
        `SPARING` such reads the parts cannot be foreseen, and some heads of every queue are read.

        left: the heads that have not been asked. started: jobs of each queue that may start. refused: heads of each
        queue that were refused since.
        """
        unasked, admitted = Counter(head.queue.id for head in left), sum(started.values())
        pace = READ * (self._free_units - admitted) / max(1, admitted)
        some = max(2, min(PATIENCE, constrained.MOST_IN_WINDOWS // max(1, len(self.cut))))
        self._further += 1
        wanted = dict[ConstrainedQueue, int]()
        for queue_id, queue in self.cut.items():
            if not unasked[queue_id]:
                least = PATIENCE if refused.get(queue_id) else some
            else:
                least = some if self._further > SPARING else 0
            wanted[queue] = max(math.ceil(started.get(queue_id, 0) * pace), least) - unasked[queue_id]
        return self._next(wanted)

    def _next(self, wanted: Mapping[ConstrainedQueue, int]) -> list[QueueHead]:
        """Read and lock further heads: of each queue the number wanted, at most up to its bound."""
        counts = {
            queue: min(count, self._bounds[queue.id] - self._read.get(queue.id, NO_HEADS).jobs)
            for queue, count in wanted.items()
            if count > 0
        }
        found = constrained.heads(
            self._connection,
            [*counts],
            limits=[*counts.values()],
            read=self._read,
            now=self._state.now,
            ageing=self._policy.ageing,
        )
        got, last = Counter(head.queue.id for head in found), {head.queue.id: head for head in found}
        for queue, count in counts.items():
            read = self._read.get(queue.id, NO_HEADS).jobs + got[queue.id]
            if (head := last.get(queue.id)) is not None:
                self._read[queue.id] = ReadHeads(read, head.rank, head.queued_at, head.job.id)
            if got[queue.id] == count and read < self._bounds[queue.id]:
                self.cut[queue.id] = queue
            else:
                self.cut.pop(queue.id, None)
        # With ageing a number of jobs is stepped over. Others may have unlocked jobs in front of them since.
        found = [head for head in found if head.job.id not in self._known]
        self._known.update(head.job.id for head in found)
        return found

    def _first_of_windows(
        self, queues: Sequence[ConstrainedQueue], within: OrderWithinQueue, count: int
    ) -> list[QueueHead]:
        """Read the window of each queue, and lock up to `count` jobs of it, the first by the order within a queue."""
        window = min(constrained.WINDOW, max(PATIENCE, constrained.MOST_IN_WINDOWS // max(1, len(queues))))
        seen: dict[QueueId, list[QueueHead]] = defaultdict(list)
        for head in constrained.heads(
            self._connection,
            queues,
            limits=[window] * len(queues),
            now=self._state.now,
            ageing=self._policy.ageing,
            lock=False,
        ):
            seen[head.queue.id].append(head)
        most = sum(min(count, len(heads)) for heads in seen.values())
        # The first of each queue, then the second of each: what others have locked is replaced by what comes next.
        ranked = [[*enumerate(within(heads, self._state))] for heads in seen.values()]
        heads = [head for _, head in sorted(itertools.chain(*ranked), key=itemgetter(0))][: TRIED * most]
        locked = constrained.lock_first(self._connection, [head.job.id for head in heads], most=most)
        return [head for head in heads if head.job.id in locked]
