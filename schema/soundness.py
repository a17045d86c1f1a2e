"""The check of a job's row, which calls the function in `schema/sql/checks/job_is_sound.sql`."""

from typing import Any

from sqlalchemy import Connection, event

from schema import sql
from schema.columns import metadata

CHECK = """
job_is_sound(state, finished_at, schedule_after, fence, result_fence, priority, label, locality_hint, units,
    max_attempts, attempts, kills, evictions, dedup_key, timeout_seconds)
"""


@event.listens_for(metadata, "before_create")
def _load_checks(_: object, connection: Connection, **__: Any) -> None:
    sql.load_all(connection, "checks")
