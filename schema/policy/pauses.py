"""The rows of pauses: which labels, tasks, instances and schedules start no further jobs, who said so, and why.

Who pauses an instance drains it, and who pauses a schedule disables it; these rows say why. Labels and tasks are paused
by their rows alone: no transaction that sees the row gives one of their jobs to a bot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args

from leasehold import wire

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, READY

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
# What was drained or disabled before there were such rows has none, and neither has a schedule that was made disabled.
_LIST = Statement("""
SELECT kind, name, instance, reason, actor, at FROM pauses
UNION ALL
SELECT 'instance', i.name, '', '', '', NULL FROM instances i
WHERE i.draining AND NOT EXISTS (SELECT FROM pauses WHERE kind = 'instance' AND name = i.name)
UNION ALL
SELECT 'schedule', s.name, i.name, '', '', NULL FROM schedules s JOIN instances i ON i.id = s.instance
WHERE NOT s.enabled AND NOT EXISTS (
    SELECT FROM pauses p WHERE p.kind = 'schedule' AND p.name = s.name AND p.instance = i.name)
ORDER BY 1, 2, 3
""")
# Queued jobs of a label or a task. Of a task, the first of all queued jobs are looked at, because only the command of a
# job names it.
_OF_LABEL = """
SELECT FROM jobs j WHERE j.label = :name AND j.label <> '' AND j.state = 'queued' AND {scope} LIMIT :most"""
_OF_TASK = f"""
SELECT FROM (
    (SELECT id, instance FROM jobs WHERE {READY} LIMIT :most) UNION ALL
    (SELECT id, instance FROM jobs WHERE {AT_REST} LIMIT :most)) j
WHERE {{scope}} AND EXISTS (
    SELECT FROM job_payloads o WHERE o.job_id = j.id AND o.payload->'command'->>0 = '{wire.COMMAND}'
        AND o.payload->'command'->>2 = :name)
LIMIT :most"""
_SCOPE = "(:instance = '' OR j.instance = (SELECT id FROM instances WHERE name = :instance))"
_STOPPED = """
SELECT (SELECT count(*) FROM ({jobs}) jobs) AS jobs,
    (SELECT count(*) FROM schedules j WHERE {scope} AND {of}) AS schedules
"""
_STOPPED_BY_LABEL = Statement(
    _STOPPED.format(jobs=_OF_LABEL.format(scope=_SCOPE), scope=_SCOPE, of="j.request->>'label' = :name")
)
_STOPPED_BY_TASK = Statement(
    _STOPPED.format(
        jobs=_OF_TASK.format(scope=_SCOPE),
        scope=_SCOPE,
        of=f"j.request->'command'->>0 = '{wire.COMMAND}' AND j.request->'command'->>2 = :name",
    )
)
#: The most queued jobs that are counted, or of a task looked at.
COUNTED = 10_000


@dataclass(frozen=True)
class Pause:
    """One pause. instance: see the table. reason: as the operator wrote it, maybe empty. at: when it began.

    An instance that was drained, or a schedule that was disabled, without such a row has neither reason, actor nor at.
    """

    kind: Kind
    name: str
    instance: str
    reason: str
    actor: str
    at: datetime | None


@dataclass(frozen=True)
class Stopped:
    """What a pause of a label or a task stops: queued jobs, at most `COUNTED`, and schedules whose jobs will wait."""

    jobs: int
    schedules: int


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


def stopped(connection: Connection, kind: Literal["label", "task"], name: str, *, instance: str) -> Stopped:
    """Count what waits for the end of such a pause."""
    query = _STOPPED_BY_LABEL if kind == "label" else _STOPPED_BY_TASK
    row = connection.execute(query, {"name": name, "instance": instance, "most": COUNTED}).one()
    return Stopped(**row._asdict())


def _named(kind: Kind, name: str, instance: str) -> Mapping[str, str]:
    return {"kind": kind, "name": name, "instance": instance}
