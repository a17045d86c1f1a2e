"""One command of a lease, with real processes: what it gets, what it gives back, and why it may not start."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bots.runner import Assignment, Place, Run
from schema import limits
from tests.proc import NEEDS_PROC
from tests.runs import finish, start, text_of

pytestmark = NEEDS_PROC


def test_a_command_that_exits_with_0_succeeded_and_its_output_keeps_the_order_of_writing(place: Place) -> None:
    run = start(place, "sh", "-c", "echo one; echo two >&2; echo three")
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("succeeded", 0, None)
    assert text_of(run) == "one\ntwo\nthree\n"
    assert (outcome.output_bytes, outcome.output_truncated) == (14, False)
    assert outcome.seconds is not None


def test_another_exit_code_is_a_failure_and_a_signal_is_negative(place: Place) -> None:
    outcome = finish(start(place, "sh", "-c", "exit 3"))
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("failed", 3, "exit code 3")
    outcome = finish(start(place, "sh", "-c", "kill -SEGV $$"))
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("failed", -11, "killed by SIGSEGV")


def test_the_environment_is_the_allow_list_the_payload_and_what_leasehold_says(place: Place) -> None:
    run = start(place, "env", env={"COLOUR": "blue", "LEASEHOLD_JOB": "forged", "TZ": "UTC"})
    finish(run)
    seen = dict(line.split("=", 1) for line in text_of(run).splitlines())
    directory = seen.pop("LEASEHOLD_WORK")
    assert Path(directory).parent == place.workplace.root
    assert seen.pop("LEASEHOLD_USAGE").startswith(f"{directory}/")
    assert seen == {
        "PATH": os.defpath,
        "HOME": directory,
        "TMPDIR": f"{directory}/tmp",
        "COLOUR": "blue",
        "TZ": "UTC",
        "LEASEHOLD_JOB": "a-job",
        "LEASEHOLD_FENCE": "7",
        "LEASEHOLD_ATTEMPT": "2",
        "LEASEHOLD_INSTANCE": "tenant",
        "LEASEHOLD_BOT": "bot-1",
    }


def test_a_command_works_in_a_private_directory_with_its_own_session_and_default_signals(place: Place) -> None:
    program = (
        "import os,signal; print(os.getcwd() == os.environ['HOME'], oct(os.stat('.').st_mode & 0o777), os.getsid(0) =="
        " os.getpid() == os.getpgrp(), [n for n in signal.Signals if signal.getsignal(n) == signal.SIG_IGN])"
    )
    run = start(place, sys.executable, "-S", "-c", program)
    finish(run)
    # Python itself ignores SIGPIPE and SIGXFSZ.
    assert text_of(run) == f"True 0o700 True {[signal.SIGPIPE, signal.SIGXFSZ]}\n"


def test_standard_input_is_the_payloads_or_empty(place: Place) -> None:
    run = start(place, "cat", stdin="käse\n" * 20_000)
    finish(run)
    assert text_of(run) == "käse\n" * 20_000
    run = start(place, "cat")
    assert finish(run).verdict == "succeeded"
    assert text_of(run) == ""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-program", "command not found: 'no-such-program' (or the interpreter it names)"),
        ("/etc/passwd", "command is not executable: '/etc/passwd'"),
    ],
)
def test_a_command_that_cannot_be_started_is_an_error_of_the_bot(place: Place, command: str, reason: str) -> None:
    outcome = finish(start(place, command))
    assert (outcome.verdict, outcome.reason, outcome.exit_code) == ("error", reason, None)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, "payload: Input should be a valid dictionary or instance of Payload"),
        ({}, "command: Field required"),
        ({"command": []}, "command: List should have at least 1 item after validation, not 0"),
        ({"command": [""]}, "command.0: is empty"),
        ({"command": ["echo", "\0"]}, "command or env holds a NUL character"),
        ({"command": ["env"], "env": {"A=B": "c"}}, "env: a name is empty or holds '='"),
        ({"command": ["env"], "shell": True}, "shell: Extra inputs are not permitted"),
    ],
)
def test_a_payload_that_no_bot_can_run_failed(place: Place, payload: Any, reason: str) -> None:
    assignment = Assignment(job="j", fence=1, attempt=1, instance="i", timeout=None, payload=payload)
    run = Run(assignment, place, notify=lambda: None)
    run.start()
    outcome = finish(run)
    assert (outcome.verdict, outcome.reason) == ("failed", f"invalid payload: {reason}")


def test_a_work_directory_that_cannot_be_made_is_an_error_of_the_bot(place: Place) -> None:
    root = place.workplace.root
    root.rmdir()
    root.write_text("in the way")
    outcome = finish(start(place, "true"))
    root.unlink()
    root.mkdir()
    assert (outcome.verdict, outcome.reason) == ("error", "the work directory cannot be made: Not a directory")


def test_output_beyond_the_cap_is_counted_but_not_kept(place: Place) -> None:
    size = limits.MAX_OUTPUT_BYTES + 12_345
    run = start(place, "sh", "-c", f"head -c {size} /dev/zero")
    outcome = finish(run)
    assert (outcome.verdict, outcome.output_bytes, outcome.output_truncated) == ("succeeded", size, True)
    assert run.output.unsent == limits.MAX_OUTPUT_BYTES
