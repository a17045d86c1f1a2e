"""Times and durations as people give them to a command."""

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from leasehold.errors import BadInput

from assigner.cli import errors
from assigner.cli.main import cli
from bots.cli import times
from tests.support.http import Answer, Gateway, in_turn


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The zone of this machine is Europe/Berlin."""
    monkeypatch.setitem(os.environ, "TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("45", 45), ("1.5", 1.5), ("90m", 5400), ("90min", 5400), ("1h30m", 5400), ("2 d 1s", 172_801), ("0s", 0)],
)
def test_a_duration_is_read_with_its_units(given: str, wanted: float) -> None:
    assert times.seconds(given, option="--in") == wanted


@pytest.mark.parametrize("given", ["", "soon", "-5", "5x", "90m!", "m", "1e9"])
def test_what_is_no_duration_is_refused(given: str) -> None:
    with pytest.raises(BadInput, match=r"--in: '.*' is not a duration"):
        times.seconds(given, option="--in")


def test_a_time_is_one_of_this_machines_zone_unless_it_has_an_offset(berlin: None) -> None:
    assert times.moment("2026-12-01 10:00", option="--at") == "2026-12-01T10:00:00+01:00"
    assert times.moment("2026-07-01T10:00:30", option="--at") == "2026-07-01T10:00:30+02:00"
    for early in ("2026-12-01 9:30", "2026-12-01T9:30:00", " 2026-12-01 09:30", "2026-12-01 9:30+01:00"):
        assert times.moment(early, option="--at") == "2026-12-01T09:30:00+01:00"
    assert times.moment("2026-07-01T10:00Z", option="--at") == "2026-07-01T10:00:00+00:00"
    soon = times.moment("10:00", option="--at")
    assert soon[10:19] == "T10:00:00"


@pytest.mark.parametrize(
    ("given", "next_one", "last_one"),
    [  # on Thursday, 2 July 2026, at 13:30
        ("13:31", "07-02T13:31", "07-01T13:31"),
        ("9:30", "07-03T09:30", "07-02T09:30"),
        ("today 10:00", "07-02T10:00", "07-02T10:00"),
        ("Tomorrow  10:00", "07-03T10:00", "07-03T10:00"),
        ("yesterday 10:00", "07-01T10:00", "07-01T10:00"),
        ("monday 09:30", "07-06T09:30", "06-29T09:30"),
        ("Thu 13:31", "07-02T13:31", "06-25T13:31"),
        ("thursday 13:30", "07-09T13:30", "07-02T13:30"),
    ],
)
def test_a_day_may_be_a_word(
    berlin: None, monkeypatch: pytest.MonkeyPatch, given: str, next_one: str, last_one: str
) -> None:
    monkeypatch.setattr("bots.cli.times.clock.wall", lambda: datetime(2026, 7, 2, 11, 30, tzinfo=UTC).timestamp())
    assert times.moment(given, option="--at") == f"2026-{next_one}:00+02:00"
    assert times.moment(given, option="--at", is_past=True) == f"2026-{last_one}:00+02:00"


def test_a_word_for_a_day_is_refused_where_the_clock_is_changed(berlin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bots.cli.times.clock.wall", lambda: datetime(2026, 3, 28, 11, tzinfo=UTC).timestamp())
    for given in ("tomorrow 02:30", "sunday 02:30", "02:30"):
        with pytest.raises(BadInput, match="is skipped by a change of the clock here"):
            times.moment(given, option="--at")
    assert times.moment("tomorrow 03:30", option="--at") == "2026-03-29T03:30:00+02:00"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("2026-03-29 02:30", "is skipped by a change of the clock here"),
        ("2026-10-25 02:30", r"is there twice here: give 2026-10-25T02:30:00\+02:00 or 2026-10-25T02:30:00\+01:00"),
        ("tomorrow", "needs a time of day, such as 'tomorrow 10:00'$"),
        ("mon", "needs a time of day, such as 'mon 10:00'$"),
        ("noon", "is not a time, such as 10:00, 'tomorrow 10:00', 'monday 09:30' or '2026-12-01 10:00'$"),
        ("tomorrow 25:00", "is not a time, such as"),
        ("someday 10:00", "is not a time, such as"),
        ("25:00", "is not a time, such as"),
        ("2026-02-30 10:00", "is not a time, such as"),
        ("2026-02-30 9:30", "is not a time, such as"),
        ("2026-10-25 2:30", "is there twice here: give "),
        ("0001-01-01", "is not a time, such as"),
        ("0001-01-01 00:30", "is not a time, such as"),
    ],
)
def test_a_time_that_there_is_not_or_twice_is_refused(berlin: None, given: str, why: str) -> None:
    with pytest.raises(BadInput, match=f"--at: '{given}' {why}"):
        times.moment(given, option="--at")


@pytest.mark.parametrize(
    ("zone", "given"), [("Asia/Tokyo", "0001-01-01"), ("America/New_York", "9999-12-31 23:59"), ("UTC", "10000-01-01")]
)
def test_a_time_at_the_edge_of_what_there_is_is_refused(zone: str, given: str) -> None:
    with pytest.raises(BadInput, match=f"ended_after: '{given}' is not a time, such as"):
        times.moment(given, option="ended_after", is_past=True, zone=ZoneInfo(zone))


@pytest.mark.parametrize("zone", [None, ZoneInfo("Europe/Berlin")])
@pytest.mark.parametrize(
    ("minutes", "is_past", "wanted"),
    [  # from 02:00 in summer time; in this night 02:00 to 03:00 comes twice
        (45, False, None),
        (45, True, None),
        (75, True, None),
        (105, False, "2026-10-26T02:30:00+01:00"),
        (-20, True, "2026-10-24T02:30:00+02:00"),
        (200, False, "2026-10-26T02:30:00+01:00"),
    ],
)
def test_the_next_and_the_last_time_may_be_the_other_one_of_a_repeated_hour(
    berlin: None,
    monkeypatch: pytest.MonkeyPatch,
    zone: ZoneInfo | None,
    minutes: int,
    is_past: bool,
    wanted: str | None,
) -> None:
    now = datetime(2026, 10, 25, tzinfo=UTC).timestamp() + 60 * minutes
    monkeypatch.setattr("bots.cli.times.clock.wall", lambda: now)
    if wanted is not None:
        assert times.moment("02:30", option="--at", is_past=is_past, zone=zone) == wanted
        return
    with pytest.raises(BadInput, match=r"'02:30' is there twice here: give 2026-10-25T02:30:00\+02:00 or .*\+01:00"):
        times.moment("02:30", option="--at", is_past=is_past, zone=zone)


@pytest.mark.usefixtures("no_pool_of_our_own", "berlin")
def test_a_changed_start_is_told_with_its_offset(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.cli.times.clock.wall", lambda: datetime(2026, 7, 2, 11, 30, tzinfo=UTC).timestamp())
    job = {"id": "01a22923-0000-7000-8000-000000000001", "state": "queued", "starts_at": "2026-07-03T08:00:00Z"}
    stands.script = in_turn(Answer({"jobs": [job | {"changed": True}], "next": None}))
    assert errors.run(cli, ["reschedule", job["id"], "--at", "tomorrow 10:00"]) == 0
    assert capsys.readouterr().err == "starts at 2026-07-03T10:00:00+02:00 at the earliest\n"
    assert stands.asked[0].body["schedule_after"] == "2026-07-03T10:00:00+02:00"
    running = job | {"state": "running", "starts_at": None, "changed": False, "why": "a bot has it"}
    for given, jobs, said in (
        ([job["id"]], [running], f"error: job '{job['id']}' is running: a bot has it; nothing was changed"),
        (["--all", "--label", "x"], [], "no job that this could change passes the filter"),
    ):
        stands.script = in_turn(Answer({"jobs": jobs, "next": None}))
        errors.run(cli, ["reschedule", *given, "--at", "tomorrow 10:00"])
        assert capsys.readouterr().err == f"{said}\n", "no start is told of what was not changed"


@pytest.mark.parametrize("zone", ["Europ/Berlin", "nowhere"])
def test_a_zone_that_nobody_knows_is_not_taken_for_utc(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TZ", zone)
    with pytest.raises(BadInput, match=f"'10:00' needs an offset, because TZ names no known zone: '{zone}'"):
        times.moment("10:00", option="--at")
    assert times.moment("2026-07-01T10:00Z", option="--at") == "2026-07-01T10:00:00+00:00"
    for known in ("", "UTC", ":Europe/Berlin", "CET-1CEST", "/etc/localtime"):
        monkeypatch.setitem(os.environ, "TZ", known)
        assert times.moment("10:00", option="--at")


@pytest.mark.usefixtures("no_pool_of_our_own", "berlin")
def test_times_of_filters_are_of_this_machines_zone_unless_they_say_another(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stands.script = in_turn(Answer({"jobs": [], "next": None}))
    for given, sent in (
        ("2026-07-01 10:00", "2026-07-01T10:00:00+02:00"),
        ("2026-12-01", "2026-12-01T00:00:00+01:00"),
        ("2026-12-01T10:00:00Z", "2026-12-01T10:00:00Z"),
    ):
        assert errors.run(cli, ["list", "--ended-after", given]) == 0
        assert datetime.fromisoformat(stands.asked[-1].query["ended_after"]) == datetime.fromisoformat(sent)
    monkeypatch.setattr("bots.cli.times.clock.wall", lambda: datetime(2026, 7, 2, 11, 30, tzinfo=UTC).timestamp())
    for given, last in (("13:30", "2026-07-02T13:30:00+02:00"), ("13:31", "2026-07-01T13:31:00+02:00")):
        assert errors.run(cli, ["list", "--ended-after", given]) == 0
        assert datetime.fromisoformat(stands.asked[-1].query["ended_after"]) == datetime.fromisoformat(last)
    none = "is not a time, such as 10:00, 'tomorrow 10:00', 'monday 09:30' or '2026-12-01 10:00'"
    for given, said in (
        ("lately", none),
        ("yesterday", "needs a time of day, such as 'yesterday 10:00'"),
        ("2026-13-01", none),
        ("2027-03-28 02:30", "is skipped by a change"),
    ):
        assert errors.run(cli, ["list", "--ended-after", given]) == 2
        assert f"error: --ended-after: '{given}' {said}" in capsys.readouterr().err
