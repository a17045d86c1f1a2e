"""Accounts: the instances with a share of the pool, their limits, the limits of the whole pool, reported usage.

An instance with an account is *managed*: all its jobs are constrained jobs. When an instance becomes managed, or stops
being so, its waiting jobs change queue in batches (schema/moves/reassign.py) and may start meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field, field_validator

from schema import audit
from schema.accounting import counters, limit_patterns
from schema.accounting.counters import instance_counter, lock_counter
from schema.fields import Name, NameOrPattern
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.validation import check_name

MAX_WEIGHT, MAX_BUDGET, MAX_JOBS = 1e6, 1e12, 1_000_000_000
#: The lowest weight above 0: usage is divided by weights, and PostgreSQL fails on what is too large for a double.
MIN_WEIGHT = 1e-9
#: The instance of jobs that name none; it has no row before the first of them.
DEFAULT_INSTANCE = "default"
#: The most locks of one instance in one request.
MAX_LOCKS = 1000
#: For each limit the ending of the counter's name (of an instance), or the whole name (of the pool).
OF_INSTANCE = {"max_concurrent": "jobs", "budget": "cost", "slots": "slots"}
OF_POOL = {"max_concurrent": "pool:jobs", "budget": "pool:cost"}

_INTERN = Statement("SELECT intern_instance(:name)")
_INTERN_ALL = Statement("SELECT name, intern_instance(name) AS id FROM unnest(CAST(:names AS text[])) AS w (name)")
_HOLD = Statement("""
SELECT id, managed FROM instances WHERE id = ANY (CAST(:ids AS integer[])) ORDER BY id FOR NO KEY UPDATE
""")
_KNOWN = Statement("""
SELECT instance, credit_weight AS weight, unit FROM accounts WHERE instance = ANY (CAST(:ids AS integer[]))
""")
_PUT = Statement("""
INSERT INTO accounts (instance, credit_weight, lift_weight, unit)
SELECT w.instance, w.weight, w.weight, w.unit
FROM unnest(CAST(:ids AS integer[]), CAST(:weights AS double precision[]), CAST(:units AS text[]))
    AS w (instance, weight, unit)
ON CONFLICT (instance) DO UPDATE SET credit_weight = EXCLUDED.credit_weight, unit = EXCLUDED.unit
""")
_MANAGED = Statement("""
UPDATE instances SET managed = :managed WHERE id = ANY (CAST(:ids AS integer[])) AND managed <> :managed
""")
_FIND = Statement("""
SELECT id, name FROM instances WHERE name = ANY (CAST(:names AS text[])) AND managed ORDER BY id FOR NO KEY UPDATE
""")
_REMOVE = Statement("DELETE FROM accounts WHERE instance = ANY (CAST(:ids AS integer[]))")
_LIST = Statement("""
SELECT i.name, a.credit_weight AS weight, a.unit,
    cost.used::double precision AS used, cost.most::double precision AS budget,
    jobs.used::double precision AS running, jobs.most::double precision AS max_concurrent,
    jobs.slots::double precision AS slots
FROM accounts a JOIN instances i ON i.id = a.instance
LEFT JOIN counters cost ON cost.name = 'instance:' || i.name || '\\:cost'
LEFT JOIN counters jobs ON jobs.name = 'instance:' || i.name || '\\:jobs'
ORDER BY i.name
""")


class PoolLimits(BaseModel):
    """Limits on all constrained jobs of the pool together. An omitted field keeps its value; null = unlimited.

    max_concurrent: jobs that run at once. budget: cost within the rolling window.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_concurrent: int | None = Field(
        default=None, ge=0, le=MAX_JOBS, description="jobs that run at once; null = unlimited"
    )
    budget: float | None = Field(
        default=None, ge=0, le=MAX_BUDGET, description="cost within the rolling window, in its unit; null = unlimited"
    )

    def limits(self) -> dict[str, float | None]:
        """The limits in this request, by counter name."""
        return {OF_POOL[key]: getattr(self, key) for key in OF_POOL if key in self.model_fields_set}


class Account(PoolLimits):
    """The share and limits of an instance. An omitted field keeps its value.

    A new account has weight 1 and no limits.

    weight: its share relative to the weights of other instances; 0 = only what the others leave.
    unit: what its budget counts: `cost`, or any unit that its jobs report. For `seconds`, the measured run time counts,
        or what they report if that is more.
    slots: the number of its slots. Each running job occupies one; null = unlimited.
    locks: for each named lock, how many jobs may hold it at once. A lock that is not named allows 1. A pattern such as
        `customer-*` stands for every lock whose name begins so.
    """

    weight: float | None = Field(
        default=None, ge=0, le=MAX_WEIGHT, description="share relative to the weights of others; 0 = what they leave"
    )
    unit: Name | None = Field(
        default=None, description="what the budget counts: cost, seconds, or what bots report under that name"
    )
    slots: int | None = Field(
        default=None, ge=0, le=MAX_JOBS, description="slots in which its jobs work, one each; null = unlimited"
    )
    locks: dict[NameOrPattern, Annotated[int, Field(ge=0, le=MAX_JOBS)]] = Field(
        default={}, max_length=MAX_LOCKS, description="how many jobs may hold each of these locks at once"
    )

    @field_validator("weight")
    @classmethod
    def _weight_can_divide(cls, weight: float | None) -> float | None:
        if weight is not None and 0 < weight < MIN_WEIGHT:
            raise ValueError(f"must be 0, or at least {MIN_WEIGHT:g}")
        return weight

    @property
    def is_given(self) -> bool:
        """True if any field has a value."""
        return any(getattr(self, key) not in (None, {}) for key in Account.model_fields)

    def limits_of(self, name: str) -> dict[str, float | None]:
        """The limits in this request for the instance `name`, by counter name."""
        found = {
            instance_counter(name, ending): getattr(self, key)
            for key, ending in OF_INSTANCE.items()
            if key in self.model_fields_set
        }
        return found | {lock_counter(name, lock): float(slots) for lock, slots in self.locks.items()}


@dataclass(frozen=True)
class Share:
    """The share of one instance as an operator sees it.

    used: cost within the rolling window, including what is reserved; its limit is `budget`.
    running: live leases; their limit is `max_concurrent`. A limit of None means unlimited.
    """

    name: str
    weight: float
    unit: str
    used: float | None
    budget: float | None
    running: float | None
    max_concurrent: float | None
    slots: float | None


def accounts(connection: Connection) -> list[Share]:
    """The shares of all managed instances, ordered by name."""
    return [Share(**row._asdict()) for row in connection.execute(_LIST)]


def put_account(connection: Connection, name: str, account: Account, *, actor: str, reason: str = "") -> None:
    """Give the instance a share of the pool, or change it, as `put_accounts` does."""
    put_accounts(connection, {name: account}, actor=actor, reason=reason)


def put_accounts(connection: Connection, wanted: Mapping[str, Account], *, actor: str, reason: str = "") -> None:
    """Give instances, by name, a share of the pool, or change it. Creates the instances; writes only what differs.

    It takes as many statements for many as for one, but that each changed pattern of locks has its own.
    """
    if not wanted:
        return
    for name in wanted:
        check_name("name", name)
    ids = {row.name: row.id for row in connection.execute(_INTERN_ALL, {"names": sorted(wanted)})}
    managed = {row.id for row in connection.execute(_HOLD, {"ids": list(ids.values())}) if row.managed}
    known = {row.instance: {"weight": row.weight, "unit": row.unit}
             for row in connection.execute(_KNOWN, {"ids": list(ids.values())})}  # fmt: skip
    before = {name: known.get(id) for name, id in ids.items()}
    after = {name: _terms(before[name] or {}, wanted[name]) for name in ids}
    if unlike := {name: after[name] for name in ids if before[name] != after[name]}:
        connection.execute(_PUT, {
            "ids": [ids[name] for name in unlike],
            "weights": [terms["weight"] for terms in unlike.values()],
            "units": [terms["unit"] for terms in unlike.values()],
        })  # fmt: skip
    if new := [id for id in ids.values() if id not in managed]:
        connection.execute(_MANAGED, {"ids": new, "managed": True})
    limits = {name: wanted[name].limits_of(name) for name in ids}
    changed = _limit(connection, {name: most for each in limits.values() for name, most in each.items()})
    noted = {}
    for name, id in ids.items():
        of_it = {counter: changed[counter] for counter in sorted(limits[name]) if counter in changed}
        if name in unlike or id not in managed or of_it:
            details = {"before": before[name], "after": after[name], "limits": of_it, "reason": reason}
            noted[f"instance:{name}"] = details
    if noted:
        audit.write_all(connection, "account.set", noted, actor=actor)
        wake(connection, "jobs")


def _terms(before: Mapping[str, Any], account: Account) -> dict[str, Any]:
    """Return weight and unit of an account that was so, and is to be changed."""
    return {
        "weight": before.get("weight", 1.0) if account.weight is None else account.weight,
        "unit": account.unit or before.get("unit", "cost"),
    }


def remove_account(connection: Connection, name: str, *, actor: str, reason: str = "") -> None:
    """Remove the instance's account, as `remove_accounts` does."""
    remove_accounts(connection, [name], actor=actor, reason=reason)


def remove_accounts(connection: Connection, names: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Remove the accounts of instances: they are no longer managed, and their limits except those of locks are removed.

    Raises NotFound if one of them has no account.
    """
    ids = {row.name: row.id for row in connection.execute(_FIND, {"names": list(names)})}
    for name in names:
        if name not in ids:
            raise NotFound(f"instance: '{name}' has no share of the pool")
    connection.execute(_REMOVE, {"ids": list(ids.values())})
    connection.execute(_MANAGED, {"ids": list(ids.values()), "managed": False})
    _limit(connection, {instance_counter(name, ending): None for name in names for ending in OF_INSTANCE.values()})
    noted = {f"instance:{name}": {"reason": reason} for name in names}
    audit.write_all(connection, "account.remove", noted, actor=actor)
    wake(connection, "jobs")


def limit_pool(connection: Connection, limits: PoolLimits, *, actor: str, reason: str = "") -> None:
    """Set the limits of the whole pool. Writes only what differs."""
    changed = _limit(connection, limits.limits())
    if changed:
        audit.write(connection, "pool.limit", actor=actor, subject="pool", details={**changed, "reason": reason})
        wake(connection, "jobs")


def pool_limits(connection: Connection) -> dict[str, counters.Counter]:
    """The pool's amounts in use and limits, by the name of the limit."""
    found = counters.read(connection, list(OF_POOL.values()))
    return {key: found.get(name, counters.Counter()) for key, name in OF_POOL.items()}


def _limit(connection: Connection, limits: Mapping[str, float | None]) -> dict[str, float | None]:
    """Set the limits that differ from the stored ones, in the order of counter names; returns these."""
    patterns = sorted(name for name in limits if limit_patterns.is_pattern(name))
    known = counters.read(connection, sorted({counters.stored_counter(name) for name in limits}))
    changed = {
        name: most
        for name, most in sorted(limits.items())
        if not limit_patterns.is_pattern(name)
        and (known[name].most != most or _is_due_to_pattern(known[name], name) if name in known else most is not None)
    }
    # A change of patterns waits for other changes. It comes first, because nobody may wait so while it holds a row.
    for name in patterns:
        most = limits[name]
        if most is not None and limit_patterns.lock_slots(connection, name) != most:
            limit_patterns.put_lock(connection, name, most, actor="", note=False)
            changed[name] = most
    counters.limit_all(
        connection, {name: most for name, most in changed.items() if not limit_patterns.is_pattern(name)}
    )
    return changed


def _is_due_to_pattern(counter: counters.Counter, name: str) -> bool:
    """Return whether a lock has its limit by chance, and not because an operator has set it by its name."""
    return name.startswith("lock:") and counter.limited_by != limit_patterns.BY_NAME


# Usage as bots reported it, in every unit, for as long as it is kept.


#: The longest period of a query, hours.
MAX_HOURS = 24 * 3650

_REPORTED = Statement("""
SELECT split_part(name, ':', 2) AS instance, split_part(name, ':', 3) AS unit,
    sum(amount)::double precision AS amount, sum(jobs) AS jobs
FROM usage
WHERE name LIKE 'reported:%' AND bucket > now() - make_interval(secs => :hours * 3600.0)
GROUP BY 1, 2 ORDER BY 1, 2
""")


@dataclass(frozen=True)
class ReportedUsage:
    """What an instance has used of one unit. `jobs`: the number of ended jobs with a report in that unit."""

    instance: str
    unit: str
    amount: float
    jobs: int


def reported_usage(connection: Connection, *, hours: float) -> list[ReportedUsage]:
    """The usage reported within the last `hours`, ordered by instance and unit."""
    return [ReportedUsage(**row._asdict()) for row in connection.execute(_REPORTED, {"hours": hours})]


# Ceilings of reports: the most that one attempt's report counts for, by instance and unit. `settle.sql` cuts the rest.


_CEILINGS = Statement("""
SELECT i.name AS instance, c.unit,
    CASE jsonb_typeof(c.amount) WHEN 'number' THEN c.amount::double precision END AS amount
FROM instances i CROSS JOIN LATERAL jsonb_each(
    CASE jsonb_typeof(i.report_ceilings) WHEN 'object' THEN i.report_ceilings ELSE '{}' END) AS c (unit, amount)
WHERE i.report_ceilings IS NOT NULL ORDER BY i.name, c.unit
""")
_SET_CEILING = Statement("""
UPDATE instances SET report_ceilings = CASE jsonb_typeof(report_ceilings) WHEN 'object' THEN report_ceilings
    ELSE '{}' END || jsonb_build_object(CAST(:unit AS text), CAST(:amount AS numeric))
WHERE name = :instance RETURNING id
""")
_REMOVE_CEILING = Statement("""
UPDATE instances SET report_ceilings = nullif(report_ceilings - CAST(:unit AS text), '{}')
WHERE name = :instance AND report_ceilings ? CAST(:unit AS text) RETURNING id
""")


@dataclass(frozen=True)
class ReportCeiling:
    """The most that the report of one attempt of the instance counts for, in this unit; None = it is no number."""

    instance: str
    unit: str
    amount: float | None


def report_ceilings(connection: Connection) -> list[ReportCeiling]:
    """All ceilings of reports, ordered by instance and unit."""
    return [ReportCeiling(**row._asdict()) for row in connection.execute(_CEILINGS)]


def set_report_ceiling(
    connection: Connection, instance: str, unit: str, amount: float, *, actor: str, reason: str = ""
) -> None:
    """Let the report of one attempt count for at most `amount` of the unit. Attempts that have ended stay counted.

    Raises BadInput, and NotFound for an instance that does not exist: the ceiling of a misspelt name would hold for no
    job.
    """
    check_name("unit", unit)
    if not 0 <= amount <= MAX_BUDGET:
        raise BadInput("amount", f"must be between 0 and {MAX_BUDGET:g}")
    if instance == DEFAULT_INSTANCE:
        connection.execute(_INTERN, {"name": instance})
    values = {"instance": instance, "unit": unit, "amount": repr(amount)}
    if connection.execute(_SET_CEILING, values).one_or_none() is None:
        raise NotFound(f"instance: there is no instance '{escaped(instance, 63)}'")
    details = {"unit": unit, "amount": amount, "reason": reason}
    audit.write(connection, "report-ceiling.set", actor=actor, subject=f"instance:{instance}", details=details)


def remove_report_ceiling(connection: Connection, instance: str, unit: str, *, actor: str, reason: str = "") -> None:
    """Let reports of the unit count in full. Raises NotFound if the instance has no ceiling of that unit."""
    if connection.execute(_REMOVE_CEILING, {"instance": instance, "unit": unit}).one_or_none() is None:
        raise NotFound(f"report-ceiling: '{escaped(f'{instance}/{unit}', 127)}' is not set")
    details = {"unit": unit, "amount": None, "reason": reason}
    audit.write(connection, "report-ceiling.rm", actor=actor, subject=f"instance:{instance}", details=details)
