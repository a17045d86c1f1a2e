"""How many queued and held jobs of one label may wait; a submit beyond that is refused (`refuse_full_queues`)."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, text

from schema import audit
from schema.limits import Label

#: The largest limit, in jobs: each submit to the label counts up to it, while the others wait.
MAX_QUEUED = 100_000

_PUT = text("""
INSERT INTO queue_limits AS q (label, max_queued) VALUES (:label, :max_queued)
ON CONFLICT (label) DO UPDATE SET max_queued = EXCLUDED.max_queued WHERE q.max_queued <> EXCLUDED.max_queued
RETURNING label
""")
_REMOVE = text("DELETE FROM queue_limits WHERE label = :label RETURNING label")


class QueueSettings(BaseModel):
    """The queued jobs of one label, those that are held included.

    max_queued: so many may wait; submits beyond that are refused. Unset takes a limit away. Doubling it doubles the
        backlog that submitters of this label may build up, and what a submit costs while it is full.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    label: Label
    max_queued: int | None = Field(default=None, ge=0, le=MAX_QUEUED)


def declare(connection: Connection, wanted: Sequence[QueueSettings], *, actor: str) -> None:
    """Give the named labels the limits that the configuration says; the others keep theirs."""
    for each in sorted(wanted, key=lambda one: one.label):
        values = {"label": each.label, "max_queued": each.max_queued}
        statement = _REMOVE if each.max_queued is None else _PUT
        if connection.execute(statement, values).one_or_none() is not None:
            details = {"max_queued": each.max_queued, "reason": "configuration"}
            audit.write(connection, "queue.set", actor=actor, subject=f"label:{each.label}", details=details)
