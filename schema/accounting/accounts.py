"""Accounts: the instances that have a share of the pool, and the limits of what they and all together may have.

An instance with an account is `managed`: all its jobs wait at gates. Those that wait already when that changes are
taken over step by step (`schema.moves.managing`), while they go on being placed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, text

from schema import audit
from schema.accounting import counters
from schema.accounting.counters import instance_counter, lock_counter
from schema.errors import NotFound
from schema.postgres.notify import wake
from schema.validation import Name, check_name

MAX_WEIGHT, MAX_BUDGET, MAX_JOBS = 1e6, 1e12, 1_000_000_000
#: Locks of one instance that may be given slots at once.
MAX_LOCKS = 1000
#: What is limited by which counter of an instance, and of the pool.
OF_INSTANCE = {"max_concurrent": "jobs", "budget": "cost", "slots": "slots"}
OF_POOL = {"max_concurrent": "pool:jobs", "budget": "pool:cost"}

_INTERN = text("SELECT intern_instance(:name)")
_HOLD = text("SELECT managed FROM instances WHERE id = :instance FOR NO KEY UPDATE")
_KNOWN = text("SELECT credit_weight, unit FROM accounts WHERE instance = :instance")
_PUT = text("""
INSERT INTO accounts (instance, credit_weight, unit) VALUES (:instance, :credit_weight, :unit)
ON CONFLICT (instance) DO UPDATE SET credit_weight = :credit_weight, unit = :unit
""")
_MANAGED = text("UPDATE instances SET managed = :managed WHERE id = :instance AND managed <> :managed")
_FIND = text("SELECT id FROM instances WHERE name = :name AND managed FOR NO KEY UPDATE")
_REMOVE = text("DELETE FROM accounts WHERE instance = :instance")
_LIST = text("""
SELECT i.name, a.credit_weight, a.unit, cost.used::double precision AS used, cost.most::double precision AS budget,
    jobs.used::double precision AS running, jobs.most::double precision AS max_concurrent,
    slots.most::double precision AS slots
FROM accounts a JOIN instances i ON i.id = a.instance
LEFT JOIN counters cost ON cost.name = 'instance:' || i.name || '\\:cost'
LEFT JOIN counters jobs ON jobs.name = 'instance:' || i.name || '\\:jobs'
LEFT JOIN counters slots ON slots.name = 'instance:' || i.name || '\\:slots'
ORDER BY i.name
""")


class PoolLimits(BaseModel):
    """What all managed instances may have together, and the jobs with terms of others with them. What is not given
    stays; null = any number.

    max_concurrent: jobs that run at once. budget: cost within the rolling window.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_concurrent: int | None = Field(
        default=None, ge=0, le=MAX_JOBS, description="jobs that run at once; null = any number"
    )
    budget: float | None = Field(
        default=None, ge=0, le=MAX_BUDGET, description="cost within the rolling window, in its unit; null = any amount"
    )

    def limits(self) -> dict[str, float | None]:
        """The limits that are given, by counter."""
        return {OF_POOL[key]: getattr(self, key) for key in OF_POOL if key in self.model_fields_set}


class Account(PoolLimits):
    """What an instance may have. What is not given stays; a new account has a weight of 1 and no limits.

    credit_weight: its part beside the others'; 0 = what they leave.
    unit: what its budget counts: `cost`, or whatever its bots report under that name; of `seconds`, the run time where
        they report none.
    slots: places in which its jobs work, one for each; null = any number.
    locks: how many jobs may hold each of these locks at once; 1 for one that is never named here.
    """

    credit_weight: float | None = Field(
        default=None, ge=0, le=MAX_WEIGHT, description="share beside the weights of the others; 0 = what they leave"
    )
    unit: Name | None = Field(
        default=None, description="what the budget counts: cost, seconds, or what bots report under that name"
    )
    slots: int | None = Field(
        default=None, ge=0, le=MAX_JOBS, description="places in which its jobs work, one each; null = any number"
    )
    locks: dict[Name, Annotated[int, Field(ge=0, le=MAX_JOBS)]] = Field(
        default={}, max_length=MAX_LOCKS, description="how many jobs may hold each of these locks at once"
    )

    @property
    def is_given(self) -> bool:
        """Whether it says anything."""
        return any(getattr(self, key) not in (None, {}) for key in Account.model_fields)

    def limits_of(self, name: str) -> dict[str, float | None]:
        """The limits that are given, by counter, for the instance of that name."""
        found = {
            instance_counter(name, ending): getattr(self, key)
            for key, ending in OF_INSTANCE.items()
            if key in self.model_fields_set
        }
        return found | {lock_counter(name, lock): float(slots) for lock, slots in self.locks.items()}


@dataclass(frozen=True)
class Share:
    """The share of one instance for an operator. `used`: cost within the window with what is reserved, of `budget`;
    `running`: live leases, of `max_concurrent`; limits are None for any number."""

    name: str
    credit_weight: float
    unit: str
    used: float | None
    budget: float | None
    running: float | None
    max_concurrent: float | None
    slots: float | None


def accounts(connection: Connection) -> list[Share]:
    """The shares of all managed instances, by name."""
    return [Share(**row._mapping) for row in connection.execute(_LIST)]


def put_account(connection: Connection, name: str, account: Account, *, actor: str, reason: str = "") -> None:
    """Give the instance, made if it is new, a share of the pool, or change it. What is so already is not written."""
    check_name("name", name)
    instance = connection.execute(_INTERN, {"name": name}).scalar_one()
    managed = connection.execute(_HOLD, {"instance": instance}).scalar_one()
    known = connection.execute(_KNOWN, {"instance": instance}).one_or_none()
    before: dict[str, Any] = {} if known is None else dict(known._mapping)
    after = {
        "credit_weight": before.get("credit_weight", 1.0) if account.credit_weight is None else account.credit_weight,
        "unit": account.unit or before.get("unit", "cost"),
    }
    if before != after:
        connection.execute(_PUT, {"instance": instance, **after})
    connection.execute(_MANAGED, {"instance": instance, "managed": True})
    changed = _limit(connection, account.limits_of(name))
    if before == after and managed and not changed:
        return
    details = {"before": before or None, "after": after, "limits": changed, "reason": reason}
    audit.write(connection, "account.set", actor=actor, subject=f"instance:{name}", details=details)
    wake(connection, "jobs")


def remove_account(connection: Connection, name: str, *, actor: str, reason: str = "") -> None:
    """The instance shares no more: its jobs wait for a place alone, and its limits are gone, but for its locks.

    Raises NotFound without an account.
    """
    instance = connection.execute(_FIND, {"name": name}).scalar_one_or_none()
    if instance is None:
        raise NotFound(f"instance: '{name}' has no share of the pool")
    connection.execute(_REMOVE, {"instance": instance})
    connection.execute(_MANAGED, {"instance": instance, "managed": False})
    _limit(connection, {instance_counter(name, ending): None for ending in OF_INSTANCE.values()})
    audit.write(connection, "account.remove", actor=actor, subject=f"instance:{name}", details={"reason": reason})
    wake(connection, "jobs")


def limit_pool(connection: Connection, limits: PoolLimits, *, actor: str, reason: str = "") -> None:
    """Limit what all have together. What is so already is not written."""
    changed = _limit(connection, limits.limits())
    if changed:
        audit.write(connection, "pool.limit", actor=actor, subject="pool", details={**changed, "reason": reason})
        wake(connection, "jobs")


def pool_limits(connection: Connection) -> dict[str, counters.Counter]:
    """What all have together, by what is limited."""
    found = counters.read(connection, list(OF_POOL.values()))
    return {key: found.get(name, counters.Counter()) for key, name in OF_POOL.items()}


def declare(connection: Connection, wanted: Mapping[str, Account], *, actor: str, reason: str) -> None:
    """Give the named instances what the configuration says; the others, and what it does not say, stay."""
    for name in sorted(wanted):
        put_account(connection, name, wanted[name], actor=actor, reason=reason)


def _limit(connection: Connection, limits: Mapping[str, float | None]) -> dict[str, float | None]:
    """Set those of the limits that are different, in the order of their counters; returns them."""
    known = counters.read(connection, list(limits))
    changed = {
        name: most
        for name, most in sorted(limits.items())
        if (name not in known and (most is not None)) or (name in known and known[name].most != most)
    }
    for name, most in changed.items():
        counters.limit(connection, name, most)
    return changed


# What instances have used, for people: as their bots reported it, in every unit, for as long as it is kept.


#: The largest stretch of time that is asked for, hours.
MAX_HOURS = 24 * 3650

_REPORTED = text("""
SELECT split_part(name, ':', 2) AS instance, split_part(name, ':', 3) AS unit,
    sum(amount)::double precision AS amount, sum(jobs) AS jobs
FROM usage
WHERE name LIKE 'reported:%' AND bucket > now() - make_interval(secs => :hours * 3600.0)
GROUP BY 1, 2 ORDER BY 1, 2
""")


@dataclass(frozen=True)
class ReportedUsage:
    """What an instance has used of one unit; `jobs` are those that are done and said something of it."""

    instance: str
    unit: str
    amount: float
    jobs: int


def reported_usage(connection: Connection, *, hours: float) -> list[ReportedUsage]:
    """What was reported within so many hours, by instance and unit."""
    return [ReportedUsage(**row._mapping) for row in connection.execute(_REPORTED, {"hours": hours})]
