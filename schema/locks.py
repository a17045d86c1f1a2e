"""Kernel locks on files: they end with the process that holds them, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def held(path: Path) -> Iterator[IO[bytes]]:
    """Hold `path`, made if need be, exclusively; waits for as long as somebody else does."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def share(file: IO[bytes]) -> None:
    """Hold `file` together with others until it is closed; waits for an exclusive holder."""
    fcntl.flock(file, fcntl.LOCK_SH)


def take(file: IO[bytes]) -> bool:
    """Try to hold `file` exclusively until it is closed. A shared hold of the caller's is lost even if that fails."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
