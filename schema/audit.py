"""Who did what to the pool: one row for every act of an operator, written in the act's own transaction."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert

from schema.tables import audit

_WRITE = insert(audit)


def write(
    connection: Connection,
    action: str,
    *,
    actor: str,
    subject: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Note that `actor` did `action` (noun.verb) to `subject`; `details` hold ids, names and counts, never payloads."""
    row = {"actor": actor, "action": action, "subject": subject, "details": None if details is None else dict(details)}
    connection.execute(_WRITE, row)
