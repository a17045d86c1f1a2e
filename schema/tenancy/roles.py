"""Roles of the database's server: programs that submit in transactions of their own, and processes of the pool.

A program holds no token and calls no gateway. What it may do is what PostgreSQL lets it: the function
`leasehold.submit` runs with the rights of the owner of the pool's tables, and nobody may call it but this owner and
whom it has let.
Gateways and assigners need rights on rows, and none to change a table.
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
_OWNER = Statement("""
SELECT quote_ident(pg_get_userbyid(nspowner)) AS name, pg_has_role(nspowner, 'MEMBER') AS may
FROM pg_namespace WHERE nspname = :schema
""")
_ROWS, _NUMBERS = "SELECT, INSERT, UPDATE, DELETE ON", "USAGE ON"


def grant_submit(connection: Connection, role: str, *, actor: str) -> None:
    """Let a role of the server call `leasehold.submit`, for any instance and at any priority, and nothing else.

    Raises NotFound if there is no such role, Forbidden if the role of this connection may not pass that right on.
    """
    name = _quoted(connection, role)
    for right in (f"USAGE ON SCHEMA {SCHEMA}", f"EXECUTE ON FUNCTION {SUBMIT}"):
        connection.execute_sql(f"GRANT {right} TO {name}")
    # The server only warns of a right that was not granted, if the role of the connection has that right itself.
    if not connection.execute(_MAY_SUBMIT, {"name": role, "schema": SCHEMA, "function": SUBMIT}).scalar_one():
        raise Forbidden(
            f"role: {escaped(role, MAX_ROLE)} may still not call {SCHEMA}.submit: only the owner of the schema can "
            "grant it; run this as that role"
        )
    audit.write(connection, "db.grant_submit", actor=actor, subject=f"role:{role}")


def grant_process(connection: Connection, role: str, *, actor: str) -> None:
    """Let gateways and assigners run as a role of the server, also after upgrades: it reads and writes rows.

    What the owner of the schema makes later is granted to the role too. Raises NotFound if there is no such role,
    Forbidden if the role of this connection may not pass these rights on.
    """
    name = _quoted(connection, role)
    owner = require_owner(connection, "grant this")
    later = f"ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {SCHEMA}"
    connection.execute_sql(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {name}")
    for right, things in ((_ROWS, "TABLES"), (_NUMBERS, "SEQUENCES")):
        connection.execute_sql(f"GRANT {right} ALL {things} IN SCHEMA {SCHEMA} TO {name}")
        connection.execute_sql(f"{later} GRANT {right} {things} TO {name}")
    audit.write(connection, "db.grant_process", actor=actor, subject=f"role:{role}")


def require_owner(connection: Connection, act: str) -> str:
    """Return the owner of the schema as a statement has it. Raises Forbidden for other roles, which may not `act`."""
    owner = connection.execute(_OWNER, {"schema": SCHEMA}).one()
    if not owner.may:
        raise Forbidden(f"role: only the owner of the schema {SCHEMA}, {owner.name}, can {act}; run this as that role")
    return str(owner.name)


def _quoted(connection: Connection, role: str) -> str:
    """Return the role's name as a statement has it. Raises NotFound."""
    name = connection.execute(_ROLE, {"name": role}).scalar_one_or_none()
    if name is None:
        raise NotFound(f"role: the server has no role '{escaped(role, MAX_ROLE)}'")
    return str(name)
