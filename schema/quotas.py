"""What operators set: the quota of an instance in a cohort. Every change is audited in its own transaction."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, text

from schema import audit
from schema.errors import BadInput, NotFound
from schema.ledger import ALONE, EFFECTIVE_MAX, EVICTION_COOLDOWN
from schema.limits import check_name, escaped
from schema.wakeups import wake

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
        connection.execute(ALONE)
        before = connection.execute(_FOUND, key).one_or_none()
    return before


def _key(connection: Connection, cohort: str, instance: str) -> dict[str, int]:
    found = connection.execute(_COHORT, {"cohort": cohort}).scalar_one_or_none()
    if found is None:
        raise NotFound(f"cohort: no cohort '{escaped(cohort, 63)}'")
    check_name("instance", instance)
    return {"cohort": found, "instance": connection.execute(_INSTANCE, {"instance": instance}).scalar_one()}
