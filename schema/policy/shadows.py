"""Shadows: a version of the policy that decides beside the one in force, and how often it would decide otherwise.

A shadow changes nothing. It ends by itself: after its time, when its version comes into force, or is not kept any more.
Assigners learn of it by the statement by which they look which version is in force, and add what they have counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from leasehold.errors import BadInput, Conflict, NotFound

from schema import audit
from schema.policy import versions
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.states import FETCHED

#: Seconds for which a shadow goes on unless it is told otherwise, and the most.
SECONDS, MOST_SECONDS = 86400.0, 7 * 86400.0
#: The part of the cycles at which it looks unless it is told otherwise.
SHARE = 0.01
#: The error code: another shadow goes on.
ANOTHER = "shadow_running"
#: Shadows that are kept, the newest.
KEPT = 20
#: Starts, those of the newest jobs, of which is told how many were fetches.
STARTS = 10_000
#: The most instances of which is told, those with the most differences.
MOST_INSTANCES = 1000
#: What is counted by instance: decisions that were compared, and those of them that were different.
COUNTED = ("bots", "other_bots", "orders", "other_orders", "victims", "other_victims")
#: What is counted by process of the cycles that were looked at.
CYCLES = ("compared", "skipped", "failed")

_START = Statement("""
WITH forgotten AS (
    DELETE FROM policy_shadows WHERE id <= (SELECT max(id) FROM policy_shadows) - :kept
)
INSERT INTO policy_shadows (policy, share, author, reason, ends_at)
VALUES (:policy, :share, :author, :reason, now() + make_interval(secs => :seconds))
RETURNING id
""")
_STOP = Statement("UPDATE policy_shadows SET ended_at = clock_timestamp(), ended = 'it was stopped' WHERE id = :id")
_SHADOW = Statement("""
SELECT s.id, s.policy, s.share, s.author, s.reason, s.began_at, s.ends_at,
    coalesce(s.ended_at, CASE WHEN s.ends_at <= clock_timestamp() THEN s.ends_at END) AS ended_at,
    coalesce(s.ended, CASE WHEN s.ends_at <= clock_timestamp() THEN 'its time was over'
        WHEN NOT EXISTS (SELECT FROM policies p WHERE p.id = s.policy) THEN 'its version is not kept any more' END)
        AS ended
FROM policy_shadows s WHERE CAST(:policy AS integer) IS NULL OR s.policy = :policy ORDER BY s.id DESC LIMIT 1
""")
# Sums of all instances come first, without a name.
_COUNTS = Statement(f"""
SELECT i.name, {", ".join(f"coalesce(sum(c.{name}), 0)::bigint AS {name}" for name in COUNTED)}
FROM policy_shadow_counts c LEFT JOIN instances i ON i.id = c.instance WHERE c.shadow = :id
GROUP BY GROUPING SETS ((), (c.instance, i.name))
ORDER BY grouping(c.instance) DESC, sum(c.other_bots + c.other_orders + c.other_victims) DESC, i.name
LIMIT 1 + :most
""")
_PROCESSES = Statement("""
SELECT process, at, compared, skipped, failed, seconds, reason FROM policy_shadow_processes
WHERE shadow = :id ORDER BY process
""")
_STARTS = Statement(f"""
SELECT count(*) AS starts, count(*) FILTER (WHERE strategy = '{FETCHED}') AS fetched
FROM (SELECT strategy, granted_at FROM leases ORDER BY job_id DESC LIMIT :most) l
WHERE granted_at BETWEEN :began AND coalesce(CAST(:ended AS timestamptz), clock_timestamp())
""")
_ADD = Statement(f"""
INSERT INTO policy_shadow_counts AS c (shadow, instance, {", ".join(COUNTED)})
SELECT s.id, w.* FROM policy_shadows s CROSS JOIN unnest(
    CAST(:instances AS integer[]), {", ".join(f"CAST(:{name} AS bigint[])" for name in COUNTED)}) AS w (instance)
WHERE s.id = :shadow ORDER BY w.instance
ON CONFLICT (shadow, instance) DO UPDATE SET {", ".join(f"{name} = c.{name} + EXCLUDED.{name}" for name in COUNTED)}
""")
_ADD_CYCLES = Statement(f"""
INSERT INTO policy_shadow_processes AS p (shadow, process, {", ".join(CYCLES)}, seconds, reason)
SELECT id, :process, {", ".join(f"CAST(:{name} AS bigint)" for name in CYCLES)}, :seconds, :reason
FROM policy_shadows WHERE id = :shadow
ON CONFLICT (shadow, process) DO UPDATE SET at = now(), reason = EXCLUDED.reason,
    {", ".join(f"{name} = p.{name} + EXCLUDED.{name}" for name in (*CYCLES, "seconds"))}
""")


@dataclass(frozen=True)
class Counts:
    """What shadows have compared for the jobs of an instance; None = of all.

    bots, orders, victims: decisions. other_bots: the shadow wants another bot for the job, or none, or the cycle had
    none. other_orders: the job would have another place, or would not be among those to be placed. other_victims: other
    running jobs would be stopped for the job.
    """

    instance: str | None
    bots: int
    other_bots: int
    orders: int
    other_orders: int
    victims: int
    other_victims: int


@dataclass(frozen=True)
class ShadowProcess:
    """What the shadow of one assigner process did. compared, skipped, failed: cycles; `skipped` are those for which it
    had no processor time left. seconds: of processor time. reason: what it cannot compare, and why."""

    process: str
    at: datetime
    compared: int
    skipped: int
    failed: int
    seconds: float
    reason: str | None


@dataclass(frozen=True)
class Shadow:
    """A version that decides, or decided, beside the one in force. share: the part of the cycles at which it looks, 0
    to 1. ended: why it goes on no more; None = it does."""

    id: int
    policy: int
    share: float
    author: str
    reason: str
    began_at: datetime
    ends_at: datetime
    ended_at: datetime | None
    ended: str | None


@dataclass(frozen=True)
class Report:
    """A shadow and what came of it. starts: those of the newest jobs in its time, up to STARTS; fetched: by bots, to
    whose starts most of what a shadow compares does not apply."""

    shadow: Shadow
    total: Counts
    instances: Sequence[Counts]
    processes: Sequence[ShadowProcess]
    starts: int
    fetched: int


def newest(connection: Connection, *, policy: int | None = None) -> Shadow | None:
    """Return the shadow that goes on, or else the last one; None = there was none. policy: of this version alone."""
    row = connection.execute(_SHADOW, {"policy": policy}).one_or_none()
    return None if row is None else Shadow(**row._asdict())


def start(connection: Connection, policy: int, *, share: float, seconds: float, actor: str, reason: str) -> Shadow:
    """Let a version decide beside the one in force, and audit it. The same request again changes nothing.

    share: of the cycles, above 0 up to 1. seconds: until it ends by itself. Raises BadInput, NotFound for the version,
    and Conflict if it is in force or if there is another shadow.
    """
    if not 0 < share <= 1:
        raise BadInput("share", "must be above 0 and at most 1")
    if not 1 <= seconds <= MOST_SECONDS:
        raise BadInput("seconds", f"must be from 1 to {MOST_SECONDS:.0f}")
    if versions.hold(connection) == policy:
        raise Conflict(
            "policy_in_force", f"policy: version {policy} is in force; a shadow compares another one with it"
        )
    versions.version(connection, policy)
    before = newest(connection)
    if before is not None and before.ended is None:
        if (before.policy, before.share) == (policy, share):
            return before
        raise Conflict(
            ANOTHER,
            f"policy: version {before.policy} is the shadow, at {before.share:.6g} of the cycles: stop it first",
        )
    values = {"policy": policy, "share": share, "author": actor, "reason": reason, "seconds": seconds, "kept": KEPT}
    connection.execute(_START, values)
    details = {"reason": reason, "share": share, "seconds": seconds}
    audit.write(connection, "policy.shadow", actor=actor, subject=f"policy:{policy}", details=details)
    made = newest(connection)
    assert made is not None
    return made


def stop(connection: Connection, *, actor: str, reason: str) -> Shadow:
    """End the shadow, and audit it. Asked again it changes nothing. Raises NotFound if there never was one."""
    versions.hold(connection)
    found = newest(connection)
    if found is None:
        raise NotFound("policy: there was no shadow")
    if found.ended is not None:
        return found
    connection.execute(_STOP, {"id": found.id})
    audit.write(
        connection, "policy.unshadow", actor=actor, subject=f"policy:{found.policy}", details={"reason": reason}
    )
    return newest(connection) or found


def report(connection: Connection, shadow: Shadow) -> Report:
    """Return what came of a shadow so far: the sums of all processes."""
    total, *instances = [Counts(*row) for row in connection.execute(_COUNTS, {"id": shadow.id, "most": MOST_INSTANCES})]
    processes = [ShadowProcess(**row._asdict()) for row in connection.execute(_PROCESSES, {"id": shadow.id})]
    of = {"began": shadow.began_at, "ended": shadow.ended_at, "most": STARTS}
    starts = connection.execute(_STARTS, of).one()
    return Report(shadow, total, instances, processes, starts.starts, starts.fetched)


def add(
    connection: Connection,
    shadow: int,
    *,
    process: str,
    jobs: Mapping[tuple[int, str], int],
    cycles: Mapping[str, int],
    seconds: float,
    reason: str | None,
) -> None:
    """Add what the shadow of a process has counted since it was last added. A shadow that is not kept takes nothing.

    jobs: by instance and a name of COUNTED. cycles: by a name of CYCLES.
    """
    instances = sorted({instance for instance, _ in jobs})
    counted = {name: [jobs.get((each, name), 0) for each in instances] for name in COUNTED}
    connection.execute(_ADD, {"shadow": shadow, "instances": instances, **counted})
    did = {name: cycles.get(name, 0) for name in CYCLES}
    connection.execute(_ADD_CYCLES, {"shadow": shadow, "process": process, **did, "seconds": seconds, "reason": reason})
