"""The log of preemptions with their receipts, newest first.

Each row is one job that was evicted so that an instance below its minimum gets its units. It is written when the bot
has stopped the job. The receipt holds the numbers that justified the request; all rows of one preemption have the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# A job may have been deleted since; the receipt still names it.
PREEMPTIONS = Statement("""
SELECT e.id, e.at, c.name AS cohort, i.name AS instance, j.public_id AS job, b.name AS bot,
    p.name AS preemptor_instance, e.rule, e.details AS receipt
FROM evictions e
LEFT JOIN cohorts c ON c.id = e.cohort
LEFT JOIN instances i ON i.id = e.instance
LEFT JOIN instances p ON p.id = e.preemptor_instance
LEFT JOIN jobs j ON j.id = e.job_id
LEFT JOIN bots b ON b.id = e.bot_id
WHERE CAST(:before AS bigint) IS NULL OR e.id < :before
ORDER BY e.id DESC LIMIT :limit
""")


@dataclass(frozen=True)
class Preemption:
    """One job that was evicted. What has been deleted since is None.

    instance, job: whose job, and which. preemptor_instance: for whose minimum. rule: the rule of the cohort.
    """

    id: int
    at: datetime
    cohort: str | None
    instance: str | None
    job: str | None
    bot: str | None
    preemptor_instance: str | None
    rule: str
    receipt: dict[str, Any]


def preemptions(connection: Connection, *, before: int | None, limit: int) -> Sequence[Preemption]:
    """Return up to `limit` evicted jobs, newest first; `before`: only what was logged before the row with this id."""
    rows = connection.execute(PREEMPTIONS, {"before": before, "limit": limit})
    return [Preemption(**row) for row in rows.mappings()]
