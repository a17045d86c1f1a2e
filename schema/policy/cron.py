"""Ticks of cron expressions: the times at which a schedule is due, as pure functions of expression, zone and time.

An expression has five fields: minute, hour, day of the month, month, day of the week. The package cronsim reads them as
Debian's cron does, with L, LW and `#` in the fields of days. It is asked for times of the clock on the wall alone, and
this module finds the instants at which the clock shows them. Where neither the minute nor the hour begins with a star,
a time that is left out when clocks change is due at the first valid time after it, and a time that comes twice is due
the first time only. Other expressions follow the clock on the wall: they are due whenever it shows a matching time.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from typing import assert_never
from zoneinfo import ZoneInfo

from cronsim import CronSim
from leasehold.errors import BadInput
from leasehold.wire import CatchUp as CatchUp
from leasehold.wire import check_cron as check_cron

from schema.validation import load_zone

#: Longer than any span of time that clocks show twice.
LONGEST_REPEAT = timedelta(hours=3)
#: Seconds after which a tick that is not submitted counts as missed.
MISSED_AFTER = 60.0


@dataclass(frozen=True)
class Plan:
    """What a schedule that is due does next.

    tick: the tick to submit now; None = none. missed: True if ticks are left out. following: the next tick after `tick`
    that will be looked at; None = the expression has no more.
    """

    tick: datetime | None
    missed: bool
    following: datetime | None


def ticks_after(cron: str, zone: str, after: datetime) -> Iterator[datetime]:
    """Yield the ticks later than `after`, in UTC, the earliest first. Ends if there is none within 50 years.

    Raises BadInput for an expression or a zone that is not known here, which a stored one may cease to be.
    """
    last, expression, clock = after.astimezone(UTC), check_cron("cron", cron), _zone(zone)
    # With a zone, cronsim 2.8 jumps over times where clocks change within an hour: `advance_minute` adds minutes to an
    # instant. CronSim("30 * * * *", datetime(2026, 10, 4, 1, 30, tzinfo=ZoneInfo("Australia/Lord_Howe"))) goes on at
    # 03:30, although the clock shows 02:30 at the change. Its times without a zone are right.
    shown = last.astimezone(clock).replace(tzinfo=None)
    is_fixed = not any(field.startswith("*") for field in expression.split()[:2])
    found: Iterator[datetime]
    if is_fixed:
        found = (_first_valid(time, clock) for time in CronSim(expression, shown))
    else:
        # A time that was shown before may come again.
        comes_twice = len(_instants(shown, clock)) == 2
        found = _whenever_shown(CronSim(expression, shown - LONGEST_REPEAT if comes_twice else shown), clock)
    for tick in found:
        if tick > last:
            last = tick
            yield tick


def _instants(shown: datetime, zone: ZoneInfo) -> list[datetime]:
    """The instants, in UTC and in order, at which the clock shows this time: none, one or two."""
    candidates = (shown.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    return sorted({each for each in candidates if each.astimezone(zone).replace(tzinfo=None, fold=0) == shown})


def _first_valid(shown: datetime, zone: ZoneInfo) -> datetime:
    """The first instant at which the clock shows this time, or if it is left out, the next one that is not."""
    while not (instants := _instants(shown, zone)):
        shown += timedelta(minutes=1)
    return instants[0]


def _whenever_shown(times: Iterator[datetime], zone: ZoneInfo) -> Iterator[datetime]:
    """Yield all instants at which the clock shows these times, which ascend, in their order."""
    waiting: list[datetime] = []
    for shown in times:
        instants = _instants(shown, zone)
        while instants and waiting and waiting[0] < instants[0]:
            yield heappop(waiting)
        for each in instants:
            heappush(waiting, each)
    yield from sorted(waiting)


def _zone(name: str) -> ZoneInfo:
    try:
        return load_zone(name)
    except ValueError as error:
        raise BadInput("zone", str(error)) from None


def next_tick(cron: str, zone: str, after: datetime) -> datetime | None:
    """The first tick later than `after`, in UTC; None if there is none within 50 years."""
    return next(ticks_after(cron, zone, after), None)


def newest_ticks(cron: str, zone: str, *, since: datetime, until: datetime, most: int) -> list[datetime]:
    """The newest `most` ticks from `since` to `until`, both included, the earliest first.

    Looks back in spans that grow, so that the time it takes depends on `most` and not on the length of an outage.
    """
    span = timedelta(hours=1)
    first = since - timedelta(seconds=1)
    while True:
        start = max(first, until - span)
        found: deque[datetime] = deque(maxlen=most)
        for tick in ticks_after(cron, zone, start):
            if tick > until:
                break
            found.append(tick)
        if len(found) == most or start == first:
            return list(found)
        span *= 4


def plan(
    cron: str,
    zone: str,
    *,
    due: datetime,
    now: datetime,
    catch_up: CatchUp,
    most: int,
    within: float,
) -> Plan:
    """Decide what to submit at `now` of the ticks from `due` on.

    `none`: the newest tick, unless it was missed. `skip`: the newest tick, unless it is older than `within` seconds.
    `all`: the earliest of the newest `most` ticks, so that each is submitted by a transaction of its own.
    """
    match catch_up:
        case "none" | "skip":
            oldest = now - timedelta(seconds=MISSED_AFTER if catch_up == "none" else within)
            found = newest_ticks(cron, zone, since=due, until=now, most=2)
            tick = found[-1] if found and found[-1] >= oldest else None
            return Plan(tick, len(found) > (tick is not None), next_tick(cron, zone, now))
        case "all":
            found = newest_ticks(cron, zone, since=due, until=now, most=most + 1)
            kept = found[-most:]
            following = kept[1] if len(kept) > 1 else next_tick(cron, zone, now)
            return Plan(kept[0] if kept else None, len(found) > most, following)
        case _:
            assert_never(catch_up)
