"""The front of a cohort: its first ready jobs, of whatever queue, read in their order; those without constraints, or
those with some.

Where most of them can be placed, which is the rule, a pick needs no look into each queue. An index keeps an entry of a
job that is ready no more for as long as somebody holds an old snapshot, and a walk from its beginning has to step over
all of those. So where each rank begins to live is remembered, and while a walk from the very beginning is slow, most
walks begin there.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schema import clock
from schema.clock import Monotonic
from schema.predicates import IN_FRONT

#: Ranks of one cohort whose beginning is remembered, the most urgent ones.
MAX_LANES = 16
#: A submit that is committed more than so many seconds after it began may come in front of what is remembered, and then
#: waits for the next walk from the very beginning.
LATE = 0.25
#: A pick that read so many jobs from the very beginning on was quick if it took no more than so many seconds, which is
#: little more than one takes that begins later. A job that waits for the next such walk there waits among many.
MANY, QUICK = 200, 0.005
#: Picks that go to the queues at once after one that could not use the front.
ASIDE = 16

#: Below every rank, also those of jobs that are hastened before their deadline; and above.
_LEAST_RANK, _BEYOND = -1e9, 1001.0

#: Where in a lane a job is: when it was queued, in seconds of the database's clock, and its id.
Place = tuple[float, int]
_QUEUE_START: Place = (float("-inf"), 0)

#: Two CTEs, `stretches` and `front`, with places for a condition on the cohort `c`, a limit, and what is ready.
_HEAD_JOBS = """
stretches AS MATERIALIZED (
    SELECT c.id AS cohort, coalesce(m.rank, {least}) AS rank, coalesce(m.until, {beyond}) AS until,
        to_timestamp(coalesce(m.since, '-infinity')) AS since, coalesce(m.first, 0) AS first
    FROM cohorts c
    LEFT JOIN unnest(CAST(:lane_cohorts AS integer[]), CAST(:lane_ranks AS double precision[]),
                     CAST(:lane_sinces AS double precision[]), CAST(:lane_firsts AS bigint[]),
                     CAST(:lane_untils AS double precision[]))
        AS m (cohort, rank, since, first, until) ON m.cohort = c.id
    WHERE {cohorts}
), front AS MATERIALIZED (
    SELECT h.* FROM stretches s CROSS JOIN LATERAL (
        SELECT id, cohort, queue, rank, queued_at FROM jobs
        WHERE cohort = s.cohort AND (rank, queued_at, id) >= (s.rank, s.since, s.first)
            AND rank < s.until AND {ready}
        ORDER BY cohort, rank, queued_at, id LIMIT {limit}) h
    ORDER BY h.rank, h.queued_at, h.id LIMIT {limit}
)"""

#: What a walk tells about itself, as one value: how many jobs it read, when, and of each lane when the first one was
#: queued and its id.
WALKED = """
    SELECT jsonb_build_array(count(*), extract(epoch FROM now()), (
        SELECT jsonb_agg(jsonb_build_array(cohort, rank, extract(epoch FROM queued_at), id))
        FROM (SELECT DISTINCT ON (cohort, rank) cohort, rank, queued_at, id FROM front
              ORDER BY cohort, rank, queued_at, id) lane))
    FROM front"""


def head_jobs(*, cohorts: str, limit: str, ready: str = IN_FRONT) -> str:
    """The CTE `front`: up to `limit` ready jobs, the first ones of the cohorts `c` for which the condition holds.
    ready: what is ready, in the words of the index."""
    return _HEAD_JOBS.format(cohorts=cohorts, limit=limit, ready=ready, least=_LEAST_RANK, beyond=_BEYOND)


@dataclass(frozen=True)
class RankLane:
    """Ready jobs of one rank in one cohort."""

    cohort: int
    rank: float


class HeadCursor:
    """What is remembered of the front of some cohorts, always the same ones. Losing it costs one slow walk.

    A job that comes to lie before what is remembered, because it was queued again, promoted or made more urgent,
    or because its submit took long, is found by the next walk from the very beginning. Such walks are quick, and all
    walks are such walks, unless the clean-up of indexes is held up.
    """

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._since: dict[RankLane, Place] = {}
        self._whole_walk_throttle = clock.Throttle(now)
        self._disabled_for = 0

    def begin(self) -> "Walk":
        """Return the next walk, which the caller makes and reports to `learn`."""
        with self._lock:
            whole = not self._since or self._whole_walk_throttle.try_begin()
            return Walk(self._now(), whole, {} if whole else dict(self._since))

    def learn(self, walk: "Walk", told: tuple[int, float, Any], *, limit: int) -> int:
        """Take note of what a walk found; returns how many jobs it read.

        told: the value of `WALKED`.
        limit: the number of jobs that the walk could read at most.
        """
        seconds = self._now() - walk.began
        walked, at, lanes = told
        firsts: dict[RankLane, Place] = {
            RankLane(cohort, float(rank)): (since, first) for cohort, rank, since, first in lanes or ()
        }
        late = at - LATE, 0
        with self._lock:
            if walk.whole:
                self._whole_walk_throttle.finished(seconds, quick=QUICK if walked >= MANY else clock.QUICK_SECONDS)
                if walked >= limit:
                    self._since.clear()
            if walked < limit:
                for lane in self._since:
                    firsts.setdefault(lane, late)
            for lane, first in firsts.items():
                begun = walk.since.get(lane, _QUEUE_START)
                if not walk.whole and self._since.get(lane, begun) < begun:
                    continue
                self._since[lane] = min(first, late)
            for cohort in {lane.cohort for lane in firsts}:
                lanes = sorted((lane for lane in self._since if lane.cohort == cohort), key=lambda lane: lane.rank)
                for lane in lanes[MAX_LANES:]:
                    del self._since[lane]
        return walked

    def is_worthwhile(self) -> bool:
        """Return whether a pick should look at the front: after `disable_for_a_while`, from the `ASIDE`-th call on."""
        with self._lock:
            self._disabled_for = max(0, self._disabled_for - 1)
            return self._disabled_for == 0

    def disable_for_a_while(self) -> None:
        """Leave the front out of the next picks: most of its jobs could not be placed, or jobs of an instance below its
        minimum came first."""
        with self._lock:
            self._disabled_for = ASIDE


@dataclass(frozen=True)
class Walk:
    """One walk along the front: `whole` from the very beginning, else from where each of these lanes was seen to
    begin."""

    began: float
    whole: bool
    since: dict[RankLane, Place]

    def values(self) -> dict[str, Sequence[Any]]:
        """What `front` asks for: stretches from the beginning of one lane to the next lane; before the first and
        after the last one everything."""
        rows: list[tuple[int, float, Place, float]] = []
        for cohort in {lane.cohort for lane in self.since}:
            lanes = sorted((lane for lane in self.since if lane.cohort == cohort), key=lambda lane: lane.rank)
            starts = [(_LEAST_RANK, _QUEUE_START), *((lane.rank, self.since[lane]) for lane in lanes)]
            ends = [*(lane.rank for lane in lanes), _BEYOND]
            rows += [(cohort, start, since, end) for (start, since), end in zip(starts, ends, strict=True)]
        return {
            "lane_cohorts": [row[0] for row in rows],
            "lane_ranks": [row[1] for row in rows],
            "lane_sinces": [row[2][0] for row in rows],
            "lane_firsts": [row[2][1] for row in rows],
            "lane_untils": [row[3] for row in rows],
        }


class HeadCursors:
    """What a process remembers of the front of each cohort by itself."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._of: dict[int, HeadCursor] = {}

    def forget(self) -> None:
        """A transaction in which walks were made has not happened: what it saw of its own writes is not so."""
        self._of = {}

    def of(self, cohort: int) -> HeadCursor:
        """That of one cohort."""
        return self._of.setdefault(cohort, HeadCursor(self._now))
