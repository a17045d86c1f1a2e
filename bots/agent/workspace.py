"""The work directory of an agent: a private directory for each attempt, and locks for one agent per name.

    <work_dir>/<name>.lock     locked with flock while the agent lives
    <work_dir>/<name>.guard    locked with flock while the agent or one of its guardians or supervisors lives
    <work_dir>/<name>.session  the session that the agent opened last, and the kernel's boot id at that time
    <work_dir>/<name>/         one directory for each attempt, of mode 0700, owned by the attempt's account

<work_dir>/<name> has mode 0700, or 0711 if commands do not run under the agent's account.

Every command runs with LEASEHOLD_WORK=<its directory> in its environment. A later agent finds processes of an earlier
one by this variable.
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
#: Seconds within which processes of an earlier agent must die.
_DYING = 5.0
#: Identifies the running kernel: a lock says nothing about processes on another one that shares the work directory.
_KERNEL = Path("/proc/sys/kernel/random/boot_id")
_log = structlog.get_logger("leasehold.agent")


class Workspace:
    """Owns `<work_dir>/<name>`. Raises BadInput if that cannot be used or another agent uses it.

    open_to_others: other accounts may reach directories in it whose names they know, but cannot list it.
    """

    def __init__(self, work_dir: Path, name: str, *, open_to_others: bool = False) -> None:
        self.name = name
        mode = 0o711 if open_to_others else 0o700
        self.root = work_dir.absolute() / name
        try:
            self.root.parent.mkdir(mode=mode, parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
            for folder in (self.root, self.root.parent):
                if folder.lstat().st_uid not in (os.getuid(), 0):
                    raise BadInput("work_dir", f"'{folder}' belongs to another user")
            self.root.chmod(mode)
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
        """Release the locks; the directories stay."""
        os.close(self.guard)
        os.close(self._lock)

    def remember(self, session: str) -> None:
        """Store that this agent has opened `session` (the SHA-256 of its secret, in hex)."""
        try:
            # If the agent dies during the write, the partial line matches no session.
            with open(self._session, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(f"{session} {_KERNEL.read_text()}")
        except OSError as error:
            _log.warning("a restart will not be known as one: its jobs will wait", reason=error.strerror)

    def predecessor(self) -> str | None:
        """Return the session that an agent of this work directory opened last, if the machine has not rebooted since.

        Once `clear` has returned, no process of that session runs any more.
        """
        with contextlib.suppress(OSError, ValueError):
            session, kernel = self._session.read_text().split()
            if kernel == _KERNEL.read_text().strip() and re.fullmatch("[0-9a-f]{64}", session):
                return session
        return None

    @property
    def _session(self) -> Path:
        return self.root.with_name(f"{self.name}.session")

    def make(self, owner: tuple[int, int] | None = None) -> Path:
        """Make a new directory for one attempt, with `tmp` in it. `owner`: user and group id. Raises OSError."""
        directory = Path(tempfile.mkdtemp(prefix="attempt-", dir=self.root))
        (directory / "tmp").mkdir(mode=0o700)
        if owner is not None:
            os.chown(directory / "tmp", *owner)
            os.chown(directory, *owner)
        return directory

    def clear(self) -> int:
        """Kill processes and remove directories of an earlier agent or session; return the number of killed processes.

        Raises LeaseholdError if a process cannot be killed within 5 s.
        """
        killed: set[int] = set()
        give_up = clock.monotonic() + _DYING
        # A guardian that still lives may start another command. This agent's own guardian shares the agent's lock.
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
    """Lock the file; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def marked_processes(root: Path) -> set[int]:
    """Find the processes with a work directory below `root`. Zombies have no environment and do not count."""
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
    """Delete a tree, including folders without write permission; return True if it is gone."""
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
