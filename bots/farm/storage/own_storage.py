"""Storage that a door runs itself, where nobody else can reach it."""

import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from leasehold.errors import BadInput

from bots.farm.storage.programs import STORAGE, program, require
from schema.postgres.embedded import try_lock_exclusive

#: Seconds in which storage has to end when it is asked to.
END_WITHIN = 5.0
#: The most bytes of the path of a socket.
MOST_SOCKET = 107
_PR_SET_PDEATHSIG = 1


class OwnStorage(NamedTuple):
    """Storage that runs for this process: its address, and its process."""

    address: str
    process: "subprocess.Popen[bytes]"


@contextmanager
def running(directory: Path) -> Iterator[OwnStorage]:
    """Run storage that keeps its blobs and results in a directory, until the context ends, or this process does.

    It listens on a socket in a directory that only this account can enter, so no job of another account reaches it.
    Raises LeaseholdError if the program is not there, and BadInput if the directory cannot be used, or others can.
    """
    require(STORAGE)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = directory.stat().st_mode
    except OSError as error:
        raise BadInput("--storage", f"{directory} cannot be used: {error.strerror}") from None
    if mode & 0o077:
        raise BadInput("--storage", f"{directory} is open to other accounts: chmod 700 it, or name a new one")
    with _locked(directory), _socket(directory) as path:
        address = f"unix:{path}"
        process = subprocess.Popen(
            [str(program(STORAGE)), "--bind", address, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
        try:
            yield OwnStorage(address, process)
        finally:
            process.terminate()
            try:
                process.wait(END_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory for this process, until it ends or is killed. Raises BadInput if another process holds it."""
    with (directory / "door.lock").open("wb") as file:
        if not try_lock_exclusive(file):
            told = f"{directory} is that of a door that runs: give other doors the address of its storage by --cas"
            raise BadInput("--storage", told)
        yield


@contextmanager
def _socket(directory: Path) -> Iterator[Path]:
    """Give the path of a socket that only this account reaches: in the directory, unless that path is too long.

    A socket that a killed door has left in the directory is replaced.
    """
    path = directory / "socket"
    if len(os.fsencode(path)) > MOST_SOCKET:
        with tempfile.TemporaryDirectory(prefix="leasehold-farm-") as private:
            yield Path(private) / "socket"
        return
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies: another door will run storage of its own there."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
