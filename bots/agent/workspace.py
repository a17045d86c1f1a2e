"""Where an agent's commands work: one private directory for each attempt, one agent for each name.

    <work_dir>/<name>.lock     held with flock for as long as the agent lives
    <work_dir>/<name>.guard    held with flock for as long as the agent or one of its guardians or supervisors lives
    <work_dir>/<name>.session  which session the agent opened last, and on which run of the kernel
    <work_dir>/<name>/         0700; one directory in it for each attempt

Every command is started with LEASEHOLD_WORK=<its directory>, by which a later agent recognises what an earlier one
left behind.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import structlog

from schema import clock
from schema.errors import BadInput, LeaseholdError

MARK = "LEASEHOLD_WORK"
#: Seconds for what an earlier agent left behind to die.
_DYING = 5.0
#: A lock tells nothing of processes on another kernel that shares the work directory.
_KERNEL = Path("/proc/sys/kernel/random/boot_id")
_log = structlog.get_logger("leasehold.agent")


class Workspace:
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
            self._lock = _lockable(self.root.with_name(f"{name}.lock"))
            #: For guardians to inherit; `clear` locks it.
            self.guard = _lockable(self.root.with_name(f"{name}.guard"))
            alone = _locked(self._lock)
        except OSError as error:
            raise BadInput("work_dir", f"'{work_dir}' cannot be used: {error.strerror}") from None
        if not alone:
            self.close()
            raise BadInput("name", f"an agent named '{name}' already runs in '{work_dir}'")

    def close(self) -> None:
        """Let go of the locks; the directories stay."""
        os.close(self.guard)
        os.close(self._lock)

    def remember(self, session: str) -> None:
        """Write down that the agent of this workplace has opened `session` (the digest of its secret, in hex)."""
        try:
            # Half a line, should we die now, names no session.
            with open(self._session, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(f"{session} {_KERNEL.read_text()}")
        except OSError as error:
            _log.warning("a restart will not be known as one: its jobs will wait", reason=error.strerror)

    def predecessor(self) -> str | None:
        """The session that an agent of this workplace opened last, if it was on this run of this kernel.

        Nothing of it runs any more once `clear` has returned.
        """
        with contextlib.suppress(OSError, ValueError):
            session, kernel = self._session.read_text().split()
            if kernel == _KERNEL.read_text().strip() and re.fullmatch("[0-9a-f]{64}", session):
                return session
        return None

    @property
    def _session(self) -> Path:
        return self.root.with_name(f"{self.name}.session")

    def make(self) -> Path:
        """A fresh directory for one attempt, with `tmp` in it. Raises OSError."""
        directory = Path(tempfile.mkdtemp(prefix="attempt-", dir=self.root))
        (directory / "tmp").mkdir(mode=0o700)
        return directory

    def clear(self) -> int:
        """Kill and remove what an earlier agent or session left here; tells how many processes were killed.

        Raises LeaseholdError if one of them cannot be killed within 5 s.
        """
        killed: set[int] = set()
        give_up = clock.monotonic() + _DYING
        # A guardian that is not gone may still start something. Our own hold this lock together with us.
        while (left := marked_processes(self.root)) or not _locked(self.guard):
            if clock.monotonic() > give_up:
                what = f"processes {sorted(left)}" if left else "a guardian process"
                raise LeaseholdError(f"{what} of an earlier agent or session cannot be killed")
            killed |= left
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            clock.sleep(0.01)
        for directory in self.root.iterdir():
            remove_tree(directory)
        return len(killed)


def _lockable(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(descriptor: int) -> bool:
    """Lock the file; false if somebody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def remove_tree(directory: Path) -> bool:
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
