"""Job classes, service levels and the scheduling policy: points of jobs, and their expected run times.

More points are more urgent. The stored priority of a job is 100 less its points; a lower priority is more urgent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import psycopg
from leasehold.errors import BadInput, Conflict, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict

from schema import audit
from schema.fields import Name
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, READY_CONSTRAINED
from schema.validation import check_name

#: SQLSTATE that the SQL function `points_of` raises for an unknown class or service level.
UNKNOWN_POINTS = "LH003"
#: Classes that a new database has.
FIRST_CLASSES = ("critical", "serious_project", "serious", "random", "auto_generated", "background")
#: Service levels that a new database has.
FIRST_LEVELS = ("premium", "standard", "economy")
#: Points that a class or a service level may have.
LEAST_POINTS, MOST_POINTS = -900, 1100

CLASSES = Statement("SELECT name, points, seconds, seconds_high FROM job_classes ORDER BY points DESC, name")
PRICE = Statement("SELECT price FROM points_of(CAST(:own AS jsonb))")
SET_CLASSES = Statement("""
INSERT INTO job_classes AS c (name, points)
SELECT w.name, w.points FROM unnest(CAST(:names AS text[]), CAST(:points AS integer[])) AS w (name, points) ORDER BY 1
ON CONFLICT (name) DO UPDATE SET points = EXCLUDED.points WHERE c.points <> EXCLUDED.points
""")
LEVELS = Statement("SELECT name, points, timeout_seconds FROM service_levels ORDER BY points DESC, name")
HOLD_LEVELS = Statement("""
SELECT name, points, timeout_seconds FROM service_levels WHERE name = ANY (CAST(:names AS text[]))
ORDER BY name FOR NO KEY UPDATE
""")
SET_LEVELS = Statement("""
INSERT INTO service_levels AS l (name, points, timeout_seconds)
SELECT w.* FROM unnest(CAST(:names AS text[]), CAST(:points AS integer[]), CAST(:timeouts AS double precision[]))
    AS w (name, points, timeout) ORDER BY w.name
ON CONFLICT (name) DO UPDATE SET points = EXCLUDED.points, timeout_seconds = EXCLUDED.timeout_seconds
""")
POLICY = Statement("SELECT * FROM scheduling")
HOLD_POLICY = Statement("SELECT * FROM scheduling FOR NO KEY UPDATE")
SET_POLICY = Statement("""
UPDATE scheduling SET project_points = :project_points, user_points = :user_points, critical = :critical, high = :high,
    normal = :normal, starvation_seconds = :starvation_seconds, max_queue_size = :max_queue_size
""")
# The walk through the waiting jobs that gives them the priority that their points come to now begins anew; see
# `schema.moves.waiting.priority.reprice`. It is written with the points, so that it outlives the process that does so.
_BEGIN_WALK = Statement("""
UPDATE policy_in_force f SET origin = coalesce(f.origin, '{}') || w.walk
FROM (SELECT jsonb '{"repricing": {"after": [-1, "-infinity", "-infinity", -1], "changed": 0}}' AS walk) w
WHERE f.origin @> w.walk IS NOT TRUE
""")
# A submit reads its class or service level, and so holds a weak lock on that table until its job is visible.
LOCK_CLASSES = Statement("LOCK TABLE job_classes IN ACCESS EXCLUSIVE MODE")
LOCK_LEVELS = Statement("LOCK TABLE service_levels IN ACCESS EXCLUSIVE MODE")
_REMOVE_CLASSES = Statement("""
DELETE FROM job_classes WHERE name = ANY (CAST(:names AS text[])) RETURNING name, points
""")
_REMOVE_LEVELS = Statement("""
DELETE FROM service_levels WHERE name = ANY (CAST(:names AS text[])) RETURNING name, points, timeout_seconds
""")
# Every unfinished job that may have constraints; each part reads the index of its state.
_UNFINISHED = f"""
SELECT id, queue FROM jobs WHERE {READY_CONSTRAINED}
UNION ALL SELECT id, queue FROM jobs WHERE {AT_REST} AND constrained
UNION ALL SELECT id, queue FROM jobs WHERE state = 'parked' AND constrained
UNION ALL SELECT id, queue FROM jobs WHERE state = 'deferred' AND constrained
UNION ALL SELECT j.id, j.queue FROM leases l JOIN jobs j ON j.id = l.job_id
    WHERE l.state IN ('pending', 'active', 'cancelling') AND j.constrained
UNION ALL SELECT j.id, j.queue
    FROM graphs g JOIN graph_nodes n ON n.graph = g.id JOIN jobs j ON j.id = n.job_id
    WHERE g.finished_at IS NULL AND j.state = 'blocked' AND j.constrained
"""
# One of these classes, or levels, that an unfinished job has.
CLASS_IN_USE = Statement(f"""
SELECT c.name FROM ({_UNFINISHED}) j LEFT JOIN job_constraints t ON t.job_id = j.id
    JOIN queues q ON q.id = j.queue LEFT JOIN constraint_sets g ON g.id = q.constraint_set
CROSS JOIN LATERAL (VALUES (t.priority_inputs->>'class'), (g.terms->>'job_class')) AS c (name)
WHERE c.name = ANY (CAST(:names AS text[])) LIMIT 1
""")
LEVEL_IN_USE = Statement(f"""
SELECT t.priority_inputs->>'level' AS name FROM ({_UNFINISHED}) j JOIN job_constraints t ON t.job_id = j.id
WHERE t.priority_inputs->>'level' = ANY (CAST(:names AS text[])) LIMIT 1
""")


class ServiceLevelSettings(BaseModel):
    """What gateways do about service levels.

    default: service level of a submitted job that names neither a level nor a class, and that has no deduplication key.
        Unset: such a job has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: Name | None = None


@dataclass(frozen=True)
class JobClass:
    """A job class and the points of its jobs.

    seconds, seconds_high: half of the jobs run for at most `seconds`, nine of ten for at most `seconds_high`; None
        while too few jobs have run.
    """

    name: str
    points: int
    seconds: float | None
    seconds_high: float | None


@dataclass(frozen=True)
class ServiceLevel:
    """A service level: the points of its jobs, and their time-out in seconds."""

    name: str
    points: int
    timeout_seconds: float


@dataclass(frozen=True)
class Policy:
    """The scheduling policy, which applies to jobs of all classes.

    project_points: points that a job gets in addition if it names a project.
    user_points: points that a job gets in addition for each step of its user priority.
    critical, high, normal: largest effective priority of each urgency level; a job above all of them is low.
    starvation_seconds: seconds in one level after which a job moves up to the next one; None = never.
    max_queue_size: number of waiting jobs above which the newest jobs of the low level are deferred; None = no limit.
    """

    project_points: int = 10
    user_points: int = 5
    critical: int = 0
    high: int = 40
    normal: int = 60
    starvation_seconds: float | None = 3600.0
    max_queue_size: int | None = None

    def level(self, effective: float) -> str:
        """The urgency level of a job with this effective priority."""
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


def require_default(connection: Connection, settings: ServiceLevelSettings) -> None:
    """Raise BadInput if the default service level does not exist: every submit that names none would be refused."""
    known = [each.name for each in service_levels(connection)]
    if settings.default is not None and settings.default not in known:
        raise BadInput(
            "service_levels.default", f"there is no service level '{settings.default}': there are {', '.join(known)}"
        )


def policy(connection: Connection, *, held: bool = False) -> Policy:
    """The scheduling policy. `held`: lock it against changes until this transaction ends."""
    row = dict(connection.execute(HOLD_POLICY if held else POLICY).mappings().one())
    del row["one"]
    return Policy(**row)


def priority_of(connection: Connection, priority_inputs: Mapping[str, Any], *, place: str) -> int:
    """The priority that a request with these inputs gets. `place`: that of the request, for errors.

    Raises BadInput for an unknown class or service level.
    """
    try:
        return int(connection.execute(PRICE, {"own": json.dumps(priority_inputs)}).scalar_one())
    except psycopg.Error as error:
        if error.sqlstate == UNKNOWN_POINTS:
            raise unknown_points(error, {place: priority_inputs}) from None
        raise


def unknown_points(error: psycopg.Error, inputs: Mapping[str, Mapping[str, Any]]) -> BadInput:
    """The refusal of the first request that names the unknown class or service level of this error of `points_of`.

    inputs: the inputs of each request by its place, such as `jobs.3`.
    """
    field, name = error.diag.column_name, error.diag.message_detail
    word = "level" if field == "service_level" else "class"
    places = (f"{place}.{field}" for place, given in inputs.items() if given.get(word) == name)
    return BadInput(next(places, "jobs"), escaped(error.diag.message_primary or "", 300))


def put_classes(connection: Connection, points: Mapping[str, int], *, actor: str, reason: str = "") -> None:
    """Make classes of these names, or change their points, in as many statements for many as for one.

    Waiting jobs keep their priority until `moves.reprice`. Raises BadInput.
    """
    for name, wanted in points.items():
        _check(name, wanted)
    connection.execute(SET_CLASSES, {"names": list(points), "points": list(points.values())})
    connection.execute(_BEGIN_WALK)
    noted = {name: {"points": wanted, "reason": reason} for name, wanted in points.items()}
    audit.write_all(connection, "class.set", noted, actor=actor)


def remove_classes(connection: Connection, names: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Remove classes, in as many statements for many as for one.

    Raises NotFound, and Conflict `class_in_use` while an unfinished job has one of them.
    """
    rows = _removed(connection, names, noun="class", lock=LOCK_CLASSES, in_use=CLASS_IN_USE, remove=_REMOVE_CLASSES)
    noted = {name: {"before": rows[name], "reason": reason} for name in names}
    audit.write_all(connection, "class.rm", noted, actor=actor)


def put_service_levels(
    connection: Connection,
    wanted: Mapping[str, tuple[int | None, float | None]],
    *,
    actor: str,
    reason: str = "",
) -> list[ServiceLevel]:
    """Make or change service levels, in as many statements for many as for one, and return them.

    wanted: points, and time-out in seconds, by name. What is None stays as it is. Existing jobs do not change. Raises
    BadInput, also if a new level lacks one of them.
    """
    for name in wanted:
        check_name("name", name)
    known = {row.name: ServiceLevel(*row) for row in connection.execute(HOLD_LEVELS, {"names": list(wanted)})}
    levels = [_level(name, points, timeout, known.get(name)) for name, (points, timeout) in wanted.items()]
    connection.execute(
        SET_LEVELS,
        {
            "names": [level.name for level in levels],
            "points": [level.points for level in levels],
            "timeouts": [level.timeout_seconds for level in levels],
        },
    )
    connection.execute(_BEGIN_WALK)
    noted = {
        level.name: {"points": level.points, "timeout_seconds": level.timeout_seconds, "reason": reason}
        for level in levels
    }
    audit.write_all(connection, "service_level.set", noted, actor=actor)
    return levels


def _level(name: str, points: int | None, timeout: float | None, known: ServiceLevel | None) -> ServiceLevel:
    if known is not None:
        points = known.points if points is None else points
        timeout = known.timeout_seconds if timeout is None else timeout
    if points is None or timeout is None:
        missing = "points" if points is None else "timeout_seconds"
        raise BadInput(missing, f"is missing: there is no service level '{name}' yet")
    _check(name, points)
    return ServiceLevel(name, points, timeout)


def remove_service_levels(connection: Connection, names: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Remove service levels as `remove_classes` does classes. The Conflict is `service_level_in_use`."""
    noun = "service level"
    rows = _removed(connection, names, noun=noun, lock=LOCK_LEVELS, in_use=LEVEL_IN_USE, remove=_REMOVE_LEVELS)
    noted = {name: {"before": rows[name], "reason": reason} for name in names}
    audit.write_all(connection, "service_level.rm", noted, actor=actor)


def put_policy(connection: Connection, wanted: Policy, *, actor: str, reason: str = "") -> None:
    """Replace the scheduling policy. Raises BadInput if the levels are not in order."""
    if not wanted.critical < wanted.high < wanted.normal:
        raise BadInput("levels", "must have critical < high < normal")
    connection.execute(SET_POLICY, vars(wanted))
    connection.execute(_BEGIN_WALK)
    audit.write(
        connection, "scheduling.set", actor=actor, subject="scheduling", details=vars(wanted) | {"reason": reason}
    )


def _removed(
    connection: Connection, names: Sequence[str], *, noun: str, lock: Statement, in_use: Statement, remove: Statement
) -> dict[str, dict[str, Any]]:
    """Remove rows that no unfinished job uses, and return their values by their names.

    Takes an exclusive lock on the table. It waits for submits that have read a row, and a later submit waits and does
    not find the row. Before the lock the use is tested once, so that submits do not wait if a row is in use anyway.
    """
    for fence in (None, lock):
        if fence is not None:
            connection.execute(fence)
        used = connection.execute(in_use, {"names": list(names)}).scalar_one_or_none()
        if used is not None:
            raise Conflict(
                f"{noun.replace(' ', '_')}_in_use", f"{noun} '{escaped(used, 63)}' is used by unfinished jobs"
            )
    rows = {row.name: row._asdict() for row in connection.execute(remove, {"names": list(names)})}
    for name in names:
        if name not in rows:
            raise NotFound(f"{noun}: there is no {noun} '{escaped(name, 63)}'")
    return {row.pop("name"): row for row in rows.values()}


def _check(name: str, points: int) -> None:
    check_name("name", name)
    if not LEAST_POINTS <= points <= MOST_POINTS:
        raise BadInput("points", f"must be between {LEAST_POINTS} and {MOST_POINTS}")


# Expected run times of classes


#: Number of finished jobs that are read, the newest ones.
MAX_RUNS_READ = 5000

EXPECTED_SECONDS = Statement("""
SELECT name, seconds FROM job_classes WHERE name = ANY (CAST(:names AS text[])) AND seconds IS NOT NULL
""")
# If no constraint set has a class, no jobs are read.
RECENT_RUN_TIMES = Statement("""
SELECT g.name, array_agg(extract(epoch FROM j.finished_at - j.started_at)::float8) AS seconds
FROM (SELECT q.id, g.terms->>'job_class' AS name FROM constraint_sets g JOIN queues q ON q.constraint_set = g.id
      WHERE g.terms ? 'job_class') g
JOIN (SELECT queue, state, started_at, finished_at FROM jobs
      WHERE finished_at IS NOT NULL AND EXISTS (SELECT FROM constraint_sets WHERE terms ? 'job_class')
      ORDER BY finished_at DESC LIMIT :most) j ON j.queue = g.id
WHERE j.state = 'succeeded' AND j.started_at IS NOT NULL AND j.finished_at >= j.started_at
GROUP BY g.name
""")
# By instance and label, or by instance and command of jobs without a label.
RUN_TIMES_ALIKE = Statement("""
SELECT i.name AS instance, j.label, j.command, count(*) AS jobs,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY j.seconds) AS median
FROM (SELECT e.instance, e.label, extract(epoch FROM e.finished_at - e.started_at)::float8 AS seconds,
          CASE WHEN e.label = '' THEN (
              SELECT sha256(convert_to((p.payload->'command')::text, 'UTF8'))
              FROM job_payloads p WHERE p.job_id = e.id) END AS command
      FROM (SELECT id, instance, label, state, started_at, finished_at FROM jobs WHERE finished_at IS NOT NULL
            ORDER BY finished_at DESC LIMIT :most) e
      WHERE e.state = 'succeeded' AND e.started_at IS NOT NULL AND e.finished_at >= e.started_at) j
JOIN instances i ON i.id = j.instance
GROUP BY i.name, j.label, j.command HAVING count(*) >= :enough
""")
STORE_PREDICTIONS = Statement("""
UPDATE job_classes c SET seconds = w.seconds, seconds_high = w.high
FROM unnest(CAST(:names AS text[]), CAST(:seconds AS float8[]), CAST(:highs AS float8[])) AS w (name, seconds, high)
WHERE c.name = w.name AND (c.seconds, c.seconds_high) IS DISTINCT FROM (w.seconds, w.high)
""")

# Of the newest finished jobs, those that have a class.
ACCURACY = Statement("""
SELECT g.terms->>'job_class' AS name, count(*) AS jobs, count(t.seconds) AS estimated,
    round((percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM j.finished_at - j.started_at)
            / greatest(t.seconds, 0.001))
        FILTER (WHERE t.seconds IS NOT NULL AND j.started_at IS NOT NULL))::numeric, 3)::float8 AS ratio,
    count(t.deadline) AS dated, count(*) FILTER (WHERE j.finished_at > t.deadline) AS late
FROM (SELECT id, queue, started_at, finished_at FROM jobs WHERE finished_at IS NOT NULL
      ORDER BY finished_at DESC LIMIT :most) j
JOIN queues q ON q.id = j.queue JOIN constraint_sets g ON g.id = q.constraint_set AND g.terms ? 'job_class'
LEFT JOIN job_constraints t ON t.job_id = j.id
GROUP BY 1 ORDER BY 1
""")


@dataclass(frozen=True)
class RunTimes:
    """Run times of the newest jobs that are alike and succeeded: how many, and their median in seconds."""

    jobs: int
    median: float


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the estimates of a class, over its jobs among the newest finished ones.

    jobs: finished jobs.
    estimated: those that had an estimate of their run time.
    ratio: median of run time divided by estimate; None without estimates.
    dated: jobs that had a deadline.
    late: jobs that ended after their deadline.
    """

    name: str
    jobs: int
    estimated: int
    ratio: float | None
    dated: int
    late: int


@dataclass(frozen=True)
class Prediction:
    """Predicted run time of a class in seconds: half of the jobs take at most `seconds`, nine of ten at most `high`."""

    seconds: float
    high: float


def expected_seconds(connection: Connection, names: Sequence[str]) -> dict[str, float]:
    """Median run time in seconds of each of these classes; classes without a prediction are left out."""
    if not names:
        return {}
    return {row.name: row.seconds for row in connection.execute(EXPECTED_SECONDS, {"names": list(names)})}


def recent_run_times(connection: Connection) -> dict[str, list[float]]:
    """Class → run times in seconds of its jobs that succeeded, among the newest finished jobs."""
    return {row.name: list(row.seconds) for row in connection.execute(RECENT_RUN_TIMES, {"most": MAX_RUNS_READ})}


def run_times_alike(connection: Connection, *, enough: int) -> dict[tuple[str, str, bytes | None], RunTimes]:
    """(Instance, label, digest of the command) → run times, of at least `enough` jobs among the newest finished ones.

    Jobs with a label are alike by it, and their digest is None; jobs without one are alike by `command_digest`.
    """
    rows = connection.execute(RUN_TIMES_ALIKE, {"most": MAX_RUNS_READ, "enough": enough})
    return {
        (row.instance, row.label, None if row.command is None else bytes(row.command)): RunTimes(row.jobs, row.median)
        for row in rows
    }


def command_digest(command: Sequence[str]) -> bytes:
    """The digest of a command, as `run_times_alike` computes it from the stored one."""
    return sha256(json.dumps(list(command), ensure_ascii=False).encode()).digest()


def accuracy(connection: Connection) -> list[Accuracy]:
    """Accuracy of the estimates of each class, over the newest finished jobs."""
    return [Accuracy(**row) for row in connection.execute(ACCURACY, {"most": MAX_RUNS_READ}).mappings()]


def store_predictions(connection: Connection, found: Mapping[str, Prediction]) -> None:
    """Store the predictions of these classes. Rows that do not change are not written."""
    connection.execute(
        STORE_PREDICTIONS,
        {
            "names": list(found),
            "seconds": [each.seconds for each in found.values()],
            "highs": [each.high for each in found.values()],
        },
    )
