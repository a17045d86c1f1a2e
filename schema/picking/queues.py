"""Queues: find those that hold ready jobs and are open, and whether there is anything to do.

A queue is a row: jobs of one cohort, instance, requirement set, number of units and constraint set and with the same
preferred properties, which are alike for the choice of a bot. A queue that rests holds ready jobs, but no bot could
take one of them lately.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from schema import predicates
from schema.accounting.quotas import HEADROOM
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import (
    ANY_CONSTRAINED_READY,
    ANY_IN_FRONT,
    ANY_PAUSE,
    AT_REST,
    DRAIN,
    has_ready_jobs,
    ready_in,
    ready_queues,
)

#: Queue `k` does not rest.
AWAKE = "(k.schedule_after IS NULL OR k.schedule_after <= now())"
#: The jobs of queue `k` have no constraints; they have some.
PLAIN, CONSTRAINED = "k.constraint_set IS NULL", "k.constraint_set IS NOT NULL"

# What a quota leaves is computed once for all queues of an instance. The queues of an instance are gathered in an
# array, so that the planner's estimate of their number does not matter.
_OPEN = """
    SELECT k.id AS queue, w.cohort, w.instance, k.platform, k.units, k.preferred, k.looks, w.pool, w.headroom{more}
    FROM (
        SELECT g.cohort, g.instance, g.members, i.pool, {headroom} AS headroom, i.name, i.managed,
            q.min_quota - q.usage AS below_minimum
        FROM (SELECT k.cohort, k.instance, array_agg(k) AS members FROM queues k
              WHERE k.id = ANY (ARRAY(SELECT queue FROM {waiting})) AND {which}
              GROUP BY k.cohort, k.instance) g
        JOIN instances i ON i.id = g.instance AND {undrained}
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.members) AS k
    WHERE {allowed}"""

_PRIORITIES = """
    WITH RECURSIVE ranks AS (
        (SELECT rank FROM jobs WHERE {of_queue} ORDER BY queue, rank LIMIT 1)
        UNION ALL
        SELECT following.rank FROM ranks z CROSS JOIN LATERAL (
            SELECT rank FROM jobs WHERE {of_queue} AND rank > z.rank ORDER BY queue, rank LIMIT 1) following
    )
    SELECT rank FROM ranks"""


def open_queues(waiting: str, *, which: str, more: str = "") -> str:
    """Return a query of the queues of CTE `waiting` whose instance's quota leaves enough units for one of their jobs.

    Further conditions on the queue `k` and on its instance `w` may be appended. which: a condition on `k`. The column
    `headroom` has the units that the quota leaves; null for any number. more: further columns, each with a comma before
    it; the instance's `w.name` and `w.managed`, and `w.below_minimum`, the units to its minimum, null without a quota.
    """
    undrained, allowed = DRAIN.of(instance="i"), predicates.QUOTA.of(job="k", headroom="w.headroom")
    return _OPEN.format(
        waiting=waiting, headroom=HEADROOM, which=which, undrained=undrained, allowed=allowed, more=more
    )


def ready_ranks(queue: str) -> str:
    """Return a query of the ranks of the ready jobs in a queue without constraints; one step along the index for
    each."""
    return _PRIORITIES.format(of_queue=f"queue = {queue} AND {predicates.READY_PLAIN}")


_HAS_JOBS = f"""EXISTS (
    SELECT FROM queues k WHERE k.instance = q.instance AND k.cohort = q.cohort AND {{which}}
        AND {has_ready_jobs("k")} OFFSET 0)"""
#: The instance of quota `q` has ready jobs without constraints in queues that do not rest.
HAS_AWAKE_JOBS = _HAS_JOBS.format(which=f"{PLAIN} AND {AWAKE}")
# Quotas of instances that are below their minimum although jobs of them wait.
_BELOW_MINIMUM = f"SELECT FROM quotas q WHERE q.usage < q.min_quota AND {_HAS_JOBS}"
PENDING_WORK = Statement(f"""
SELECT (SELECT CAST(extract(epoch FROM schedule_after - now()) AS float8) FROM jobs WHERE {AT_REST}
        ORDER BY schedule_after LIMIT 1) AS rest_seconds,
    EXISTS (SELECT FROM preference_waits WHERE until <= now()) AS preference_elapsed,
    EXISTS ({_BELOW_MINIMUM.format(which=PLAIN)}) AS below_minimum,
    EXISTS ({_BELOW_MINIMUM.format(which=CONSTRAINED)}) AS constrained_below_minimum,
    g.constrained,
    CASE WHEN g.constrained OR :quiet THEN {ANY_IN_FRONT} ELSE true END AS plain,
    (SELECT coalesce(sum(kept_units), 0)::integer FROM bots WHERE kept_units > 0) AS kept_units, {ANY_PAUSE} AS paused
FROM (SELECT {ANY_CONSTRAINED_READY} AS constrained OFFSET 0) g
""")


@dataclass(frozen=True)
class PendingWork:
    """The work that waits for assigners."""

    #: Until the first job that rests may start, from the beginning of the transaction; not above 0 if one may start
    #: now, None if none rests.
    rest_seconds: float | None
    #: Some job has waited for a preferred bot for as long as it should.
    preference_elapsed: bool
    #: An instance is below its minimum although plain jobs of it wait; although constrained jobs of it wait.
    below_minimum: bool
    constrained_below_minimum: bool
    #: There are ready constrained jobs.
    constrained: bool
    #: There are ready plain jobs; true without a look if there are no constrained ones and the pool is not quiet.
    plain: bool
    #: Units that bots keep for instances below their minimum.
    kept_units: int = 0
    #: A label or a task is paused.
    paused: bool = False

    @property
    def has_rested(self) -> bool:
        """Some job that rested may start now."""
        return self.rest_seconds is not None and self.rest_seconds <= 0

    @property
    def is_any(self) -> bool:
        """There may be something to place."""
        return self.plain or self.constrained or self.has_rested or self.preference_elapsed

    def with_ready(self, *, constrained: bool) -> "PendingWork":
        """Return what is pending after more jobs became ready, of any instance. constrained: some have constraints."""
        return replace(
            self,
            plain=True,
            constrained=self.constrained or constrained,
            constrained_below_minimum=self.constrained_below_minimum or constrained,
        )

    def without_constrained(self) -> "PendingWork":
        """Return what is pending beside constrained jobs."""
        return replace(self, constrained=False, constrained_below_minimum=False)


def pending_work(connection: Connection, *, quiet: bool) -> PendingWork:
    """Read whether there is anything to do: one statement, which on a quiet pool is all that an idle cycle executes.

    quiet: hardly any job was placed lately. Then a look at the front saves a pick for nothing, which costs the server
    three times as much. On a busy pool the look would step over the entries of jobs that have just started.
    """
    return PendingWork(*connection.execute(PENDING_WORK, {"quiet": quiet}).one())


#: The most jobs of one queue that are counted. Of longer queues each counts as one of this length.
MAX_COUNTED = 1000
WAITING_JOBS = Statement(f"""
WITH RECURSIVE {ready_queues("plain")}, {ready_queues("needy", constrained=True)}
SELECT k.cohort, k.units, t.terms, sum(n.jobs)::integer AS jobs
FROM queues k LEFT JOIN constraint_sets t ON t.id = k.constraint_set
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs FROM (SELECT FROM jobs WHERE {ready_in("k")} LIMIT :most) counted) n
WHERE k.id = ANY (ARRAY(SELECT queue FROM plain UNION ALL SELECT queue FROM needy))
GROUP BY k.cohort, k.units, t.id
""")


class WaitingJobs(NamedTuple):
    """Jobs of a cohort that take the same units and have the same constraints, and how many of them are ready.

    terms: the constraints as they are stored; None = none.
    """

    cohort: int
    units: int
    terms: Any
    jobs: int


def waiting_jobs(connection: Connection) -> list[WaitingJobs]:
    """Read how many jobs are ready, by what they take. The cost grows with the number of queues, and with their length
    up to `MAX_COUNTED`."""
    return [WaitingJobs._make(row) for row in connection.execute(WAITING_JOBS, {"most": MAX_COUNTED})]
