"""Submit rules: which jobs operators refuse or put back in the order when they are submitted.

A rule belongs to the whole pool or to an instance, and a job must pass every rule that covers it. The SQL function
`within_limits` judges each way to submit, SQL included. Nothing is refused where no rule is set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schema import audit
from schema.policy.ceilings import instance_id
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
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
_OF = "r.instance IS NOT DISTINCT FROM CAST(:instance AS integer)"
_MAKE = Statement("INSERT INTO submit_rules (instance) VALUES (:instance) ON CONFLICT DO NOTHING")
_HOLD = Statement(f"SELECT {_FIELDS} FROM submit_rules r WHERE {_OF} FOR UPDATE")
_CHANGE = Statement(f"""
UPDATE submit_rules r SET property_keys = :property_keys, commands = :commands, owner_cost = :owner_cost,
    owner_penalty = :owner_penalty
WHERE {_OF}
""")
_REMOVE = Statement(f"DELETE FROM submit_rules r WHERE {_OF} RETURNING {_FIELDS}")


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


def set_submit_rule(
    connection: Connection, instance: str | None, terms: SubmitRuleTerms, *, actor: str, reason: str = ""
) -> dict[str, Any]:
    """Set the given parts of a rule, and return all of it. A rule that is left without any part is removed.

    Jobs that were submitted before stay as they are. Raises BadInput for a penalty without a threshold, and NotFound
    for an instance that does not exist.
    """
    scope = _scope(connection, instance)
    connection.execute(_MAKE, scope)
    before = dict(connection.execute(_HOLD, scope).one()._asdict())
    given = terms.model_dump(include=terms.model_fields_set & before.keys())
    for name in ("property_keys", "commands"):
        if given.get(name) is not None:
            given[name] = sorted(set(given[name]))
    after = before | given
    if after["owner_penalty"] is not None and after["owner_cost"] is None:
        raise BadInput("owner_penalty", "means nothing without owner_cost")
    if all(value is None for value in after.values()):
        connection.execute(_REMOVE, scope)
    elif after != before:
        connection.execute(_CHANGE, {**scope, **after})
    if after != before:
        _note(connection, "submit-rule.set", instance, before, after, actor=actor, reason=reason)
    return after


def remove_submit_rule(connection: Connection, instance: str | None, *, actor: str, reason: str = "") -> None:
    """Remove the rule of an instance, or of the pool. Raises NotFound if it has none."""
    row = connection.execute(_REMOVE, _scope(connection, instance)).one_or_none()
    if row is None:
        whose = "the pool" if instance is None else f"'{escaped(instance, 63)}'"
        raise NotFound(f"submit-rule: {whose} has none")
    _note(connection, "submit-rule.rm", instance, dict(row._asdict()), None, actor=actor, reason=reason)


def _scope(connection: Connection, instance: str | None) -> dict[str, int | None]:
    return {"instance": None if instance is None else instance_id(connection, instance)}


def _note(
    connection: Connection,
    action: str,
    instance: str | None,
    before: Mapping[str, Any],
    after: Mapping[str, Any] | None,
    *,
    actor: str,
    reason: str,
) -> None:
    subject = "pool" if instance is None else f"instance:{instance}"
    audit.write(
        connection, action, actor=actor, subject=subject, details={"before": before, "after": after, "reason": reason}
    )
