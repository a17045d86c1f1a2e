"""What a meter is expected to stand at, by the hours of the days behind, and when a job had best start. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from schema.meters import Level
from schema.openings import Openings, Window

#: Hours with at least this share of the busiest hour's usage are peaks, those with at most this share idle.
PEAK, IDLE = 0.8, 0.2
#: How far a forecast looks ahead.
AHEAD = timedelta(days=7)


@dataclass(frozen=True)
class Pattern:
    """How a meter's usage goes over the day (Sleepless Agent's usage pattern report).

    avg_usage_by_hour: percent of the limit at each hour of the day, 0 to 23; None where nothing is known.
    peak_hours: those with at least 80 % of the usage of the busiest one.
    idle_periods: from the first hour on up to the second, past midnight too, with at most 20 % of it.
    """

    avg_usage_by_hour: Sequence[float | None]
    peak_hours: Sequence[int]
    idle_periods: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Start:
    """When a window opens, and what its meter is expected to stand at then, in percent; None if it goes by no meter."""

    window: str
    at: datetime
    percent: float | None


def averages(levels: Sequence[Level], zone: ZoneInfo) -> list[float | None]:
    """What was seen at each hour of the day, 0 to 23, on the zone's clock, on average over the days."""
    found: list[list[float]] = [[] for _ in range(24)]
    for level in levels:
        found[level.hour.astimezone(zone).hour].append(level.percent)
    return [sum(each) / len(each) if each else None for each in found]


def pattern(levels: Sequence[Level], zone: ZoneInfo) -> Pattern:
    """The report of what was seen."""
    found = averages(levels, zone)
    busiest = max((each for each in found if each is not None), default=0.0)
    peaks = [hour for hour, each in enumerate(found) if each and each >= PEAK * busiest]
    idle = [each is not None and each <= IDLE * busiest for each in found]
    return Pattern(found, peaks, _periods(idle))


def best_start(
    openings: Openings,
    job_class: str,
    *,
    estimate: float,
    histories: Mapping[str, Sequence[Level]],
    now: datetime,
) -> Start | None:
    """The next window to open, within a week, that takes the class and of which the meter is expected to stand so low
    then that with `estimate` more, in the meter's unit, it stays below the threshold (Sleepless Agent's best execution
    time). None: there is no suitable window."""
    ahead = [
        (at, window)
        for window in openings.windows
        if window.settings.takes(job_class)
        for at in _opening_times(window, now)
    ]
    for at, window in sorted(ahead, key=lambda each: (each[0], each[1].settings.name)):
        settings = window.settings
        if settings.meter is None or settings.usage_threshold is None:
            return Start(settings.name, at, None)
        if window.meter is None:
            continue
        percent = _expected(window, histories.get(settings.meter, ()), at)
        if percent + 100.0 * estimate / window.meter.most < settings.usage_threshold:
            return Start(settings.name, at, percent)
    return None


def _expected(window: Window, levels: Sequence[Level], at: datetime) -> float:
    """What was seen at that hour of the day; where nothing was, what the meter stands at, or 0 after its reset."""
    zone = window.settings.hours.zone
    seen = averages(levels, zone)[at.astimezone(zone).hour]
    assert window.meter is not None
    return window.meter.percent(at) if seen is None else seen


def _opening_times(window: Window, now: datetime) -> list[datetime]:
    found: list[datetime] = []
    at = window.settings.hours.opens(now)
    while at is not None and at - now <= AHEAD:
        found.append(at)
        at = window.settings.hours.opens(at)
    return found


def _periods(idle: Sequence[bool]) -> list[tuple[int, int]]:
    if all(idle):
        return [(0, 24)]
    begins = [hour for hour in range(24) if idle[hour] and not idle[hour - 1]]
    ends = [next(hour % 24 for hour in range(begin, begin + 24) if not idle[hour % 24]) for begin in begins]
    return [(begin, end or 24) for begin, end in zip(begins, ends, strict=True)]
