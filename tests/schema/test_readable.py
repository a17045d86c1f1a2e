"""Durations, times and numbers as people read them."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from rich.console import Console

from schema.readable import call_arguments, cell, divided, duration, moment, number, plural, run_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1e-05, "<1 ms"),
        (0.0014, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (90, "1 min 30 s"),
        (120, "2 min"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (3660, "1 h 1 min"),
        (86399, "1 d"),
        (90000, "1 d 1 h"),
        (86400 * 1234, "1,234 d"),
        (-90, "-1 min 30 s"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_how_long_a_job_ran_is_told_as_in_a_list_and_what_its_bot_measured_beside_it() -> None:
    whole = {"started_at": "2026-07-01T12:00:00Z", "finished_at": "2026-07-01T12:00:00.462000Z"}
    said = "462 ms, <1 ms of it by the clock of its bot"
    assert run_time(whole | {"result": {"seconds": 0.0002}}) == said
    assert run_time(whole | {"result": {"seconds": 0.4621}}) == "462 ms"
    assert run_time(whole | {"result": None}) == "462 ms"
    assert run_time({"started_at": whole["started_at"], "finished_at": None, "result": None}) is None
    assert run_time({"started_at": None, "finished_at": whole["finished_at"]}) is None, "it never ran"


@pytest.mark.parametrize(
    ("stdin", "said"),
    [
        ({"args": [7], "kwargs": {"cents": 1250}}, "7, cents=1250"),
        ({"args": [{"leasehold.result": 3}], "kwargs": {}}, "the result of node 3"),
        ({"args": [[{"leasehold.result": 0}, {"leasehold.result": 1}]], "kwargs": {}}, "[the results of 2 nodes]"),
        ({"args": ["x" * 300], "kwargs": {}}, f'"{"x" * 99}…{"x" * 98}"'),
    ],
)
def test_the_arguments_of_a_call_are_told_as_in_a_call(stdin: object, said: str) -> None:
    assert call_arguments(json.dumps(stdin)) == said


def test_arguments_of_which_only_the_beginning_is_known_end_where_they_go_on() -> None:
    beginning = json.dumps({"args": [[f"/srv/{number}" for number in range(500)]], "kwargs": {}})[:2000]
    assert call_arguments(beginning, limit=40) == '["/srv/0", "/srv/1", "/srv/2", "/srv/3"…'


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
def test_a_person_reads_the_time_of_the_place_with_its_zone_and_a_program_utc() -> None:
    stored = "2026-07-01T12:00:00.250999Z"
    assert moment(stored, local=True) == "2026-07-01 14:00:00.250 CEST"
    assert moment("2026-01-01T12:00:00+00:00", local=True) == "2026-01-01 13:00:00 CET"
    assert moment(stored, local=False) == stored
    assert moment("2026-07-01T14:00:00+02:00") == "2026-07-01T12:00:00Z", "standard output is no terminal here"
    assert moment(datetime(2026, 7, 1, 12, tzinfo=UTC)) == "2026-07-01T12:00:00Z"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (6.0, "6"), (0.25, "0.25"), (1e-05, "0.00001"), (1.25e-7, "0.000000125"), (2e6, "2000000")],
)
def test_a_number_has_no_exponent(value: float, text: str) -> None:
    assert number(value) == text
    assert number(1234567.25, digits=12) == "1234567.25"
    assert number(1e-30) == "1e-30"


def test_things_are_counted_in_the_singular_and_the_plural() -> None:
    told = [plural(number, noun) for number, noun in ((1, "job"), (0, "job"), (1200, "job"), (1, "dependency"))]
    assert told == ["1 job", "0 jobs", "1,200 jobs", "1 dependency"]
    assert [plural(2, "dependency"), plural(2, "day"), plural(0.5, "job")] == ["2 dependencies", "2 days", "0.5 jobs"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("error: a sentence goes on below", ["error: a sentence", "goes on below"]),
        ("error: /srv/a/path/longer/than/that is gone", ["error:", "/srv/a/path/longer/than/that", "is gone"]),
        ("now say `leasehold show` to see", ["now say", "`leasehold show` to", "see"]),
        ("two\nlines", ["two", "lines"]),
        ("it has waited 3 min 18 s", ["it has waited", "3 min 18 s"]),
        ("中文字中文字中 a word", ["中文字中文字中 a", "word"]),
    ],
)
def test_a_sentence_is_divided_between_words_only(text: str, lines: list[str]) -> None:
    assert list(divided(text, Console(width=20))) == lines


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (999, "999"),
        (-12345, "-12,345"),
        (1234.5, "1,234.5"),
        (-0.5, "-0.5"),
        (1e12, "1,000,000,000,000"),
        (1e300, "1e+300"),
        (float("inf"), "inf"),
        (True, "yes"),
        ("12345", "12345"),
        (None, "-"),
    ],
)
def test_a_table_tells_quantities_with_separators_and_names_as_they_are(value: object, told: str) -> None:
    assert cell(value) == told
