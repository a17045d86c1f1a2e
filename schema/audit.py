"""Who did what to the pool: a row for every act of an operator, written in the act's own transaction.

Looks at payloads and results are noted too, but a look that is repeated only once an hour: waiting for a job looks at
it many times.
"""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, text

from schema.tables.tenancy import audit

_WRITE = insert(audit)
# Two looks at the same moment may both be noted.
_WRITE_ACCESS = text("""
INSERT INTO audit (actor, action, subject, details)
SELECT :actor, :action, :subject, CAST(:details AS jsonb)
WHERE NOT EXISTS (
    SELECT FROM audit WHERE actor = :actor AND action = :action AND subject = :subject
        AND at > now() - interval '1 hour')
""")
# A server that crashes within a second may forget the note; no look waits for the disk.
_LAZY_COMMIT = text("SET LOCAL synchronous_commit = off")


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


def write_access(
    connection: Connection,
    action: str,
    *,
    actor: str,
    subject: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Note that `actor` looked at `subject`, unless the same was noted within the last hour.

    Only for a transaction that writes nothing else, because its commit does not wait for the disk.
    """
    noted = None if details is None else json.dumps(dict(details))
    row = {"actor": actor, "action": action, "subject": subject, "details": noted}
    if connection.execute(_WRITE_ACCESS, row).rowcount:
        connection.execute(_LAZY_COMMIT)
