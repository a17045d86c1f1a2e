"""The policy on new instances: submits, schedules and bots make one by naming it, or only operators make one.

The SQL function `intern_instance`, through which all submits, schedules and bots go, asks for the policy only before it
makes an instance. Operators make instances by name (`schema/tenancy/instances.py`), whatever the policy is.
"""

from collections.abc import Iterable
from typing import Literal

import psycopg
from leasehold.errors import BadInput
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: What the function raises for an instance that may not be made.
UNKNOWN_INSTANCE = "LH007"

_PUT = Statement("""
INSERT INTO tenancy_policy AS p (create_instances) VALUES (:create_instances)
ON CONFLICT (one) DO UPDATE SET create_instances = EXCLUDED.create_instances
WHERE p.create_instances <> EXCLUDED.create_instances RETURNING one
""")
_REMOVE = Statement("DELETE FROM tenancy_policy RETURNING one")
_REFUSED = Statement("""
SELECT n.name FROM unnest(CAST(:names AS text[])) AS n (name)
WHERE n.name <> 'default' AND NOT EXISTS (SELECT FROM instances i WHERE i.name = n.name)
    AND EXISTS (SELECT FROM tenancy_policy WHERE create_instances = 'never')
""")


class TenancySettings(BaseModel):
    """The section `[tenancy]`, which holds for the whole pool.

    create_instances: `on_submit` = a submit, a schedule or a bot that names an instance which is not there makes it.
        `never` = it is refused, and only operators make instances. `default` is always there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    create_instances: Literal["on_submit", "never"] = "on_submit"


def declare(connection: Connection, wanted: TenancySettings, *, actor: str) -> None:
    """Let every process and every caller in SQL follow the configuration."""
    statement = _REMOVE if wanted == TenancySettings() else _PUT
    if connection.execute(statement, wanted.model_dump()).one_or_none() is not None:
        details = {**wanted.model_dump(), "reason": "configuration"}
        audit.write(connection, "tenancy.set", actor=actor, subject="tenancy", details=details)


def refused_instances(connection: Connection, names: Iterable[str]) -> set[str]:
    """Return those of the names whose instances are not there and may not be made."""
    wanted = sorted(set(names))
    return set(connection.execute(_REFUSED, {"names": wanted}).scalars()) if wanted else set()


def refusal(name: str, field: str = "instance") -> BadInput:
    """The refusal of an instance that is not there."""
    return BadInput(field, f"there is no instance '{escaped(name, 63)}', and only operators make one")


def refused_instance(error: BaseException | None) -> str | None:
    """Return the name of the instance that the database did not make; None if that is not the error."""
    if not isinstance(error, psycopg.Error) or error.sqlstate != UNKNOWN_INSTANCE:
        return None
    return error.diag.message_detail or ""
