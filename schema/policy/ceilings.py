"""Ceilings: the default and the longest run time of jobs, and the longest wait for their first start.

A ceiling covers the whole pool, an instance, a label, or a label of an instance. Of all that cover a job the tightest
holds; the SQL function `ceiling_of` says so. A submit refuses what a request gives beyond it (`within_limits`), and
upkeep ends what was submitted before the ceiling was set (`schema/moves/waiting/timeouts.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.validation import MAX_LABEL

#: The largest ceiling, in seconds (a year): the longest time-out of a job.
MAX_CEILING = 31_536_000.0

_INTERN_DEFAULT = Statement("SELECT intern_instance('default')")
_INSTANCE = Statement("SELECT id FROM instances WHERE name = :name")
_LIST = Statement("""
SELECT i.name AS instance, c.label, c.default_timeout, c.max_timeout, c.max_queue_age
FROM ceilings c LEFT JOIN instances i ON i.id = c.instance ORDER BY i.name NULLS FIRST, c.label NULLS FIRST
""")
_OF = "c.instance IS NOT DISTINCT FROM CAST(:instance AS integer) AND c.label IS NOT DISTINCT FROM CAST(:label AS text)"
_MAKE = Statement("INSERT INTO ceilings (instance, label) VALUES (:instance, :label) ON CONFLICT DO NOTHING")
_HOLD = Statement(f"SELECT default_timeout, max_timeout, max_queue_age FROM ceilings c WHERE {_OF} FOR UPDATE")
_CHANGE = Statement(f"""
UPDATE ceilings c SET default_timeout = :default_timeout, max_timeout = :max_timeout, max_queue_age = :max_queue_age
WHERE {_OF}
""")
_REMOVE = Statement(f"DELETE FROM ceilings c WHERE {_OF} RETURNING default_timeout, max_timeout, max_queue_age")


class CeilingTerms(BaseModel):
    """The ceilings of one scope. An omitted field keeps its value; null = none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    default_timeout: float | None = Field(
        default=None,
        gt=0,
        le=MAX_CEILING,
        description="longest run time of a job that gives none (seconds); null = none",
        json_schema_extra={"unit": "seconds"},
    )
    max_timeout: float | None = Field(
        default=None,
        gt=0,
        le=MAX_CEILING,
        description="longest run time that a job may have (seconds); null = any",
        json_schema_extra={"unit": "seconds"},
    )
    max_queue_age: float | None = Field(
        default=None,
        gt=0,
        le=MAX_CEILING,
        description="longest time that a job may wait for its first start (seconds); null = any",
        json_schema_extra={"unit": "seconds"},
    )


@dataclass(frozen=True)
class Ceiling:
    """The ceilings of one scope, in seconds. No instance means all of them, and no label all jobs."""

    instance: str | None
    label: str | None
    default_timeout: float | None
    max_timeout: float | None
    max_queue_age: float | None


def ceilings(connection: Connection) -> list[Ceiling]:
    """All ceilings: first those of every instance, then by instance and label."""
    return [Ceiling(**row._asdict()) for row in connection.execute(_LIST)]


def instance_id(connection: Connection, name: str) -> int:
    """The id of an instance that exists; `default` is made if need be. Raises NotFound.

    A limit of a misspelt name would hold for no job.
    """
    if name == "default":
        return int(connection.execute(_INTERN_DEFAULT).scalar_one())
    found = connection.execute(_INSTANCE, {"name": name}).scalar_one_or_none()
    if found is None:
        raise NotFound(f"instance: there is no instance '{escaped(name, 63)}'")
    return int(found)


def set_ceiling(
    connection: Connection,
    instance: str | None,
    label: str | None,
    terms: CeilingTerms,
    *,
    actor: str,
    reason: str = "",
) -> dict[str, float | None]:
    """Set the given ceilings of the scope, and return all of its ceilings. A scope that is left without any is removed.

    Raises BadInput for a default above the longest run time, and NotFound for an instance that does not exist.
    """
    scope = _scope(connection, instance, label)
    connection.execute(_MAKE, scope)
    before = dict(connection.execute(_HOLD, scope).one()._asdict())
    after = before | terms.model_dump(include=terms.model_fields_set & before.keys())
    default, most = after["default_timeout"], after["max_timeout"]
    if default is not None and most is not None and default > most:
        raise BadInput("default_timeout", f"must be at most {most:g}, the longest run time")
    if all(value is None for value in after.values()):
        connection.execute(_REMOVE, scope)
    elif after != before:
        connection.execute(_CHANGE, {**scope, **after})
    if after != before:
        _note(connection, "ceiling.set", instance, label, before, after, actor=actor, reason=reason)
    return after


def remove_ceiling(
    connection: Connection, instance: str | None, label: str | None, *, actor: str, reason: str = ""
) -> None:
    """Remove all ceilings of the scope. Raises NotFound if it has none."""
    row = connection.execute(_REMOVE, _scope(connection, instance, label)).one_or_none()
    if row is None:
        raise NotFound(f"ceiling: {_named(instance, label)} has none")
    _note(connection, "ceiling.rm", instance, label, dict(row._asdict()), {}, actor=actor, reason=reason)


def _scope(connection: Connection, instance: str | None, label: str | None) -> dict[str, object]:
    return {"instance": None if instance is None else instance_id(connection, instance), "label": label}


def _named(instance: str | None, label: str | None) -> str:
    """Return the name of the scope for messages and for the audit."""
    parts = [f"instance:{instance}"] if instance is not None else []
    parts += [f"label:{escaped(label, MAX_LABEL)}"] if label is not None else []
    return ",".join(parts) or "pool"


def _note(
    connection: Connection,
    action: str,
    instance: str | None,
    label: str | None,
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    *,
    actor: str,
    reason: str,
) -> None:
    details = {"before": dict(before), "after": dict(after) or None, "reason": reason}
    audit.write(connection, action, actor=actor, subject=_named(instance, label), details=details)
