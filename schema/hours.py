"""Hours of the day at which something may happen, on the clock of a named time zone. Pure.

What counts is what the clock on the wall says: a window from 2 to 3 is open for two hours on the day on which that hour
comes twice, and not at all on the day on which it is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator

#: Clocks of all zones change, and their hours begin, at quarters of an hour of UTC.
_STEP = timedelta(minutes=15)
#: A time of day that is left out today comes tomorrow; no zone leaves out one on two days in a row.
_FAR = timedelta(days=3)


@cache
def _names() -> frozenset[str]:
    return frozenset(available_timezones())


def zone(name: str) -> ZoneInfo:
    """The time zone of that name, such as `UTC` or `Europe/Berlin`. Raises ValueError if there is none."""
    if name not in _names():
        raise ValueError(f"'{name[:60]}' is not a time zone: use a name such as 'UTC' or 'Europe/Berlin'")
    return ZoneInfo(name)


#: The name of a time zone as a field of a model.
Zone = Annotated[str, AfterValidator(lambda name: zone(name).key)]


@dataclass(frozen=True)
class Hours:
    """From `start` (0 to 23) on, up to and without `end` (1 to 24), every day; past midnight if `end` is not later."""

    start: int
    end: int
    zone: ZoneInfo

    def open_at(self, at: datetime) -> bool:
        """Whether it is within these hours at that instant."""
        hour = at.astimezone(self.zone).hour
        if self.start < self.end:
            return self.start <= hour < self.end
        return hour >= self.start or hour < self.end

    def opens(self, at: datetime) -> datetime | None:
        """The first instant after `at` at which they begin; None if they never end."""
        return _first(at, lambda before, after: not before and after, self.open_at)

    def closes(self, at: datetime) -> datetime | None:
        """The first instant after `at` at which they end; None if they never do."""
        return _first(at, lambda before, after: before and not after, self.open_at)


@dataclass(frozen=True)
class Preferred:
    """Single hours of the day, 0 to 23."""

    hours: frozenset[int]
    zone: ZoneInfo

    def open_at(self, at: datetime) -> bool:
        """Whether it is one of these hours at that instant."""
        return at.astimezone(self.zone).hour in self.hours

    def opens(self, at: datetime) -> datetime | None:
        """The first instant after `at` at which such an hour begins after one that is none; None if all of them are."""
        return _first(at, lambda before, after: not before and after, self.open_at)


def wall(at: datetime, zone: ZoneInfo) -> str:
    """An instant for people, on the clock of the zone."""
    return f"{at.astimezone(zone):%Y-%m-%d %H:%M} {zone.key}"


def _first(at: datetime, edge: Callable[[bool, bool], bool], open_at: Callable[[datetime], bool]) -> datetime | None:
    instant = at.astimezone(UTC)
    begins = instant.replace(minute=instant.minute // 15 * 15, second=0, microsecond=0)
    before = open_at(instant)
    for _ in range(_FAR // _STEP):
        begins += _STEP
        after = open_at(begins)
        if edge(before, after):
            return begins
        before = after
    return None
