"""Declarations of limits: pool limits, locks, rates, backpressure, meters, queue limits and execution windows."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from leasehold.errors import NotFound
from leasehold.wire import escaped
from pydantic import AwareDatetime, ConfigDict, Field

from assigner.operator_resources.declaration import (
    ALL,
    SECONDS,
    By,
    Irremovable,
    Key,
    Keys,
    Page,
    Removal,
    Request,
    Resource,
    Row,
    Setting,
    check_scope,
    given,
    one_of,
)
from schema.accounting import accounts, counters, limit_patterns, rates
from schema.accounting.accounts import PoolLimits
from schema.accounting.rates import RateTerms
from schema.policy import meters, queue_limits, time_windows
from schema.policy.time_windows import WindowTerms
from schema.postgres.connection import Connection
from schema.readable import plural
from schema.validation import YEAR


class PoolLimitsRequest(PoolLimits):
    model_config = ConfigDict(strict=True)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class PoolLimit(Row):
    used: float
    most: float | None = Field(description="unset = any number")


class PoolLimitList(Row):
    """Limits on all managed instances together."""

    max_concurrent: PoolLimit = Field(description="jobs that run at once")
    budget: PoolLimit = Field(description="cost within the rolling window")


def _set_pool_limits(connection: Connection, _keys: Keys, body: PoolLimitsRequest, by: By) -> None:
    accounts.limit_pool(connection, body, **by)


def _pool_limits_given(_keys: Keys, body: PoolLimitsRequest) -> Mapping[str, Sequence[str]]:
    return {"pool-limit": sorted(body.model_fields_set - {"reason"})}


POOL_LIMITS = Resource(
    name="pool-limit",
    plural="limits",
    help="Limits on all instances with a share together.",
    keys=(),
    answers_as="pool",
    row=PoolLimitList,
    rows=lambda connection, _: [accounts.pool_limits(connection)],
    columns=(
        ("running jobs", lambda row: row["max_concurrent"]["used"]),
        ("max concurrent jobs", lambda row: row["max_concurrent"]["most"]),
        ("used cost", lambda row: row["budget"]["used"]),
        ("budget cost", lambda row: row["budget"]["most"]),
    ),
    set=Setting(
        help="Limit all instances with a share together; limits that are not given stay.",
        model=PoolLimitsRequest,
        apply=_set_pool_limits,
        partial=True,
        claims=_pool_limits_given,
        stops={
            "max_concurrent": "no constrained job starts while the pool may run 0",
            "budget": "no job of an instance with a share starts while they may cost 0",
        },
    ),
    printed=lambda done: "; ".join(
        f"all instances with a share together {what} {'any number' if done[name] is None else f'{done[name]:g}'}"
        for name, what in (("max_concurrent", "run at most"), ("budget", "cost at most"))
        if name in done
    ),
    remove=Irremovable("the pool always has these limits; set them to none"),
    section="[fair_share]",
)


class LockRequest(Request):
    slots: int = given(unit="jobs", help="how many jobs may hold the lock at once", ge=0, le=counters.MAX_JOBS)


class Lock(Row):
    instance: str
    lock: str
    used: float = given(unit="jobs", help="jobs that hold it now, or a lock of the pattern")
    slots: float | None = given(unit="jobs", help="jobs that may hold it at once; 1 unless set")
    keys: int | None = given(
        None, unit="locks", help="locks of a pattern that are in use or were lately; null = a name"
    )
    pattern: str | None = Field(default=None, description="the pattern that gives it its slots; unset = none does")


def _locks(connection: Connection, _: Page) -> list[Lock]:
    """Locks that are set or used by name, and patterns, without the locks that have their slots from a pattern."""
    found = [_lock(each) for each in counters.limits(connection, counters.SLOTS_OF_LOCK)]
    found += [
        Lock(instance=each.instance, lock=each.pattern, used=each.used, slots=each.slots, keys=each.keys)
        for each in limit_patterns.lock_patterns(connection)
    ]
    return sorted(found, key=lambda lock: (lock.instance, lock.lock))


def _lock(found: counters.CounterLimit) -> Lock:
    pattern = limit_patterns.pattern_of(found.limited_by) if found.limited_by else None
    return Lock(instance=found.names[0], lock=found.names[1], used=found.used, slots=found.most, pattern=pattern)


def _show_lock(connection: Connection, keys: Keys, page: Page) -> Lock:
    if limit_patterns.is_pattern(keys[1]):
        found = [each for each in _locks(connection, page) if [each.instance, each.lock] == list(keys)]
    else:
        found = [_lock(each) for each in counters.limits(connection, counters.SLOTS_OF_LOCK, names=keys)]
    if not found:
        raise NotFound(f"lock: there is no lock '{escaped('/'.join(keys), 127)}'")
    return found[0]


def _of_pattern(row: Mapping[str, Any], noun: str) -> str | None:
    """Return the pattern of a key, or how many keys a pattern has."""
    keys: int | None = row["keys"]
    return row["pattern"] if keys is None else f"of {keys} {noun}{'' if keys == 1 else 's'}"


LOCKS = Resource(
    name="lock",
    plural="locks",
    help="How many jobs of an instance may hold a lock at once: one, unless set. A name such as 'customer-*' sets it "
    "for every lock whose name begins so; a whole name wins, then the longest pattern.",
    keys=(Key("instance", "INSTANCE", instance=True), Key("lock", "LOCK", check=limit_patterns.check)),
    row=Lock,
    rows=_locks,
    show=_show_lock,
    columns=(
        ("instance", "instance"),
        ("lock", "lock"),
        ("held by jobs", "used"),
        ("slots (jobs)", "slots"),
        ("pattern", lambda row: _of_pattern(row, "lock")),
    ),
    set=Setting(
        help="Set how many jobs of an instance may hold a lock at once. A smaller number stops no running job.",
        model=LockRequest,
        apply_all=lambda connection, wanted, by: counters.set_limits(
            connection, counters.SLOTS_OF_LOCK, {tuple(keys): body.slots for keys, body in wanted}, **by
        ),
        arguments=("slots",),
        stops={"slots": "no job that asks for this lock starts while it has 0 slots"},
    ),
    printed=lambda done: (
        f"{done['lock']} of {done['instance']} may be held by {done['slots']} "
        f"{'job' if done['slots'] == 1 else 'jobs'} at once"
    ),
    remove=Removal(
        help="Give a lock its default again: the slots of a pattern, or else one. Remove a pattern.",
        apply_all=lambda connection, names, by: counters.remove_limits(connection, counters.SLOTS_OF_LOCK, names, **by),
        printed="what was set for {lock} of {instance} is removed",
    ),
    section="[[instances]]",
)


class RateRequest(Request):
    per_second: float = given(
        unit="jobs per second", help="starts in the long run; may be below 1", ge=rates.MIN_RATE, le=rates.MAX_RATE
    )
    burst: int = given(1, unit="jobs", help="jobs that may start at once after a pause", ge=1, le=rates.MAX_BURST)


class Rate(Row):
    resource: str = Field(description="CLASS, CLASS/MODEL, or a pattern")
    per_second: float = given(unit="jobs per second", help="starts in the long run")
    burst: int = given(unit="jobs", help="jobs that may start at once after a pause")
    tokens: float | None = given(unit="jobs", help="jobs that may start at once now; null = a pattern")
    keys: int | None = given(None, unit="rates", help="rates that the pattern has made and that were used lately")
    pattern: str | None = Field(default=None, description="the pattern that gives it its rate; unset = none does")


def _rates(connection: Connection, _: Page) -> list[Rate]:
    """Rates that are set by name, and patterns, without the rates that patterns have made."""
    found = [Rate.model_validate(each) for each in rates.rates(connection)]
    found += [
        Rate(resource=each.pattern, per_second=each.per_second, burst=each.burst, tokens=None, keys=each.keys)
        for each in limit_patterns.rate_patterns(connection)
    ]
    return sorted(found, key=lambda rate: rate.resource)


def _show_rate(connection: Connection, keys: Keys, page: Page) -> Rate:
    named = _rates(connection, page) + [
        Rate.model_validate(each) for each in rates.rates(connection, used=keys[0]) if each.pattern
    ]
    for each in named:
        if each.resource == keys[0]:
            return each
    raise NotFound(f"rate: there is no rate '{escaped(keys[0], 127)}'")


def _set_rates(connection: Connection, wanted: Sequence[tuple[Keys, RateRequest]], by: By) -> None:
    terms = {keys[0]: RateTerms(body.per_second, body.burst) for keys, body in wanted}
    rates.set_rates(connection, terms, **by)


RATES = Resource(
    name="rate",
    plural="rates",
    help="How many jobs of a resource class, or of one model of it, may start per second. A name such as 'api-*' or "
    "'api/*' gives every class, or model, whose name begins so a rate of its own; a whole name wins, then the longest "
    "pattern.",
    keys=(Key("resource", "CLASS[/MODEL]", check=rates.check_resource, slashes=True),),
    row=Rate,
    rows=_rates,
    show=_show_rate,
    columns=(
        ("resource", "resource"),
        ("per second", "per_second"),
        ("burst (jobs)", "burst"),
        ("now (jobs)", lambda row: None if row["tokens"] is None else f"{row['tokens']:.1f}"),
        ("pattern", lambda row: _of_pattern(row, "rate")),
    ),
    set=Setting(
        help="Set a rate: in any S seconds, at most BURST + PER_SECOND x S jobs start in the whole pool.",
        model=RateRequest,
        apply_all=_set_rates,
    ),
    printed=lambda done: (
        f"{done['resource']} starts {plural(done['per_second'], 'job')} per second, {done['burst']} at once"
    ),
    remove=Removal(
        help="Remove a rate: jobs may then start at any rate.",
        apply_all=lambda connection, names, by: rates.remove_rates(connection, [keys[0] for keys in names], **by),
        printed="{resource} has no rate",
    ),
    section="[[rates]]",
)


class AdviceRequest(Request):
    allowed: bool = Field(default=False, description="whether jobs may start")
    delay: float = given(0.0, unit=SECONDS, help="pause of assigners after a start", ge=0, le=rates.MAX_DELAY)
    seconds: float | None = given(
        None, unit=SECONDS, help="how long the advice holds; unset = until it is removed", gt=0, le=YEAR
    )


class Advice(Row):
    resource_class: str | None = Field(description="unset = all constrained jobs")
    allowed: bool = Field(description="whether jobs may start")
    delay: float = given(unit=SECONDS, help="pause of assigners after a start")
    until: datetime | None = Field(description="unset = until it is removed")


def _advise(connection: Connection, keys: Keys, body: AdviceRequest, by: By) -> None:
    advice: Any = body.model_dump(include={"allowed", "delay", "seconds"})
    rates.advise(connection, one_of(keys[0]), **advice, **by)


def _advised(done: Mapping[str, Any]) -> str:
    effect = f"wait {done['delay']:g} s after a start" if done["allowed"] else "start no jobs"
    return f"assigners {effect} of {done['resource_class'] or 'any class'}"


BACKPRESSURE = Resource(
    name="backpressure",
    command="rule backpressure",
    plural="backpressure",
    help="Advice to hold back the constrained jobs of one resource class, or all of them.",
    keys=(Key("resource_class", "[CLASS]", check=check_scope, default=ALL),),
    row=Advice,
    rows=lambda connection, _: rates.advice_in_force(connection),
    columns=(
        ("class", lambda row: row["resource_class"] or "all"),
        ("allowed", "allowed"),
        ("delay (s)", "delay"),
        ("until", "until"),
    ),
    set=Setting(
        help="Advise assigners to start no jobs, or to pause between starts. Running jobs go on.",
        model=AdviceRequest,
        apply=_advise,
        options={"seconds": "--for"},
        switches={"--stop": ("allowed", False)},
        exactly_one=("--stop", "--delay"),
        preset={"allowed": True},
    ),
    printed=_advised,
    remove=Removal(
        help="Withdraw advice.",
        apply=lambda connection, keys, by: rates.withdraw_advice(connection, one_of(keys[0]), **by),
        printed="nothing is advised for {resource_class}",
    ),
)


class MeterRequest(Request):
    used: float = given(unit="the meter's own unit", help="what is used", ge=0, le=meters.MAX_AMOUNT)
    limit: float = given(
        unit="the meter's own unit", help="the most that may be used", ge=meters.MIN_LIMIT, le=meters.MAX_AMOUNT
    )
    resets_at: Annotated[AwareDatetime, Field(strict=False)] | None = Field(
        default=None, description="time with a zone at which it starts at 0 again; unset = not known"
    )


class Meter(Row):
    name: str
    used: float = given(unit="the meter's own unit", help="what is used")
    limit: float = given(unit="the meter's own unit", help="the most that may be used")
    percent: float = given(unit="percent of the limit", help="its level now, estimated from the last reading")
    resets_at: datetime | None = Field(description="when it starts at 0 again; unset = not known")
    updated_at: datetime = Field(description="when it was read")
    age: float = given(unit=SECONDS, help="time since it was read")


def _meters(connection: Connection, _: Page) -> list[Meter]:
    now: datetime = connection.now()
    return [
        Meter(
            name=each.name,
            used=each.used,
            limit=each.most,
            percent=each.percent(now),
            resets_at=each.resets_at,
            updated_at=each.updated_at,
            age=(now - each.updated_at).total_seconds(),
        )
        for each in meters.meters(connection)
    ]


def _set_meter(connection: Connection, keys: Keys, body: MeterRequest, by: By) -> None:
    meters.put(connection, keys[0], used=body.used, most=body.limit, resets_at=body.resets_at, **by)


METERS = Resource(
    name="meter",
    command="rule meter",
    plural="meters",
    help="Usage meters, on which execution windows may depend.",
    keys=(Key("name", "NAME"),),
    row=Meter,
    rows=_meters,
    columns=(
        ("meter", "name"),
        ("used", "used"),
        ("limit", "limit"),
        ("percent", lambda row: f"{row['percent']:.3g}"),
        ("seconds ago", lambda row: f"{row['age']:.0f}"),
        ("resets at", "resets_at"),
    ),
    set=Setting(
        help="Set the reading of a meter. Windows that depend on it follow at once.",
        model=MeterRequest,
        apply=_set_meter,
    ),
    printed=lambda done: f"{done['name']} stands at {100 * done['used'] / done['limit']:.3g} % of its limit",
    remove=Removal(
        help="Remove a meter. Windows that depend on it are closed until it has a reading again.",
        apply=lambda connection, keys, by: meters.remove(connection, keys[0], **by),
        printed="{name} is forgotten",
    ),
)


class QueueLimitRequest(Request):
    max_queued: int = given(
        unit="jobs", help="jobs that may wait, held jobs included", ge=0, le=queue_limits.MAX_QUEUED
    )


class QueueLimit(Row):
    label: str
    max_queued: int = given(unit="jobs", help="jobs that may wait, held jobs included")


def _set_queue_limits(connection: Connection, wanted: Sequence[tuple[Keys, QueueLimitRequest]], by: By) -> None:
    queue_limits.set_queue_limits(connection, {keys[0]: body.max_queued for keys, body in wanted}, **by)


QUEUE_LIMITS = Resource(
    name="queue-limit",
    plural="queue-limits",
    help="How many jobs with a label may wait.",
    keys=(Key("label", "LABEL", check=queue_limits.check_label, slashes=True),),
    row=QueueLimit,
    rows=lambda connection, _: queue_limits.queue_limits(connection),
    columns=(("label", "label"), ("max queued (jobs)", "max_queued")),
    set=Setting(
        help="Set how many jobs with a label may wait. Submits beyond that are refused; jobs that wait already stay.",
        model=QueueLimitRequest,
        apply_all=_set_queue_limits,
        arguments=("max_queued",),
        stops={"max_queued": "every submit with this label is refused"},
    ),
    printed=lambda done: f"{plural(done['max_queued'], 'job')} with the label {done['label']} may wait",
    remove=Removal(
        help="Let any number of jobs with a label wait.",
        apply_all=lambda connection, names, by: queue_limits.remove_queue_limits(
            connection, [keys[0] for keys in names], **by
        ),
        printed="any number of jobs with the label {label} may wait",
    ),
    section="[[queues]]",
)


class WindowRequest(WindowTerms):
    model_config = ConfigDict(strict=True)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class Window(Row):
    name: str
    start: int = Field(description="hour of the day at which it opens, 0 to 23")
    end: int = Field(description="hour of the day at which it closes, 1 to 24")
    zone: str = Field(description="time zone of both hours")
    types: tuple[str, ...] = Field(description="classes that the window admits; all = every class")
    exempt_types: tuple[str, ...] = Field(description="classes among them that start whatever the meter reads")
    match: str = Field(description="prefix: a type also stands for classes whose names begin with it")
    meter: str | None = Field(description="meter that can close the window")
    usage_threshold: float | None = Field(description="percent of the meter's limit at which the window closes")
    meter_max_age: float = Field(description="seconds after which a reading of the meter is too old")
    wrong: str | None = Field(description="why it cannot be used here and counts as closed; null = it can")


def _windows(connection: Connection, _: Page) -> list[Window]:
    return [Window(**vars(each.settings), wrong=each.wrong) for each in time_windows.read(connection).windows]


WINDOWS = Resource(
    name="window",
    command="rule window",
    plural="windows",
    help="Hours of the day in which jobs of certain classes may start.",
    keys=(Key("name", "NAME"),),
    row=Window,
    rows=_windows,
    columns=(
        ("window", "name"),
        ("start (hour)", "start"),
        ("end (hour)", "end"),
        ("zone", "zone"),
        ("types", "types"),
        ("match", "match"),
        ("meter", "meter"),
        ("threshold (%)", "usage_threshold"),
        ("meter max age (s)", "meter_max_age"),
        ("exempt types", "exempt_types"),
        ("cannot be used", "wrong"),
    ),
    set=Setting(
        help="Make a window, or replace it. While any exist, a job that names a class starts only in one of them.",
        model=WindowRequest,
        apply_all=lambda connection, wanted, by: time_windows.put_windows(
            connection, {keys[0]: body for keys, body in wanted}, **by
        ),
        options={"types": "--type", "exempt_types": "--exempt-type"},
    ),
    printed=lambda done: f"window {done['name']} is open from {done['start']} to {done['end']} o'clock, {done['zone']}",
    remove=Removal(
        help="Remove a window. Without windows, jobs of every class may start at any hour.",
        apply_all=lambda connection, names, by: time_windows.remove_windows(
            connection, [keys[0] for keys in names], **by
        ),
        printed="window {name} is removed",
    ),
    section="[[windows]]",
)

RESOURCES: tuple[Resource[Any], ...] = (POOL_LIMITS, LOCKS, RATES, BACKPRESSURE, METERS, QUEUE_LIMITS, WINDOWS)
