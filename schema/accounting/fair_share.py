"""Fair share: the weight of each instance, its usage within the rolling window, and when it last had jobs.

An instance earns nothing while it has no jobs, or only jobs that nobody can run. When it returns, its usage is lifted
to the level of the least served of those instances that have been starting jobs, relative to their weights. An instance
that starts nothing is not compared with, because its level stays where it is. The lift fades within the rolling window,
as usage does.

The level of an instance is (usage + lift) / weight. When its weight is changed, the lift changes too, below 0 if need
be, so that the instance keeps its level, or gets that of the least served if this is lower. Otherwise it would take
everything, or nothing, until its usage fits the new weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from schema.accounting.counters import Counter, instance_counter
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

Mode = Literal["waiting", "demand", "literal"]

#: Seconds between two records of demand of one instance.
DEMAND_INTERVAL = 10.0

# The current lift of account `a`. It falls evenly to 0 within the window, as real usage would leave the window.
_LIFT = """coalesce(a.lift * greatest(0, 1 - extract(epoch FROM now() - greatest(a.lifted_at, now()
    - make_interval(secs => :window)))::double precision / :window), 0)"""

# One look at everything that is stored of an instance. What it has completed is not read if it runs its guaranteed
# number of jobs, unless only completed jobs count.
_COUNTER = "(SELECT used, most, slots FROM counters WHERE name = 'instance:' || i.name || '\\:{}' OFFSET 0)"
CANDIDATES = Statement(f"""
SELECT i.id, i.name, coalesce(a.credit_weight, 1) AS weight, {_LIFT} AS lift,
    coalesce(a.credit_weight <> a.lift_weight, false) AS is_reweighed,
    CASE WHEN :literal OR j.used IS NULL OR j.used < :guarantee THEN (
        SELECT coalesce(sum(jobs), 0) FROM (
            SELECT jobs FROM usage WHERE name = 'instance:' || i.name || '\\:cost' AND jobs > 0
                AND bucket > now() - make_interval(secs => :window)
            ORDER BY bucket DESC LIMIT :guarantee) latest) ELSE 0 END AS completed,
    c.used::double precision, c.most::double precision,
    j.used::double precision, j.most::double precision, j.slots::double precision
FROM instances i LEFT JOIN accounts a ON a.instance = i.id
LEFT JOIN LATERAL {_COUNTER.format("cost")} c ON true
LEFT JOIN LATERAL {_COUNTER.format("jobs")} j ON true
WHERE i.id = ANY (CAST(:instances AS integer[]))
""")
OTHERS = Statement(f"""
SELECT count(*) AS instances, coalesce(sum(coalesce(a.credit_weight, 1)), 0) AS weight,
    coalesce(sum(c.used::double precision + {_LIFT}), 0) AS used,
    :literal AND EXISTS (SELECT FROM counters WHERE name LIKE 'instance:%' AND slots IS NOT NULL) AS slotted
FROM counters c
JOIN instances i ON i.name = split_part(c.name, ':', 2) AND i.id <> ALL (CAST(:instances AS integer[]))
LEFT JOIN accounts a ON a.instance = i.id
WHERE c.name LIKE 'instance:%' AND c.name LIKE '%\\:cost' AND c.used > 0
""")

# If all weights are zero, they count as equal. An account whose row another transaction holds is being recorded there:
# it is skipped, and its instance is returned if it counts as away.
RECORD_DEMAND = Statement(f"""
WITH due AS MATERIALIZED (
    SELECT a.instance, a.credit_weight <> a.lift_weight AS is_reweighed,
        a.demand_at < now() - make_interval(secs => :idle) AS returned
    FROM accounts a WHERE a.instance = ANY (CAST(:instances AS integer[]))
        AND (a.demand_at < now() - interval '{DEMAND_INTERVAL:g} s' OR a.credit_weight <> a.lift_weight)
    ORDER BY a.instance FOR NO KEY UPDATE SKIP LOCKED
), standing AS MATERIALIZED (
    SELECT a.instance, j.charged_at AS started_at, nullif(a.lift_weight, 0) AS lift_weight,
        a.demand_at >= now() - make_interval(secs => :idle) AND a.credit_weight = a.lift_weight AS active,
        CASE WHEN max(a.credit_weight) OVER () > 0 THEN a.credit_weight ELSE 1 END AS weight,
        coalesce(c.used::double precision, 0) AS used, {_LIFT} AS lift
    FROM accounts a JOIN instances i ON i.id = a.instance
    LEFT JOIN counters c ON c.name = 'instance:' || i.name || '\\:cost'
    LEFT JOIN counters j ON j.name = 'instance:' || i.name || '\\:jobs'
    WHERE EXISTS (SELECT FROM due WHERE returned OR is_reweighed)
), floor AS MATERIALIZED (
    SELECT min((used + lift) / weight) AS level FROM standing
    WHERE active AND weight > 0
        AND started_at >= (SELECT max(started_at) FROM standing WHERE active) - make_interval(secs => :idle)
), noted AS (
    UPDATE accounts a SET demand_at = now(), lift_weight = a.credit_weight,
        lift = CASE
            WHEN d.returned AND d.is_reweighed THEN coalesce(f.level * s.weight - s.used, 0)
            WHEN d.returned THEN greatest(s.lift, coalesce(f.level * s.weight - s.used, 0))
            WHEN d.is_reweighed THEN
                coalesce(least((s.used + s.lift) / s.lift_weight, f.level) * s.weight - s.used, 0)
            ELSE a.lift END,
        lifted_at = CASE WHEN d.returned OR d.is_reweighed THEN now() ELSE a.lifted_at END
    FROM due d CROSS JOIN floor f LEFT JOIN standing s ON s.instance = d.instance
    WHERE a.instance = d.instance
)
SELECT a.instance FROM accounts a
WHERE a.instance = ANY (CAST(:instances AS integer[])) AND a.demand_at < now() - make_interval(secs => :idle)
    AND NOT EXISTS (SELECT FROM due d WHERE d.instance = a.instance)
""")


class FairShareSettings(BaseModel):
    """How instances share the pool by their weights.

    rolling_window_hours: older usage does not count. Doubling it doubles the time for which an instance that used much
        has to wait behind others.
    min_task_guarantee: in each window, this many jobs of each instance (done or running) start before weights count;
        0 = none.
    mode: the instances among which weight and usage of an instance are compared.
        `waiting`: only instances with waiting jobs. They share by their weights, whatever others weigh or have used.
        `demand`: instances with waiting jobs, or with usage in the window. An idle instance that has used much then
        lets the heaviest of the others have everything for a while.
        `literal`: as AgentQueue. Weight as in `waiting`, usage as in `demand`. If any instance has slots, an instance
        without slots may run nothing. Only completed jobs count for the guarantee. What a cycle starts counts as usage
        from the next cycle on.
    budget_reserve: true = a job starts only if its estimate fits into the rest of the budget; false = while anything
        of the budget is left, so that the last job may exceed it.
    idle_after: seconds without a running job, or a waiting one that some bot could run, after which an instance counts
        as away. Doubling it lets an
        instance earn through pauses twice as long.
    budget, max_concurrent: limits on all constrained jobs of the pool together; unset = the value in the database
        stays.
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


class Share(NamedTuple):
    """An instance with waiting jobs.

    lift: the amount that counts as used in addition to real usage. completed: its jobs that completed within the
    window, counted up to the guarantee; 0 if it runs enough jobs without them. is_reweighed: its weight has changed
    since its lift was stored.
    """

    name: str
    weight: float = 1.0
    lift: float = 0.0
    completed: int = 0
    is_reweighed: bool = False

    @property
    def cost(self) -> str:
        """The name of the counter of its cost."""
        return instance_counter(self.name, "cost")

    @property
    def jobs(self) -> str:
        """The name of the counter of its running jobs."""
        return instance_counter(self.name, "jobs")


@dataclass(frozen=True)
class Shares:
    """The instances with waiting jobs, by id, and totals of all others with usage.

    others, others_weight, others_used: number, weight and usage of the others. They are 0 in the mode `waiting`, which
        does not read them.
    slotted: some instance has slots, so that an instance without slots may run nothing (mode `literal`).
    counters: what the instances with waiting jobs use of cost, jobs and slots, by the name of the counter.
    """

    of: Mapping[int, Share]
    others: int = 0
    others_weight: float = 0.0
    others_used: float = 0.0
    guarantee: int = 1
    mode: Mode = "waiting"
    slotted: bool = False
    counters: Mapping[str, Counter] = field(default_factory=dict)


def read_shares(connection: Connection, instances: Sequence[int], settings: FairShareSettings) -> Shares:
    """Read the shares and counters of these instances, which have waiting jobs, and the totals of the others."""
    where = {"instances": list(instances), "window": settings.window, "literal": settings.mode == "literal"}
    of, counters = dict[int, Share](), dict[str, Counter]()
    rows = connection.execute(CANDIDATES, where | {"guarantee": settings.min_task_guarantee})
    for instance, name, weight, lift, is_reweighed, completed, cost, budget, jobs, most, slots in rows:
        of[instance] = Share(name, weight, lift, completed, is_reweighed)
        counters[instance_counter(name, "cost")] = Counter(cost or 0.0, budget)
        counters[instance_counter(name, "jobs")] = Counter(jobs or 0.0, most)
        if slots is not None:
            counters[instance_counter(name, "slots")] = Counter(jobs, slots)
    if settings.mode == "waiting":
        return Shares(of, guarantee=settings.min_task_guarantee, counters=counters)
    others = connection.execute(OTHERS, where).one()
    return Shares(
        of,
        others.instances,
        others.weight,
        others.used,
        settings.min_task_guarantee,
        settings.mode,
        others.slotted,
        counters,
    )


def record_demand(connection: Connection, instances: Sequence[int], settings: FairShareSettings) -> set[int]:
    """Record that these instances have jobs, at most every 10 s for each; lift those that return or are reweighed.

    Returns the instances that another transaction is recording as returned at this moment. Their jobs should wait
    until their lift is stored.
    """
    where = {"instances": list(instances), "window": settings.window, "idle": settings.idle_after}
    return {row.instance for row in connection.execute(RECORD_DEMAND, where)}


def jain_index(values: Iterable[float]) -> float | None:
    """Jain's index of fairness: 1 = equal values, 1/n = one of n has everything, None = every value is 0.

    It is the squared sum of the values over n times the sum of their squares (Jain, Chiu and Hawe, 1984).
    """
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares > 0 else None
