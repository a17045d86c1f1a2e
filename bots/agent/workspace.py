"""The work directory of an agent: a private directory for each attempt, and locks for one agent per name.

    <work_dir>/<name>.lock     locked with flock while the agent lives
    <work_dir>/<name>.guard    locked with flock while the agent or one of its guardians or supervisors lives
    <work_dir>/<name>.session  the session that the agent opened last, and the kernel's boot id at that time
    <work_dir>/<name>/         one directory for each attempt, of mode 0700, owned by the attempt's account
    <work_dir>/<name>.trash/   mode 0700; directories of ended attempts until they are removed

<work_dir>/<name> has mode 0700, or 0711 if commands do not run under the agent's account.

Every command runs with LEASEHOLD_WORK=<its directory> in its environment. A later agent finds processes of an earlier
one by this variable.
"""

import contextlib
import fcntl
import os
import re
import signal
import stat
import tempfile
from pathlib import Path

import structlog
from leasehold.errors import BadInput, LeaseholdError

from bots.agent import guardian
from bots.agent.guardian import descendants, kill, process_tree
from bots.agent.removal import Trash
from schema import clock

MARK = "LEASEHOLD_WORK"
#: Seconds within which processes of an earlier agent must die.
_DYING = 5.0
#: Seconds for which an agent that ends waits for the removal of directories; its successor removes the rest.
_CLOSING = 1.0
#: Identifies the running kernel: a lock says nothing about processes on another one that shares the work directory.
_KERNEL = Path("/proc/sys/kernel/random/boot_id")
_log = structlog.get_logger("leasehold.agent")


class Workspace:
    """Owns `<work_dir>/<name>`. Raises BadInput if that cannot be used or another agent uses it.

    open_to_others: other accounts may reach directories in it whose names they know, but cannot list it.
    """

    def __init__(self, work_dir: Path, name: str, *, open_to_others: bool = False) -> None:
        self.name = name
        self._mode = 0o711 if open_to_others else 0o700
        self.root = work_dir.absolute() / name
        try:
            self.root.parent.mkdir(mode=self._mode, parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
            for folder in (self.root, self.root.parent):
                if folder.lstat().st_uid not in (os.getuid(), 0):
                    raise BadInput("work_dir", f"'{folder}' belongs to another user")
            self._trash = Trash(self.root.with_name(f"{name}.trash"))
            self._lock = lockable(self.root.with_name(f"{name}.lock"))
            #: For guardians to inherit; `clear` locks it.
            self.guard = lockable(self.root.with_name(f"{name}.guard"))
            alone = locked(self._lock)
            if alone:  # else the jobs of the agent that has it need the mode that it has set
                self.root.chmod(self._mode)
                _admit(self.root.parent, self._mode)
        except OSError as error:
            raise BadInput("work_dir", f"'{work_dir}' cannot be used: {error.strerror}") from None
        if not alone:
            self.close()
            raise BadInput("name", f"an agent named '{name}' already runs in '{work_dir}'")

    def close(self) -> None:
        """Release the locks; directories of attempts that have not ended stay."""
        self._trash.close(_CLOSING)
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
        try:
            directory = Path(tempfile.mkdtemp(prefix="attempt-", dir=self.root))
        except OSError:
            self._mend()
            directory = Path(tempfile.mkdtemp(prefix="attempt-", dir=self.root))
        (directory / "tmp").mkdir(mode=0o700)
        if owner is not None:
            os.chown(directory / "tmp", *owner)
            os.chown(directory, *owner)
        return directory

    def discard(self, directory: Path) -> None:
        """Move the directory of an ended attempt out of the way and remove it in the background. Never raises."""
        self._trash.take(directory)

    def _mend(self) -> None:
        """Make the root anew: a command that runs as the agent's user can remove, replace or close it."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(self.root.lstat().st_mode):
                self._trash.take(self.root)
        self.root.mkdir(mode=0o700, exist_ok=True)
        self.root.chmod(self._mode)

    def clear(self) -> int:
        """Kill processes and remove directories of an earlier agent or session; return the number of killed processes.

        A guardian gets half of 5 s to kill its commands itself, also one that a command has stopped. Raises
        LeaseholdError if a process cannot be killed within 5 s. What cannot be removed is logged and left.
        """
        killed: set[int] = set()
        give_up = clock.monotonic() + _DYING
        # A guardian that still lives may start another command. This agent's own guardian shares the agent's lock.
        while (left := marked_processes(self.root)) or not locked(self.guard):
            # Not before the first kill: on a busy machine one look may take that long.
            if killed and clock.monotonic() > give_up:
                what = f"processes {sorted(left)}" if left else "a guardian process"
                raise LeaseholdError(f"{what} of an earlier agent or session cannot be killed")
            if not left:
                guardians = _holders(self.guard)
                kill(guardians, signal.SIGCONT)
                if clock.monotonic() > give_up - _DYING / 2:
                    left = {*guardians, *descendants(guardians, process_tree())}
            killed |= left
            kill(list(left), signal.SIGKILL)
            clock.sleep(0.01)
        self._trash.resume()
        try:
            self._mend()
            names = os.listdir(self.root)
        except OSError as error:
            _log.warning("what earlier commands left cannot be listed", reason=error.strerror)
            names = []
        for name in names:
            self._trash.take(self.root / name)
        return len(killed)


def _admit(directory: Path, mode: int) -> None:
    """Let other accounts enter the work directory if `mode` does.

    An agent whose jobs had no accounts of their own may have closed it to them.
    """
    status = directory.stat()
    if status.st_uid == os.getuid() and mode & ~stat.S_IMODE(status.st_mode):
        directory.chmod(stat.S_IMODE(status.st_mode) | mode)


def lockable(path: Path) -> int:
    """Open a file for a lock, which other programs do not inherit. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def locked(descriptor: int) -> bool:
    """Lock the file; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holders(descriptor: int) -> list[int]:
    """List the other processes that have the guard open.

    An agent that is not root cannot list the open files of its guardians, whose memory is closed to its account. The
    launcher therefore names the guard in their command line.
    """
    file = os.readlink(f"/proc/self/fd/{descriptor}")
    named = {guardian.__file__.encode(), file.encode()}
    found = []
    for process in (Path("/proc", entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if int(process.name) != os.getpid():
            holds = False
            with contextlib.suppress(OSError):
                holds = named <= set((process / "cmdline").read_bytes().split(b"\0"))
                holds = holds or any(os.readlink(opened) == file for opened in (process / "fd").iterdir())
            if holds:
                found.append(int(process.name))
    return found


def marked_processes(root: Path) -> set[int]:
    """Find the processes whose work directory is `root` or below it. Zombies have no environment and do not count."""
    mark = f"{MARK}={root}".encode()
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                    environment = file.read()
                    if mark in environment and any(
                        line == mark or line.startswith(mark + b"/") for line in environment.split(b"\0")
                    ):
                        found.add(int(entry))
    return found
