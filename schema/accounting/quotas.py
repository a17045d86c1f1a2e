"""Quotas: how many units each instance may use and uses in each cohort, and repair of such totals.

Usage is stored on the quota's row. Only the transactions that begin and end leases change it. They lock quota rows in
the order (cohort, instance), after bots, jobs and leases. A transaction that already holds a quota row skips further
rows that others hold. An instance without a quota in a cohort has no minimum and no maximum there, and its usage is not
counted.

Each bot's row stores the units of its live leases and their number. These totals change together, on the locked row,
wherever a lease begins or ends. A total that is too high leaves a bot idle. One that is too low gives a bot more than
it can hold, or hides its oldest lease from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_quota
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.validation import check_name


@dataclass(frozen=True)
class Cooldown:
    """What evictions do to the maximum of the instance that lost the jobs, in one cohort.

    seconds: for so long each of them lowers it by one, but not below the minimum (as in BuildGrid). With a maximum of
    10, a minimum of 4 and seven evictions it is 4.
    literal: also while nobody else wants what it leaves idle, as in BuildGrid. Otherwise the maximum is lowered only
    while it is contended: another instance has a job waiting in the cohort, in a queue that does not rest, and is below
    its own maximum, lowered by its own evictions. So of two lowered instances neither holds the other up.
    """

    seconds: float = 600.0
    literal: bool = False

    def values(self) -> dict[str, Any]:
        """Return the parameters of the queries."""
        return {"cooldown": self.seconds, "literal": self.literal}


EVICTION_COOLDOWN = Cooldown()

_EFFECTIVE_MAX = "CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - {evicted}) END"
# Only where evictions are counted is it asked whether others wait, which takes a step for each queue with ready jobs.
_IN_FORCE = """CASE WHEN {evicted} > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN {evicted} ELSE 0 END"""
#: The effective maximum of quota `q`, NULL if there is none.
EFFECTIVE_MAX = _EFFECTIVE_MAX.format(
    evicted=f"""(
        SELECT {_IN_FORCE.format(evicted="e.evicted")} FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)"""
)
#: The same of a row `q` that has the number of its evictions within the cooldown, `q.evicted`.
LIMIT = _EFFECTIVE_MAX.format(evicted=_IN_FORCE.format(evicted="q.evicted"))

#: The units that an instance with quota `q`, which may be a row of nulls, may still receive; NULL = unlimited.
HEADROOM = f"({EFFECTIVE_MAX}) - q.usage"

#: Units that are being freed on bots, with the cohort and the instance that they are kept for. Once all that a bot
#: keeps is free, its units are not among them any more.
BEING_FREED = """
    SELECT cohort, kept_for AS instance, sum(kept_units) AS units FROM bots
    WHERE kept_units > 0 AND kept_units > capacity - in_use GROUP BY cohort, kept_for"""

LIMITED = Statement("SELECT EXISTS (SELECT FROM quotas WHERE max_quota IS NOT NULL)")
SHORT_AMONG = Statement(f"""
SELECT EXISTS (
    SELECT FROM (SELECT CAST(:cohort AS integer) AS cohort, unnest(CAST(:instances AS integer[])) AS instance) w
    CROSS JOIN LATERAL {newest_quota("w", columns="*")} q
    WHERE q.max_quota IS NOT NULL AND {HEADROOM} < :units)
""")
DRIFT = Statement("""
SELECT FROM quotas q
LEFT JOIN (SELECT cohort, instance, sum(units) AS units FROM leases
           WHERE state IN ('pending', 'active', 'cancelling') GROUP BY cohort, instance) l
    ON l.cohort = q.cohort AND l.instance = q.instance
WHERE q.usage <> coalesce(l.units, 0) LIMIT 1
""")
# Waits for every transaction that has written leases, and lets no other write any until this transaction ends.
LOCK_LEASES = Statement("LOCK TABLE leases IN SHARE ROW EXCLUSIVE MODE")
# A transaction that holds a quota and has not yet written leases would wait for this one, so that waiting for its row
# would be a deadlock. Its quota is skipped until the next round.
REPAIR_QUOTAS = Statement("""
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
    """A quota whose stored `usage` was not `live`, the units of its live leases."""

    cohort: str
    instance: str
    usage: int
    live: int


def any_maximum(connection: Connection) -> bool:
    """True if any instance has a maximum in any cohort."""
    return bool(connection.execute(LIMITED).scalar_one())


def any_short_of_quota(
    connection: Connection, cohort: int, instances: Iterable[int], *, units: int, cooldown: Cooldown
) -> bool:
    """True if any of these instances has less than `units` left below its maximum in the cohort."""
    values = {"cohort": cohort, "instances": sorted(instances), "units": units, **cooldown.values()}
    return bool(connection.execute(SHORT_AMONG, values).scalar_one())


def reconcile_quotas(connection: Connection) -> list[QuotaDrift]:
    """Compare the usage of every quota with the live leases; repair and return those that differ.

    On a sound database none differs and nothing is locked. A drift is a defect, not routine. If the first look finds
    one, leases are locked and the comparison is repeated before the repair.
    """
    if connection.execute(DRIFT).first() is None:
        return []
    connection.execute(LOCK_LEASES)
    return [QuotaDrift(row.cohort, row.instance, row.usage, int(row.live)) for row in connection.execute(REPAIR_QUOTAS)]


# Quotas as operators set them. Every change is audited in its own transaction.


#: The largest quota, in units.
MAX_QUOTA = 1_000_000_000

# Rows are locked in the order in which all lock them.
_COHORTS = Statement("""
SELECT id, name FROM cohorts WHERE name = ANY (CAST(:names AS text[])) ORDER BY id FOR KEY SHARE
""")
_INSTANCES = Statement("SELECT name, intern_instance(name) AS id FROM unnest(CAST(:names AS text[])) AS w (name)")
_FOUND = Statement("""
SELECT q.cohort, q.instance, q.min_quota, q.max_quota
FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[])) AS w (cohort, instance)
JOIN quotas q ON q.cohort = w.cohort AND q.instance = w.instance
ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q
""")
_WANTED = """unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:minimums AS integer[]),
    CAST(:maximums AS integer[])) AS w (cohort, instance, min_quota, max_quota)"""
_CHANGE = Statement(f"""
UPDATE quotas q SET min_quota = w.min_quota, max_quota = w.max_quota FROM {_WANTED}
WHERE q.cohort = w.cohort AND q.instance = w.instance
""")
_CREATE = Statement(f"""
INSERT INTO quotas (cohort, instance, min_quota, max_quota, usage)
SELECT w.cohort, w.instance, w.min_quota, w.max_quota, coalesce(l.units, 0) FROM {_WANTED}
LEFT JOIN (
    SELECT cohort, instance, sum(units) AS units FROM leases
    WHERE instance = ANY (CAST(:instances AS integer[])) AND state IN ('pending', 'active', 'cancelling')
    GROUP BY cohort, instance) l ON l.cohort = w.cohort AND l.instance = w.instance
""")
_REMOVE = Statement("""
WITH held AS MATERIALIZED (
    SELECT q.cohort, q.instance, c.name AS cohort_name, i.name AS instance_name
    FROM unnest(CAST(:cohorts AS text[]), CAST(:instances AS text[])) AS w (cohort, instance)
    JOIN cohorts c ON c.name = w.cohort JOIN instances i ON i.name = w.instance
    JOIN quotas q ON q.cohort = c.id AND q.instance = i.id
    ORDER BY q.cohort, q.instance FOR UPDATE OF q
)
DELETE FROM quotas q USING held h WHERE q.cohort = h.cohort AND q.instance = h.instance
RETURNING h.cohort_name AS cohort, h.instance_name AS instance, q.min_quota, q.max_quota
""")
_LIST = Statement(f"""
SELECT c.name AS cohort, i.name AS instance, q.min_quota, q.max_quota, q.usage, ({EFFECTIVE_MAX}) AS effective_max
FROM quotas q JOIN cohorts c ON c.id = q.cohort JOIN instances i ON i.id = q.instance
ORDER BY c.position, c.name, i.name
""")


@dataclass(frozen=True)
class Quota:
    """One quota as an operator sees it, in units.

    max_quota: None = no maximum. effective_max: the maximum, lowered by recent evictions if their cooldown is in force.
    """

    cohort: str
    instance: str
    min_quota: int
    max_quota: int | None
    usage: int
    effective_max: int | None


@dataclass(frozen=True)
class QuotaChange:
    """What the quota of an instance in a cohort is to be. terms: `min` and `max`, in units; a `max` of None means no
    maximum. What is not among them stays; a new quota has a minimum of 0 and no maximum."""

    cohort: str
    instance: str
    terms: Mapping[str, int | None]

    @property
    def name(self) -> str:
        """Its name in versions and in the audit."""
        return f"{self.cohort}/{self.instance}"


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
    """Set the instance's minimum and maximum in the cohort, as `change_quotas` does."""
    wanted = QuotaChange(cohort, instance, {"min": minimum, "max": maximum})
    change_quotas(connection, [wanted], actor=actor, reason=reason)


def change_quotas(
    connection: Connection, wanted: Sequence[QuotaChange], *, actor: str, reason: str = ""
) -> list[dict[str, int | None]]:
    """Set quotas, each named once, and return the `min` and `max` that each has now. It takes as many statements for
    ten thousand of them as for one.

    A change applies to the next grant, except where a call of a bot that is being settled has returned units and takes
    them again. A maximum below the usage stops no job: no job starts until the usage has fallen below it. The first
    quota of an instance in a cohort waits until every transaction that has written leases has ended, because its usage
    starts at the units of the live leases. Raises NotFound for an unknown cohort, and BadInput for a minimum above the
    maximum or a value out of range.
    """
    keys = _keys(connection, wanted)
    before = _held(connection, keys)
    after = [{"min": 0, "max": None, **(before.get(key) or {}), **each.terms}
             for key, each in zip(keys, wanted, strict=True)]  # fmt: skip
    for each in after:
        _check(each["min"], each["max"])
    rows = [(*key, each["min"], each["max"]) for key, each in zip(keys, after, strict=True)]
    for statement, is_new in ((_CHANGE, False), (_CREATE, True)):
        if among := [row for row in rows if (row[:2] not in before) is is_new]:
            columns = map(list, zip(*among, strict=True))
            connection.execute(
                statement, dict(zip(("cohorts", "instances", "minimums", "maximums"), columns, strict=True))
            )
    noted = {
        f"quota:{each.name}": {"before": before.get(key), "after": now, "reason": reason}
        for key, each, now in zip(keys, wanted, after, strict=True)
    }
    audit.write_all(connection, "quota.set", noted, actor=actor)
    wake(connection, "jobs")
    return after


def remove_quotas(connection: Connection, names: Sequence[tuple[str, str]], *, actor: str, reason: str = "") -> None:
    """Remove the quotas of these cohorts and instances. Raises NotFound if one of them has none."""
    cohorts, instances = map(list, zip(*names, strict=True))
    found = connection.execute(_REMOVE, {"cohorts": cohorts, "instances": instances})
    before = {(row.cohort, row.instance): {"min": row.min_quota, "max": row.max_quota} for row in found}
    for cohort, instance in names:
        if (cohort, instance) not in before:
            raise NotFound(f"quota: '{escaped(instance, 63)}' has none in cohort '{escaped(cohort, 63)}'")
    noted = {
        f"quota:{cohort}/{instance}": {"before": before[cohort, instance], "after": None, "reason": reason}
        for cohort, instance in names
    }
    audit.write_all(connection, "quota.rm", noted, actor=actor)
    wake(connection, "jobs")


def quotas(connection: Connection, *, cooldown: Cooldown = EVICTION_COOLDOWN) -> list[Quota]:
    """Every quota, ordered by cohort and instance."""
    return [Quota(**row._asdict()) for row in connection.execute(_LIST, cooldown.values())]


def _check(minimum: int | None, maximum: int | None) -> None:
    for field, value in (("min", minimum), ("max", maximum)):
        if value is not None and not 0 <= value <= MAX_QUOTA:
            raise BadInput(field, f"must be between 0 and {MAX_QUOTA}")
    if maximum is not None and (minimum or 0) > maximum:
        raise BadInput("min", f"must not be more than the maximum of {maximum}")


_Key = tuple[int, int]


def _held(connection: Connection, keys: Sequence[_Key]) -> dict[_Key, dict[str, int | None]]:
    """Read and lock the quotas that there are. If one is missing, no other transaction can create it meanwhile."""
    cohorts, instances = map(list, zip(*keys, strict=True))
    values = {"cohorts": cohorts, "instances": instances}
    rows = connection.execute(_FOUND, values).all()
    if len(rows) < len(keys):
        connection.execute(LOCK_LEASES)
        rows = connection.execute(_FOUND, values).all()
    return {(row.cohort, row.instance): {"min": row.min_quota, "max": row.max_quota} for row in rows}


def _keys(connection: Connection, wanted: Sequence[QuotaChange]) -> list[_Key]:
    """Return the ids of the cohort and the instance of each. Makes instances that are new."""
    rows = connection.execute(_COHORTS, {"names": sorted({each.cohort for each in wanted})})
    cohorts = {row.name: row.id for row in rows}
    for each in wanted:
        if each.cohort not in cohorts:
            raise NotFound(f"cohort: no cohort '{escaped(each.cohort, 63)}'")
    names = sorted({each.instance for each in wanted})
    for name in names:
        check_name("instance", name)
    instances = {row.name: row.id for row in connection.execute(_INSTANCES, {"names": names})}
    return [(cohorts[each.cohort], instances[each.instance]) for each in wanted]


# The totals on the rows of bots.


# A transaction that begins or ends leases of a bot holds its row. Such a bot is skipped until the next
# round.
LOCK_CAPACITY = Statement("""
SELECT b.id FROM bots b
LEFT JOIN (SELECT bot_id, sum(units) AS units, count(*) AS leases FROM live GROUP BY bot_id) l ON l.bot_id = b.id
WHERE b.in_use <> coalesce(l.units, 0) OR b.held <> coalesce(l.leases, 0)
ORDER BY b.id FOR NO KEY UPDATE OF b SKIP LOCKED
""")
# Compared again on the locked rows, because the query before this one may have seen a row newer than the leases.
REPAIR_CAPACITY = Statement("""
WITH wrong AS MATERIALIZED (
    SELECT b.id, b.name, b.in_use, b.held, s.leased, s.leases FROM bots b
    CROSS JOIN LATERAL (SELECT
        (SELECT coalesce(sum(l.units), 0) FROM live l WHERE l.bot_id = b.id) AS leased,
        (SELECT count(*) FROM live l WHERE l.bot_id = b.id) AS leases) s
    WHERE b.id = ANY (CAST(:bot_ids AS bigint[])) AND (b.in_use, b.held) <> (s.leased, s.leases)
), mended AS (
    UPDATE bots b SET in_use = w.leased, held = w.leases, capacity = greatest(b.capacity, w.leased)
    FROM wrong w WHERE b.id = w.id
)
SELECT name, in_use, leased, held, leases FROM wrong ORDER BY id
""")


@dataclass(frozen=True)
class CapacityDrift:
    """A bot with a wrong total. Each pair is what was stored and what it should have been.

    in_use, leased: units of its live leases. held, leases: their number.
    """

    bot: str
    in_use: int
    leased: int
    held: int
    leases: int


def reconcile_capacity(connection: Connection) -> list[CapacityDrift]:
    """Compare the totals of every bot with its live leases; repair and return those that differ.

    On a sound database none differs and nothing is locked. A drift is a defect, not routine.
    """
    bot_ids = [row.id for row in connection.execute(LOCK_CAPACITY)]
    if not bot_ids:
        return []
    found = connection.execute(REPAIR_CAPACITY, {"bot_ids": bot_ids})
    return [CapacityDrift(row.name, row.in_use, int(row.leased), row.held, row.leases) for row in found]
