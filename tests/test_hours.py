"""Hours of the day on the clocks of time zones: half open, past midnight, and when clocks change."""

from datetime import UTC, datetime, timedelta

import pytest

from schema.hours import Hours, Preferred, wall, zone

BERLIN, NEW_YORK = zone("Europe/Berlin"), zone("America/New_York")
NIGHT, DAY = Hours(20, 8, zone("UTC")), Hours(8, 20, zone("UTC"))


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
def test_a_26_every_instant_belongs_to_one_of_two_windows_that_meet(at: str, night: bool) -> None:
    assert NIGHT.open_at(utc(at)) is night
    assert DAY.open_at(utc(at)) is not night


def test_sa_10_a_window_past_midnight_opens_in_the_evening_and_closes_in_the_morning() -> None:
    assert NIGHT.opens(utc("2026-11-21T12:34:56")) == utc("2026-11-21T20:00")
    assert NIGHT.opens(utc("2026-11-21T20:00")) == utc("2026-11-22T20:00")
    assert NIGHT.closes(utc("2026-11-21T23:10")) == utc("2026-11-22T08:00")


def test_a_window_to_midnight_and_one_of_the_whole_day() -> None:
    late = Hours(22, 24, zone("UTC"))
    assert late.open_at(utc("2026-11-21T23:59"))
    assert not late.open_at(utc("2026-11-22T00:00"))
    whole = Hours(0, 24, zone("UTC"))
    assert whole.open_at(utc("2026-11-21T00:00"))
    assert whole.opens(utc("2026-11-21T10:00")) is None
    assert whole.closes(utc("2026-11-21T10:00")) is None


@pytest.mark.parametrize(
    ("hours", "noon", "next_noon", "hours_open"),
    [
        (Hours(20, 8, BERLIN), "2026-03-28T11:00", "2026-03-29T10:00", 11),
        (Hours(20, 8, BERLIN), "2026-10-24T10:00", "2026-10-25T11:00", 13),
        (Hours(20, 8, NEW_YORK), "2026-03-07T17:00", "2026-03-08T16:00", 11),
        (Hours(20, 8, NEW_YORK), "2026-10-31T16:00", "2026-11-01T17:00", 13),
    ],
)
def test_a_26_a_night_is_shorter_or_longer_when_clocks_change(
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
    ("hours", "before", "opens"),
    [
        # The hour from 2 to 3 is left out in March: the next one is that of the day after.
        (Hours(2, 3, BERLIN), "2026-03-28T12:00", "2026-03-30T00:00"),
        (Hours(2, 3, NEW_YORK), "2026-03-07T12:00", "2026-03-09T06:00"),
        # A window that would begin within it begins when the clock has jumped over it.
        (Hours(2, 5, BERLIN), "2026-03-28T12:00", "2026-03-29T01:00"),
        (Hours(2, 5, NEW_YORK), "2026-03-07T12:00", "2026-03-08T07:00"),
        # Clocks that are put back to 2, or 1, have not been at 3, or 2, before.
        (Hours(3, 5, BERLIN), "2026-10-24T12:00", "2026-10-25T02:00"),
        (Hours(2, 5, NEW_YORK), "2026-10-31T12:00", "2026-11-01T07:00"),
    ],
)
def test_a_26_a_window_opens_when_the_clock_on_the_wall_says_so(hours: Hours, before: str, opens: str) -> None:
    assert hours.opens(utc(before)) == utc(opens)


@pytest.mark.parametrize(
    ("hours", "opens", "closes"),
    [
        (Hours(2, 3, BERLIN), "2026-10-25T00:00", "2026-10-25T02:00"),
        (Hours(1, 2, NEW_YORK), "2026-11-01T05:00", "2026-11-01T07:00"),
    ],
)
def test_a_26_an_hour_that_comes_twice_is_open_both_times(hours: Hours, opens: str, closes: str) -> None:
    assert hours.open_at(utc(opens))
    assert not hours.open_at(utc(opens) - timedelta(microseconds=1))
    assert hours.closes(utc(opens)) == utc(closes)


def test_sa_14_preferred_hours_are_those_of_the_clock_in_their_zone() -> None:
    hours = Preferred(frozenset({6, 23}), BERLIN)
    assert hours.open_at(utc("2026-01-10T22:30"))
    assert not hours.open_at(utc("2026-01-10T23:00"))
    assert hours.open_at(utc("2026-07-10T21:30"))
    assert not hours.open_at(utc("2026-07-10T22:30"))
    assert hours.opens(utc("2026-01-10T23:00")) == utc("2026-01-11T05:00")
    assert Preferred(frozenset(range(24)), BERLIN).opens(utc("2026-01-10T23:00")) is None


def test_a_26_a_time_zone_has_a_name_that_exists() -> None:
    assert wall(utc("2026-07-01T18:00"), BERLIN) == "2026-07-01 20:00 Europe/Berlin"
    for name in ("Europe/Atlantis", "", "../etc/passwd", "Europe/../UTC", "EST5EDT4"):
        with pytest.raises(ValueError, match="is not a time zone"):
            zone(name)
