"""Queues: jobs that wait for the same kind of bot, one queue for each cohort, instance and requirement set."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema import predicates
from schema.accounting.quotas import KEPT
from schema.predicates import AT_REST, CONSTRAINED, DRAIN, DUE, IN_LINE, READY, RESTING


@dataclass(frozen=True)
class Queue:
    """Jobs that wait for the same kind of bot."""

    cohort: int
    instance: int
    platform: int


_WAITING = """{name} AS (
    (SELECT cohort, instance, platform FROM jobs WHERE {waiting}
     ORDER BY cohort, instance, platform LIMIT 1)
    UNION ALL
    SELECT following.cohort, following.instance, following.platform FROM {name} q CROSS JOIN LATERAL (
        SELECT cohort, instance, platform FROM jobs
        WHERE {waiting}
            AND (cohort, instance, platform) > (q.cohort, q.instance, q.platform)
        ORDER BY cohort, instance, platform LIMIT 1) following
)"""

# The queues that are open under a guard, each with the units that its instance may still be given; what a quota leaves
# is found once for all queues of an instance.
_OPEN = f"""
    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM ({KEPT}) each GROUP BY cohort, instance
    )
    SELECT w.cohort, w.instance, p.platform, w.pool, w.headroom FROM (
        SELECT g.cohort, g.instance, g.platforms, i.pool, {{headroom}} AS headroom
        FROM (SELECT cohort, instance, array_agg(platform) AS platforms FROM {{queues}} GROUP BY cohort, instance) g
        JOIN instances i ON i.id = g.instance AND {{undrained}}
        LEFT JOIN quotas q ON q.cohort = g.cohort AND q.instance = g.instance
        LEFT JOIN kept k ON k.cohort = g.cohort AND k.instance = g.instance
        OFFSET 0
    ) w CROSS JOIN LATERAL unnest(w.platforms) AS p (platform)
    WHERE {{allowed}}"""

_PRIORITIES = """
    WITH RECURSIVE priorities AS (
        (SELECT priority FROM jobs WHERE {of_queue} ORDER BY cohort, instance, platform, priority LIMIT 1)
        UNION ALL
        SELECT following.priority FROM priorities z CROSS JOIN LATERAL (
            SELECT priority FROM jobs WHERE {of_queue} AND priority > z.priority
            ORDER BY cohort, instance, platform, priority LIMIT 1) following
    )
    SELECT priority FROM priorities"""

# One step along the index for each size, and then into each of them: however many jobs do not fit, they cost nothing.
# An equal size would let the planner take an index in which the sizes are mixed.
_FITTING_JOBS = """
    WITH RECURSIVE sizes AS (
        (SELECT units FROM jobs WHERE {of_queue} AND units <= {units}
         ORDER BY cohort, instance, platform, units LIMIT 1)
        UNION ALL
        SELECT following.units FROM sizes z CROSS JOIN LATERAL (
            SELECT units FROM jobs WHERE {of_queue} AND units > z.units AND units <= {units}
            ORDER BY cohort, instance, platform, units LIMIT 1) following
    )
    SELECT fit.* FROM (SELECT units FROM sizes LIMIT :sizes) z CROSS JOIN LATERAL (
        SELECT id, priority, queued_at, considered FROM jobs
        WHERE {of_queue} AND units >= z.units AND units <= z.units
        ORDER BY cohort, instance, platform, units, priority, queued_at, id LIMIT {limit}) fit"""


def ready_queues(name: str) -> str:
    """A recursive CTE `name` of the queues that hold ready jobs.

    It takes one step along the index for each queue, however many jobs the queue holds.
    """
    return _WAITING.format(name=name, waiting=READY)


def backoff_queues(name: str) -> str:
    """The same of the queues that hold jobs in backoff."""
    return _WAITING.format(name=name, waiting=RESTING)


def constrained_queues(name: str) -> str:
    """The same of the queues that hold ready jobs which ask for more than a place."""
    return _WAITING.format(name=name, waiting=CONSTRAINED)


def open_queues(queues: str, headroom: str) -> str:
    """Those of `queues` whose instance may be given anything; a query to which further conditions on `w` may be added,
    a row with the cohort, the instance, its pool and the headroom."""
    undrained, allowed = DRAIN.of(instance="i"), predicates.open_instance("w.headroom")
    return _OPEN.format(queues=queues, headroom=headroom, undrained=undrained, allowed=allowed)


def fitting_jobs(queue: str, *, units: str, limit: str) -> str:
    """A query of the ready jobs of row `queue` that need at most `units`: the `limit` most urgent ones of each size."""
    return _FITTING_JOBS.format(of_queue=_same_queue(queue), units=units, limit=limit)


def ready_priorities(queue: str) -> str:
    """A query of the priorities that the ready jobs of row `queue` have, one step along the index for each."""
    return _PRIORITIES.format(of_queue=_same_queue(queue))


def _same_queue(queue: str) -> str:
    same = " AND ".join(f"{name} = {queue}.{name}" for name in ("cohort", "instance", "platform"))
    return f"{same} AND {READY}"


# What an assigner sees to beside its picks: one look, which nearly always finds nothing.


_OF_QUOTA = "EXISTS (SELECT FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND {jobs} OFFSET 0)"
#: Quotas `q` of instances that have less than their minimum although jobs of theirs wait: for a place alone, or at
#: gates.
BELOW_MINIMUM = f"""
    SELECT FROM quotas q WHERE q.usage < q.min_quota
        AND ({_OF_QUOTA.format(jobs=READY)} OR {_OF_QUOTA.format(jobs=RESTING)})"""
CONSTRAINED_BELOW_MINIMUM = f"SELECT FROM quotas q WHERE q.usage < q.min_quota AND {_OF_QUOTA.format(jobs=CONSTRAINED)}"
PENDING_WORK = text(f"""
SELECT EXISTS (SELECT FROM jobs WHERE {AT_REST} AND considered = 0 AND {DUE})
        OR EXISTS (SELECT FROM jobs WHERE {AT_REST} AND considered > 0 AND {DUE}) AS backoff_elapsed,
    EXISTS ({BELOW_MINIMUM}) AS below_minimum, EXISTS ({CONSTRAINED_BELOW_MINIMUM}) AS constrained_below_minimum,
    g.gated AS constrained,
    CASE WHEN g.gated THEN EXISTS (SELECT FROM jobs WHERE {IN_LINE}) ELSE true END AS plain
FROM (SELECT EXISTS (SELECT FROM jobs WHERE {CONSTRAINED}) AS gated OFFSET 0) g
""")


@dataclass(frozen=True)
class PendingWork:
    """`rested`: the wait of some job is over. `below`: some instance has less than its minimum, and jobs that wait for
    a place alone; `owed`: and such as ask for more. `gated`: there is a job that asks for more than a place;
    `ordinary`: if so, whether there is also one that does not."""

    backoff_elapsed: bool
    below_minimum: bool
    constrained_below_minimum: bool
    constrained: bool
    plain: bool


def pending_work(connection: Connection) -> PendingWork:
    """Whether there is anything to see to."""
    row = connection.execute(PENDING_WORK).one()
    return PendingWork(
        row.backoff_elapsed, row.below_minimum, row.constrained_below_minimum, row.constrained, row.plain
    )
