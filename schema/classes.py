"""Points: classes of jobs, service levels, and what else decides how urgent a job is, as operators set them.

More points are more urgent; what is stored with a job is its priority, 100 less its points, where lower is more urgent.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from schema import audit
from schema.errors import BadInput
from schema.limits import check_name, escaped

#: What `priced` raises when a class or a service level is not known.
UNKNOWN_POINTS = "LH003"
#: Points that a class or a service level may have.
LEAST_POINTS, MOST_POINTS = -900, 1100

CLASSES = text("SELECT name, points, seconds, seconds_high FROM job_classes ORDER BY points DESC, name")
PRICE = text("SELECT priced(CAST(:own AS jsonb))")
SET_CLASS = text("""
INSERT INTO job_classes AS c (name, points) VALUES (:name, :points)
ON CONFLICT (name) DO UPDATE SET points = :points WHERE c.points <> :points
""")
LEVELS = text("SELECT name, points, timeout_seconds FROM service_levels ORDER BY points DESC, name")
SET_LEVEL = text("""
INSERT INTO service_levels AS l (name, points, timeout_seconds) VALUES (:name, :points, :timeout)
ON CONFLICT (name) DO UPDATE SET points = :points, timeout_seconds = :timeout
""")
POLICY = text("SELECT * FROM scheduling")
SET_POLICY = text("""
UPDATE scheduling SET project_points = :project_points, user_points = :user_points, critical = :critical, high = :high,
    normal = :normal, starvation_seconds = :starvation_seconds, max_queue_size = :max_queue_size
""")


@dataclass(frozen=True)
class JobClass:
    """What jobs of the class are worth. `seconds`: how long one of two of them runs at most, `seconds_high` nine of
    ten; None while too few have run."""

    name: str
    points: int
    seconds: float | None
    seconds_high: float | None


@dataclass(frozen=True)
class ServiceLevel:
    """What its jobs are worth, and their timeout in seconds."""

    name: str
    points: int
    timeout_seconds: float


@dataclass(frozen=True)
class Policy:
    """What holds for all classes.

    project_points, user_points: for a job of a project, and for each step of its user's priority.
    critical, high, normal: the largest effective priority of these levels; what is above is low.
    starvation_seconds: after so long in one level a job moves up by one; None = never.
    max_queue_size: when more jobs wait, the newest of the low level are deferred; None = any number may wait.
    """

    project_points: int = 10
    user_points: int = 5
    critical: int = 0
    high: int = 40
    normal: int = 60
    starvation_seconds: float | None = 3600.0
    max_queue_size: int | None = None

    def level(self, effective: float) -> str:
        """The level of a job with this effective priority."""
        for name, most in (("critical", self.critical), ("high", self.high), ("normal", self.normal)):
            if effective <= most:
                return name
        return "low"


def classes(connection: Connection) -> list[JobClass]:
    """All classes, the most urgent first."""
    return [JobClass(**row) for row in connection.execute(CLASSES).mappings()]


def service_levels(connection: Connection) -> list[ServiceLevel]:
    """All service levels, the most urgent first."""
    return [ServiceLevel(**row) for row in connection.execute(LEVELS).mappings()]


def policy(connection: Connection) -> Policy:
    """What holds for all classes."""
    row = dict(connection.execute(POLICY).mappings().one())
    del row["one"]
    return Policy(**row)


def priority_of(connection: Connection, own: Mapping[str, Any]) -> int:
    """The priority that a request with these `own` terms gets. Raises BadInput for a class that is not known."""
    try:
        return int(connection.execute(PRICE, {"own": json.dumps(own)}).scalar_one())
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error) and error.orig.sqlstate == UNKNOWN_POINTS:
            raise BadInput("jobs", escaped(error.orig.diag.message_primary or "", 300)) from None
        raise


def put_class(connection: Connection, name: str, *, points: int, actor: str) -> None:
    """Make a class, or change its points. Jobs that wait keep theirs until `moves.reprice`. Raises BadInput."""
    _check(name, points)
    connection.execute(SET_CLASS, {"name": name, "points": points})
    audit.write(connection, "class.set", actor=actor, subject=name, details={"points": points})


def put_service_level(connection: Connection, name: str, *, points: int, timeout: float, actor: str) -> None:
    """Make a service level, or change it; `timeout` in seconds. Jobs keep what they got. Raises BadInput."""
    _check(name, points)
    connection.execute(SET_LEVEL, {"name": name, "points": points, "timeout": timeout})
    details = {"points": points, "timeout_seconds": timeout}
    audit.write(connection, "service_level.set", actor=actor, subject=name, details=details)


def put_policy(connection: Connection, wanted: Policy, *, actor: str) -> None:
    """Replace what holds for all classes. Raises BadInput if the levels are not in order."""
    if not wanted.critical < wanted.high < wanted.normal:
        raise BadInput("levels", "must have critical < high < normal")
    connection.execute(SET_POLICY, vars(wanted))
    audit.write(connection, "scheduling.set", actor=actor, subject="scheduling", details=dict(vars(wanted)))


def _check(name: str, points: int) -> None:
    check_name("name", name)
    if not LEAST_POINTS <= points <= MOST_POINTS:
        raise BadInput("points", f"must be between {LEAST_POINTS} and {MOST_POINTS}")
