"""What surrounds a call in a warm child, and how its end is told, without an agent."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.runtime.call_messages import CallEnd, read_end
from leasehold.runtime.surroundings import TICK, AttemptDirectory, Surroundings

from tests.support.patience import eventually

#: Seconds after which the clock of the file system of the tests has moved on.
MOVED_ON = 0.1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of an attempt, as an agent makes it."""
    made = tmp_path / "attempt"
    made.mkdir(mode=0o700)
    (made / "tmp").mkdir(mode=0o700)
    return made


def leave_nothing(_: Path) -> None:
    pass


def leave_a_file(directory: Path) -> None:
    (directory / "left").touch()


def leave_a_temporary_file(directory: Path) -> None:
    (directory / "tmp" / "left").touch()


def leave_nothing_of_a_file(directory: Path) -> None:
    (directory / "tmp" / "made").touch()
    (directory / "tmp" / "made").unlink()


def close_to_the_agent(directory: Path) -> None:
    (directory / "tmp").chmod(0o500)


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
        (leave_nothing, True),
        (leave_nothing_of_a_file, True),
        (leave_a_file, False),
        (leave_a_temporary_file, False),
        (close_to_the_agent, False),
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
