"""Queues: jobs that wait for the same kind of bot, one queue for each cohort, instance and requirement set."""

from dataclasses import dataclass

from schema import gates
from schema.gates import DRAIN, READY, RESTING
from schema.ledger import KEPT


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

# The queues that are open under a guard, each with the units that its instance may still be given.
_OPEN = f"""
    WITH kept AS MATERIALIZED (
        SELECT cohort, instance, sum(units) AS units FROM ({KEPT}) each GROUP BY cohort, instance
    )
    SELECT w.cohort, w.instance, w.platform, i.pool, {{headroom}} AS headroom
    FROM {{queues}} w
    JOIN instances i ON i.id = w.instance AND {{undrained}}
    LEFT JOIN quotas q ON q.cohort = w.cohort AND q.instance = w.instance
    LEFT JOIN kept k ON k.cohort = w.cohort AND k.instance = w.instance
    WHERE {{allowed}}"""

# One step along the index for each size, and then into each of them: however many jobs do not fit, they cost nothing.
# An equal size would let the planner take an index in which the sizes are mixed.
_FITTING = """
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


def resting_queues(name: str) -> str:
    """The same of the queues that hold jobs in backoff."""
    return _WAITING.format(name=name, waiting=RESTING)


def open_queues(queues: str, headroom: str) -> str:
    """Those of `queues` whose instance may be given anything; a query to which further conditions may be added."""
    undrained, allowed = DRAIN.of(instance="i"), gates.open_instance(headroom)
    return _OPEN.format(queues=queues, headroom=headroom, undrained=undrained, allowed=allowed)


def fitting(queue: str, *, units: str, limit: str) -> str:
    """A query of the ready jobs of row `queue` that need at most `units`: the `limit` most urgent ones of each size."""
    same = " AND ".join(f"{name} = {queue}.{name}" for name in ("cohort", "instance", "platform"))
    return _FITTING.format(of_queue=f"{same} AND {READY}", units=units, limit=limit)
