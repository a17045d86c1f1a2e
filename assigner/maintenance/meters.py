"""Meters that are read by a command: it is run now and then, by one process of all, and prints what it has read."""

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
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from schema.errors import BadInput
from schema.policy import meters
from schema.policy.meters import Level
from schema.policy.time_windows import Window, WindowSchedule
from schema.postgres.engine import Database
from schema.validation import Name, escaped

#: Bytes that such a command may print.
MAX_PRINTED = 64 * 1024
#: Seconds between two looks at which meters are due.
POLL_INTERVAL = 5.0

log = structlog.get_logger()


class MeterSettings(BaseModel):
    """A meter that is read by a command, which prints one JSON object: `used` and `limit`, numbers in a unit of its
    own, and optionally `resets_at`, when it begins at 0 again. The command is run by assigner processes, without a
    shell, one of them at a time.

    interval: seconds between two readings. Doubling it halves the runs and lets jobs go by readings twice as old.
    timeout: seconds after which the command is killed; then the reading before it stands, as long as windows take it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name
    command: tuple[str, ...] = Field(min_length=1, max_length=100)
    interval: float = Field(default=300.0, ge=1, le=86400)
    timeout: float = Field(default=10.0, gt=0, le=60)


class Reading(BaseModel):
    """What the command prints; other keys mean nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    used: float
    limit: float
    resets_at: AwareDatetime | None = None


class MeterPoller:
    """The meters of one process that commands read. A command that fails is logged, and its meter stays as it was."""

    def __init__(self, database: Database, settings: Sequence[MeterSettings]) -> None:
        self._database, self._settings = database, settings

    def reconfigure(self, settings: Sequence[MeterSettings]) -> None:
        """Read other meters from now on."""
        self._settings = settings

    def run_once(self) -> float:
        """Read the meters that are due and nobody else reads; returns the seconds until the next look."""
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
    """Run the command of a meter once. Raises BadInput, naming the command, if that gives no reading."""
    printed = _run_command(meter)
    if len(printed) > MAX_PRINTED:
        raise BadInput("command", f"prints more than {MAX_PRINTED} bytes")
    try:
        return Reading.model_validate_json(printed)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"])) or "its output"
        raise BadInput("command", f"prints no reading: {where}: {escaped(found['msg'], 120)}") from None


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


# What a meter is expected to stand at, by the hours of the days behind, and when a job had best start. Pure.


#: Hours with at least this share of the busiest hour's usage are peaks, those with at most this share idle.
PEAK, IDLE = 0.8, 0.2
#: How far a forecast looks ahead.
AHEAD = timedelta(days=7)


@dataclass(frozen=True)
class UsagePattern:
    """How a meter's usage goes over the day (Sleepless Agent's usage pattern report).

    avg_usage_by_hour: percent of the limit at each hour of the day, 0 to 23; None where nothing is known.
    peak_hours: those with at least 80 % of the usage of the busiest one.
    idle_periods: from the first hour on up to the second, past midnight too, with at most 20 % of it.
    """

    avg_usage_by_hour: Sequence[float | None]
    peak_hours: Sequence[int]
    idle_periods: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class StartForecast:
    """When a window opens, and what its meter is expected to stand at then, in percent; None if it goes by no meter."""

    window: str
    at: datetime
    percent: float | None


def hourly_averages(levels: Sequence[Level], zone: ZoneInfo) -> list[float | None]:
    """What was seen at each hour of the day, 0 to 23, on the zone's clock, on average over the days."""
    found: list[list[float]] = [[] for _ in range(24)]
    for level in levels:
        found[level.hour.astimezone(zone).hour].append(level.percent)
    return [sum(each) / len(each) if each else None for each in found]


def usage_pattern(levels: Sequence[Level], zone: ZoneInfo) -> UsagePattern:
    """The report of what was seen."""
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
    """The next window to open, within a week, that takes the class and of which the meter is expected to stand so low
    then that with `estimate` more, in the meter's unit, it stays below the threshold (Sleepless Agent's best execution
    time). None: there is no suitable window."""
    ahead = [
        (at, window)
        for window in openings.windows
        if window.settings.admits(job_class)
        for at in _opening_times(window, now)
    ]
    for at, window in sorted(ahead, key=lambda each: (each[0], each[1].settings.name)):
        settings = window.settings
        if settings.meter is None or settings.usage_threshold is None:
            return StartForecast(settings.name, at, None)
        if window.meter is None:
            continue
        percent = _expected(window, histories.get(settings.meter, ()), at)
        if percent + 100.0 * estimate / window.meter.most < settings.usage_threshold:
            return StartForecast(settings.name, at, percent)
    return None


def _expected(window: Window, levels: Sequence[Level], at: datetime) -> float:
    """What was seen at that hour of the day; where nothing was, what the meter stands at, or 0 after its reset."""
    zone = window.settings.hours.zone
    seen = hourly_averages(levels, zone)[at.astimezone(zone).hour]
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
