"""Hours of the day on the clocks of time zones: half open, past midnight, and when clocks change."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from leasehold.errors import BadInput

from assigner.maintenance.meters import best_start
from assigner.operator_resources import limits
from assigner.operator_resources.declaration import Page
from assigner.process import assign
from assigner.settings import PoolSettings
from schema.accounting.quotas import EVICTION_COOLDOWN
from schema.policy import meters, time_windows
from schema.policy.meters import Meter
from schema.policy.time_windows import (
    Hours,
    PreferredHours,
    Window,
    WindowSchedule,
    WindowSettings,
    local_time,
)
from schema.validation import load_zone
from tests.support.explain import closed, explained, gates_of
from tests.support.patience import eventually
from tests.support.pool import Pool, completed

BERLIN, NEW_YORK = load_zone("Europe/Berlin"), load_zone("America/New_York")
NIGHT, DAY = Hours(20, 8, load_zone("UTC")), Hours(8, 20, load_zone("UTC"))


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def opened(hours: Hours, since: str, until: str) -> timedelta:
    """For how long they are open, counted minute by minute."""
    at, minute, found = utc(since), timedelta(minutes=1), timedelta()
    while at < utc(until):
        found += minute if hours.open_at(at) else timedelta()
        at += minute
    return found


@pytest.mark.parametrize(
    ("at", "night"),
    [
        ("2026-11-21T19:59:59.999999", False),
        ("2026-11-21T20:00", True),
        ("2026-11-21T23:59", True),
        ("2026-11-22T00:00", True),
        ("2026-11-22T07:59:59", True),
        ("2026-11-22T08:00", False),
    ],
)
def test_every_instant_belongs_to_one_of_two_windows_that_meet(at: str, night: bool) -> None:
    assert NIGHT.open_at(utc(at)) is night
    assert DAY.open_at(utc(at)) is not night


def test_windows_past_midnight_to_midnight_and_of_the_whole_day_open_and_close() -> None:
    assert NIGHT.opens(utc("2026-11-21T12:34:56")) == utc("2026-11-21T20:00")
    assert NIGHT.opens(utc("2026-11-21T20:00")) == utc("2026-11-22T20:00")
    assert NIGHT.closes(utc("2026-11-21T23:10")) == utc("2026-11-22T08:00")
    late, whole = Hours(22, 24, load_zone("UTC")), Hours(0, 24, load_zone("UTC"))
    assert (late.open_at(utc("2026-11-21T23:59")), late.open_at(utc("2026-11-22T00:00"))) == (True, False)
    assert whole.open_at(utc("2026-11-21T00:00"))
    assert whole.opens(utc("2026-11-21T10:00")) is whole.closes(utc("2026-11-21T10:00")) is None


@pytest.mark.parametrize(
    ("hours", "noon", "next_noon", "hours_open"),
    [
        (Hours(20, 8, BERLIN), "2026-03-28T11:00", "2026-03-29T10:00", 11),
        (Hours(20, 8, BERLIN), "2026-10-24T10:00", "2026-10-25T11:00", 13),
        (Hours(20, 8, NEW_YORK), "2026-03-07T17:00", "2026-03-08T16:00", 11),
        (Hours(20, 8, NEW_YORK), "2026-10-31T16:00", "2026-11-01T17:00", 13),
    ],
)
def test_a_night_is_shorter_or_longer_when_clocks_change(
    hours: Hours, noon: str, next_noon: str, hours_open: int
) -> None:
    assert opened(hours, noon, next_noon) == timedelta(hours=hours_open)
    opens = hours.opens(utc(noon))
    assert opens is not None
    assert opens.astimezone(hours.zone).hour == 20
    closes = hours.closes(opens)
    assert closes is not None
    assert closes - opens == timedelta(hours=hours_open)
    assert closes.astimezone(hours.zone).hour == 8


@pytest.mark.parametrize(
    ("hours", "before", "opens", "closes"),
    [
        # The hour from 2 to 3 is left out in March: the next one is that of the day after.
        (Hours(2, 3, BERLIN), "2026-03-28T12:00", "2026-03-30T00:00", "2026-03-30T01:00"),
        (Hours(2, 3, NEW_YORK), "2026-03-07T12:00", "2026-03-09T06:00", "2026-03-09T07:00"),
        # A window that would begin within it begins when the clock has jumped over it.
        (Hours(2, 5, BERLIN), "2026-03-28T12:00", "2026-03-29T01:00", "2026-03-29T03:00"),
        (Hours(2, 5, NEW_YORK), "2026-03-07T12:00", "2026-03-08T07:00", "2026-03-08T09:00"),
        # Clocks that are put back to 2, or 1, have not been at 3, or 2, before.
        (Hours(3, 5, BERLIN), "2026-10-24T12:00", "2026-10-25T02:00", "2026-10-25T04:00"),
        (Hours(2, 5, NEW_YORK), "2026-10-31T12:00", "2026-11-01T07:00", "2026-11-01T10:00"),
        # An hour that comes twice is open both times.
        (Hours(2, 3, BERLIN), "2026-10-24T12:00", "2026-10-25T00:00", "2026-10-25T02:00"),
        (Hours(1, 2, NEW_YORK), "2026-10-31T12:00", "2026-11-01T05:00", "2026-11-01T07:00"),
    ],
)
def test_a_window_opens_and_closes_when_the_clock_on_the_wall_says_so(
    hours: Hours, before: str, opens: str, closes: str
) -> None:
    assert hours.opens(utc(before)) == utc(opens)
    assert (hours.open_at(utc(opens)), hours.open_at(utc(opens) - timedelta(microseconds=1))) == (True, False)
    assert hours.closes(utc(opens)) == utc(closes)


def test_preferred_hours_are_those_of_the_clock_in_their_zone() -> None:
    hours = PreferredHours(frozenset({6, 23}), BERLIN)
    assert hours.open_at(utc("2026-01-10T22:30"))
    assert not hours.open_at(utc("2026-01-10T23:00"))
    assert hours.open_at(utc("2026-07-10T21:30"))
    assert not hours.open_at(utc("2026-07-10T22:30"))
    assert hours.opens(utc("2026-01-10T23:00")) == utc("2026-01-11T05:00")
    assert PreferredHours(frozenset(range(24)), BERLIN).opens(utc("2026-01-10T23:00")) is None


def test_a_time_zone_has_a_name_that_exists() -> None:
    assert local_time(utc("2026-07-01T18:00"), BERLIN) == "2026-07-01 20:00 Europe/Berlin"
    for name in ("Europe/Atlantis", "", "../etc/passwd", "Europe/../UTC", "EST5EDT4"):
        with pytest.raises(ValueError, match="is not a time zone"):
            load_zone(name)
    with pytest.raises(ValueError, match=r"; did you mean 'Europe/Berlin'\?$"):
        load_zone("europe/berlin")
    with pytest.raises(ValueError, match=r" 'Europe/Berlin'$"):
        load_zone("CEST")  # nobody means EST


# Jobs that wait for a window, for a meter, or for an hour that they prefer.


NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
NIGHT_TIMETABLE: dict[str, Any] = {"name": "night", "start": 20, "end": 8, "types": ["all"], "meter": "plan"}
DAY_TIMETABLE: dict[str, Any] = {
    "name": "day",
    "start": 8,
    "end": 20,
    "types": ["critical", "serious"],
    "meter": "plan",
}


def at(hour: int, minute: int = 0) -> datetime:
    return NOON.replace(hour=hour, minute=minute)


def inventory(percent: float | None, *, read_at: datetime = NOON, **day: Any) -> WindowSchedule:
    """The two windows as they are commonly used, with the meter at so many percent."""
    meter = None if percent is None else Meter("plan", percent, 100.0, None, read_at)
    timetables = ({**DAY_TIMETABLE, "usage_threshold": 20, **day}, {**NIGHT_TIMETABLE, "usage_threshold": 80})
    settings = [WindowSettings.model_validate({"meter_max_age": 86400, **each}) for each in timetables]
    return WindowSchedule([Window(each, meter) for each in settings])


def around_now(pool: Pool, *, opened: bool, **fields: Any) -> WindowSettings:
    """A window that is open by the database's clock, or not, and stays so for an hour at least."""
    hour = pool.row("SELECT extract(hour FROM now() AT TIME ZONE 'UTC')::integer AS hour").hour
    start, end = (hour - 1, hour + 2) if opened else (hour + 2, hour + 4)
    fields = {"name": "now", **fields}
    return WindowSettings.model_validate({**fields, "start": start % 24, "end": end % 24 or 24})


def declare(pool: Pool, *windows: WindowSettings) -> None:
    assign.declare(pool.database, PoolSettings(windows=windows))


def read(pool: Pool, used: float, most: float = 100) -> None:
    pool.database.run(lambda c: meters.put(c, "plan", used=used, most=most))


def started(pool: Pool, *, name: str = "bot-1") -> int:
    bot = pool.bot(name, capacity=10)
    given = pool.given(bot)
    bot.sync(*(completed(lease) for lease in given))
    return len(given)


def test_a_class_starts_in_windows_that_list_it_or_all() -> None:
    windows = inventory(0)
    assert windows.closed_for_class("serious", at(8)) is None
    assert windows.closed_for_class("random", at(19, 59)) == "window 'night' opens at 2026-11-21 20:00 UTC"
    assert windows.closed_for_class("random", at(20)) is None
    assert windows.closed_for_class("random", at(7, 59)) is None
    assert WindowSchedule().closed_for_class("random", at(12)) is None
    alone = WindowSchedule([inventory(0).windows[0]])
    assert alone.closed_for_class("random", at(12)) == "no window lets jobs of class 'random' start"
    assert windows.closed_for_class("serious_project", NOON) is not None, "types are no prefixes unless they should be"
    assert inventory(0, match="prefix").closed_for_class("serious_project", NOON) is None
    assert inventory(0, match="prefix").closed_for_class("background", NOON) is not None


@pytest.mark.parametrize(
    ("job_class", "when", "percent", "day", "why"),
    [
        ("critical", at(12), 19.999, {}, None),
        ("critical", at(12), 20, {}, "meter 'plan' stands at 20 % of its limit"),
        ("background", at(21), 79.9, {}, None),
        ("background", at(21), 80, {}, "meter 'plan' stands at 80 % of its limit"),
        ("critical", NOON, 99, {"exempt_types": ["critical"]}, None),
        ("critical", NOON, None, {"exempt_types": ["critical"]}, None),
        ("serious", NOON, 99, {"exempt_types": ["critical"]}, "meter 'plan' stands at 99 % of its limit"),
        ("critical", NOON, None, {}, "has not been read yet"),
        ("critical", at(15), 1, {"meter_max_age": 3600}, "was last read more than 3600 s ago"),
    ],
)
def test_nothing_starts_from_the_threshold_of_the_window_on_unless_its_class_is_exempt(
    job_class: str, when: datetime, percent: float | None, day: dict[str, Any], why: str | None
) -> None:
    said = inventory(percent, **day).closed_for_class(job_class, when)
    assert (said is None) is (why is None)
    if said is not None and why is not None:
        assert why in said
        assert percent is None or percent == 1 or "opens at" in said


def test_a_meter_begins_at_nothing_when_its_reset_has_passed() -> None:
    meter = Meter("plan", 90, 100, resets_at=at(13), updated_at=at(12))
    assert meter.percent(at(12, 59)) == 90
    assert meter.percent(at(13)) == 0
    assert Meter("plan", 90, 100, resets_at=at(11), updated_at=at(12)).percent(at(13)) == 90


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"start": 8, "end": 8}, "never open"),
        ({"end": 25}, "less than or equal to 24"),
        ({"zone": "Mars/Olympus"}, "is not a time zone"),
        ({"usage_threshold": 20}, "set both or neither"),
        ({"types": []}, "at least 1"),
        ({"exempt_types": ["Critical!"]}, "pattern"),
    ],
)
def test_a_window_that_cannot_be_meant_is_refused(fields: dict[str, Any], refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        WindowSettings.model_validate({"name": "day", "start": 8, "end": 20, **fields})


def test_jobs_of_a_class_wait_until_a_window_takes_them_and_others_do_not(pool: Pool) -> None:
    pool.submit(2, terms={"job_class": "random"})
    pool.submit(terms={"locks": ["tree"]})
    pool.submit()
    declare(pool, around_now(pool, opened=True, types=["critical"]))
    assert started(pool) == 2
    declare(pool, around_now(pool, opened=False, types=["random"]))
    assert started(pool) == 0
    declare(pool, around_now(pool, opened=True, types=["all"]))
    assert started(pool) == 2
    pool.submit(terms={"job_class": "random"})
    declare(pool)
    assert started(pool) == 1, "without windows none is asked for"


def test_a_reading_above_the_threshold_waits_for_what_starts_by_the_one_before_it(pool: Pool) -> None:
    pool.submit(terms={"job_class": "critical"})
    declare(pool, around_now(pool, opened=True, meter="plan", usage_threshold=20))
    read(pool, 1)
    with ThreadPoolExecutor(1) as threads, pool.database.listen() as holder:
        holder.execute("BEGIN")
        holder.execute("SET search_path TO leasehold")
        holder.execute(meters.LOCK_METERS[True].text)
        writer = threads.submit(read, pool, 90)
        waiting = "SELECT count(*) AS n FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND state = 'active'"
        eventually(lambda: pool.row(waiting).n)
        assert not writer.done()
        holder.execute("COMMIT")
        writer.result()
    assert started(pool) == 0


def test_a_job_starts_at_an_hour_that_it_prefers(pool: Pool) -> None:
    hour = pool.row("SELECT extract(hour FROM now() AT TIME ZONE 'Asia/Kathmandu')::integer AS hour").hour
    late = [(hour + 3) % 24, (hour + 4) % 24]
    pool.submit(terms={"preferred_hours": late, "preferred_zone": "Asia/Kathmandu"})
    assert started(pool) == 0
    soon = [(hour - 1) % 24, hour, (hour + 1) % 24]
    pool.submit(terms={"preferred_hours": soon, "preferred_zone": "Asia/Kathmandu"})
    assert started(pool) == 1


def test_a_zone_that_does_not_exist_keeps_only_its_own_jobs_waiting(pool: Pool) -> None:
    (lost,) = pool.submit(terms={"preferred_hours": [1], "preferred_zone": "Mars"})
    pool.submit(terms={"locks": ["tree"]})
    assert started(pool) == 1
    assert "'Mars' is not a time zone" in explained(pool, lost).sentence


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [("zone", "Mars/Phobos", "zone: 'Mars/Phobos' is not a time zone"), ("types", ["No Name"], "types.0: ")],
)
def test_a_window_that_cannot_be_used_any_more_is_closed_and_nothing_else_is(
    pool: Pool, column: str, value: Any, said: str
) -> None:
    declare(pool, around_now(pool, opened=True, types=["random"]))
    pool.change(f"UPDATE windows SET {column} = :value", value=value)
    pool.change("UPDATE windows SET types = types || ARRAY['random']")
    (lost,) = pool.submit(terms={"job_class": "random"})
    pool.submit(terms={"locks": ["tree"]})
    (plain,) = pool.submit(terms={"locks": ["other"]})
    assert said in gates_of(explained(pool, lost))["window"].sentence
    assert closed(explained(pool, plain)) == ["cohort"], "there is no bot yet"
    assert started(pool) == 2
    (shown,) = pool.database.run(lambda c: list(limits.WINDOWS.rows(c, Page("", 9, EVICTION_COOLDOWN))))
    assert said in shown.wrong
    now = pool.row("SELECT now() AS now").now
    windows = pool.database.run(time_windows.read)
    assert best_start(windows, "random", estimate=0, histories={}, now=now) is None
    declare(pool, around_now(pool, opened=True, types=["random"]))
    assert started(pool) == 1


def test_windows_are_those_of_the_configuration_and_written_only_if_they_differ(pool: Pool) -> None:
    window = around_now(pool, opened=True, zone="Europe/Berlin", exempt_types=["critical"], match="prefix")
    declare(pool, window)
    declare(pool, window)
    (kept,) = pool.database.run(time_windows.read).windows
    assert kept.settings == window
    assert pool.row("SELECT count(*) AS n FROM audit WHERE action = 'windows.set'").n == 1
    declare(pool)
    assert not pool.database.run(time_windows.read).windows


def test_a_meter_keeps_what_it_stood_at_by_the_hour_for_four_weeks(pool: Pool) -> None:
    read(pool, 10)
    read(pool, 30)
    pool.change("UPDATE meter_hours SET hour = hour - interval '28 days 2 hours'")
    read(pool, 50, most=200)
    (level,) = pool.database.run(lambda c: meters.history(c, ["plan"]))["plan"]
    assert level.percent == 25
    (meter,) = pool.database.run(meters.meters)
    assert (meter.used, meter.most) == (50, 200)
    with pytest.raises(BadInput, match="limit"):
        read(pool, 1, most=0)
    with pytest.raises(BadInput, match="used"):
        read(pool, float("nan"))


def test_a_job_starts_once_its_window_its_meter_and_its_bots_resources_allow_it_and_is_told_which_do_not(
    pool: Pool,
) -> None:
    need = {"cpu_milli": 2000, "memory_mib": 1024, "disk_mib": 512}
    (job,) = pool.submit(terms={"job_class": "random", "resources": need})
    enough = {"cpu_milli": 4000, "memory_mib": 4096, "disk_mib": 4096}

    def waits_for(gate: str, why: str) -> None:
        found = explained(pool, job)
        assert closed(found) == [gate]
        assert why in gates_of(found)[gate].sentence
        pool.assigner().run_once()
        assert pool.job(job).state == "queued"

    for kind, amount in need.items():
        pool.bot(capacity=4, resources={**enough, kind: amount - 1})
        waits_for("resources", f"it takes {amount} {kind}, and no bot with room has more than {amount - 1} left")
    bot = pool.bot(capacity=4, resources=enough)
    declare(pool, around_now(pool, opened=False))
    waits_for("window", "window 'now' opens at")
    declare(pool, around_now(pool, opened=True, meter="plan", usage_threshold=20))
    read(pool, 90)
    waits_for("window", "90")
    read(pool, 10)
    assert closed(explained(pool, job)) == []
    pool.assigner().run_once()
    assert len(bot.take()) == 1
