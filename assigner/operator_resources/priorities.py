"""Declarations of priorities: classes with limits and reserves, service levels, and the scheduling policy."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pydantic import Field

from assigner.operator_resources.declaration import (
    SECONDS,
    By,
    Fields,
    Irremovable,
    Key,
    Keys,
    Page,
    Removal,
    Request,
    Resource,
    Row,
    Setting,
    given,
)
from schema.accounting import class_reserves, counters
from schema.accounting.counters import JOBS_OF_CLASS
from schema.moves.waiting import priority as priority_moves
from schema.policy import priority_classes
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.readable import plural
from schema.validation import YEAR

#: Jobs repriced in one transaction.
BATCH = 500


def reprice(database: Database, *, actor: str) -> int:
    """Give all waiting jobs the priority of their points, a batch at a time, if points were changed. Returns how many
    jobs the last such change has changed."""
    while not (done := database.run(partial(priority_moves.reprice, limit=BATCH, actor=actor, wait=True))).is_over:
        pass
    return done.changed


def _reprice(database: Database, actor: str) -> Mapping[str, Any]:
    return {"repriced": reprice(database, actor=actor)}


def _points(default: Any = ..., *, help: str) -> Any:
    return given(default, unit="points", help=help, ge=priority_classes.LEAST_POINTS, le=priority_classes.MOST_POINTS)


class ClassRequest(Request):
    points: int = _points(help="points of its jobs; more = sooner")


class Class(Row):
    name: str
    points: int = given(unit="points", help="points of its jobs; more = sooner")
    priority: int = Field(description="100 - points; lower = sooner")
    level: str = Field(description="level of a job with exactly these points")
    seconds: float | None = given(unit=SECONDS, help="median run time of its jobs; unset = not known")
    seconds_high: float | None = given(unit=SECONDS, help="90th percentile of the run times; unset = not known")
    running: float = given(unit="jobs", help="running jobs that count against the limit")
    jobs: float | None = given(unit="jobs", help="jobs that may run at once; unset = any number")


def _classes(connection: Connection, _: Page) -> list[dict[str, Any]]:
    policy = priority_classes.policy(connection)
    limits = {each.names[0]: each for each in counters.limits(connection, JOBS_OF_CLASS)}
    return [
        asdict(each)
        | {"priority": 100 - each.points, "level": policy.level(100 - each.points)}
        | {"running": limits[each.name].used if each.name in limits else 0.0}
        | {"jobs": limits[each.name].most if each.name in limits else None}
        for each in priority_classes.classes(connection)
    ]


CLASSES = Resource(
    name="class",
    plural="classes",
    help="Classes of jobs, each with points: more points are more urgent.",
    keys=(Key("name", "NAME"),),
    row=Class,
    rows=_classes,
    columns=(
        ("class", "name"),
        ("points (higher = sooner)", "points"),
        ("priority (lower = sooner)", "priority"),
        ("level", "level"),
        ("half run at most (s)", "seconds"),
        ("nine of ten (s)", "seconds_high"),
        ("running at once (jobs)", lambda row: None if row["jobs"] is None else row["running"]),
        ("limit (jobs)", "jobs"),
    ),
    set=Setting(
        help="Make a class, or change its points. Its waiting jobs get the new priority while the pool works on.",
        model=ClassRequest,
        apply_all=lambda connection, wanted, by: priority_classes.put_classes(
            connection, {keys[0]: body.points for keys, body in wanted}, **by
        ),
        then=_reprice,
        arguments=("points",),
    ),
    printed=lambda done: f"{done['name']} has {plural(done['points'], 'point')}: priority {100 - done['points']}",
    remove=Removal(
        help="Remove a class that no unfinished job uses.",
        apply_all=lambda connection, names, by: priority_classes.remove_classes(
            connection, [keys[0] for keys in names], **by
        ),
        printed="class {name} is removed",
    ),
)


class ClassLimitRequest(Request):
    jobs: int | None = given(unit="jobs", help="most jobs at once; null = any number", ge=0, le=counters.MAX_JOBS)


class ClassLimit(Row):
    name: str = Field(description="the class")
    running: float = given(unit="jobs", help="jobs that run now")
    jobs: float | None = given(unit="jobs", help="jobs that may run at once")


def _class_limits(connection: Connection, _: Page) -> list[ClassLimit]:
    return [
        ClassLimit(name=each.names[0], running=each.used, jobs=each.most)
        for each in counters.limits(connection, JOBS_OF_CLASS)
    ]


CLASS_LIMITS = Resource(
    name="class-limit",
    command="limit class",
    plural="class-limits",
    help="How many jobs of a class may run at once.",
    keys=(Key("name", "NAME"),),
    row=ClassLimit,
    rows=_class_limits,
    columns=(("class", "name"), ("running (jobs)", "running"), ("limit (jobs)", "jobs")),
    set=Setting(
        help="Set how many jobs of a class may run at once, so that other classes have room; none = any number.",
        model=ClassLimitRequest,
        apply_all=lambda connection, wanted, by: counters.set_limits(
            connection, JOBS_OF_CLASS, {tuple(keys): body.jobs for keys, body in wanted}, **by
        ),
        arguments=("jobs",),
        stops={"jobs": "no job of this class starts while it may run 0"},
    ),
    printed=lambda done: (
        f"{done['name']} may run "
        f"{'any number of jobs' if done['jobs'] is None else plural(done['jobs'], 'job')} at once"
    ),
    remove=Removal(
        help="Let any number of jobs of a class run at once.",
        apply_all=lambda connection, names, by: counters.remove_limits(connection, JOBS_OF_CLASS, names, **by),
        printed="{name} may run any number of jobs at once",
    ),
)


class ClassReserveRequest(Request):
    jobs: int = given(unit="jobs", help="jobs of the pool's limit that are kept for it", ge=1, le=counters.MAX_JOBS)


class ClassReserve(Row):
    name: str = Field(description="the class")
    jobs: int = given(unit="jobs", help="jobs of the pool's limit that are kept for it")
    running: float = given(unit="jobs", help="its jobs that run now, within its reserve and beyond")


CLASS_RESERVES = Resource(
    name="class-reserve",
    command="limit reserve",
    plural="class-reserves",
    help="How many of the jobs that the pool may run at once are kept for a class.",
    keys=(Key("name", "NAME"),),
    row=ClassReserve,
    rows=lambda connection, _: class_reserves.reserves(connection),
    columns=(("class", "name"), ("kept (jobs)", "jobs"), ("running (jobs)", "running")),
    set=Setting(
        help="Keep so many jobs of the pool's limit for a class; jobs of other classes take the rest.",
        model=ClassReserveRequest,
        apply=lambda connection, keys, body, by: class_reserves.put_reserve(connection, keys[0], jobs=body.jobs, **by),
        arguments=("jobs",),
    ),
    printed=lambda done: f"{done['jobs']} of the jobs that the pool may run at once are kept for {done['name']}",
    remove=Removal(
        help="Keep nothing of the pool's limit for a class.",
        apply=lambda connection, keys, by: class_reserves.remove_reserve(connection, keys[0], **by),
        printed="nothing is kept for {name}",
    ),
)


class LevelRequest(Request):
    points: int = _points(0, help="points of its jobs; more = sooner; a new level needs them")
    timeout_seconds: float = given(
        0.0, unit=SECONDS, help="timeout of a job that sets none; a new level needs it", gt=0, le=YEAR
    )


class Level(Row):
    name: str
    points: int = given(unit="points", help="points of its jobs; more = sooner")
    priority: int = Field(description="100 - points; lower = sooner")
    timeout_seconds: float = given(unit=SECONDS, help="timeout of a job that sets none")


def _levels(connection: Connection, _: Page) -> list[dict[str, Any]]:
    return [asdict(each) | {"priority": 100 - each.points} for each in priority_classes.service_levels(connection)]


def _set_levels(connection: Connection, wanted: Sequence[tuple[Keys, LevelRequest]], by: By) -> Sequence[Fields]:
    given = {
        keys[0]: (
            body.points if "points" in body.model_fields_set else None,
            body.timeout_seconds if "timeout_seconds" in body.model_fields_set else None,
        )
        for keys, body in wanted
    }
    levels = priority_classes.put_service_levels(connection, given, **by)
    return [{"points": level.points, "timeout_seconds": level.timeout_seconds} for level in levels]


def _told_of_level(done: Mapping[str, Any]) -> str:
    points, timeout = done["points"], done["timeout_seconds"]
    return f"{done['name']} has {plural(points, 'point')}: priority {100 - points}, timeout {timeout:g} s"


SERVICE_LEVELS = Resource(
    name="service-level",
    command="rule service-level",
    plural="service-levels",
    help="Service levels, each with the points and the timeout of its jobs.",
    keys=(Key("name", "NAME"),),
    row=Level,
    rows=_levels,
    columns=(
        ("level", "name"),
        ("points (higher = sooner)", "points"),
        ("priority (lower = sooner)", "priority"),
        ("timeout (s)", "timeout_seconds"),
    ),
    set=Setting(
        help="Make a service level, or change it; fields that are not given stay. Waiting jobs get the new points but "
        "keep their timeout.",
        model=LevelRequest,
        apply_all=_set_levels,
        partial=True,
        then=_reprice,
        options={"timeout_seconds": "--timeout"},
    ),
    printed=_told_of_level,
    remove=Removal(
        help="Remove a service level that no unfinished job uses.",
        apply_all=lambda connection, names, by: priority_classes.remove_service_levels(
            connection, [keys[0] for keys in names], **by
        ),
        printed="service level {name} is removed",
    ),
)


def _edge(level: str) -> Any:
    return given(
        0, unit="priority", help=f"largest effective priority of the level {level}", ge=-1_000_000, le=1_000_000
    )


class SchedulingRequest(Request):
    project_points: int = given(10, unit="points", help="points of a job that belongs to a project", ge=-100, le=100)
    user_points: int = given(5, unit="points", help="points for each step of the user's priority", ge=-100, le=100)
    critical: int = _edge("critical")
    high: int = _edge("high")
    normal: int = _edge("normal; above it is low")
    starvation_seconds: float | None = given(
        None, unit=SECONDS, help="time in one level until a job moves up; null = never", gt=0, le=YEAR
    )
    max_queue_size: int | None = given(
        None, unit="jobs", help="jobs that may wait; null = any number", gt=0, le=counters.MAX_JOBS
    )


class Scheduling(Row):
    project_points: int = given(unit="points", help="points of a job that belongs to a project")
    user_points: int = given(unit="points", help="points for each step of the user's priority")
    critical: int = given(unit="priority", help="largest effective priority of this level")
    high: int = given(unit="priority", help="largest effective priority of this level")
    normal: int = given(unit="priority", help="largest effective priority of this level; above it is low")
    starvation_seconds: float | None = given(unit=SECONDS, help="time in one level until a job moves up; unset = never")
    max_queue_size: int | None = given(unit="jobs", help="jobs that may wait; unset = any number")


def _set_scheduling(connection: Connection, _keys: Keys, body: SchedulingRequest, by: By) -> None:
    wanted: Any = {name: getattr(body, name) for name in body.model_fields_set - {"reason"}}
    priority_classes.put_policy(connection, replace(priority_classes.policy(connection, held=True), **wanted), **by)


SCHEDULING = Resource(
    name="scheduling",
    plural="scheduling",
    help="Settings for all classes: points of projects and users, levels, starvation, overflow.",
    keys=(),
    answers_as="scheduling",
    row=Scheduling,
    rows=lambda connection, _: [priority_classes.policy(connection)],
    columns=(
        ("project points", "project_points"),
        ("user points", "user_points"),
        ("critical (priority)", "critical"),
        ("high (priority)", "high"),
        ("normal (priority)", "normal"),
        ("starvation (s)", "starvation_seconds"),
        ("max queue size (jobs)", "max_queue_size"),
    ),
    set=Setting(
        help="Change settings for all classes; settings that are not given stay.",
        model=SchedulingRequest,
        apply=_set_scheduling,
        partial=True,
        then=_reprice,
        options={"starvation_seconds": "--starvation"},
    ),
    printed=lambda _: "done",
    remove=Irremovable("it holds for all classes, and jobs always need it; set its parts to other values"),
)

RESOURCES: tuple[Resource[Any], ...] = (CLASSES, CLASS_LIMITS, CLASS_RESERVES, SERVICE_LEVELS, SCHEDULING)
