"""Advice of operators on jobs that ask for more than a place: start none for now, or wait between starts.

It is for one resource class or for all such jobs, and ends by itself if it was given for a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from schema import audit
from schema.errors import BadInput, NotFound
from schema.limits import check_name, escaped
from schema.wakeups import wake

#: Seconds: the longest delay, and the longest time that advice is given for (a year).
MAX_DELAY, MAX_TIME = 3600.0, 31_536_000.0
#: Of advice that is for all jobs.
ALL = ""

#: The condition that there is any, for a statement that runs anyway.
ANY = "EXISTS (SELECT FROM backpressure)"
IN_FORCE = "(until IS NULL OR until > now())"
READ = text(f"SELECT resource_class, allowed, delay FROM backpressure WHERE {IN_FORCE}")
_LIST = text(f"SELECT * FROM backpressure WHERE {IN_FORCE} ORDER BY resource_class")
_FORGET = text("DELETE FROM backpressure WHERE until <= now()")
_PUT = text("""
INSERT INTO backpressure (resource_class, allowed, delay, until)
VALUES (:resource_class, :allowed, :delay, clock_timestamp() + make_interval(secs => :seconds))
ON CONFLICT (resource_class)
DO UPDATE SET allowed = EXCLUDED.allowed, delay = EXCLUDED.delay, until = EXCLUDED.until
""")
_REMOVE = text("DELETE FROM backpressure WHERE resource_class = :resource_class RETURNING allowed, delay")


@dataclass(frozen=True)
class Advice:
    """`allowed`: whether jobs may start; `delay`: seconds that each assigner waits after it has started some."""

    allowed: bool
    delay: float = 0.0


@dataclass(frozen=True)
class Standing:
    """One row for an operator. `resource_class` None is all jobs; `until` None is until it is taken back."""

    resource_class: str | None
    allowed: bool
    delay: float
    until: datetime | None


def read(connection: Connection) -> dict[str, Advice]:
    """What is advised now, by resource class, '' for all."""
    return {row.resource_class: Advice(row.allowed, row.delay) for row in connection.execute(READ)}


def of(advice: Mapping[str, Advice], resource_class: str | None) -> Advice:
    """What is advised for a class: the stricter of its own advice and that for all."""
    found = [advice[name] for name in {ALL, resource_class or ALL} if name in advice]
    return Advice(all(each.allowed for each in found), max((each.delay for each in found), default=0.0))


def advise(
    connection: Connection,
    resource_class: str | None,
    *,
    allowed: bool,
    delay: float = 0.0,
    seconds: float | None = None,
    actor: str,
    reason: str = "",
) -> None:
    """Advise this for a class, or for all jobs that ask for more than a place, for so many seconds, or until it is
    taken back. Raises BadInput for what is out of range, or says nothing."""
    if resource_class is not None:
        check_name("resource_class", resource_class)
    if not 0 <= delay <= MAX_DELAY:
        raise BadInput("delay", f"must be between 0 and {MAX_DELAY:.0f}")
    if seconds is not None and not 0 < seconds <= MAX_TIME:
        raise BadInput("seconds", f"must be above 0 and at most {MAX_TIME:.0f}")
    if allowed and not delay:
        raise BadInput("delay", "must be above 0 where jobs may start")
    connection.execute(_FORGET)
    values = {"resource_class": resource_class or ALL, "allowed": allowed, "delay": delay, "seconds": seconds}
    connection.execute(_PUT, values)
    details = {"allowed": allowed, "delay": delay, "seconds": seconds, "reason": reason}
    audit.write(connection, "backpressure.set", actor=actor, subject=_subject(resource_class), details=details)
    wake(connection, "jobs")


def take_back(connection: Connection, resource_class: str | None, *, actor: str, reason: str = "") -> None:
    """Advise nothing any more. Raises NotFound if nothing is advised."""
    connection.execute(_FORGET)
    before = connection.execute(_REMOVE, {"resource_class": resource_class or ALL}).one_or_none()
    if before is None:
        whom = "all jobs" if resource_class is None else f"'{escaped(resource_class, 63)}'"
        raise NotFound(f"backpressure: nothing is advised for {whom}")
    details = {"before": {"allowed": before.allowed, "delay": before.delay}, "after": None, "reason": reason}
    audit.write(connection, "backpressure.rm", actor=actor, subject=_subject(resource_class), details=details)
    wake(connection, "jobs")


def standing(connection: Connection) -> list[Standing]:
    """All advice in force, that for all jobs first."""
    return [
        Standing(row.resource_class or None, row.allowed, row.delay, row.until) for row in connection.execute(_LIST)
    ]


def _subject(resource_class: str | None) -> str:
    return f"backpressure:{resource_class or '*'}"
