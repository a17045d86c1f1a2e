"""Roles of the database's server that submit jobs in transactions of their own.

They hold no token and call no gateway. What they may do is what PostgreSQL lets them: the function `leasehold.submit`
runs with the rights of the owner of the pool's tables, and nobody may call it but this owner and whom it has let.
"""

from leasehold.errors import Forbidden, NotFound
from leasehold.wire import escaped

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.sql import SCHEMA

#: The longest name of a role, in bytes.
MAX_ROLE = 63
SUBMIT = f"{SCHEMA}.submit(jsonb, text)"

_ROLE = Statement("SELECT quote_ident(rolname) FROM pg_roles WHERE rolname = :name")
_MAY_SUBMIT = Statement("""
SELECT has_schema_privilege(CAST(:name AS name), :schema, 'USAGE')
    AND has_function_privilege(CAST(:name AS name), :function, 'EXECUTE')
""")


def grant_submit(connection: Connection, role: str, *, actor: str) -> None:
    """Let a role of the server call `leasehold.submit`, for any instance and at any priority, and nothing else.

    Raises NotFound if there is no such role, Forbidden if the role of this connection may not pass that right on.
    """
    name = connection.execute(_ROLE, {"name": role}).scalar_one_or_none()
    if name is None:
        raise NotFound(f"role: the server has no role '{escaped(role, MAX_ROLE)}'")
    for right in (f"USAGE ON SCHEMA {SCHEMA}", f"EXECUTE ON FUNCTION {SUBMIT}"):
        connection.execute_sql(f"GRANT {right} TO {name}")
    # The server only warns of a right that was not granted, if the role of the connection has that right itself.
    if not connection.execute(_MAY_SUBMIT, {"name": role, "schema": SCHEMA, "function": SUBMIT}).scalar_one():
        raise Forbidden(
            f"role: {escaped(role, MAX_ROLE)} may still not call {SCHEMA}.submit: only the owner of the schema can "
            "grant it; run this as that role"
        )
    audit.write(connection, "db.grant_submit", actor=actor, subject=f"role:{role}")
