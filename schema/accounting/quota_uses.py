"""What monitoring asks of quotas: who uses what, what is free for whom, and which minimums are not met."""

from dataclasses import dataclass

from schema.accounting.quotas import LIMIT, Cooldown
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import ready_in

# Of pair `q` of instance `i`. A minimum that is not met for less than a minute is being seen to. Jobs that ask for more
# than a place may wait for that, and a queue that rests waits for other bots.
_UNMET = f"""CASE WHEN q.usage < q.min_quota AND NOT i.draining AND EXISTS (
            SELECT FROM (SELECT k.id, k.constraint_set
                         FROM queues k LEFT JOIN constraint_sets s ON s.id = k.constraint_set
                         WHERE k.cohort = q.cohort AND k.instance = q.instance AND k.units <= q.min_quota - q.usage
                             AND (k.schedule_after IS NULL OR k.schedule_after <= now())
                             AND (k.constraint_set IS NULL OR s.terms = '{{}}') OFFSET 0) k
            CROSS JOIN LATERAL (
                SELECT queued_at FROM jobs WHERE {ready_in("k")} ORDER BY queue, rank, queued_at, id LIMIT 1) first
            WHERE first.queued_at <= now() - interval '1 minute')
        THEN q.min_quota - q.usage ELSE 0 END"""

# The pairs are those of the oldest cohorts and instances, so that a new one displaces none. Free units that a bot keeps
# count for the instance that they are kept for only, and those of a bot that serves some instances for these only.
USE = Statement(f"""
WITH shown AS MATERIALIZED (
    SELECT q.*, sum(greatest(0, q.usage - q.min_quota)) OVER of_cohort AS above, sum(q.usage) OVER of_cohort AS counted
    FROM quotas q WINDOW of_cohort AS (PARTITION BY q.cohort) ORDER BY q.cohort, q.instance LIMIT :most
), taken AS MATERIALIZED (
    SELECT cohort, sum(in_use) AS units FROM bots WHERE in_use > 0 GROUP BY cohort
), room AS MATERIALIZED (
    SELECT cohort, instance, pool, kept_for, sum(open) AS open, sum(units - open) AS kept
    FROM (SELECT cohort, instance, pool, CASE WHEN kept_units > 0 THEN kept_for END AS kept_for,
              capacity - in_use AS units, greatest(0, capacity - in_use - kept_units) AS open
          FROM bots WHERE free) b
    GROUP BY cohort, instance, pool, kept_for
), measured AS MATERIALIZED (
    SELECT q.*, c.name AS cohort_name, i.name AS instance_name, e.evicted,
        greatest(0, coalesce(t.units, 0) - q.counted) AS uncounted, {_UNMET} AS unmet,
        coalesce(a.units, 0) + coalesce(o.units, 0) + coalesce(p.units, 0) + coalesce(k.units, 0) AS free
    FROM shown q JOIN cohorts c ON c.id = q.cohort JOIN instances i ON i.id = q.instance
    LEFT JOIN taken t ON t.cohort = q.cohort
    LEFT JOIN (SELECT cohort, sum(open) AS units FROM room
               WHERE instance IS NULL AND pool IS NULL GROUP BY cohort) a ON a.cohort = q.cohort
    LEFT JOIN (SELECT cohort, instance, sum(open) AS units FROM room
               GROUP BY cohort, instance) o ON o.cohort = q.cohort AND o.instance = q.instance
    LEFT JOIN (SELECT cohort, pool, sum(open) AS units FROM room
               GROUP BY cohort, pool) p ON p.cohort = q.cohort AND p.pool = i.pool
    LEFT JOIN (SELECT cohort, kept_for, sum(kept) AS units FROM room
               GROUP BY cohort, kept_for) k ON k.cohort = q.cohort AND k.kept_for = q.instance
    CROSS JOIN LATERAL (
        SELECT count(*) AS evicted FROM evictions e
        WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e
)
SELECT t.pairs, q.cohort_name AS cohort, q.instance_name AS instance, q.min_quota, q.max_quota, q.usage,
    {LIMIT} AS effective_max, q.free, q.above - greatest(0, q.usage - q.min_quota) AS lent, q.uncounted,
    q.evicted, CASE WHEN q.free < q.unmet THEN q.unmet ELSE 0 END AS unmet
FROM (SELECT count(*) AS pairs FROM quotas) t LEFT JOIN measured q ON true
ORDER BY q.cohort, q.instance
""")


@dataclass(frozen=True)
class QuotaUse:
    """What a quota is used for and what could be had for its instance at one moment, in units.

    free: free units of the cohort's healthy bots that serve the instance and keep them for no other.
    lent: units that the other instances with quotas in the cohort use above their minimums, on whatever bots.
    uncounted: units in use on the cohort's bots by instances without a quota there.
    evictions: of jobs of the instance in the cohort within the cooldown; a number of jobs.
    unmet: units that the instance lacks of its minimum, which are not free, while the first job of a queue of it, which
        asks for nothing but a place, has waited for a minute.
    """

    cohort: str
    instance: str
    min_quota: int
    max_quota: int | None
    usage: int
    effective_max: int | None
    free: int
    lent: int
    uncounted: int
    evictions: int
    unmet: int

    @property
    def opportunistic(self) -> int:
        """Units in use above the minimum, which preemption may take."""
        return max(0, self.usage - self.min_quota)

    @property
    def reclaimable(self) -> int:
        """Units that others use above their minimums; an instance without a quota has a minimum of 0."""
        return self.lent + self.uncounted

    @property
    def capacity_gap(self) -> int:
        """Units of the minimum that could not be had even if all others gave back what they use above theirs."""
        return max(0, self.min_quota - self.usage - self.free - self.reclaimable)


@dataclass(frozen=True)
class QuotaUses:
    """The pairs of cohort and instance that were read, and how many more have a quota."""

    pairs: list[QuotaUse]
    left_out: int


def quota_uses(connection: Connection, *, most: int, cooldown: Cooldown) -> QuotaUses:
    """Read up to `most` pairs in one statement, so that all figures are of one moment.

    It reads every quota and every bot once, and the first jobs of the instances below their minimums.
    """
    rows = connection.execute(USE, {"most": most, **cooldown.values()}).all()
    pairs = [
        QuotaUse(
            row.cohort,
            row.instance,
            row.min_quota,
            row.max_quota,
            row.usage,
            row.effective_max,
            int(row.free),
            int(row.lent),
            int(row.uncounted),
            row.evicted,
            row.unmet,
        )
        for row in rows
        if row.cohort is not None
    ]
    return QuotaUses(pairs, rows[0].pairs - len(pairs))
