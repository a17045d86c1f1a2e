"""Where an agent's commands work: one private directory for each attempt, one agent for each name.

    <work_dir>/<name>.lock     held with flock for as long as the agent lives
    <work_dir>/<name>/         0700; one directory in it for each attempt

Every command is started with LEASEHOLD_WORK=<its directory>, by which a later agent recognises what an earlier one
left behind.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from pathlib import Path

from schema import clock
from schema.errors import BadInput, LeaseholdError

MARK = "LEASEHOLD_WORK"


class Workplace:
    """Owns `<work_dir>/<name>`; raises BadInput when that cannot be used or another agent uses it."""

    def __init__(self, work_dir: Path, name: str) -> None:
        self.name = name
        self.root = work_dir.absolute() / name
        try:
            self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
            for folder in (self.root, self.root.parent):
                if folder.lstat().st_uid not in (os.getuid(), 0):
                    raise BadInput("work_dir", f"'{folder}' belongs to somebody else")
            self.root.chmod(0o700)
            self._lock = os.open(self.root.with_name(f"{name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadInput("work_dir", f"'{work_dir}' cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise BadInput("name", f"an agent named '{name}' already runs in '{work_dir}'") from None

    def close(self) -> None:
        """Let go of the lock; the directories stay."""
        os.close(self._lock)

    def make(self) -> Path:
        """A fresh directory for one attempt, with `tmp` in it. Raises OSError."""
        directory = Path(tempfile.mkdtemp(prefix="attempt-", dir=self.root))
        (directory / "tmp").mkdir(mode=0o700)
        return directory

    def clear(self) -> int:
        """Kill and remove what an earlier agent of this name left here; tells how many processes were killed.

        Raises LeaseholdError if one of them cannot be killed within 5 s.
        """
        killed: set[int] = set()
        give_up = clock.monotonic() + 5.0
        while left := marked_processes(self.root):
            if clock.monotonic() > give_up:
                raise LeaseholdError(f"processes of an earlier agent cannot be killed: {sorted(left)}")
            killed |= left
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            clock.sleep(0.01)
        for directory in self.root.iterdir():
            remove(directory)
        return len(killed)


def marked_processes(root: Path) -> set[int]:
    """Processes that were started with a work directory below `root`. Zombies have no environment and do not count."""
    mark = f"{MARK}={root}/".encode()
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    environment = (entry / "environ").read_bytes()
                    if any(line.startswith(mark) for line in environment.split(b"\0")):
                        found.add(int(entry.name))
    return found


def remove(directory: Path) -> bool:
    """Delete a tree, also one with folders that nobody may write; tells whether it is gone."""
    shutil.rmtree(directory, ignore_errors=True)
    if os.path.lexists(directory):
        with contextlib.suppress(OSError):
            directory.chmod(stat.S_IRWXU)
        for folder, names, _ in os.walk(directory):
            for name in names:
                inner = Path(folder, name)
                if not inner.is_symlink():
                    with contextlib.suppress(OSError):
                        inner.chmod(stat.S_IRWXU)
        shutil.rmtree(directory, ignore_errors=True)
    return not os.path.lexists(directory)
