"""Instances: the tenants that share the bots. An instance may belong to one pool of instances served together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from leasehold.errors import Conflict, NotFound
from leasehold.wire import MAX_LIST, escaped, suggestion
from pydantic import BaseModel, ConfigDict, Field, model_validator

from schema import audit
from schema.accounting.accounts import DEFAULT_INSTANCE, Account
from schema.accounting.quotas import LOCK_LEASES, MAX_QUOTA
from schema.fields import Name
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, ready_in
from schema.validation import check_name

#: The most jobs counted for one instance and state. A larger number is shown as this one.
MAX_COUNTED = 10_000

_MAKE = Statement("""
INSERT INTO instances (name) SELECT name FROM unnest(CAST(:names AS text[])) AS w (name) ORDER BY name
ON CONFLICT (name) DO NOTHING
""")
_HOLD = Statement("""
SELECT id, name, pool FROM instances WHERE name = ANY (CAST(:names AS text[])) ORDER BY id FOR NO KEY UPDATE
""")
_PUT = Statement("""
UPDATE instances i SET pool = w.pool FROM unnest(CAST(:names AS text[]), CAST(:pools AS text[])) AS w (name, pool)
WHERE i.name = w.name
""")
_KNOWN = Statement("SELECT pool FROM instances WHERE name = :name")
_NAMES = Statement("SELECT name FROM instances ORDER BY name LIMIT 10000")
_POOLS = Statement("SELECT name, pool FROM instances WHERE name = ANY (CAST(:names AS text[]))")
# Of these instances, the first one that has jobs on bots which serve a pool.
_ON_POOLS = Statement("""
SELECT i.name FROM instances i
WHERE i.name = ANY (CAST(:names AS text[])) AND EXISTS (
    SELECT FROM leases l JOIN bots b ON b.id = l.bot_id
    WHERE l.instance = i.id AND l.state IN ('pending', 'active', 'cancelling') AND b.pool IS NOT NULL)
ORDER BY i.name LIMIT 1
""")
# OFFSET 0 keeps the planner from joining, and so reading, the whole table of jobs. All live leases are read once: no
# index has their instances, because each lease would pay for it. Of the jobs that are to be tried again, only the first
# are counted, for all instances.
_SHOWN = f"""
SELECT i.name, i.pool, i.draining, q.usage, q.min_quota, q.max_quota, a.credit_weight AS weight, a.unit,
    used.used::double precision AS used, used.most::double precision AS budget,
    jobs.most::double precision AS max_concurrent, jobs.slots::double precision AS slots,
    (SELECT count(*) FROM (
        SELECT FROM (SELECT id, constraint_set FROM queues WHERE instance = i.id OFFSET 0) k CROSS JOIN LATERAL (
            SELECT FROM jobs WHERE {ready_in("k")} ORDER BY queue LIMIT :most) j
        UNION ALL
        SELECT FROM unnest(retrying.instances) AS r WHERE r = i.id
        LIMIT :most) w) AS queued,
    least(coalesce(ran.leases, 0), :most) AS running
FROM (SELECT * FROM instances WHERE {{which}}) i
CROSS JOIN (
    SELECT ARRAY(SELECT instance FROM jobs WHERE {AT_REST} ORDER BY schedule_after LIMIT :most) AS instances OFFSET 0
) retrying
LEFT JOIN (SELECT instance, count(*) AS leases FROM live GROUP BY instance) ran ON ran.instance = i.id
LEFT JOIN LATERAL (
    SELECT sum(usage)::bigint AS usage, sum(min_quota)::bigint AS min_quota,
        CASE WHEN bool_and(max_quota IS NOT NULL) THEN sum(max_quota)::bigint END AS max_quota
    FROM quotas WHERE instance = i.id) q ON true
LEFT JOIN accounts a ON a.instance = i.id
LEFT JOIN counters used ON a.instance IS NOT NULL AND used.name = 'instance:' || i.name || '\\:cost'
LEFT JOIN counters jobs ON a.instance IS NOT NULL AND jobs.name = 'instance:' || i.name || '\\:jobs'
ORDER BY i.name
"""
_LIST = Statement(_SHOWN.format(which="name > :after ORDER BY name LIMIT :limit"))
_SHOW = Statement(_SHOWN.format(which="name = :name"))


class QuotaTerms(BaseModel):
    """The quota of an instance in one cohort, in units. max: None = no maximum."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min: int = Field(default=0, ge=0, le=MAX_QUOTA)
    max: int | None = Field(default=None, ge=0, le=MAX_QUOTA)

    @model_validator(mode="after")
    def _max_holds_min(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min}, above max, which is {self.max}")
        return self


class InstanceSettings(Account):
    """One instance of the configuration. With any field of an account it becomes managed.

    pool: the group of instances it belongs to. Bots of that pool, and assigners of any instance in it, serve them all.
    quotas: by the name of the cohort.
    """

    name: Name
    pool: Name | None = None
    quotas: dict[Name, QuotaTerms] = Field(default={}, max_length=1000)


@dataclass(frozen=True)
class Instance:
    """One instance as an operator sees it.

    usage, min_quota, max_quota: units, summed over the cohorts in which the instance has a quota; None without a quota.
        max_quota is also None if one of these quotas has no maximum.
    queued, running: jobs, counted up to MAX_COUNTED.
    weight, unit: of its account; None if it is not managed.
    used: cost within the rolling window, including what is reserved for live leases. budget: its limit.
    budget, max_concurrent, slots: None = unlimited.
    """

    name: str
    pool: str | None
    draining: bool
    usage: int | None
    min_quota: int | None
    max_quota: int | None
    queued: int
    running: int
    weight: float | None = None
    unit: str | None = None
    used: float | None = None
    budget: float | None = None
    max_concurrent: float | None = None
    slots: float | None = None


def put_instance(connection: Connection, name: str, *, pool: str | None, actor: str, reason: str = "") -> None:
    """Create the instance if it is new, and put it into the pool, as `put_instances` does."""
    put_instances(connection, {name: pool}, actor=actor, reason=reason)


def put_instances(connection: Connection, pools: Mapping[str, str | None], *, actor: str, reason: str = "") -> None:
    """Create the instances, by name, that are new, and put each into its pool; None = into no pool. It takes as many
    statements for many as for one.

    Raises Conflict `instance_in_use` if bots that serve a pool run jobs of one. After the change these bots would run
    jobs that they do not serve.
    """
    for name, pool in pools.items():
        check_name("name", name)
        if pool is not None:
            check_name("pool", pool)
    names = sorted(pools)
    known = {row.name for row in connection.execute(_POOLS, {"names": names})}
    if missing := [name for name in names if name not in known]:
        connection.execute(_MAKE, {"names": missing})
    before = {row.name: row.pool for row in connection.execute(_HOLD, {"names": names})}
    if moved := [name for name in names if before[name] != pools[name]]:
        connection.execute(_PUT, {"names": moved, "pools": [pools[name] for name in moved]})
        connection.execute(LOCK_LEASES)
        if (found := connection.execute(_ON_POOLS, {"names": moved}).scalar_one_or_none()) is not None:
            raise Conflict("instance_in_use", f"bots that serve a pool run jobs of instance '{found}': drain it first")
    noted = {
        f"instance:{name}": {"before": before[name], "after": pools[name], "reason": reason}
        for name in names
        if name not in known or before[name] != pools[name]
    }
    if noted:
        audit.write_all(connection, "instance.set", noted, actor=actor)
        wake(connection, "jobs")


def require(
    connection: Connection, name: str, *, field: str = "instance", create: bool, actor: str, reason: str = ""
) -> None:
    """Raise NotFound, with the most similar name, unless the instance is there; or make it, if `create` is true.

    What is set for a misspelt name would hold for no job. `default` is always there.
    """
    check_name(field, name)
    if name == DEFAULT_INSTANCE or connection.execute(_KNOWN, {"name": name}).one_or_none() is not None:
        return
    if create:
        put_instance(connection, name, pool=None, actor=actor, reason=reason)
        return
    raise NotFound(f"{unknown(connection, name, field=field)} (--create, over HTTP create=true, makes it)")


def unknown(connection: Connection, name: str, *, field: str = "instance") -> NotFound:
    """The refusal of an instance that is not there, with the most similar name."""
    near = suggestion(name, connection.execute(_NAMES).scalars())
    return NotFound(f"{field}: there is no instance '{escaped(name, 63)}'{near}")


def changed_instances(connection: Connection, wanted: Sequence[InstanceSettings]) -> list[InstanceSettings]:
    """The wanted instances that do not exist or belong to another pool, ordered by name."""
    found = connection.execute(_POOLS, {"names": [each.name for each in wanted]})
    known = {(row.name, row.pool) for row in found}
    return sorted((each for each in wanted if (each.name, each.pool) not in known), key=lambda one: one.name)


def instances(connection: Connection, *, after: str = "", limit: int = MAX_LIST) -> list[Instance]:
    """One page of instances ordered by name, from the first name after `after`."""
    rows = connection.execute(_LIST, {"after": after, "limit": limit, "most": MAX_COUNTED})
    return [Instance(**row._asdict()) for row in rows]


def instance(connection: Connection, name: str) -> Instance:
    """One instance. Raises NotFound."""
    row = connection.execute(_SHOW, {"name": name, "most": MAX_COUNTED}).one_or_none()
    if row is None:
        raise unknown(connection, name)
    return Instance(**row._asdict())
