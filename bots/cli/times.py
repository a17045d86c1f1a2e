"""Times and durations as people give them to a command: `10:00`, `tomorrow 10:00`, `2026-12-01 10:00`, `90m`."""

import os
import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click
from leasehold.errors import BadInput
from leasehold.wire import escaped

from schema import clock, validation

#: A zone given by its rules, as CET-1CEST.
_RULE = re.compile(r"(<[^>]{3,}>|[A-Za-z]{3,})[+-]?\d")
#: Where an hour of one digit begins after a date.
_SHORT_HOUR = re.compile(r"(?<=[ T])(?=\d:)")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")
#: Days by their distance from today, and by their place in the week, also by their first three letters.
_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
#: How times are given; what is told with an option and with a refusal.
EXAMPLES = "10:00, 'tomorrow 10:00', 'monday 09:30' or '2026-12-01 10:00'"


class Duration(click.FloatRange):
    """The type of an option that is a duration, as seconds or such as `90m`, within bounds in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, str):
            try:
                value = seconds(value, option="")
            except BadInput as refused:
                self.fail(refused.reason, param, ctx)
        return float(super().convert(value, param, ctx))

    def _describe_range(self) -> str:
        return ""  # help would have the bounds as bare numbers


def seconds(text: str, *, option: str) -> float:
    """Return the seconds of a duration. Raises BadInput, also for more than a year."""
    found = validation.read_duration(option, text)
    if found > validation.YEAR:
        raise BadInput(option, f"'{escaped(text, 60)}' is more than a year")
    return found


def moment(text: str, *, option: str, is_past: bool = False, zone: tzinfo | None = None) -> str:
    """Return a time with its offset, in ISO 8601.

    Without an offset the time is one of `zone`, None = this machine's. The day is a date, today, tomorrow, yesterday or
    a day of the week. Without a day, and on a day of the week, it is the next such time, or the last one if it
    `is_past`. Raises BadInput for what is no time, for a day of these words without a time, for one that a change of
    the clock skips, and for one that it repeats, which needs an offset.
    """
    try:
        return _moment(text, is_past=is_past, zone=zone).isoformat()
    except (ValueError, OverflowError) as error:
        why = str(error) if isinstance(error, _Unclear) else f"is not a time, such as {EXAMPLES}"
        raise BadInput(option, f"'{escaped(text, 60)}' {why}") from None


class _Unclear(ValueError):
    """A time of the clock that there is not, or twice."""


def _moment(text: str, *, is_past: bool, zone: tzinfo | None) -> datetime:
    day, _, rest = text.strip().lower().rpartition(" ")
    day = day.strip()
    now = datetime.fromtimestamp(clock.wall(), UTC)
    today = now.astimezone(zone).replace(tzinfo=None, fold=0)
    if (at := _CLOCK.fullmatch(rest)) and (not day or _days_to(day, today) is not None):
        days, again = (_days_to(day, today) if day else None) or (0, 1)
        found = datetime.combine(today + timedelta(days), time(int(at[1]), int(at[2]), int(at[3] or 0)))
        first, second = _both(found, zone)
        if first <= now < second:
            again = 0  # of the two one is past and one is to come: nobody knows which one is meant
        if is_past and found > today:
            found -= timedelta(again)
        elif not is_past and found <= today:
            found += timedelta(again)
        return _here(found, zone)
    if not day and _days_to(rest, today) is not None:
        raise _Unclear(f"needs a time of day, such as '{rest} 10:00'")
    found = datetime.fromisoformat(_SHORT_HOUR.sub("0", text.strip()))
    return found if found.tzinfo is not None else _here(found, zone)


def _days_to(day: str, now: datetime) -> tuple[int, int] | None:
    """Return how far on the first such day is, and after how many days it comes again, 0 = never; None = it is none."""
    if day in _DAYS:
        return _DAYS[day], 0
    nth = next((nth for nth, name in enumerate(_WEEKDAYS) if day in (name, name[:3])), None)
    return None if nth is None else ((nth - now.weekday()) % 7, 7)


def _check_zone() -> None:
    """Raise _Unclear if this machine's zone is one that nobody knows, which the C library takes for UTC."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if not name or name.startswith("/") or _RULE.match(name):
        return
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise _Unclear(f"needs an offset, because TZ names no known zone: '{escaped(name, 60)}'") from None


def _both(naive: datetime, zone: tzinfo | None) -> tuple[datetime, datetime]:
    """Return a time before and after a change of the clock that repeats or skips it; without one both are the same."""
    if zone is None:
        return naive.astimezone(), naive.replace(fold=1).astimezone()
    return naive.replace(tzinfo=zone), naive.replace(tzinfo=zone, fold=1)


def _here(naive: datetime, zone: tzinfo | None) -> datetime:
    if zone is None:
        _check_zone()
    first, second = _both(naive, zone)
    if first.astimezone(UTC).astimezone(zone).replace(tzinfo=None, fold=0) != naive:
        raise _Unclear("is skipped by a change of the clock here")
    if first.utcoffset() != second.utcoffset():
        raise _Unclear(f"is there twice here: give {first.isoformat()} or {second.isoformat()}")
    return first


def of_start(at: str) -> str:
    """Return the sentence that tells an earliest start with its offset."""
    is_past = datetime.fromisoformat(at).timestamp() < clock.wall()
    return f"{at} is past: the job may start at once" if is_past else f"starts at {at} at the earliest"
