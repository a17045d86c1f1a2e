"""Shares: how much of the pool each instance is to have beside the others, and what it has had within the window.

An instance that asked for nothing for a while is not paid for that time: when it comes back, its usage counts as if it
had been served all the while like the least served of those that asked, and that forgets itself with the window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, text

from schema.accounting.counters import instance_counter
from schema.predicates import CONSTRAINED

Mode = Literal["waiting", "demand", "literal"]

#: Seconds within which it is not noted again that an instance asks for something.
DEMAND_INTERVAL = 10.0

# The lift of account `a` as it is now: it goes as the usage that it stands for would have gone.
_LIFT = """coalesce(a.lift * greatest(0, 1 - extract(epoch FROM now() - greatest(a.lifted_at, now()
    - make_interval(secs => :window)))::double precision / :window), 0)"""

CANDIDATES = text(f"""
SELECT i.id, i.name, coalesce(a.credit_weight, 1) AS weight, {_LIFT} AS lift,
    (SELECT coalesce(sum(jobs), 0) FROM (
        SELECT jobs FROM usage WHERE name = 'instance:' || i.name || '\\:cost' AND jobs > 0
            AND bucket > now() - make_interval(secs => :window)
        ORDER BY bucket DESC LIMIT :guarantee) latest) AS completed
FROM instances i LEFT JOIN accounts a ON a.instance = i.id
WHERE i.id = ANY (CAST(:instances AS integer[]))
""")
OTHERS = text(f"""
SELECT count(*) AS instances, coalesce(sum(coalesce(a.credit_weight, 1)), 0) AS weight,
    coalesce(sum(c.used::double precision + {_LIFT}), 0) AS used,
    :literal AND EXISTS (SELECT FROM counters WHERE name LIKE 'instance:%' AND name LIKE '%\\:slots'
        AND most IS NOT NULL) AS slotted
FROM counters c
JOIN instances i ON i.name = split_part(c.name, ':', 2) AND i.id <> ALL (CAST(:instances AS integer[]))
LEFT JOIN accounts a ON a.instance = i.id
WHERE c.name LIKE 'instance:%' AND c.name LIKE '%\\:cost' AND c.used > 0
""")

# Where all weights are zero they are equal. Whoever finds that another one notes it leaves it to that one.
RECORD_DEMAND = text(f"""
WITH due AS MATERIALIZED (
    SELECT a.instance, a.demand_at < now() - make_interval(secs => :idle) AS returned FROM accounts a
    WHERE a.instance = ANY (CAST(:instances AS integer[])) AND a.demand_at < now() - interval '{DEMAND_INTERVAL:g} s'
    ORDER BY a.instance FOR NO KEY UPDATE SKIP LOCKED
), standing AS MATERIALIZED (
    SELECT a.instance, a.demand_at >= now() - make_interval(secs => :idle) AS active,
        CASE WHEN max(a.credit_weight) OVER () > 0 THEN a.credit_weight ELSE 1 END AS weight,
        coalesce(c.used::double precision, 0) AS used, {_LIFT} AS lift
    FROM accounts a JOIN instances i ON i.id = a.instance
    LEFT JOIN counters c ON c.name = 'instance:' || i.name || '\\:cost'
    WHERE EXISTS (SELECT FROM due WHERE returned)
), floor AS MATERIALIZED (
    SELECT min((used + lift) / weight) AS level FROM standing WHERE active AND weight > 0
), noted AS (
    UPDATE accounts a SET demand_at = now(),
        lift = CASE WHEN d.returned THEN greatest(s.lift, coalesce(f.level * s.weight - s.used, 0)) ELSE a.lift END,
        lifted_at = CASE WHEN d.returned THEN now() ELSE a.lifted_at END
    FROM due d CROSS JOIN floor f LEFT JOIN standing s ON s.instance = d.instance
    WHERE a.instance = d.instance
)
SELECT a.instance FROM accounts a
WHERE a.instance = ANY (CAST(:instances AS integer[])) AND a.demand_at < now() - make_interval(secs => :idle)
    AND NOT EXISTS (SELECT FROM due d WHERE d.instance = a.instance)
""")
UNRECORDED_DEMAND = text(f"""
SELECT a.instance FROM accounts a JOIN instances i ON i.id = a.instance
WHERE a.demand_at < now() - interval '{DEMAND_INTERVAL:g} s' AND (
    EXISTS (SELECT FROM counters c WHERE c.name = 'instance:' || i.name || '\\:jobs' AND c.used > 0)
    OR EXISTS (SELECT FROM (SELECT id FROM cohorts OFFSET 0) c CROSS JOIN LATERAL (
        SELECT FROM jobs WHERE cohort = c.id AND instance = a.instance AND {CONSTRAINED}
        ORDER BY cohort, instance, platform, constraint_set LIMIT 1) j))
""")


class FairShareSettings(BaseModel):
    """How instances share the pool by their weights.

    rolling_window_hours: what was used longer ago is forgotten. Doubling it doubles the time for which an instance
        that took much has to stand back.
    min_task_guarantee: so many jobs of each instance, done or running, come before any weighing in each window; 0 =
        none.
    mode: `waiting` weighs each instance, and what it has used, among those that have jobs waiting alone, so that these
        share by their weights whatever the others weigh or have used; `demand` among those that have jobs waiting or
        usage in the window, with which an idle one that has used much lets the heaviest of the others have everything
        for a while; `literal` its weight among the former and its usage among the latter, and where any instance has
        slots, one without has none.
    budget_reserve: a job starts only if its estimate fits into what is left of a budget; false = while anything is
        left, so that the last one may overshoot.
    idle_after: seconds without a job that waits or runs after which an instance counts as having been away. Doubling
        it lets an instance be paid for pauses twice as long.
    budget, max_concurrent: of all jobs of managed instances, and of jobs with terms of others, together; unset = as it
        is in the database.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rolling_window_hours: float = Field(default=24.0, ge=0.05, le=24 * 365)
    min_task_guarantee: int = Field(default=1, ge=0, le=1000)
    mode: Mode = "waiting"
    budget_reserve: bool = True
    idle_after: float = Field(default=60.0, ge=30, le=86400)
    budget: float | None = Field(default=None, ge=0, le=1e12)
    max_concurrent: int | None = Field(default=None, ge=0, le=1_000_000_000)

    @property
    def window(self) -> float:
        """The rolling window, seconds."""
        return self.rolling_window_hours * 3600.0


@dataclass(frozen=True)
class Share:
    """An instance that has jobs waiting. `lift`: what counts as used beside what was; `completed`: jobs within the
    window, counted up to the guarantee."""

    name: str
    weight: float = 1.0
    lift: float = 0.0
    completed: int = 0

    @cached_property
    def cost(self) -> str:
        """The counter of what it uses."""
        return instance_counter(self.name, "cost")

    @cached_property
    def jobs(self) -> str:
        """The counter of its jobs that run."""
        return instance_counter(self.name, "jobs")


@dataclass(frozen=True)
class Shares:
    """The instances that have jobs waiting, by id, and what all others that have used anything weigh and have used,
    which is not looked up where it does not count (mode `waiting`).

    `slotted`: some instance has slots, so that one without has none (mode `literal`).
    """

    of: Mapping[int, Share]
    others: int = 0
    others_weight: float = 0.0
    others_used: float = 0.0
    guarantee: int = 1
    mode: Mode = "waiting"
    slotted: bool = False


def read_shares(connection: Connection, instances: Sequence[int], settings: FairShareSettings) -> Shares:
    """The shares of these instances, which have jobs waiting, and of the others."""
    where = {"instances": list(instances), "window": settings.window}
    rows = connection.execute(CANDIDATES, where | {"guarantee": settings.min_task_guarantee}).all()
    of = {row.id: Share(row.name, row.weight, row.lift, int(row.completed)) for row in rows}
    if settings.mode == "waiting":
        return Shares(of, guarantee=settings.min_task_guarantee)
    others = connection.execute(OTHERS, where | {"literal": settings.mode == "literal"}).one()
    return Shares(
        of,
        others.instances,
        others.weight,
        others.used,
        settings.min_task_guarantee,
        settings.mode,
        others.slotted,
    )


def record_demand(connection: Connection, instances: Sequence[int], settings: FairShareSettings) -> set[int]:
    """These instances have jobs waiting or running; those that come back after a while start from where the least
    served is. Returns the ones that somebody else is noting at this moment, whose jobs had better wait for it."""
    where = {"instances": list(instances), "window": settings.window, "idle": settings.idle_after}
    return {row.instance for row in connection.execute(RECORD_DEMAND, where)}


def unrecorded_demand(connection: Connection) -> list[int]:
    """The managed instances that have jobs waiting or running and of which that has not been noted just now."""
    return [row.instance for row in connection.execute(UNRECORDED_DEMAND)]
