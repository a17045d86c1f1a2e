"""Times and durations as people give them to a command."""

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime

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
    assert times.moment("2026-07-01T10:00Z", option="--at") == "2026-07-01T10:00:00+00:00"
    soon = times.moment("10:00", option="--at")
    assert soon[10:19] == "T10:00:00"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("2026-03-29 02:30", "is skipped by a change of the clock here"),
        ("2026-10-25 02:30", r"is there twice here: give 2026-10-25T02:30:00\+02:00 or 2026-10-25T02:30:00\+01:00"),
        ("tomorrow", "is not a time, such as"),
        ("25:00", "is not a time, such as"),
        ("2026-02-30 10:00", "is not a time, such as"),
    ],
)
def test_a_time_that_there_is_not_or_twice_is_refused(berlin: None, given: str, why: str) -> None:
    with pytest.raises(BadInput, match=f"--at: '{given}' {why}"):
        times.moment(given, option="--at")


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
    none = "is not a time, such as '2026-12-01 10:00' or 10:00"
    for given, said in (("yesterday", none), ("2026-13-01", none), ("2027-03-28 02:30", "is skipped by a change")):
        assert errors.run(cli, ["list", "--ended-after", given]) == 2
        assert f"error: --ended-after: '{given}' {said}" in capsys.readouterr().err
