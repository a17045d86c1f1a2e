"""Audit rows: one for each act of an operator, written in the transaction of the act.

Reads of payloads and results are recorded too. The same read by the same actor is recorded at most once an hour,
because a caller that waits for a job reads it many times.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from schema.postgres.connection import Connection, commit_lazily
from schema.postgres.statements import Statement

_WRITE = Statement("""
INSERT INTO audit (actor, action, subject, details) VALUES (:actor, :action, :subject, CAST(:details AS jsonb))
""")
_WRITE_ALL = Statement("""
INSERT INTO audit (actor, action, subject, details)
SELECT :actor, :action, n.subject, CAST(n.details AS jsonb)
FROM unnest(CAST(:subjects AS text[]), CAST(:details AS text[])) WITH ORDINALITY AS n (subject, details, nth)
ORDER BY n.nth
""")
# Two reads at the same moment may both be recorded.
_WRITE_ACCESS = Statement("""
INSERT INTO audit (actor, action, subject, details)
SELECT :actor, :action, :subject, CAST(:details AS jsonb)
WHERE NOT EXISTS (
    SELECT FROM audit WHERE actor = :actor AND action = :action AND subject = :subject
        AND at > now() - interval '1 hour')
""")
_ROWS = Statement("""
SELECT id, at, actor, action, subject, details FROM audit
WHERE CAST(:before AS bigint) IS NULL OR id < :before ORDER BY id DESC LIMIT :limit
""")


@dataclass(frozen=True)
class AuditRow:
    """One row: who did what (`noun.verb`) to what, and when."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    details: dict[str, Any] | None


def write(
    connection: Connection,
    action: str,
    *,
    actor: str,
    subject: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Record that `actor` did `action` (`noun.verb`) to `subject`.

    `details` hold ids, names and counts, never payloads.
    """
    noted = None if details is None else json.dumps(dict(details))
    connection.execute(_WRITE, {"actor": actor, "action": action, "subject": subject, "details": noted})


def write_all(connection: Connection, action: str, noted: Mapping[str, Mapping[str, Any]], *, actor: str) -> None:
    """Record that `actor` did the same to several subjects, each with its details: a row for each, in their order."""
    values = {"subjects": list(noted), "details": [json.dumps(dict(each)) for each in noted.values()]}
    connection.execute(_WRITE_ALL, {"actor": actor, "action": action, **values})


def write_access(
    connection: Connection,
    action: str,
    *,
    actor: str,
    subject: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Record that `actor` read `subject`, unless the same read was recorded within the last hour.

    Only for a transaction that writes nothing else, because its commit does not wait for the disk.
    """
    noted = None if details is None else json.dumps(dict(details))
    row = {"actor": actor, "action": action, "subject": subject, "details": noted}
    if connection.execute(_WRITE_ACCESS, row).rowcount:
        commit_lazily(connection)


def rows(connection: Connection, *, before: int | None, limit: int) -> list[AuditRow]:
    """Return up to `limit` rows, newest first; `before`: only those with a lower id."""
    return [_row(row._asdict()) for row in connection.execute(_ROWS, {"before": before, "limit": limit})]


def _row(row: dict[str, Any]) -> AuditRow:
    """Return a row. Stored details that are no object are told under a name that says so."""
    details = row["details"]
    if details is not None and not isinstance(details, dict):
        row["details"] = {"wrong JSON is stored": details}
    return AuditRow(**row)
