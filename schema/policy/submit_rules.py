"""Submit rules: which jobs operators refuse or put back in the order when they are submitted.

A rule belongs to the whole pool or to an instance, and a job must pass every rule that covers it. The SQL function
`within_limits` judges each way to submit, SQL included. Nothing is refused where no rule is set.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schema import audit
from schema.policy.ceilings import instance_ids
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.validation import MAX_PROPERTY_BYTES, check_text

#: The most entries of one list, the longest program name in bytes, and the largest threshold of an owner's cost.
MAX_ENTRIES, MAX_PROGRAM_BYTES, MAX_COST = 1000, 4096, 1e12
#: The most by which an owner's jobs are put back: from the most urgent priority to the least urgent one.
MAX_PENALTY = 2000

_FIELDS = "property_keys, commands, owner_cost::double precision AS owner_cost, owner_penalty"
_LIST = Statement(f"""
SELECT i.name AS instance, {_FIELDS} FROM submit_rules r LEFT JOIN instances i ON i.id = r.instance
ORDER BY i.name NULLS FIRST
""")
# A comparison that a hash can make, which `IS NOT DISTINCT FROM` is not: there may be many thousands of rules.
_OF = "coalesce(r.instance, -1) = coalesce(w.instance, -1)"
_WANTED = """jsonb_to_recordset(CAST(:wanted AS jsonb)) AS w (instance integer, property_keys text[], commands text[],
    owner_cost numeric, owner_penalty integer)"""
_FIELDS_OF_RULE = ", ".join(f"r.{each}" for each in _FIELDS.split(", "))
_MAKE = Statement(f"INSERT INTO submit_rules (instance) SELECT w.instance FROM {_WANTED} ON CONFLICT DO NOTHING")
_HOLD = Statement(f"""
SELECT r.instance, {_FIELDS_OF_RULE} FROM submit_rules r JOIN {_WANTED} ON {_OF} ORDER BY r.id FOR UPDATE OF r
""")
_CHANGE = Statement(f"""
UPDATE submit_rules r SET property_keys = w.property_keys, commands = w.commands, owner_cost = w.owner_cost,
    owner_penalty = w.owner_penalty
FROM {_WANTED} WHERE {_OF}
""")
_REMOVE = Statement(f"""
DELETE FROM submit_rules r USING {_WANTED} WHERE {_OF} RETURNING r.instance, {_FIELDS_OF_RULE}
""")


def _text_of(limit: int) -> AfterValidator:
    def check(value: str) -> str:
        try:
            return check_text("entry", value, limit)
        except BadInput as refused:
            raise ValueError(refused.reason) from None

    return AfterValidator(check)


PropertyKey = Annotated[str, Field(min_length=1), _text_of(MAX_PROPERTY_BYTES)]
Program = Annotated[str, Field(min_length=1), _text_of(MAX_PROGRAM_BYTES)]


class SubmitRuleTerms(BaseModel):
    """The rule of the pool or of an instance. An omitted field keeps its value; null = nothing is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    property_keys: list[PropertyKey] | None = Field(
        default=None, max_length=MAX_ENTRIES, description="the only property keys that jobs may name; null = any"
    )
    commands: list[Program] | None = Field(
        default=None,
        max_length=MAX_ENTRIES,
        description="the only programs that jobs may run, exactly as the first word of a command; null = any",
    )
    owner_cost: float | None = Field(
        default=None,
        ge=0,
        le=MAX_COST,
        description="cost within the rolling window above which an owner is heavy (cost); null = no owner is",
        json_schema_extra={"unit": "cost"},
    )
    owner_penalty: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PENALTY,
        description="steps of priority by which jobs of a heavy owner are less urgent (steps); null = they are refused",
        json_schema_extra={"unit": "steps"},
    )


@dataclass(frozen=True)
class SubmitRule:
    """The rule of an instance, or of the whole pool if it names none. None in a field means that nothing is refused."""

    instance: str | None
    property_keys: list[str] | None
    commands: list[str] | None
    owner_cost: float | None
    owner_penalty: int | None


def submit_rules(connection: Connection) -> list[SubmitRule]:
    """All rules: first that of the pool, then those of instances by name."""
    return [SubmitRule(**row._asdict()) for row in connection.execute(_LIST)]


def set_submit_rules(
    connection: Connection, wanted: Mapping[str | None, SubmitRuleTerms], *, actor: str, reason: str = ""
) -> list[dict[str, Any]]:
    """Set the given parts of the rules of instances, None = the pool, and return all of each. A rule that is left
    without any part is removed.

    It takes as many statements for many as for one. Jobs that were submitted before stay as they are. Raises BadInput
    for a penalty without a threshold, and NotFound for an instance that does not exist.
    """
    ids = instance_ids(connection, wanted)
    rows = {name: {"instance": ids[name]} for name in wanted}
    connection.execute(_MAKE, _values(rows.values()))
    held = {row.instance: _terms(row) for row in connection.execute(_HOLD, _values(rows.values()))}
    found, noted = {}, {}
    for name, terms in wanted.items():
        before = held[ids[name]]
        given = terms.model_dump(include=terms.model_fields_set & before.keys())
        for part in ("property_keys", "commands"):
            if given.get(part) is not None:
                given[part] = sorted(set(given[part]))
        after = found[name] = before | given
        if after["owner_penalty"] is not None and after["owner_cost"] is None:
            raise BadInput("owner_penalty", "means nothing without owner_cost")
        if after != before:
            noted[_subject(name)] = {"before": before, "after": after, "reason": reason}
    is_left = {name: any(value is not None for value in after.values()) for name, after in found.items()}
    if gone := [rows[name] for name in wanted if not is_left[name]]:
        connection.execute(_REMOVE, _values(gone))
    if changed := [rows[name] | found[name] for name in wanted if is_left[name] and found[name] != held[ids[name]]]:
        connection.execute(_CHANGE, _values(changed))
    if noted:
        audit.write_all(connection, "submit-rule.set", noted, actor=actor)
    return list(found.values())


def remove_submit_rules(connection: Connection, names: Sequence[str | None], *, actor: str, reason: str = "") -> None:
    """Remove the rules of instances, None = that of the pool. Raises NotFound if one has none."""
    ids = instance_ids(connection, names)
    found = connection.execute(_REMOVE, _values({"instance": ids[name]} for name in names))
    removed = {row.instance: _terms(row) for row in found}
    for name in names:
        if ids[name] not in removed:
            raise NotFound(f"submit-rule: {'the pool' if name is None else repr(escaped(name, 63))} has none")
    noted = {_subject(name): {"before": removed[ids[name]], "after": None, "reason": reason} for name in names}
    audit.write_all(connection, "submit-rule.rm", noted, actor=actor)


def _values(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {"wanted": json.dumps(list(rows))}


def _terms(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in SubmitRuleTerms.model_fields}


def _subject(instance: str | None) -> str:
    return "pool" if instance is None else f"instance:{instance}"
