"""Quotas: how many units each instance may have in each cohort, and how many it has.

Usage is a counter on the quota's row. It changes in the two statements that begin and end leases and nowhere else, on
rows that are locked in one order, (cohort, instance), after bots, jobs and leases; whoever already holds such a row
takes others only if nobody else has them. An instance without a row in a cohort has no minimum and no maximum there,
and nothing is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, text

from schema import audit
from schema.errors import BadInput, NotFound
from schema.postgres.fragments import newest_quota
from schema.postgres.notify import wake
from schema.validation import check_name, escaped

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
LOCK_LEASES = text("LOCK TABLE leases IN SHARE ROW EXCLUSIVE MODE")
# Whoever holds a quota without having written leases yet would wait for us: what it holds is left for the next time.
REPAIR_QUOTAS = text("""
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
class QuotaDrift:
    """A counter that is not the sum of the live leases that it counts."""

    cohort: str
    instance: str
    usage: int
    live: int


def any_maximum(connection: Connection) -> bool:
    """Whether any instance has a maximum in any cohort."""
    return bool(connection.execute(LIMITED).scalar_one())


def any_short_of_quota(
    connection: Connection, cohort: int, instances: Iterable[int], *, units: int, cooldown: float
) -> bool:
    """Whether the maximum of any of these instances in the cohort leaves less than so many units."""
    values = {"cohort": cohort, "instances": sorted(instances), "units": units, "cooldown": cooldown}
    return bool(connection.execute(SHORT_AMONG, values).scalar_one())


def reconcile_quotas(connection: Connection) -> list[QuotaDrift]:
    """Compare every counter with the live leases in one snapshot; those that differ are repaired and come back.

    On a sound database there are none, and nothing is locked: a drift is an alarm, not a routine. One that was found is
    judged again once nobody else writes leases.
    """
    if connection.execute(DRIFT).first() is None:
        return []
    connection.execute(LOCK_LEASES)
    return [QuotaDrift(row.cohort, row.instance, row.usage, int(row.live)) for row in connection.execute(REPAIR_QUOTAS)]


# What operators set: the quota of an instance in a cohort. Every change is audited in its own transaction.


#: The largest quota, in units.
MAX_QUOTA = 1_000_000_000

_INSTANCE = text("SELECT intern_instance(:instance)")
_COHORT = text("SELECT id FROM cohorts WHERE name = :cohort FOR KEY SHARE")
_FOUND = text(
    "SELECT min_quota, max_quota FROM quotas WHERE cohort = :cohort AND instance = :instance FOR NO KEY UPDATE"
)
_CHANGE = text("""
UPDATE quotas SET min_quota = :minimum, max_quota = :maximum WHERE cohort = :cohort AND instance = :instance
""")
_CREATE = text("""
INSERT INTO quotas (cohort, instance, min_quota, max_quota, usage)
SELECT :cohort, :instance, :minimum, :maximum, coalesce(sum(l.units), 0) FROM leases l
WHERE l.cohort = :cohort AND l.instance = :instance AND l.state IN ('pending', 'active', 'cancelling')
""")
_REMOVE = text("""
DELETE FROM quotas
WHERE cohort = (SELECT id FROM cohorts WHERE name = :cohort)
    AND instance = (SELECT id FROM instances WHERE name = :instance)
RETURNING min_quota, max_quota
""")
_LIST = text(f"""
SELECT c.name AS cohort, i.name AS instance, q.min_quota, q.max_quota, q.usage, ({EFFECTIVE_MAX}) AS effective_max
FROM quotas q JOIN cohorts c ON c.id = q.cohort JOIN instances i ON i.id = q.instance
ORDER BY c.position, c.name, i.name
""")


@dataclass(frozen=True)
class Quota:
    """One row for an operator; a maximum of None is no maximum. `effective_max` is what evictions have left of it."""

    cohort: str
    instance: str
    min_quota: int
    max_quota: int | None
    usage: int
    effective_max: int | None


def set_quota(
    connection: Connection,
    cohort: str,
    instance: str,
    *,
    minimum: int,
    maximum: int | None,
    actor: str,
    reason: str = "",
) -> None:
    """Give the instance this minimum and maximum, in units, in the cohort; a maximum of None is none.

    Takes effect with the next grant. A maximum below the usage stops nothing: nothing new starts until the usage has
    fallen below it. The first quota of an instance in a cohort waits until every transaction that has written leases
    has ended, because its counter begins with what they hold. Raises NotFound for an unknown cohort and BadInput for a
    minimum above the maximum or out of range.
    """
    _check(minimum, maximum)
    key = _key(connection, cohort, instance)
    before = _held(connection, key)
    values = {**key, "minimum": minimum, "maximum": maximum}
    connection.execute(_CREATE if before is None else _CHANGE, values)
    audit.write(
        connection,
        "quota.set",
        actor=actor,
        subject=f"quota:{cohort}/{instance}",
        details={
            "before": None if before is None else {"min": before.min_quota, "max": before.max_quota},
            "after": {"min": minimum, "max": maximum},
            "reason": reason,
        },
    )
    wake(connection, "jobs")


def limits_of(connection: Connection, cohort: str, instance: str) -> tuple[int, int | None]:
    """The minimum and the maximum of the instance in the cohort, held until this transaction ends; none if unset.
    Raises NotFound for an unknown cohort."""
    found = _held(connection, _key(connection, cohort, instance))
    return (0, None) if found is None else (found.min_quota, found.max_quota)


def remove_quota(connection: Connection, cohort: str, instance: str, *, actor: str, reason: str = "") -> None:
    """Let the instance have any number of units in the cohort. Raises NotFound if it has no quota there."""
    before = connection.execute(_REMOVE, {"cohort": cohort, "instance": instance}).one_or_none()
    if before is None:
        raise NotFound(f"quota: '{escaped(instance, 63)}' has none in cohort '{escaped(cohort, 63)}'")
    audit.write(
        connection,
        "quota.rm",
        actor=actor,
        subject=f"quota:{cohort}/{instance}",
        details={"before": {"min": before.min_quota, "max": before.max_quota}, "after": None, "reason": reason},
    )
    wake(connection, "jobs")


def quotas(connection: Connection, *, cooldown: float = EVICTION_COOLDOWN) -> list[Quota]:
    """Every quota, by cohort and instance."""
    return [Quota(**row._mapping) for row in connection.execute(_LIST, {"cooldown": cooldown})]


def _check(minimum: int, maximum: int | None) -> None:
    for field, value in (("min", minimum), ("max", maximum)):
        if value is not None and not 0 <= value <= MAX_QUOTA:
            raise BadInput(field, f"must be between 0 and {MAX_QUOTA}")
    if maximum is not None and minimum > maximum:
        raise BadInput("min", f"must not be more than the maximum of {maximum}")


def _held(connection: Connection, key: dict[str, int]) -> Row[Any] | None:
    """The quota's limits, locked; if it has none yet, nobody else gives it one until this transaction ends."""
    before = connection.execute(_FOUND, key).one_or_none()
    if before is None:
        connection.execute(LOCK_LEASES)
        before = connection.execute(_FOUND, key).one_or_none()
    return before


def _key(connection: Connection, cohort: str, instance: str) -> dict[str, int]:
    found = connection.execute(_COHORT, {"cohort": cohort}).scalar_one_or_none()
    if found is None:
        raise NotFound(f"cohort: no cohort '{escaped(cohort, 63)}'")
    check_name("instance", instance)
    return {"cohort": found, "instance": connection.execute(_INSTANCE, {"instance": instance}).scalar_one()}


# The units of each bot that are in use or reserved, and its number of live leases: copies of what these leases and its
# reservations say.
#
# They change together, on the bot's locked row, wherever a lease or a reservation begins or ends. A copy that is too
# high leaves a bot idle, one that is too low gives it more than it can hold, or hides its oldest lease from it.


# Whoever begins or ends leases or reservations of a bot holds its row; such a bot is left for the next time.
LOCK_CAPACITY = text("""
SELECT b.id FROM bots b
LEFT JOIN (SELECT bot_id, sum(units) AS units, count(*) AS leases FROM live GROUP BY bot_id) l ON l.bot_id = b.id
LEFT JOIN (SELECT bot_id, sum(units) AS units FROM reservations GROUP BY bot_id) r ON r.bot_id = b.id
WHERE b.in_use <> coalesce(l.units, 0) OR b.held <> coalesce(l.leases, 0) OR b.reserved <> coalesce(r.units, 0)
ORDER BY b.id FOR NO KEY UPDATE OF b SKIP LOCKED
""")
# Judged again on the locked rows: the query before this one may have seen a row newer than the leases.
REPAIR_CAPACITY = text("""
WITH wrong AS MATERIALIZED (
    SELECT b.id, b.name, b.in_use, b.held, b.reserved, s.leased, s.leases, s.kept FROM bots b
    CROSS JOIN LATERAL (SELECT
        (SELECT coalesce(sum(l.units), 0) FROM live l WHERE l.bot_id = b.id) AS leased,
        (SELECT count(*) FROM live l WHERE l.bot_id = b.id) AS leases,
        (SELECT coalesce(sum(r.units), 0) FROM reservations r WHERE r.bot_id = b.id) AS kept) s
    WHERE b.id = ANY (CAST(:bot_ids AS bigint[])) AND (b.in_use, b.held, b.reserved) <> (s.leased, s.leases, s.kept)
), mended AS (
    UPDATE bots b SET in_use = w.leased, held = w.leases, reserved = w.kept, capacity = greatest(b.capacity, w.leased)
    FROM wrong w WHERE b.id = w.id
)
SELECT name, in_use, leased, held, leases, reserved, kept FROM wrong ORDER BY id
""")


@dataclass(frozen=True)
class CapacityDrift:
    """A bot whose `in_use` is not `leased`, the units of its live leases, whose `held` is not their number, `leases`,
    or whose `reserved` is not `kept`, the units of its reservations."""

    bot: str
    in_use: int
    leased: int
    held: int
    leases: int
    reserved: int
    kept: int


def reconcile_capacity(connection: Connection) -> list[CapacityDrift]:
    """Compare the units of every bot with its live leases and reservations; those that differ are repaired and come
    back.

    On a sound database there are none, and nothing is locked: a drift is an alarm, not a routine.
    """
    bot_ids = [row.id for row in connection.execute(LOCK_CAPACITY)]
    if not bot_ids:
        return []
    found = connection.execute(REPAIR_CAPACITY, {"bot_ids": bot_ids})
    return [
        CapacityDrift(row.name, row.in_use, int(row.leased), row.held, row.leases, row.reserved, int(row.kept))
        for row in found
    ]
