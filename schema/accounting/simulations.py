"""Reports of simulations that operators have kept under a title, for those who open the console.

A report is what `leasehold simulate` has printed, as JSON, with the points of its charts. It never changes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from leasehold.errors import BadInput

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: The newest reports that are kept, the largest of them in bytes, and the longest title in bytes.
KEPT, MOST_BYTES, TITLE_BYTES = 100, 4 * 1024 * 1024, 200

# Numbers may have gaps, so the oldest of those that are there goes.
_KEEP = Statement("""
WITH made AS (
    INSERT INTO simulations (title, report) VALUES (:title, CAST(:report AS jsonb)) RETURNING id
), forgotten AS (
    DELETE FROM simulations WHERE id <= (SELECT id FROM simulations ORDER BY id DESC OFFSET :others LIMIT 1)
)
SELECT id FROM made
""")
# It takes no number, so that the first report is number 1.
_TRY = Statement("""
INSERT INTO simulations (id, title, report) OVERRIDING SYSTEM VALUE VALUES (0, :title, '{}')
""")
_LIST = Statement("""
SELECT id, made_at, title, NULL AS report FROM simulations
WHERE CAST(:before AS integer) IS NULL OR id < :before ORDER BY id DESC LIMIT :limit
""")
_ONE = Statement("SELECT id, made_at, title, report FROM simulations WHERE id = :id")


@dataclass(frozen=True)
class Simulation:
    """A report that is kept. report: None in lists."""

    id: int
    made_at: datetime
    title: str
    report: Mapping[str, Any] | None


def require_title(title: str) -> None:
    """Raise BadInput unless reports may be kept under this title."""
    if not title.strip() or not title.isprintable() or len(title.encode()) > TITLE_BYTES:
        raise BadInput("title", f"must be a line of 1 to {TITLE_BYTES} bytes")


def keep(connection: Connection, *, title: str, report: Mapping[str, Any], actor: str) -> int:
    """Keep a report and return its number. The oldest one goes if there are `KEPT` already. Raises BadInput."""
    require_title(title)
    text = json.dumps(report, separators=(",", ":"))
    if len(text) > MOST_BYTES:
        raise BadInput("report", f"has {len(text):,} bytes, and at most {MOST_BYTES:,} are kept")
    made: int = connection.execute(_KEEP, {"title": title, "report": text, "others": KEPT - 1}).scalar_one()
    audit.write(connection, "simulation.keep", actor=actor, subject=str(made), details={"title": title})
    return made


def try_to_keep(connection: Connection, *, title: str, actor: str) -> None:
    """Write what `keep` writes, for a caller who undoes it, to see before a report is made whether it could be kept."""
    require_title(title)
    connection.execute(_TRY, {"title": title})
    audit.write(connection, "simulation.keep", actor=actor, subject="0", details={"title": title})


def simulations(connection: Connection, *, before: int | None = None, limit: int = KEPT) -> Sequence[Simulation]:
    """Return kept reports without their contents, newest first; `before`: only those with lower numbers."""
    rows = connection.execute(_LIST, {"before": before, "limit": limit})
    return [Simulation(*row) for row in rows]


def simulation(connection: Connection, id: int) -> Simulation | None:
    """Return a report with its content; None if it is not kept."""
    row = connection.execute(_ONE, {"id": id}).one_or_none()
    return None if row is None else Simulation(*row)
