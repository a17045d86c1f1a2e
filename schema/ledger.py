"""Quotas: how many units each instance may have in each cohort, and how many it has.

Usage is a counter on the quota's row. It changes in the two statements that begin and end leases and nowhere else, on
rows that are locked in one order, (cohort, instance), after bots, jobs and leases; whoever already holds such a row
takes others only if nobody else has them. An instance without a row in a cohort has no minimum and no maximum there,
and nothing is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, text

from schema.newest import newest_quota

#: Seconds for which an eviction lowers the maximum of the instance that was evicted (BuildGrid).
EVICTION_COOLDOWN = 600.0

# Each eviction of the instance within the cooldown takes one off its maximum, down to its minimum (BuildGrid). With 10,
# 4 and seven evictions it is 4.
_EFFECTIVE_MAX = "CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - {evicted}) END"
#: The effective maximum of quota `q`, NULL if there is none.
EFFECTIVE_MAX = _EFFECTIVE_MAX.format(
    evicted="""(
        SELECT count(*) FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
            AND e.at > now() - make_interval(secs => :cooldown))"""
)


class Guard(StrEnum):
    """Up to which limit a pass may bring an instance: its minimum, for those below it, or its effective maximum."""

    MIN = "min"
    MAX = "max"


#: The limit of a quota `q` under a guard, where `q.evicted` says how often it was evicted.
LIMIT = {Guard.MIN: "q.min_quota", Guard.MAX: _EFFECTIVE_MAX.format(evicted="q.evicted")}

#: What bots keep for queued jobs, each with its cohort and instance: as good as used, or others would take of the quota
#: what an eviction has freed.
KEPT = """
    SELECT j.cohort, j.instance, v.job_id, v.units FROM reservations v
    CROSS JOIN LATERAL (SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
    WHERE v.until >= now() AND v.until >= clock_timestamp()"""

#: The units that an instance may still be given, NULL for any number; `q` is its quota and `k` the sum of what is kept
#: for its jobs, or they are rows of nulls.
HEADROOM = {
    Guard.MIN: "coalesce(q.min_quota - q.usage - coalesce(k.units, 0), 0)",
    Guard.MAX: f"({EFFECTIVE_MAX}) - q.usage - coalesce(k.units, 0)",
}

LIMITED = text("SELECT EXISTS (SELECT FROM quotas WHERE max_quota IS NOT NULL)")
SHORT_AMONG = text(f"""
SELECT EXISTS (
    SELECT FROM (SELECT CAST(:cohort AS integer) AS cohort, unnest(CAST(:instances AS integer[])) AS instance) w
    CROSS JOIN LATERAL {newest_quota("w", columns="*")} q
    LEFT JOIN (SELECT cohort, instance, sum(units) AS units FROM ({KEPT}) kept GROUP BY cohort, instance) k
        ON k.cohort = q.cohort AND k.instance = q.instance
    WHERE q.max_quota IS NOT NULL AND {HEADROOM[Guard.MAX]} < :units)
""")
DRIFT = text("""
SELECT FROM quotas q
LEFT JOIN (SELECT cohort, instance, sum(units) AS units FROM leases
           WHERE state IN ('pending', 'active', 'cancelling') GROUP BY cohort, instance) l
    ON l.cohort = q.cohort AND l.instance = q.instance
WHERE q.usage <> coalesce(l.units, 0) LIMIT 1
""")
# Whoever has written leases has ended, and nobody writes any until we have ended.
ALONE = text("LOCK TABLE leases IN SHARE ROW EXCLUSIVE MODE")
# Whoever holds a quota without having written leases yet would wait for us: what it holds is left for the next time.
REPAIR = text("""
WITH wrong AS MATERIALIZED (
    SELECT q.cohort, q.instance, q.usage, coalesce(l.units, 0) AS live
    FROM quotas q
    LEFT JOIN (SELECT cohort, instance, sum(units) AS units FROM leases
               WHERE state IN ('pending', 'active', 'cancelling') GROUP BY cohort, instance) l
        ON l.cohort = q.cohort AND l.instance = q.instance
    WHERE q.usage <> coalesce(l.units, 0)
    ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q SKIP LOCKED
), mended AS (
    UPDATE quotas q SET usage = w.live FROM wrong w WHERE q.cohort = w.cohort AND q.instance = w.instance
)
SELECT c.name AS cohort, i.name AS instance, w.usage, w.live
FROM wrong w JOIN cohorts c ON c.id = w.cohort JOIN instances i ON i.id = w.instance
ORDER BY w.cohort, w.instance
""")


@dataclass(frozen=True)
class Drift:
    """A counter that is not the sum of the live leases that it counts."""

    cohort: str
    instance: str
    usage: int
    live: int


def anybody_limited(connection: Connection) -> bool:
    """Whether any instance has a maximum in any cohort."""
    return bool(connection.execute(LIMITED).scalar_one())


def short_among(connection: Connection, cohort: int, instances: Iterable[int], *, units: int, cooldown: float) -> bool:
    """Whether the maximum of any of these instances in the cohort leaves less than so many units."""
    values = {"cohort": cohort, "instances": sorted(instances), "units": units, "cooldown": cooldown}
    return bool(connection.execute(SHORT_AMONG, values).scalar_one())


def reconcile(connection: Connection) -> list[Drift]:
    """Compare every counter with the live leases in one snapshot; those that differ are repaired and come back.

    On a sound database there are none, and nothing is locked: a drift is an alarm, not a routine. One that was found is
    judged again once nobody else writes leases.
    """
    if connection.execute(DRIFT).first() is None:
        return []
    connection.execute(ALONE)
    return [Drift(row.cohort, row.instance, row.usage, int(row.live)) for row in connection.execute(REPAIR)]
