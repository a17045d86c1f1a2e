"""Ceilings: the default and the longest run time of jobs, and the longest wait for their first start.

A ceiling covers the whole pool, an instance, a label, or a label of an instance. Of all that cover a job the tightest
holds; the SQL function `ceiling_of` says so. A submit refuses what a request gives beyond it (`within_limits`), and
upkeep ends what was submitted before the ceiling was set (`schema/moves/waiting/timeouts.py`).
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.validation import MAX_LABEL, YEAR

_INTERN_DEFAULT = Statement("SELECT intern_instance('default')")
_INSTANCES = Statement("SELECT id, name FROM instances WHERE name = ANY (CAST(:names AS text[]))")
_LIST = Statement("""
SELECT i.name AS instance, c.label, c.default_timeout, c.max_timeout, c.max_queue_age
FROM ceilings c LEFT JOIN instances i ON i.id = c.instance ORDER BY i.name NULLS FIRST, c.label NULLS FIRST
""")
# A comparison that a hash can make, which `IS NOT DISTINCT FROM` is not: there may be many thousands of rows.
_OF = "coalesce(c.instance, -1) = coalesce(w.instance, -1) AND coalesce(c.label, '') = coalesce(w.label, '')"
_WANTED = """jsonb_to_recordset(CAST(:wanted AS jsonb)) AS w (instance integer, label text, default_timeout float8,
    max_timeout float8, max_queue_age float8)"""
_MAKE = Statement(f"""
INSERT INTO ceilings (instance, label) SELECT w.instance, w.label FROM {_WANTED} ON CONFLICT DO NOTHING
""")
_HOLD = Statement(f"""
SELECT c.instance, c.label, c.default_timeout, c.max_timeout, c.max_queue_age FROM ceilings c JOIN {_WANTED} ON {_OF}
ORDER BY c.id FOR UPDATE OF c
""")
_CHANGE = Statement(f"""
UPDATE ceilings c
SET default_timeout = w.default_timeout, max_timeout = w.max_timeout, max_queue_age = w.max_queue_age
FROM {_WANTED} WHERE {_OF}
""")
_REMOVE = Statement(f"""
DELETE FROM ceilings c USING {_WANTED} WHERE {_OF}
RETURNING c.instance, c.label, c.default_timeout, c.max_timeout, c.max_queue_age
""")

#: An instance and a label; None stands for all of them.
Scope = tuple[str | None, str | None]


class CeilingTerms(BaseModel):
    """The ceilings of one scope. An omitted field keeps its value; null = none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    default_timeout: float | None = Field(
        default=None,
        gt=0,
        le=YEAR,
        description="longest run time of a job that gives none (seconds); null = none",
        json_schema_extra={"unit": "seconds"},
    )
    max_timeout: float | None = Field(
        default=None,
        gt=0,
        le=YEAR,
        description="longest run time that a job may have (seconds); null = any",
        json_schema_extra={"unit": "seconds"},
    )
    max_queue_age: float | None = Field(
        default=None,
        gt=0,
        le=YEAR,
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


def instance_ids(connection: Connection, names: Iterable[str | None]) -> dict[str | None, int | None]:
    """The ids of instances that exist, by name; `default` is made if need be. None stands for no instance, and is kept.

    Raises NotFound: a limit of a misspelt name would hold for no job.
    """
    wanted = sorted({name for name in names if name is not None})
    if "default" in wanted:
        connection.execute(_INTERN_DEFAULT)
    found: dict[str | None, int | None] = {None: None}
    if wanted:
        found |= {row.name: row.id for row in connection.execute(_INSTANCES, {"names": wanted})}
    for name in wanted:
        if name not in found:
            raise NotFound(f"instance: there is no instance '{escaped(name, 63)}'")
    return found


def set_ceilings(
    connection: Connection, wanted: Mapping[Scope, CeilingTerms], *, actor: str, reason: str = ""
) -> list[dict[str, float | None]]:
    """Set the given ceilings of these scopes, and return all ceilings of each. A scope without any is removed.

    It takes as many statements for many as for one. Raises BadInput for a default above the longest run time, and
    NotFound for an instance that does not exist.
    """
    rows = _rows(connection, wanted)
    connection.execute(_MAKE, _values(rows.values()))
    held = _by_scope(connection.execute(_HOLD, _values(rows.values())), rows)
    found, noted = {}, {}
    for scope, terms in wanted.items():
        before = held[scope]
        after = found[scope] = before | terms.model_dump(include=terms.model_fields_set & before.keys())
        default, most = after["default_timeout"], after["max_timeout"]
        if default is not None and most is not None and default > most:
            raise BadInput("default_timeout", f"must be at most {most:g}, the longest run time")
        if after != before:
            noted[_named(*scope)] = {"before": before, "after": after, "reason": reason}
    is_left = {scope: any(value is not None for value in after.values()) for scope, after in found.items()}
    if gone := [rows[scope] for scope in wanted if not is_left[scope]]:
        connection.execute(_REMOVE, _values(gone))
    if changed := [rows[scope] | found[scope] for scope in wanted if is_left[scope] and found[scope] != held[scope]]:
        connection.execute(_CHANGE, _values(changed))
    if noted:
        audit.write_all(connection, "ceiling.set", noted, actor=actor)
    return list(found.values())


def remove_ceilings(connection: Connection, scopes: Sequence[Scope], *, actor: str, reason: str = "") -> None:
    """Remove all ceilings of these scopes. Raises NotFound if one has none."""
    rows = _rows(connection, scopes)
    removed = _by_scope(connection.execute(_REMOVE, _values(rows.values())), rows)
    for scope in scopes:
        if scope not in removed:
            raise NotFound(f"ceiling: {_named(*scope)} has none")
    noted = {_named(*scope): {"before": removed[scope], "after": None, "reason": reason} for scope in scopes}
    audit.write_all(connection, "ceiling.rm", noted, actor=actor)


def _rows(connection: Connection, scopes: Collection[Scope]) -> dict[Scope, dict[str, Any]]:
    ids = instance_ids(connection, (instance for instance, _ in scopes))
    return {(instance, label): {"instance": ids[instance], "label": label} for instance, label in scopes}


def _values(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {"wanted": json.dumps(list(rows))}


def _by_scope(found: Iterable[Row], rows: Mapping[Scope, Mapping[str, Any]]) -> dict[Scope, dict[str, float | None]]:
    """Return the ceilings of each of these rows, by its scope."""
    scopes = {(row["instance"], row["label"]): scope for scope, row in rows.items()}
    return {
        scopes[row.instance, row.label]: {name: getattr(row, name) for name in CeilingTerms.model_fields}
        for row in found
    }


def _named(instance: str | None, label: str | None) -> str:
    """Return the name of the scope for messages and for the audit."""
    parts = [f"instance:{instance}"] if instance is not None else []
    parts += [f"label:{escaped(label, MAX_LABEL)}"] if label is not None else []
    return ",".join(parts) or "pool"
