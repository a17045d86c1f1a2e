"""Meters read by commands, and forecasts of when a job had best start.

For each reading one assigner process runs the meter's command, which prints the reading. Forecasts come from the usage
seen at each hour of the day; these functions are pure.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from zoneinfo import ZoneInfo

import structlog
from leasehold.errors import BadInput
from leasehold.wire import escaped
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from schema.fields import Name, first_error
from schema.policy import meters
from schema.policy.meters import Level
from schema.policy.time_windows import Window, WindowSchedule
from schema.postgres.engine import Database

#: The most bytes that a command may print.
MAX_PRINTED = 64 * 1024
#: Seconds between two checks for meters that are due.
POLL_INTERVAL = 5.0

log = structlog.get_logger()


class MeterSettings(BaseModel):
    """A meter that is read by a command.

    The command prints one JSON object: `used` and `limit`, numbers in any unit, and optionally `resets_at`, the time at
    which `used` returns to 0. One assigner process at a time runs it, without a shell.

    interval: seconds between two readings. Doubling it halves the runs, and jobs start by readings twice as old.
    timeout: seconds after which the command is killed. Then the previous reading stays in use for as long as windows
        accept its age.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name
    command: tuple[str, ...] = Field(min_length=1, max_length=100)
    interval: float = Field(default=300.0, ge=1, le=86400)
    timeout: float = Field(default=10.0, gt=0, le=60)


class Reading(BaseModel):
    """The reading that a command prints. Other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    used: float
    limit: float
    resets_at: AwareDatetime | None = None


class MeterPoller:
    """Reads the meters of one process by their commands. If a command fails, logs it and keeps the old reading."""

    def __init__(self, database: Database, settings: Sequence[MeterSettings]) -> None:
        self._database, self._settings = database, settings

    def reconfigure(self, settings: Sequence[MeterSettings]) -> None:
        """Read these meters from now on."""
        self._settings = settings

    def run_once(self) -> float:
        """Read the meters that are due and that no other process reads; returns the seconds until the next check."""
        for each in self._settings:
            if self._database.run(partial(meters.claim_reading, name=each.name, interval=each.interval)):
                self._read(each)
        return POLL_INTERVAL

    def _read(self, each: MeterSettings) -> None:
        try:
            reading = read_meter(each)
            self._database.run(
                lambda c: meters.put(c, each.name, used=reading.used, most=reading.limit, resets_at=reading.resets_at)
            )
        except BadInput as error:
            log.error("a meter could not be read", meter=each.name, reason=str(error))


def read_meter(meter: MeterSettings) -> Reading:
    """Run the command of a meter once. Raises BadInput on the field `command` if it gives no reading."""
    printed = _run_command(meter)
    if len(printed) > MAX_PRINTED:
        raise BadInput("command", f"prints more than {MAX_PRINTED} bytes")
    try:
        return Reading.model_validate_json(printed)
    except ValidationError as error:
        field, said = first_error(error)
        raise BadInput("command", f"prints no reading: {field or 'its output'}: {escaped(said, 120)}") from None


def _run_command(meter: MeterSettings) -> bytes:
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                meter.command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise BadInput("command", f"cannot be run: {error.strerror}") from None
        try:
            code = process.wait(meter.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise BadInput("command", f"takes longer than {meter.timeout:g} s") from None
        if code != 0:
            raise BadInput("command", f"ends with exit {code}")
        printed.seek(0)
        return printed.read(MAX_PRINTED + 1)


# Forecasts.


#: Hours with at least the first share of the busiest hour's usage are peaks; those with at most the second are idle.
PEAK, IDLE = 0.8, 0.2
#: How far a forecast looks ahead.
AHEAD = timedelta(days=7)


@dataclass(frozen=True)
class UsagePattern:
    """A meter's usage over the day (as in Sleepless Agent's usage pattern report).

    avg_usage_by_hour: percent of the limit at each hour of the day, 0 to 23; None where nothing is known.
    peak_hours: hours with at least 80 % of the usage of the busiest hour.
    idle_periods: pairs of first hour and end hour, also across midnight, with at most 20 % of that usage.
    """

    avg_usage_by_hour: Sequence[float | None]
    peak_hours: Sequence[int]
    idle_periods: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class StartForecast:
    """The time at which a job had best start: now, or when a window opens.

    window: the window that lets it start then; None if there are no windows.
    percent: the level of its meter, read now or expected then; None without a meter.
    """

    window: str | None
    at: datetime
    percent: float | None


def hourly_averages(levels: Sequence[Level], zone: ZoneInfo) -> list[float | None]:
    """The average percent at each hour of the day, 0 to 23, in the zone; None without readings."""
    found: list[list[float]] = [[] for _ in range(24)]
    for level in levels:
        found[level.hour.astimezone(zone).hour].append(level.percent)
    return [sum(each) / len(each) if each else None for each in found]


def usage_pattern(levels: Sequence[Level], zone: ZoneInfo) -> UsagePattern:
    """Summarise the readings as averages, peak hours and idle periods."""
    found = hourly_averages(levels, zone)
    busiest = max((each for each in found if each is not None), default=0.0)
    peaks = [hour for hour, each in enumerate(found) if each and each >= PEAK * busiest]
    idle = [each is not None and each <= IDLE * busiest for each in found]
    return UsagePattern(found, peaks, _periods(idle))


def best_start(
    openings: WindowSchedule,
    job_class: str,
    *,
    estimate: float,
    histories: Mapping[str, Sequence[Level]],
    now: datetime,
) -> StartForecast | None:
    """Find the next time within a week at which a job of the class had best start, or None.

    It is `now` if there are no windows, or if an open one lets the job start. A window lets a job start if it admits
    the class, and if its meter stays below its threshold with `estimate` more, in the meter's unit (as Sleepless
    Agent's best execution time). For classes that a window exempts its meter does not count.
    """
    if not openings.windows:
        return StartForecast(None, now, None)
    for window in sorted(openings.windows, key=lambda each: each.settings.name):
        settings = window.settings
        if settings.admits(job_class) and window.open_at(now) and window.held_back(job_class, now) is None:
            percent = None if window.meter is None else window.meter.percent(now)
            if _has_room(window, job_class, percent=percent, estimate=estimate):
                return StartForecast(settings.name, now, percent)
    ahead = [
        (at, window)
        for window in openings.windows
        if window.settings.admits(job_class)
        for at in _opening_times(window, now)
    ]
    for at, window in sorted(ahead, key=lambda each: (each[0], each[1].settings.name)):
        percent = None if window.meter is None else _expected(window, histories.get(window.meter.name, ()), at)
        if _has_room(window, job_class, percent=percent, estimate=estimate):
            return StartForecast(window.settings.name, at, percent)
    return None


def _has_room(window: Window, job_class: str, *, percent: float | None, estimate: float) -> bool:
    """Return whether the window's meter, at this percentage, lets jobs of the class start with `estimate` more."""
    threshold = window.settings.usage_threshold
    if threshold is None or window.settings.exempts(job_class):
        return True
    if window.meter is None or percent is None:
        return False
    return percent + 100.0 * estimate / window.meter.most < threshold


def _expected(window: Window, levels: Sequence[Level], at: datetime) -> float:
    """The expected percent of the window's meter at a time.

    It is the average at that hour of the day. Without readings at that hour it is the current one, or 0 after a reset.
    """
    zone = window.settings.hours.zone
    seen = hourly_averages(levels, zone)[at.astimezone(zone).hour]
    assert window.meter is not None
    return window.meter.percent(at) if seen is None else seen


def _opening_times(window: Window, now: datetime) -> list[datetime]:
    found: list[datetime] = []
    at = window.opens(now)
    while at is not None and at - now <= AHEAD:
        found.append(at)
        at = window.opens(at)
    return found


def _periods(idle: Sequence[bool]) -> list[tuple[int, int]]:
    if all(idle):
        return [(0, 24)]
    begins = [hour for hour in range(24) if idle[hour] and not idle[hour - 1]]
    ends = [next(hour % 24 for hour in range(begin, begin + 24) if not idle[hour % 24]) for begin in begins]
    return [(begin, end or 24) for begin, end in zip(begins, ends, strict=True)]
