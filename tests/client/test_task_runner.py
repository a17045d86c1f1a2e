"""`leasehold-task`: one task of a job in a process of its own, with the files and signals of an attempt."""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import MINUTE, eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a task as a bot would, with `args`; environment: more variables."""

    def started(task: str, *args: Any, **environment: str) -> subprocess.Popen[str]:
        attempt = {"LEASEHOLD_JOB": "j", "LEASEHOLD_ATTEMPT": "2", "LEASEHOLD_FENCE": "5", "LEASEHOLD_INSTANCE": "i"}
        files = {
            "LEASEHOLD_RESULT": str(tmp_path / "result"),
            "LEASEHOLD_CHECKPOINT": str(tmp_path / "checkpoint"),
        }
        call = tmp_path / "stdin"
        call.write_text(json.dumps({"args": args, "kwargs": {}}))
        program = [sys.executable, "-c", "from leasehold.runtime.task_runner import main; main()"]
        with call.open() as stdin:
            return subprocess.Popen(
                [*program, "tests.support.apps.task_app:pool", f"tests.support.apps.task_app.{task}"],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={"PYTHONPATH": str(ROOT), "PATH": os.defpath, **attempt, **files, **environment},
            )

    return started


Start = Callable[..., subprocess.Popen[str]]


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the output."""
    output, _ = process.communicate(timeout=MINUTE)
    return process.returncode, output


def result(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "result").read_text())


def test_the_value_of_a_task_is_the_result_of_the_job(start: Start, tmp_path: Path) -> None:
    assert end(start("add", 1, 2)) == (0, "1 + 2\n")
    assert result(tmp_path) == {"ok": 3}
    mine, other = tmp_path / "mine", tmp_path / "other"
    other.touch()
    assert end(start("meet", str(mine), str(other)))[0] == 0, "an `async def` has a loop of its own"


def test_an_error_is_the_result_with_its_traceback_and_exit_code_1(start: Start, tmp_path: Path) -> None:
    code, output = end(start("fail", "no luck"))
    assert (code, output.splitlines()[-1]) == (1, "ValueError: no luck")
    told = result(tmp_path)["error"]
    assert (told["type"], told["message"], told["traceback"]) == ("ValueError", "no luck", output)
    assert "task_runner" not in output, "the traceback begins in the function of the task"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x" * 70_000, "the value has 70010 bytes as JSON, and at most 65536 are stored"),
        ("a\0b", "the value cannot be stored: holds a NUL character"),
    ],
)
def test_a_value_that_cannot_be_stored_is_an_error(start: Start, tmp_path: Path, value: str, reason: str) -> None:
    assert end(start("echo", value))[0] == 1
    assert result(tmp_path)["error"]["type"] == "ResultRefused"
    assert result(tmp_path)["error"]["message"] == reason


def test_an_unknown_task_an_app_that_is_not_there_and_a_process_without_a_job_say_so(
    start: Start, tmp_path: Path
) -> None:
    assert end(start("gone"))[0] == 1
    assert result(tmp_path)["error"]["type"] == "UnknownTask"
    program = [sys.executable, "-c", "from leasehold.runtime.task_runner import main; main()", "no.such:pool", "t"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={})
    assert (done.returncode, done.stderr) == (
        1,
        "error: this process runs no attempt of a job: 'LEASEHOLD_JOB' is not set by a bot\n",
    )


def test_a_syntax_error_in_an_app_is_told_with_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import leasehold\n\ndef charge(:\n")
    program = [sys.executable, "-c", "from leasehold.runtime.task_runner import main; main()", "shop:pool", "t"]
    given = {"LEASEHOLD_JOB": "j", "LEASEHOLD_ATTEMPT": "1", "LEASEHOLD_FENCE": "1", "LEASEHOLD_INSTANCE": "i"}
    files = {"LEASEHOLD_RESULT": str(tmp_path / "result"), "LEASEHOLD_CHECKPOINT": str(tmp_path / "checkpoint")}
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL,
        env={"PYTHONPATH": str(tmp_path), **given, **files},
    )  # fmt: skip
    assert done.stderr.endswith(f"SyntaxError: invalid syntax ({tmp_path / 'shop.py'}, line 3)\n")


@pytest.mark.parametrize("mode", [None, "def", "async"])
def test_a_process_whose_agent_died_with_unread_messages_ends_without_a_word(mode: str | None) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "leasehold.runtime.task_child", "tests.support.apps.task_app:pool"],
        cwd=ROOT, stdin=theirs, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    theirs.close()
    assert select.select([ours], [], [], MINUTE)[0], "it has said that it is ready, and nobody reads that"
    if mode is not None:
        ours.send(json.dumps({"serve": mode}).encode())
        unread = bytearray(4)
        eventually(lambda: fcntl.ioctl(ours, termios.TIOCOUTQ, unread) == 0 and not any(unread))
    ours.close()
    _, said = process.communicate(timeout=MINUTE)
    assert (process.returncode, said) == (0, "")


def test_sigterm_cancels_a_task_where_it_is(start: Start, tmp_path: Path) -> None:
    for task, said in (("hold", "asked to end True\n"), ("rest", "rested True\n")):
        file = tmp_path / task
        process = start(task, str(file))
        eventually(file.exists)
        process.send_signal(signal.SIGTERM)
        assert end(process) == (143, said)
        assert not (tmp_path / "result").exists()


def test_a_checkpoint_is_there_for_the_next_attempt_after_kill_9(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "held"
    process = start("advance", str(file))
    eventually(file.exists)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    assert json.loads((tmp_path / "checkpoint").read_text()) == {"row": 41}
    assert end(start("advance", str(file)))[0] == 0
    assert result(tmp_path) == {"ok": [2, {"row": 41}]}
