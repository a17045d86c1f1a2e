"""Drains of instances and assigner processes, and the signs that assigner processes and upkeep are alive.

No job of a drained instance starts. Its running jobs continue, until the drain's deadline if it has one. A drained
assigner process places no jobs; its upkeep continues. Every drain is audited. The drain of a bot is a move, see
schema/moves/sessions.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped

from schema import audit
from schema.accounting.quotas import LOCK_LEASES
from schema.policy import pauses
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.tenancy.instances import unknown
from schema.timing import DEAD_AFTER
from schema.validation import YEAR

_INSTANCE = Statement("""
UPDATE instances i SET draining = :draining,
    drain_deadline = CASE WHEN :draining THEN now() + make_interval(secs => CAST(:deadline AS double precision)) END
FROM (SELECT id, draining FROM instances WHERE name = :name FOR NO KEY UPDATE) before
WHERE i.id = before.id RETURNING before.draining AS was_draining
""")
_HELD = Statement("""
SELECT i.draining, (
    SELECT count(*) FROM leases l WHERE l.instance = i.id AND l.state IN ('pending', 'active', 'cancelling')) AS leases
FROM instances i WHERE i.name = :name
""")

_SEEN = Statement("""
INSERT INTO assigners AS a (name, serves) VALUES (:name, coalesce(CAST(:serves AS jsonb), '[{}]'))
ON CONFLICT (name) DO UPDATE SET seen_at = clock_timestamp(), stopped_at = NULL,
    serves = coalesce(CAST(:serves AS jsonb), a.serves),
    started_at = CASE WHEN :starts THEN clock_timestamp() ELSE a.started_at END,
    drained_at = CASE WHEN a.draining AND :idle THEN coalesce(a.drained_at, clock_timestamp()) END
RETURNING draining
""")
_STOPPED = Statement("UPDATE assigners SET stopped_at = clock_timestamp() WHERE name = :name")
_DRAIN_ASSIGNER = Statement("""
UPDATE assigners SET draining = :draining, drained_at = NULL WHERE name = :name RETURNING name
""")
_ASSIGNERS = Statement("""
SELECT name, CASE WHEN stopped_at IS NOT NULL THEN 'stopped'
        WHEN seen_at < clock_timestamp() - make_interval(secs => :dead_after) THEN 'dead'
        WHEN NOT draining THEN 'running' WHEN drained_at IS NULL THEN 'draining' ELSE 'drained' END AS state,
    draining, started_at, seen_at, stopped_at, policy
FROM assigners WHERE CAST(:name AS text) IS NULL OR name = :name ORDER BY name
""")


@dataclass(frozen=True)
class AssignerProcess:
    """One assigner process as an operator sees it.

    state: running, draining (a drain was requested and is not yet in effect), drained, stopped, or dead (not seen for
        a minute).
    draining: true if an operator requested a drain. The request survives a restart of the process.
    policy: the version of the policy by which it works; None = it has told none.
    """

    name: str
    state: str
    draining: bool
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    policy: int | None


def check_deadline(field: str, deadline: float | None, *, draining: bool) -> None:
    """Raise BadInput unless `deadline`, in seconds, is valid for this request."""
    if deadline is not None and not draining:
        raise BadInput(field, "is only for a drain")
    if deadline is not None and not 0 <= deadline <= YEAR:
        raise BadInput(field, f"must be between 0 and {YEAR:.0f} seconds")


def drain_instance(
    connection: Connection, name: str, *, draining: bool, actor: str, reason: str = "", deadline: float | None = None
) -> bool:
    """Close the instance's queues, or open them again; returns whether they were not so already.

    Running jobs continue. They are asked to stop `deadline` seconds from now; with None they may take any time. Raises
    NotFound.
    """
    where = {"name": name, "draining": draining, "deadline": deadline}
    before = connection.execute(_INSTANCE, where).one_or_none()
    if before is None:
        raise unknown(connection, name)
    if draining:
        pauses.put(connection, "instance", name, instance=pauses.EVERYWHERE, reason=reason, actor=actor)
    else:
        pauses.remove(connection, "instance", name, instance=pauses.EVERYWHERE)
    details = {"reason": reason} | ({"deadline": deadline} if deadline is not None else {})
    action = "instance.drain" if draining else "instance.undrain"
    audit.write(connection, action, actor=actor, subject=f"instance:{name}", details=details)
    wake(connection, "jobs")
    return bool(before.was_draining != draining)


def instance_leases(connection: Connection, name: str) -> int | None:
    """Count the live leases of a draining instance; None if it is not draining. Raises NotFound.

    A result of 0 is final: it waits for every transaction that began to grant before the drain.
    """
    held = connection.execute(_HELD, {"name": name}).one_or_none()
    if held is not None and held.draining and not held.leases:
        connection.execute(LOCK_LEASES)
        held = connection.execute(_HELD, {"name": name}).one_or_none()
    if held is None:
        raise unknown(connection, name)
    return int(held.leases) if held.draining else None


def record_assigner_alive(
    connection: Connection,
    name: str,
    *,
    starts: bool = False,
    idle: bool = False,
    serves: Sequence[Mapping[str, Any]] | None = None,
) -> bool:
    """Record that the process is alive; returns whether an operator wants it drained.

    starts: the process has just started. idle: it places no jobs because of a drain.
    serves: for each of its assigners the names of the `instances` and `cohorts` that it serves, None = all, and
        whether it `tries` another version; unset keeps what is stored, or everything for a new process.
    """
    serves_json = None if serves is None else json.dumps([dict(each) for each in serves])
    where = {"name": name, "starts": starts, "idle": idle, "serves": serves_json}
    draining: bool = connection.execute(_SEEN, where).scalar_one()
    return draining


def record_assigner_stopped(connection: Connection, name: str) -> None:
    """Record that the process has ended."""
    connection.execute(_STOPPED, {"name": name})


def drain_assigner(connection: Connection, name: str, *, draining: bool, actor: str, reason: str = "") -> None:
    """Ask an assigner process to stop placing jobs, or to resume. It reacts within seconds. Raises NotFound."""
    if connection.execute(_DRAIN_ASSIGNER, {"name": name, "draining": draining}).one_or_none() is None:
        raise NotFound(f"assigner: no assigner process '{escaped(name, 63)}'")
    action = "assigner.drain" if draining else "assigner.undrain"
    audit.write(connection, action, actor=actor, subject=f"assigner:{name}", details={"reason": reason})


def assigners(connection: Connection, name: str | None = None) -> list[AssignerProcess]:
    """Every assigner process seen in the last day, or the one with this name."""
    rows = connection.execute(_ASSIGNERS, {"name": name, "dead_after": DEAD_AFTER})
    return [AssignerProcess(**row._asdict()) for row in rows]


# Ticks: proof that upkeep is alive, and the grace period after it was not.


#: Names of ticks of upkeep. The second one is for a process that cannot have the row of the first.
UPKEEP_TICKS = ("reaper", "reaper-2")


# If no upkeep ran for a while, or the clock jumped in either direction, bots may have been unable to call. Then no
# session expires for one full session time-to-live.
BEGIN_TICK = Statement("""
INSERT INTO ticks (name, at, grace_until)
VALUES (:name, clock_timestamp(), clock_timestamp() + make_interval(secs => :grace))
ON CONFLICT (name) DO NOTHING
""")
# Locked before the clock is read. Otherwise a tick that waits for another one would see time go back.
LOCK_TICK = Statement("SELECT FROM ticks WHERE name = :name FOR NO KEY UPDATE")
WRITE_TICK = Statement("""
UPDATE ticks t SET at = n.now, grace_until = CASE
    WHEN n.now - n.before > make_interval(secs => :gap) OR n.now < n.before THEN n.now + make_interval(secs => :grace)
    ELSE least(t.grace_until, n.now + make_interval(secs => :grace)) END
FROM (SELECT clock_timestamp() AS now, at AS before FROM ticks WHERE name = :name) n
WHERE t.name = :name
RETURNING t.grace_until > t.at AS in_grace, extract(epoch FROM n.before - n.now)::double precision AS back
""")


class Tick(NamedTuple):
    """in_grace: no session may expire now. back: seconds by which the clock is behind the last tick."""

    in_grace: bool
    back: float


def tick(connection: Connection, name: str, *, gap: float, grace: float) -> Tick:
    """Write the tick `name`. More than `gap` seconds since the last tick of any process start a grace period of `grace`
    seconds, in which no session may expire; so does a clock that was set back."""
    connection.execute(BEGIN_TICK, {"name": name, "grace": grace})
    connection.execute(LOCK_TICK, {"name": name})
    return Tick(*connection.execute(WRITE_TICK, {"name": name, "gap": gap, "grace": grace}).one())
