"""The rows of pauses: which labels, tasks, instances and schedules start no further jobs, who said so, and why.

Who pauses an instance drains it, and who pauses a schedule disables it; these rows say why. Labels and tasks are paused
by their rows alone: no transaction that sees the row gives one of their jobs to a bot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

Kind = Literal["label", "task", "instance", "schedule"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: The instance of a pause that holds for the jobs of all of them.
EVERYWHERE = ""

_PUT = Statement("""
INSERT INTO pauses (kind, name, instance, reason, actor) VALUES (:kind, :name, :instance, :reason, :actor)
ON CONFLICT (kind, name, instance) DO UPDATE
    SET reason = coalesce(nullif(EXCLUDED.reason, ''), pauses.reason), actor = EXCLUDED.actor
""")
_REMOVE = Statement("""
DELETE FROM pauses WHERE kind = :kind AND name = :name AND instance = :instance
RETURNING kind, name, instance, reason, actor, at
""")
_LIST = Statement("SELECT kind, name, instance, reason, actor, at FROM pauses ORDER BY kind, name, instance")


@dataclass(frozen=True)
class Pause:
    """One pause. instance: see the table. reason: as the operator wrote it, maybe empty. at: when it began."""

    kind: Kind
    name: str
    instance: str
    reason: str
    actor: str
    at: datetime


def put(connection: Connection, kind: Kind, name: str, *, instance: str, reason: str, actor: str) -> None:
    """Store a pause, or another reason for it; without one it keeps its reason."""
    connection.execute(_PUT, {**_named(kind, name, instance), "reason": reason, "actor": actor})


def remove(connection: Connection, kind: Kind, name: str, *, instance: str) -> Pause | None:
    """Forget a pause and return it; None if there was none."""
    row = connection.execute(_REMOVE, _named(kind, name, instance)).one_or_none()
    return None if row is None else Pause(**row._asdict())


def pauses(connection: Connection) -> list[Pause]:
    """Every pause, ordered by kind and name."""
    return [Pause(**row._asdict()) for row in connection.execute(_LIST)]


def _named(kind: Kind, name: str, instance: str) -> Mapping[str, str]:
    return {"kind": kind, "name": name, "instance": instance}
