"""The fork server of the tests: a command through it is like one of the console script."""

import fcntl
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.support.patience import MINUTE, eventually
from tests.support.servers import LEASEHOLD, Console

AWAY = {"LEASEHOLD_DATABASE_URL": "postgresql://127.0.0.1:1/x", "LEASEHOLD_DATABASE_OUTAGE_SECONDS": "0"}


@pytest.mark.parametrize(
    ("arguments", "code"), [(["config", "show"], 0), (["db", "statsu"], 2), (["db", "status"], 3)], ids=str
)
def test_a_command_prints_and_ends_as_on_the_console_script(
    tmp_path: Path, leasehold: Path, arguments: list[str], code: int
) -> None:
    forked = Console(tmp_path, leasehold, **AWAY).run(*arguments)
    real = Console(tmp_path, LEASEHOLD, **AWAY).run(*arguments)
    assert real.returncode == code
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


def reading(tmp_path: Path, leasehold: Path) -> "subprocess.Popen[bytes]":
    """Start a command that reads jobs from a pipe, which stays open, and wait until it reads."""
    process = subprocess.Popen(
        [leasehold, "submit", "--file", "-"], cwd=tmp_path, env=Console(tmp_path, leasehold).environ,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
    )  # fmt: skip
    assert process.stdin is not None
    pipe = process.stdin
    pipe.write(b"\n")
    eventually(lambda: struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0")) == (0,))
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_command(tmp_path: Path, leasehold: Path, number: int, code: int) -> None:
    with reading(tmp_path, leasehold) as process:
        process.send_signal(number)
        assert process.wait(MINUTE) == code
        assert process.stdout is not None
        assert process.stdout.read().strip() == b""


def test_a_command_ends_with_the_program_that_started_it(tmp_path: Path, leasehold: Path) -> None:
    with reading(tmp_path, leasehold) as process:
        process.kill()
        process.wait(MINUTE)
        assert process.stdout is not None
        assert process.stdout.read() == b"", "the last that could write to the pipe is gone"
