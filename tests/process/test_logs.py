"""What processes log, as programs read it that collect logs."""

import json
import logging
import math

import pytest
import structlog

from assigner import logs


def test_each_line_of_a_log_in_json_is_an_object_also_of_errors_and_of_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, level = structlog.get_config(), logging.root.level
    monkeypatch.setattr(logging.root, "handlers", [])
    try:
        logs.to_stderr("ERROR")  # as each command does first
        logs.to_stderr("INFO", "json")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            structlog.get_logger().exception("failed", duty="overflow", of={"a"}, age=math.nan, ages=[1.5, math.inf])
            logging.getLogger("library").exception('it said "%s"', "no")
    finally:
        structlog.configure(**before)
        logging.root.setLevel(level)
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ours["level"], ours["event"], ours["duty"]) == ("error", "failed", "overflow")
    assert (ours["age"], ours["ages"]) == (None, [1.5, None]), "JSON has no such numbers"
    assert (theirs["level"], theirs["event"], theirs["logger"]) == ("error", 'it said "no"', "library")
    for line in (ours, theirs):
        assert line["exception"].endswith("ValueError: two\nlines")
        assert line["timestamp"].endswith("Z")
