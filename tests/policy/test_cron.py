"""Ticks of cron expressions as pure functions: changes of clocks, catching up, bad expressions."""

import os
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from zoneinfo import ZoneInfo

import pytest
from leasehold.errors import BadInput

from schema.policy.cron import CatchUp, Plan, check_cron, newest_ticks, next_tick, plan, ticks_after

BERLIN = "Europe/Berlin"


def at(told: str) -> datetime:
    return datetime.fromisoformat(told).replace(tzinfo=UTC)


def ticks(expression: str, zone: str, after: str, count: int) -> list[str]:
    """The next ticks in UTC, each found from the one before, as a stored schedule finds them."""
    found, last = [], at(after)
    for _ in range(count):
        following = next_tick(expression, zone, last)
        assert following is not None
        last = following
        found.append(last.strftime("%m-%d %H:%M"))
    return found


# On 29 March 2026 clocks in Berlin go from 02:00 to 03:00, which is 01:00 in UTC. On 25 October 2026 they go from 03:00
# back to 02:00, again at 01:00 in UTC.


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        # 02:30 does not exist on the 29th: the first valid time after it is 03:00.
        ("30 2 * * *", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        ("0 2 * * *", ["03-28 01:00", "03-29 01:00", "03-30 00:00"]),
        ("0,30 2 * * *", ["03-28 01:00", "03-28 01:30", "03-29 01:00", "03-30 00:00"]),
        ("0 3 * * *", ["03-28 02:00", "03-29 01:00", "03-30 01:00"]),
        ("0 4 * * *", ["03-28 03:00", "03-29 02:00", "03-30 02:00"]),
    ],
)
def test_a_time_in_the_hour_that_is_left_out_is_due_once_at_the_next_valid_time(
    expression: str, expected: list[str]
) -> None:
    assert ticks(expression, BERLIN, "2026-03-27T12:00:00", len(expected)) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 2 * * *", ["10-24 00:00", "10-25 00:00", "10-26 01:00"]),
        ("30 2 * * *", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
        ("59 2 * * *", ["10-24 00:59", "10-25 00:59", "10-26 01:59"]),
        ("0 3 * * *", ["10-24 01:00", "10-25 02:00", "10-26 02:00"]),
    ],
)
def test_a_time_in_the_hour_that_comes_twice_is_due_the_first_time_only(expression: str, expected: list[str]) -> None:
    assert ticks(expression, BERLIN, "2026-10-23T12:00:00", len(expected)) == expected


def test_a_schedule_made_in_the_second_of_two_equal_hours_has_no_tick_in_the_past() -> None:
    # 01:10 in UTC is 02:10 for the second time.
    assert ticks("30 2 * * *", BERLIN, "2026-10-25T01:10:00", 1) == ["10-26 01:30"]
    assert ticks("0 2 * * *", BERLIN, "2026-10-25T01:10:00", 1) == ["10-26 01:00"]


def test_an_expression_of_every_hour_follows_the_clock_on_the_wall() -> None:
    assert ticks("30 * * * *", BERLIN, "2026-10-24T23:45:00", 3) == ["10-25 00:30", "10-25 01:30", "10-25 02:30"]
    assert ticks("30 * * * *", BERLIN, "2026-03-29T00:00:00", 3) == ["03-29 00:30", "03-29 01:30", "03-29 02:30"]
    assert ticks("*/30 2 * * *", BERLIN, "2026-10-24T23:45:00", 5) == [
        "10-25 00:00", "10-25 00:30", "10-25 01:00", "10-25 01:30", "10-26 01:00"
    ]  # fmt: skip


#: Clocks that change at other hours, by half an hour, by two hours, at midnight, or twice more each year.
ZONES = ("Africa/Casablanca", "America/Havana", "Antarctica/Troll", "Australia/Lord_Howe", "Europe/Berlin")
MORE_ZONES = (
    "Africa/Cairo", "America/New_York", "America/Nuuk", "America/Santiago", "America/St_Johns", "Asia/Beirut",
    "Asia/Jerusalem", "Europe/London", "Pacific/Chatham",
)  # fmt: skip
YEARS_VARIABLE = "LEASEHOLD_TEST_YEARS"
#: The minutes, hours and weekdays (Sunday is 0) of expressions, and whether they are for fixed times.
EVERY = frozenset(range(60))
EXPRESSIONS: dict[str, tuple[frozenset[int], frozenset[int], frozenset[int]]] = {
    "* * * * *": (EVERY, EVERY, EVERY),
    "30 * * * *": (frozenset({30}), EVERY, EVERY),
    "0 * * * *": (frozenset({0}), EVERY, EVERY),
    "*/20 * * * *": (frozenset({0, 20, 40}), EVERY, EVERY),
    "*/15 2 * * *": (frozenset({0, 15, 30, 45}), frozenset({2}), EVERY),
    "15,45 */2 * * *": (frozenset({15, 45}), frozenset(range(0, 24, 2)), EVERY),
    "30 2 * * *": (frozenset({30}), frozenset({2}), EVERY),
    "0,20,40 0,1,2,3 * * *": (frozenset({0, 20, 40}), frozenset({0, 1, 2, 3}), EVERY),
    "5 0 * * 0": (frozenset({5}), frozenset({0}), frozenset({0})),
}
FIRST_YEAR = 2024
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)


def changes(zone: ZoneInfo, years: int) -> list[datetime]:
    """The first hours of UTC after each change of the zone's clocks."""
    hours = [datetime(FIRST_YEAR, 1, 1, tzinfo=UTC) + timedelta(hours=n) for n in range(years * 8766)]
    offsets = [hour.astimezone(zone).utcoffset() for hour in hours]
    return [hour for hour, before, now in zip(hours[1:], offsets, offsets[1:], strict=False) if before != now]


def searched(shown: list[tuple[datetime, datetime]], expression: str) -> list[datetime]:
    """The ticks among these minutes, each with what the clock shows then, found by looking at every minute."""
    minutes, hours, weekdays = EXPRESSIONS[expression]
    is_fixed = "*" not in "".join(field[0] for field in expression.split()[:2])

    def matches(at: datetime) -> bool:
        return at.minute in minutes and at.hour in hours and at.isoweekday() % 7 in weekdays

    found, latest = [], shown[0][1] - MINUTE
    for instant, at in shown:
        left_out = [latest + n * MINUTE for n in range(1, (at - latest) // MINUTE)]
        is_due = (matches(at) and (not is_fixed or at > latest)) or (is_fixed and any(map(matches, left_out)))
        if is_due:
            found.append(instant)
        latest = max(latest, at) if is_fixed else at
    return found


@pytest.mark.parametrize("name", [*ZONES, *(MORE_ZONES if os.environ.get(YEARS_VARIABLE) else ())])
def test_ticks_around_every_change_of_clocks_are_those_of_a_search_minute_by_minute(name: str) -> None:
    """LEASEHOLD_TEST_YEARS=7 looks at all years until 2030, and at more zones."""
    zone, years = ZoneInfo(name), int(os.environ.get(YEARS_VARIABLE) or 1)
    found = changes(zone, years)
    assert len(found) >= 2 * years
    for change in found:
        instants = [change - DAY + n * MINUTE for n in range(2 * 1440)]
        shown = [(each, each.astimezone(zone).replace(tzinfo=None, fold=0)) for each in instants]
        for expression in EXPRESSIONS:
            wanted = searched(shown, expression)
            ticks = takewhile(lambda tick: tick <= instants[-1], ticks_after(expression, name, instants[0] - MINUTE))  # noqa: B023
            assert list(ticks) == wanted, (expression, change)
            for moment in (change - MINUTE, change, change + timedelta(minutes=29, seconds=7)):
                later = [tick for tick in wanted if tick > moment]
                assert not later or next_tick(expression, name, moment) == later[0], (expression, moment)


def test_the_newest_ticks_of_a_long_outage_are_found_without_counting_all() -> None:
    until = at("2026-11-24T03:00:30")
    found = newest_ticks("* * * * *", "UTC", since=at("2006-01-01T00:00:00"), until=until, most=3)
    assert [tick.strftime("%H:%M") for tick in found] == ["02:58", "02:59", "03:00"]
    yearly = newest_ticks("0 0 1 1 *", "UTC", since=at("2020-01-01T00:00:00"), until=until, most=100)
    assert [tick.year for tick in yearly] == list(range(2020, 2027))


@pytest.mark.parametrize(
    ("catch_up", "now", "tick", "missed", "following"),
    [
        ("skip", "12:00:01", "12:00", False, "13:00"),
        ("none", "12:00:01", "12:00", False, "13:00"),
        ("all", "12:00:01", "12:00", False, "13:00"),
        # Four ticks late.
        ("skip", "15:30:00", "15:00", True, "16:00"),
        ("none", "15:30:00", None, True, "16:00"),
        ("none", "15:00:59", "15:00", True, "16:00"),
        ("all", "15:30:00", "13:00", True, "14:00"),
        # The newest tick is older than `skip` allows.
        ("skip", "15:50:00", None, True, "16:00"),
        ("all", "14:30:00", "12:00", False, "13:00"),
    ],
)
def test_what_is_submitted_after_an_outage(
    catch_up: CatchUp, now: str, tick: str | None, missed: bool, following: str
) -> None:
    day = "2026-11-24T"
    due, looked = at(f"{day}12:00:00"), at(f"{day}{now}")
    found = plan("0 * * * *", "UTC", due=due, now=looked, catch_up=catch_up, most=3, within=45 * 60.0)
    assert found == Plan(tick and at(f"{day}{tick}:00"), missed, at(f"{day}{following}:00"))


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "has 0 fields, not the five fields minute, hour, day of the month, month, day of the week"),
        ("* * * *", "has 4 fields"),
        ("0 * * * * *", "has 6 fields"),
        ("@daily", "has 1 field, not"),
        ("60 * * * *", "is not a cron expression: bad minute"),
        ("* 24 * * *", "bad hour"),
        ("* * 0 * *", "bad day-of-month"),
        ("* * * 13 *", "bad month"),
        ("* * * * 8", "bad day-of-week"),
        ("*/0 * * * *", "bad minute"),
        ("5-1 * * * *", "bad minute"),
        ("0 0 30 2 *", "bad day-of-month, which none of its months has"),
        ("0 0 31 4,6 *", "bad day-of-month, which none of its months has"),
        ("0 0 * * 1L/2", "is not a cron expression"),
        ("a\x1b b c d e", "'a\\x1b b c d e' is not a cron expression"),
        ("1," * 150 + "1 * * * *", "is longer than 200 bytes"),
    ],
)
def test_a_bad_expression_is_refused_in_one_line_that_names_the_field(expression: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_cron("cron", expression)
    assert refused.value.field == "cron"
    assert said in refused.value.reason


def test_an_expression_without_any_tick_has_none() -> None:
    assert check_cron("cron", " 0  0 29 2  MON#5 ") == "0 0 29 2 MON#5"
    assert next_tick(check_cron("cron", "0 0 */31 2 MON#5"), "UTC", at("2026-01-01T00:00:00")) is None
