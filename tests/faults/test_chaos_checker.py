"""The checker of fault runs finds each violation that is planted in sound records, and nothing in the sound ones."""

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ops.chaos import checker, execution, journal, records
from ops.chaos.checker import JobRow, Kind, Violation
from ops.chaos.execution import Line, Running
from ops.chaos.journal import Acknowledged, Submits
from tests.support.pool import Pool

#: One job that ran twice, because the bot of its first attempt was killed, and one that ran once.
SOUND = """
start a 1 1 bot-1 11 1.00
start b 1 1 bot-2 12 1.01
beat a 1 1 bot-1 11 1.05
end b 1 1 bot-2 12 1.06
start a 3 2 bot-2 13 5.00
beat a 3 2 bot-2 13 5.05
end a 3 2 bot-2 13 5.10
"""
SUBMITS = Submits({"k-a": 0.5, "k-b": 0.5}, (Acknowledged("k-a", "a", 0.6), Acknowledged("k-b", "b", 0.6)))
ROWS = [JobRow("a", "k-a", "succeeded", 3, 3, 1), JobRow("b", "k-b", "succeeded", 1, 1, 1)]


@pytest.fixture
def parsed(tmp_path: Path) -> Callable[[str], list[Line]]:
    def parse(text: str) -> list[Line]:
        path = tmp_path / "execution"
        path.write_text(text.lstrip())
        return execution.read(path)

    return parse


def kinds(found: list[Violation]) -> list[Kind]:
    return [violation.kind for violation in found]


def test_a_process_that_hides_is_found_by_more_than_its_id(parsed: Callable[[str], list[Line]]) -> None:
    log = parsed("start a 1 1 bot-1 11 1.00\nstart b 1 1 bot-2 12 9.00\n")
    running = [Running(pid=12, job="b", fence=1, bot="bot-2"), Running(pid=11, job="b", fence=1, bot="bot-2")]
    assert execution.hidden(running, log) == [11]


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("", []),
        ("beat a 1 1 bot-1 11 5.02\n", [Kind.OVERLAP]),  # after the start of fence 3
        ("start a 3 2 bot-2 13 5.11\n", [Kind.FENCE]),
        ("start a 2 2 bot-1 14 6.00\n", [Kind.FENCE]),  # an older fence after a newer one
        ("start b 2 2 bot-1 14 6.00\n", [Kind.DOUBLED]),  # it had succeeded
        ("start c 1 1 bot-1 15 6.00\n", [Kind.LOST]),  # no such job
    ],
)
def test_each_planted_line_is_found(parsed: Callable[[str], list[Line]], planted: str, found: list[Kind]) -> None:
    assert kinds(checker.check(SUBMITS, parsed(SOUND + planted), ROWS)) == found


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([ROWS[0]], [Kind.LOST, Kind.LOST]),  # acknowledged, and it ran
        ([ROWS[0], replace(ROWS[1], ends=2)], [Kind.DOUBLED]),
        ([ROWS[0], replace(ROWS[1], state="failed", reason="exit code 2")], [Kind.FAILED]),
        ([ROWS[0], replace(ROWS[1], state="failed", reason="killed by SIGKILL")], [Kind.FAILED]),  # no fault did that
        ([ROWS[0], replace(ROWS[1], state="cancelled")], [Kind.FAILED]),  # nobody asked for it
        ([ROWS[0], replace(ROWS[1], state="dead", reason="every attempt ended without a result")], [Kind.FAILED]),
        ([ROWS[0], replace(ROWS[1], state="dead", reason="its bot was lost three times")], []),
        ([ROWS[0], replace(ROWS[1], fence=2, result_fence=2)], [Kind.LOST]),  # nobody ran fence 2
        ([*ROWS, JobRow("c", "k-b", "queued", 0, None, 0)], [Kind.DOUBLED]),  # one key, two jobs
        ([*ROWS, JobRow("c", "k-c", "queued", 0, None, 0)], [Kind.DOUBLED]),  # nobody asked for it
        ([*ROWS, JobRow("c", None, "queued", 0, None, 0)], [Kind.DOUBLED]),
    ],
)
def test_each_planted_row_is_found(parsed: Callable[[str], list[Line]], rows: list[JobRow], found: list[Kind]) -> None:
    assert kinds(checker.check(SUBMITS, parsed(SOUND), rows)) == found


def test_what_callers_and_faults_did_is_held_against_the_jobs(parsed: Callable[[str], list[Line]]) -> None:
    """A key that was answered with two jobs is wrong. A submit without an answer may have made a job or not. A job may
    fail after its command was killed, and be cancelled on request."""
    made = [*ROWS, JobRow("c", "k-c", "queued", 0, None, 0)]
    ended = [replace(ROWS[0], state="cancelled"), replace(ROWS[1], state="failed", reason="killed by SIGKILL")]
    twice = (*SUBMITS.acknowledged, Acknowledged("k-a", "b", 7.0))
    for submits, rows, found in (
        (replace(SUBMITS, acknowledged=twice), ROWS, [Kind.DOUBLED]),
        (replace(SUBMITS, asked={**SUBMITS.asked, "k-c": 2.0, "k-d": 2.0}), made, []),
        (replace(SUBMITS, cancelled=frozenset("a"), killed=frozenset("b")), ended, []),
    ):
        assert kinds(checker.check(submits, parsed(SOUND), rows)) == found


def test_a_command_notes_its_start_its_beats_and_its_end(tmp_path: Path) -> None:
    log = tmp_path / "execution"
    for number, kind in enumerate(execution.Kind):
        asked = execution.payload(log, "run", kind=kind, beats=2, pause=0.01)
        own = {"LEASEHOLD_JOB": kind, "LEASEHOLD_FENCE": "4", "LEASEHOLD_ATTEMPT": "2", "LEASEHOLD_BOT": f"b{number}"}
        subprocess.run(asked["command"], env={"PATH": os.defpath, **asked["env"], **own}, check=True, timeout=60)
        # The hidden child of one kind runs on; a bot would have killed it with the command.
        for process in execution.processes("run"):
            with suppress(ProcessLookupError):
                os.kill(process.pid, 9)
    for number, kind in enumerate(execution.Kind):
        (attempt,) = execution.attempts(execution.read(log))[kind]
        assert (attempt.fence, attempt.first.what, attempt.first.bot) == (4, "start", f"b{number}")
        assert (attempt.first.attempt, attempt.starts, attempt.ended) == (2, 1, True)


def test_lines_of_many_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def write(name: str) -> None:
        noted = journal.Journal(path)
        for number in range(200):
            noted.ask(f"{name}-{number}")
            noted.acknowledge(f"{name}-{number}", f"job-{name}-{number}")
        noted.close()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = journal.read(path)
    assert len(list(records.lines(path))) == 1600
    assert {answer.key: answer.job for answer in read.acknowledged} == {key: f"job-{key}" for key in read.asked}


def test_the_rows_of_the_pool_are_what_the_checker_compares(pool: Pool, tmp_path: Path) -> None:
    noted = journal.Journal(tmp_path / "journal")
    for key in ("k-1", "k-2"):
        noted.ask(key)
        (job,) = pool.submit(key=key)
        noted.acknowledge(key, job)
    noted.close()
    rows = checker.stored(pool.database)
    assert [(row.job, row.key, row.state, row.ends) for row in rows] == [
        (job, key, "queued", 0) for key, job in noted.jobs.items()
    ]
    assert checker.check(journal.read(noted.path), [], rows) == []
    assert len(checker.unfinished(rows)) == 2
