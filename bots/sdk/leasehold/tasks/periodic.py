"""Schedules that a program declares beside its tasks: calls that a pool makes at the ticks of cron expressions.

`Pool.periodic` declares one. A pool knows of it once it is applied, by `leasehold schedule apply MODULE:POOL` or
`Pool.apply_schedules`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from leasehold import wire
from leasehold.client import Client
from leasehold.errors import BadInput
from leasehold.tasks.large_results import LargeResults
from leasehold.tasks.task import Task, TaskRegistry
from leasehold.transport import Record
from leasehold.wire import CatchUp, Overlap, Serialiser, check_cron, escaped, has_ticks

T = TypeVar("T", bound=Task[..., Any])


@dataclass(frozen=True)
class DeclaredSchedule:
    """A schedule that a program declares: a call of a task at each tick.

    record: what is sent for it when the schedules are applied.
    """

    name: str
    task: Task[..., Any]
    record: Record


#: What applying did to a schedule. `left`: the program declares it no longer, and it was not pruned.
Outcome = Literal["created", "changed", "unchanged", "removed", "left"]


@dataclass(frozen=True)
class AppliedSchedule:
    """What became of one schedule of a program. next_tick: None if it is disabled."""

    name: str
    instance: str
    outcome: Outcome
    next_tick: datetime | None

    @classmethod
    def of(cls, record: Record) -> Self:
        """Make one of the gateway's record."""
        tick = record["next_tick"]
        at = None if tick is None else datetime.fromisoformat(tick)
        return cls(record["name"], record["instance"], record["outcome"], at)


class AppRegistry(TaskRegistry):
    """The tasks of one app, and the schedules that it declares for them. `Pool` and `AsyncPool` are such."""

    def __init__(
        self,
        *,
        app: str | None = None,
        serialiser: Serialiser | None = None,
        large_results: LargeResults | None = None,
    ) -> None:
        super().__init__(app=app, serialiser=serialiser, large_results=large_results)
        #: Declared schedules by name.
        self.schedules: dict[str, DeclaredSchedule] = {}

    if TYPE_CHECKING:

        def periodic(
            self,
            cron: str,
            *,
            timezone: str = "UTC",
            name: str | None = None,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
            catch_up: CatchUp = "skip",
            catch_up_most: int = 10,
            catch_up_seconds: float = 86_400.0,
            overlap: Overlap = "allow",
            enabled: bool | None = None,
        ) -> Callable[[T], T]: ...

    else:

        def periodic(self, cron, /, *, name=None, timezone="UTC", args=(), kwargs=None, **options):
            """Declare a schedule, as a decorator above `task`: a call of the task at each tick of a cron expression.

            The pool has it once it is applied: `leasehold schedule apply`, `Pool.apply_schedules`. timezone: of the
            expression. name: unique in the instance; default that of the task. args, kwargs: of the call. catch_up,
            catch_up_most, catch_up_seconds: what is done after an outage. overlap: `skip` leaves a tick out while the
            previous job has not ended. enabled: default, a new one is enabled and one that exists stays as it is.
            Raises BadInput, also for an option that there is not, and TypeError if the function cannot be called so.
            """
            terms = {"cron": _checked_cron(cron), "zone": _checked_zone(timezone), **_checked(options)}
            _check_call(name, args, kwargs)

            def decorate(task):
                _add(self, task, name, _call(task, args, kwargs or {}), terms)
                return task

            return decorate


def _check_call(name: Any, args: Any, kwargs: Any) -> None:
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise BadInput("args", f"is a list or a tuple of arguments, such as (7,), not a '{type(args).__name__}'")
    if not isinstance(kwargs, Mapping | None):
        raise BadInput("kwargs", f"is a mapping of named arguments, not a '{type(kwargs).__name__}'")
    if name is not None:
        if not isinstance(name, str):
            raise BadInput("name", f"is a text, not a '{type(name).__name__}'")
        wire.check_name("name", name)


def apply(registry: AppRegistry, client: Client, *, prune: bool, take_over: bool) -> list[AppliedSchedule]:
    """See `Pool.apply_schedules`."""
    records = [each.record for each in registry.schedules.values()]
    done = client.schedules.apply(app_of(registry), records, prune=prune, take_over=take_over)
    return [AppliedSchedule.of(each) for each in done]


def app_of(registry: AppRegistry) -> str:
    """Return the app that owns the schedules of this pool. Raises BadInput if its tasks do not belong to one."""
    if registry.app is not None:
        return registry.app
    apps = sorted({registry.app_of(task.function.__module__) for task in registry.tasks.values()})
    if len(apps) == 1:
        return apps[0]
    found = f"the tasks are of {len(apps)} packages, {', '.join(apps[:5])}" if apps else "the pool has no tasks"
    raise BadInput("app", f"{found}: name the app, as in Pool.from_env(app=…)")


def _checked_cron(cron: str) -> str:
    if not isinstance(cron, str):
        raise BadInput("cron", f"is a text such as '*/5 * * * *', not a '{type(cron).__name__}'")
    expression = check_cron("cron", cron)
    if not has_ticks(expression):
        raise BadInput("cron", f"'{expression}' has no tick within 50 years")
    return expression


def _checked_zone(zone: str) -> str:
    if not isinstance(zone, str):
        raise BadInput("timezone", f"is a name such as 'Europe/Berlin', not a '{type(zone).__name__}'")
    if zone == "UTC":
        return zone
    if not wire.zone_names():
        raise BadInput("timezone", "cannot be checked: this machine knows no time zones; install the package tzdata")
    try:
        wire.load_zone(zone)
    except ValueError as error:
        raise BadInput("timezone", str(error)) from None
    return zone


def _checked(options: Mapping[str, Any]) -> Record:
    """The terms that are given. Raises BadInput for the first option that there is not, or that has no such value."""
    for option, value in options.items():
        if option not in _CHECKS:
            known = ["name", "timezone", "args", "kwargs", *_CHECKS]
            raise BadInput(option, f"is not an option of a schedule{wire.suggestion(option, known)}")
        is_valid, wanted = _CHECKS[option]
        if not is_valid(value):
            raise BadInput(option, f"is {wanted}, not {escaped(value, 40)}")
    return {option: value for option, value in options.items() if value is not None}


def _is_number(value: Any, *, least: float, most: float, whole: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and not isinstance(value, int)):
        return False
    return least <= value <= most


def _one_of(words: Any) -> tuple[Callable[[Any], bool], str]:
    known = get_args(words)
    return (lambda value: value in known), " or ".join(f"'{word}'" for word in known)


#: Options of a schedule besides its call and its ticks: what they may be, for a program and in words.
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "catch_up": _one_of(CatchUp),
    "catch_up_most": (lambda value: _is_number(value, least=1, most=1000, whole=True), "a number from 1 to 1000"),
    "catch_up_seconds": (
        lambda value: _is_number(value, least=0, most=31_536_000),
        "a number of seconds, up to a year",
    ),
    "overlap": _one_of(Overlap),
    "enabled": (lambda value: value is None or isinstance(value, bool), "true or false"),
}


def _call(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Record:
    """The job of the schedule: a call of the task. Raises BadInput and TypeError."""
    if not isinstance(task, Task):
        kind = getattr(task, "__qualname__", type(task).__name__)
        raise BadInput("periodic", f"stands above @pool.task, and '{kind}' is no task")
    request = task.request(*args, **kwargs)
    if "dedup_key" in request:
        instead = f"give the schedule overlap='skip', and `{task.function.__name__}.using(unique=False)` as the task"
        raise BadInput("unique", f"does not hold for the calls of a schedule: {instead}")
    if "key" in request:
        raise BadInput("key", "does not hold for the calls of a schedule: each tick has a key of its own")
    return request


def _add(registry: AppRegistry, task: Task[..., Any], name: str | None, job: Record, terms: Record) -> None:
    if task.registry is not registry:
        raise BadInput("periodic", f"'{task.name}' is a task of another pool")
    called = name or task.name
    if not wire.NAME.fullmatch(called):
        raise BadInput("name", f"'{escaped(called, 80)}' is no name of a schedule: give one, such as name='nightly'")
    known = registry.schedules.get(called)
    # A module that is imported again declares its schedules again.
    if known is not None and (known.task.function is task.function or known.task.name != task.name):
        raise BadInput("name", f"'{called}' is the name of two schedules: give one of them another name")
    instance = job.pop("instance", None)
    record = {"name": called, **terms, "job": job} | ({} if instance is None else {"instance": instance})
    registry.schedules[called] = DeclaredSchedule(called, task, record)
