"""One task of a job: `leasehold-task` in a process of its own, and what surrounds a call in a warm child."""

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from leasehold.errors import BadInput
from leasehold.runtime.attempt import Attempt
from leasehold.runtime.call_messages import CallEnd, read_end
from leasehold.runtime.surroundings import TICK, AttemptDirectory, Surroundings

from tests.support.patience import MINUTE, eventually

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-c", "from leasehold.runtime.task_runner import main; main()"]


@pytest.fixture
def attempt(tmp_path: Path) -> dict[str, str]:
    """The variables that a bot sets."""
    files = {f"LEASEHOLD_{name}": str(tmp_path / name.lower()) for name in ("RESULT", "CHECKPOINT")}
    own = {"LEASEHOLD_JOB": "j", "LEASEHOLD_ATTEMPT": "2", "LEASEHOLD_FENCE": "5", "LEASEHOLD_INSTANCE": "i"}
    return {"PYTHONPATH": str(ROOT), "PATH": os.defpath} | files | own


@pytest.fixture
def start(tmp_path: Path, attempt: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Starts a task as a bot would, with `args`."""

    def started(task: str, *args: Any) -> subprocess.Popen[str]:
        call = tmp_path / "stdin"
        if args or not call.exists():
            call.write_text(json.dumps({"args": args, "kwargs": {}}))
        command = [*PROGRAM, "tests.support.apps.task_app:pool", f"tests.support.apps.task_app.{task}"]
        with call.open() as stdin:
            return subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=attempt
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


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_arguments_are_read_as_utf_8_in_every_locale(
    locale: dict[str, str], start: Start, attempt: dict[str, str], tmp_path: Path
) -> None:
    attempt |= locale
    for given, code in ("ä🙂".encode(), 0), (b"\xe4", 1):
        (tmp_path / "stdin").write_bytes(b'{"args": ["%s"], "kwargs": {}}' % given)
        ended, output = end(start("echo"))
        assert ended == code
    assert result(tmp_path) == {"ok": "ä🙂"}
    assert output.startswith("error: the standard input is no UTF-8: ")


def test_an_error_is_the_result_with_its_traceback_and_exit_code_1(start: Start, tmp_path: Path) -> None:
    code, output = end(start("fail", "no luck"))
    assert (code, output.splitlines()[-1]) == (1, "ValueError: no luck")
    told = result(tmp_path)["error"]
    assert (told["type"], told["message"], told["traceback"]) == ("ValueError", "no luck", output)
    assert "task_runner" not in output, "the traceback begins in the function of the task"


def test_a_value_that_cannot_be_stored_is_an_error(start: Start, tmp_path: Path) -> None:
    for value, reason in (
        ("x" * 70_000, "the value has 70010 bytes as JSON, and at most 65536 are stored"),
        ("ä" * 33_000, "the value has 66010 bytes as JSON, and at most 65536 are stored"),
        ("a\0b", "the value cannot be stored: holds a NUL character"),
    ):
        assert end(start("echo", value))[0] == 1
        told = result(tmp_path)["error"]
        assert (told["type"], told["message"]) == ("ResultRefused", reason)


def test_a_value_or_checkpoint_of_letters_is_stored_if_its_bytes_of_utf_8_fit(
    start: Start, attempt: dict[str, str], tmp_path: Path
) -> None:
    assert end(start("echo", "ä" * 32_000))[0] == 0
    assert result(tmp_path) == {"ok": "ä" * 32_000}
    here = Attempt(attempt)
    here.checkpoint("ä" * 32_000)
    with pytest.raises(BadInput, match=r"^checkpoint: has 66002 bytes as JSON, and at most 65536 are stored$"):
        here.checkpoint("ä" * 33_000)
    assert Attempt(attempt).last_checkpoint == "ä" * 32_000


def test_an_unknown_task_an_app_that_cannot_be_imported_and_a_process_without_a_job_say_so(
    start: Start, attempt: dict[str, str], tmp_path: Path
) -> None:
    assert end(start("gone"))[0] == 1
    assert result(tmp_path)["error"]["type"] == "UnknownTask"
    (tmp_path / "shop.py").write_text("import leasehold\n\ndef charge(:\n")
    for environment, said in (
        (
            {},
            "error: this process runs no attempt of a job: 'LEASEHOLD_JOB' is not set by a bot; "
            "leasehold.testing.inline() runs tasks without one\n",
        ),
        (attempt | {"PYTHONPATH": str(tmp_path)}, f"SyntaxError: invalid syntax ({tmp_path / 'shop.py'}, line 3)\n"),
    ):
        done = subprocess.run(
            [*PROGRAM, "shop:pool", "t"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
            env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.endswith(said)


def test_an_app_that_fails_inside_the_library_or_python_is_told_with_its_own_line(
    attempt: dict[str, str], tmp_path: Path
) -> None:
    defers = "@pool.task\ndef hello(): pass\n\nhello.defer()\n"
    for text, said, line in (
        (defers, "no gateway is known", 7),
        ("import json\njson.loads('')\n", "JSONDecodeError", 5),
    ):
        (tmp_path / "early.py").write_text(f"import leasehold\n\npool = leasehold.Pool.from_env()\n{text}")
        done = subprocess.run(
            [*PROGRAM, "early:pool", "t"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
            env=attempt | {"PYTHONPATH": str(tmp_path), "LEASEHOLD_DATA": str(tmp_path)}, cwd=tmp_path,
        )  # fmt: skip
        assert said in done.stderr
        assert done.stderr.endswith(f"({tmp_path / 'early.py'}, line {line})\n")


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


@pytest.mark.parametrize(
    ("how", "code"), {"raise": 1, "exit": 7, "return": 0, "stop": -signal.SIGTERM, "close": 1}.items()
)
def test_a_process_that_a_coroutine_forks_takes_nothing_of_the_loop_of_its_parent(
    start: Start, tmp_path: Path, how: str, code: int
) -> None:
    said = end(start("fork_beside_others", how))
    assert (said[0], result(tmp_path)) == (0, {"ok": code}), said[1]


def test_a_checkpoint_is_there_for_the_next_attempt_after_kill_9(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "held"
    process = start("advance", str(file))
    eventually(file.exists)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    assert json.loads((tmp_path / "checkpoint").read_text()) == {"row": 41}
    assert end(start("advance", str(file)))[0] == 0
    assert result(tmp_path) == {"ok": [2, {"row": 41}]}


# What surrounds a call in a warm child, and how its end is told, without an agent


#: Seconds after which the clock of the file system of the tests has moved on.
MOVED_ON = 0.1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of an attempt, as an agent makes it."""
    made = tmp_path / "attempt"
    made.mkdir(mode=0o700)
    (made / "tmp").mkdir(mode=0o700)
    return made


def leave_nothing_of_a_file(directory: Path) -> None:
    (directory / "tmp" / "made").touch()
    (directory / "tmp" / "made").unlink()


def make_a_file_and_hide_it(directory: Path) -> None:
    before = directory.stat()
    (directory / "left").touch()
    os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_it(directory: Path) -> None:
    directory.rename(directory.with_name("hidden"))
    directory.mkdir(mode=0o700)
    (directory / "tmp").mkdir(mode=0o700)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    ("act", "untouched"),
    [
        (lambda _: None, True),
        (leave_nothing_of_a_file, True),
        (lambda directory: (directory / "left").touch(), False),
        (lambda directory: (directory / "tmp" / "left").touch(), False),
        (lambda directory: (directory / "tmp").chmod(0o500), False),
        (make_a_file_and_hide_it, False),
        (replace_it, False),
    ],
)
def test_a_directory_in_which_an_attempt_has_changed_anything_is_not_for_another(
    directory: Path, is_old: bool, act: Callable[[Path], None], untouched: bool
) -> None:
    opened = AttemptDirectory(str(directory))
    if is_old:
        eventually(lambda: time.monotonic() - opened.opened_at > MOVED_ON)
        opened.opened_at -= 2 * TICK
    else:
        # As if the clock of the file system had not moved on, from an attempt at once.
        opened.enter()
    since = time.monotonic()
    act(directory)
    assert opened.is_untouched(since) is untouched
    assert opened.is_untouched(time.monotonic()) is untouched, "and so it stays"
    opened.close()


def test_the_c_library_has_the_variables_of_the_attempt_and_none_of_them_afterwards(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAYS", "own")
    monkeypatch.delenv("LEASEHOLD_JOB", raising=False)
    surroundings = Surroundings()
    output = os.open(os.devnull, os.O_WRONLY)
    standard = [os.dup(1), os.dup(2)]
    found = []
    try:
        for job in ("a" * 36, "b" * 36, "cé\udcff"):
            surroundings.enter({"LEASEHOLD_JOB": job, "STAYS": job}, str(directory), output)
            found.append((os.environ["LEASEHOLD_JOB"], library.getenv(b"LEASEHOLD_JOB"), library.getenv(b"STAYS")))
            surroundings.leave()
        assert Path.cwd() == directory
        surroundings.rest()
    finally:
        for own, number in zip(standard, (1, 2), strict=True):
            os.dup2(own, number)
            os.close(own)
        os.close(output)
    assert found == [(job, os.fsencode(job), os.fsencode(job)) for job in ("a" * 36, "b" * 36, "cé\udcff")]
    assert Path.cwd() == tmp_path
    assert "LEASEHOLD_JOB" not in os.environ
    assert (library.getenv(b"LEASEHOLD_JOB"), library.getenv(b"STAYS")) == (None, b"own")


def test_an_end_that_is_cut_off_is_no_end() -> None:
    told = CallEnd(7, -9, 0.5, True, False, b'{"ok": null}')
    assert read_end(told.message()) == told
    assert read_end(b'{"ready": "app"}') is None
    with pytest.raises(ValueError, match="cut off"):
        read_end(told.message()[:10])
