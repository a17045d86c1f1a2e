"""Execution windows: hours of the day in which jobs of certain classes may start, and the meters that may close them.

Hours are those of the clock on the wall in a named time zone. A window from 2 to 3 is open for two hours on the day on
which that hour occurs twice, and does not open on the day on which it is skipped.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, Self
from zoneinfo import ZoneInfo

from leasehold.errors import NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field, model_validator

from schema import audit, declarations
from schema.fields import Name, Zone, as_stored
from schema.policy.meters import Meter
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Row, Statement
from schema.validation import YEAR, check_name, load_zone

# Hours of the day: pure functions


#: In every zone, hours begin and clocks change at a quarter of an hour of UTC.
_STEP = timedelta(minutes=15)
#: A time of day that is skipped today occurs tomorrow; no zone skips the same one on two days in a row.
_FAR = timedelta(days=3)


@dataclass(frozen=True)
class Hours:
    """A daily span from hour `start` (0 to 23) until hour `end` (1 to 24); it passes midnight if `end` is not later."""

    start: int
    end: int
    zone: ZoneInfo

    def open_at(self, at: datetime) -> bool:
        """True if the instant is within these hours."""
        hour = at.astimezone(self.zone).hour
        if self.start < self.end:
            return self.start <= hour < self.end
        return hour >= self.start or hour < self.end

    def opens(self, at: datetime) -> datetime | None:
        """The first instant after `at` at which the span begins; None if it is the whole day."""
        return _first(at, lambda before, after: not before and after, self.open_at)

    def closes(self, at: datetime) -> datetime | None:
        """The first instant after `at` at which the span ends; None if it is the whole day."""
        return _first(at, lambda before, after: before and not after, self.open_at)


@dataclass(frozen=True)
class PreferredHours:
    """Single hours of the day, 0 to 23."""

    hours: frozenset[int]
    zone: ZoneInfo

    def open_at(self, at: datetime) -> bool:
        """True if the instant is in one of these hours."""
        return at.astimezone(self.zone).hour in self.hours

    def opens(self, at: datetime) -> datetime | None:
        """The first instant after `at` at which a listed hour follows one that is not; None if all 24 are listed."""
        return _first(at, lambda before, after: not before and after, self.open_at)


def local_time(at: datetime, zone: ZoneInfo) -> str:
    """An instant as text for people, on the clock of the zone."""
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


# Windows


#: The type that stands for every class.
ALL = "all"

Types = tuple[Name, ...]

_COLUMNS = "name, starts, ends, zone, types, exempt_types, match, meter, usage_threshold, meter_max_age"
READ = Statement(f"""
SELECT w.*, m.used, m.most, m.resets_at, m.updated_at
FROM (SELECT {_COLUMNS} FROM windows) w LEFT JOIN usage_meters m ON m.name = w.meter AND m.updated_at IS NOT NULL
ORDER BY w.name
""")
# Processes that declare different windows take turns, so nobody reads a mixture. The last one wins.
LOCK = Statement("LOCK TABLE windows IN SHARE ROW EXCLUSIVE MODE")
REMOVE = Statement("DELETE FROM windows WHERE name = ANY (CAST(:names AS text[])) RETURNING name")
PUT = Statement(f"""
INSERT INTO windows ({_COLUMNS}) SELECT {_COLUMNS} FROM jsonb_populate_recordset(NULL::windows, CAST(:windows AS jsonb))
""")


class WindowTerms(BaseModel):
    """Hours in which jobs of certain classes may start: every day from hour `start` until hour `end` of the zone.

    The window passes midnight if `end` is not later than `start`. A job that names no class waits for no window.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    start: int = Field(ge=0, le=23, description="hour of the day at which it opens, 0 to 23")
    end: int = Field(ge=1, le=24, description="hour of the day at which it closes, 1 to 24")
    zone: Zone = Field(default="UTC", description="time zone of both hours")
    types: Types = Field(
        default=(ALL,),
        min_length=1,
        max_length=100,
        strict=False,
        description="classes that the window admits; all = every class",
    )
    exempt_types: Types = Field(
        default=(),
        max_length=100,
        strict=False,
        description="classes among them that start whatever the meter reads",
    )
    match: Literal["exact", "prefix"] = Field(
        default="exact", description="exact, or prefix: a type also stands for classes whose names begin with it"
    )
    meter: Name | None = Field(default=None, description="meter that can close the window; unset = none")
    usage_threshold: float | None = Field(
        default=None, ge=0, le=100, description="percent of the meter's limit at which the window closes"
    )
    meter_max_age: float = Field(
        default=3600.0, gt=0, le=YEAR, description="seconds after which a reading of the meter is too old"
    )

    @model_validator(mode="after")
    def _can_be_open(self) -> Self:
        if self.start == self.end:
            raise ValueError("end: a window that ends as it starts is never open; the whole day is from 0 to 24")
        if (self.meter is None) != (self.usage_threshold is None):
            raise ValueError("usage_threshold goes with a meter: set both or neither")
        return self


class WindowSettings(WindowTerms):
    """One window with its name, as the configuration declares it.

    types: classes that the window admits; "all" stands for every class.
    match: "exact", or "prefix": a type also stands for classes whose names begin with it.
    meter: meter that can close the window; unset = none.
    usage_threshold: percent of the meter's limit, 0 to 100, at which the window closes. Doubling it lets jobs use twice
        as much of what the meter counts.
    exempt_types: classes among `types` that start whatever the meter reads.
    meter_max_age: seconds after which a reading of the meter is too old. Then the window admits exempt classes only.
        Doubling it lets jobs start by readings twice as old.
    """

    name: Name

    @property
    def hours(self) -> Hours:
        """The hours in which the window is open."""
        return Hours(self.start, self.end, load_zone(self.zone))

    def admits(self, job_class: str) -> bool:
        """True if the window admits jobs of the class, whatever its meter reads."""
        return ALL in self.types or self._among(self.types, job_class)

    def exempts(self, job_class: str) -> bool:
        """True if jobs of the class may start whatever the meter reads."""
        return ALL in self.exempt_types or self._among(self.exempt_types, job_class)

    def _among(self, types: Types, job_class: str) -> bool:
        return job_class in types or (self.match == "prefix" and job_class.startswith(types))


@dataclass(frozen=True)
class Window:
    """A window and the last reading of its meter.

    wrong: why the stored window cannot be used here, such as a time zone that this host does not know. Then it is never
        open, and all others are as they are.
    """

    settings: WindowSettings
    meter: Meter | None = None
    wrong: str | None = None

    def open_at(self, at: datetime) -> bool:
        """True if the instant is within the window's hours."""
        return self.wrong is None and self.settings.hours.open_at(at)

    def opens(self, at: datetime) -> datetime | None:
        """The first instant after `at` at which the window opens; None if there is none."""
        return None if self.wrong is not None else self.settings.hours.opens(at)

    def held_back(self, job_class: str, at: datetime) -> str | None:
        """Return why the meter keeps jobs of the class from starting during the window's hours; None if it does not."""
        settings = self.settings
        if settings.usage_threshold is None or settings.exempts(job_class):
            return None
        if self.meter is None:
            return f"window '{settings.name}' goes by meter '{settings.meter}', which has not been read yet"
        if not self.meter.fresh(at, settings.meter_max_age):
            return (
                f"window '{settings.name}' goes by meter '{settings.meter}', "
                f"which was last read more than {settings.meter_max_age:g} s ago"
            )
        percent = self.meter.percent(at)
        if percent >= settings.usage_threshold:
            return (
                f"meter '{settings.meter}' stands at {percent:.3g} % of its limit, "
                f"and in window '{settings.name}' jobs start below {settings.usage_threshold:g} %"
            )
        return None

    def spare(self, job_class: str, at: datetime) -> float:
        """Share of the meter's threshold that is not used yet, 0 to 1; 1 without a threshold for the class."""
        threshold = self.settings.usage_threshold
        if threshold is None or self.settings.exempts(job_class):
            return 1.0
        if self.meter is None or not threshold or self.held_back(job_class, at) is not None:
            return 0.0
        return 1.0 - self.meter.percent(at) / threshold


@dataclass(frozen=True)
class WindowSchedule:
    """All windows. Without any, no job waits for a window."""

    windows: Sequence[Window] = ()

    def closed_for_class(self, job_class: str, at: datetime) -> str | None:
        """Return why no job of the class may start at that instant; None if it may."""
        if not self.windows:
            return None
        taking = [window for window in self.windows if window.settings.admits(job_class)]
        if not taking:
            return f"no window lets jobs of class '{job_class}' start"
        found = [window.held_back(job_class, at) for window in taking if window.open_at(at)]
        if None in found:
            return None
        wrong = [f"window '{each.settings.name}' cannot be used: {each.wrong}" for each in taking if each.wrong]
        return "; ".join([*(why for why in found if why), *wrong, self._following(taking, at)])

    def opens_for_class(self, job_class: str, at: datetime) -> datetime | None:
        """Return when the next window for the class opens; None if one is open, or if none ever does."""
        taking = [window for window in self.windows if window.settings.admits(job_class)]
        if any(window.open_at(at) for window in taking):
            return None
        return min((opens for each in taking if (opens := each.opens(at)) is not None), default=None)

    def spare(self, job_class: str, at: datetime) -> float:
        """Largest unused share of a meter's threshold among the open windows of the class, 0 to 1; 1 without windows.

        It tells how far jobs of the class are from being stopped by meters.
        """
        if not self.windows:
            return 1.0
        taking = [window for window in self.windows if window.settings.admits(job_class)]
        left = (window.spare(job_class, at) for window in taking if window.open_at(at))
        return max(left, default=0.0)

    @staticmethod
    def _following(windows: Sequence[Window], at: datetime) -> str:
        ahead = [(opens, each.settings) for each in windows if (opens := each.opens(at)) is not None]
        if not ahead:
            return "no other window opens later"
        opens, settings = min(ahead, key=lambda each: (each[0], each[1].name))
        return f"window '{settings.name}' opens at {local_time(opens, settings.hours.zone)}"


def declare(connection: Connection, wanted: Sequence[WindowSettings], *, actor: str) -> None:
    """Store the windows of the configuration, and remove those that it declared before and no longer does.

    Windows that operators made stay. Writes nothing if nothing changes.
    """
    connection.execute(LOCK)
    named = {each.name for each in wanted}
    before = declarations.replace(connection, "window", named) | named
    if {each.settings for each in read(connection).windows if each.settings.name in before} == set(wanted):
        return
    connection.execute(REMOVE, {"names": sorted(before)})
    _put(connection, wanted)
    audit.write(connection, "windows.set", actor=actor, subject="windows", details={"windows": sorted(named)})


def put_windows(connection: Connection, wanted: Mapping[str, WindowTerms], *, actor: str, reason: str = "") -> None:
    """Make windows, or replace those of these names, in as many statements for many as for one. Raises BadInput."""
    for name in wanted:
        check_name("name", name)
    given = {
        name: {field: getattr(terms, field) for field in WindowTerms.model_fields} for name, terms in wanted.items()
    }
    connection.execute(LOCK)
    connection.execute(REMOVE, {"names": list(wanted)})
    _put(connection, [WindowSettings(name=name, **terms) for name, terms in given.items()])
    noted = {f"window:{name}": {"after": terms, "reason": reason} for name, terms in given.items()}
    audit.write_all(connection, "window.set", noted, actor=actor)
    wake(connection, "jobs")


def remove_windows(connection: Connection, names: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Remove windows. Without any window, no job waits for one. Raises NotFound if one is not there."""
    connection.execute(LOCK)
    removed = set(connection.execute(REMOVE, {"names": list(names)}).scalars())
    for name in names:
        if name not in removed:
            raise NotFound(f"window: no window '{escaped(name, 63)}'")
    noted = {f"window:{name}": {"reason": reason} for name in names}
    audit.write_all(connection, "window.rm", noted, actor=actor)
    wake(connection, "jobs")


def _put(connection: Connection, windows: Sequence[WindowSettings]) -> None:
    rows = [each.model_dump() | {"starts": each.start, "ends": each.end} for each in windows]
    connection.execute(PUT, {"windows": json.dumps(rows)})


def read(connection: Connection) -> WindowSchedule:
    """All windows, with the last readings of their meters."""
    return WindowSchedule([_window(row) for row in connection.execute(READ)])


def _window(row: Row) -> Window:
    settings, wrong = as_stored(
        WindowSettings,
        {
            "name": row.name,
            "start": row.starts,
            "end": row.ends,
            "zone": row.zone,
            "types": tuple(row.types),
            "exempt_types": tuple(row.exempt_types),
            "match": row.match,
            "meter": row.meter,
            "usage_threshold": row.usage_threshold,
            "meter_max_age": row.meter_max_age,
        },
    )
    meter = None
    if row.updated_at is not None:
        meter = Meter(row.meter, float(row.used), float(row.most), row.resets_at, row.updated_at)
    return Window(settings, meter, wrong)
