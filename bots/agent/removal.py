"""Removal of what commands leave behind: any tree of files, in the background, without ever failing the agent.

What has to go is first renamed into the folder `<work_dir>/<name>.trash`, which takes no time whatever it holds. A
thread then empties the trash.

The trash is flat. A folder inside an entry that is not empty becomes an entry of its own, by another rename. So neither
depth nor the length of a path matters, and three descriptors are open at any time. A rename never crosses a mount and
fails on a mount point, so nothing outside the work directory is ever deleted. No symbolic link is followed.

What cannot be removed stays in the trash, such as a mount point. The agent logs how many directories that are, and
tries again when it starts the next time.
"""

import array
import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import structlog

from schema import clock

_log = structlog.get_logger("leasehold.agent")

#: Seconds of work on one entry before it is the next one's turn.
_TURN = 1.0
#: How often a folder to which some process still writes is read again, in one turn.
_PASSES = 100
#: How many turns in a row may remove nothing of an entry before it is left.
_IDLE_TURNS = 3
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# ioctl numbers of <linux/fs.h>, and the flags that forbid to change a file even to its owner.
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_IMMUTABLE, _APPEND_ONLY = 0x10, 0x20
_REFUSED = (errno.EACCES, errno.EPERM)


class Trash:
    """Removes trees in a thread of its own, which exists while there is something to remove."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._waiting: deque[_Entry] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        #: The reason for each entry that could not be removed, and how many of them the log has told.
        self._left: dict[str, str] = {}
        self._told = 0

    @property
    def left(self) -> int:
        """How many directories could not be removed since this agent started."""
        return len(self._left)

    def take(self, path: Path) -> bool:
        """Move a file or tree into the trash and remove it later; return False if it cannot be moved. Never raises."""
        name = secrets.token_hex(8)
        try:
            if path == self._folder:
                if (aside := self._set_aside()) is None:
                    return True
                path = aside
            with _opened(self._made()) as trash, _opened(path.parent) as parent:
                _rename(parent, path.name, trash, name)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._leave(str(path), error)
            self._tell()
            return False
        self._put(name)
        return True

    def resume(self) -> None:
        """Remove what an earlier agent left in the trash. Never raises."""
        try:
            with _opened(self._made()) as trash:
                names = os.listdir(trash)
        except OSError as error:
            self._leave(str(self._folder), error)
            self._tell()
            return
        for name in names:
            self._put(name)

    def close(self, seconds: float) -> None:
        """Stop after at most `seconds`; the next agent of this name removes the rest."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        self._stopping = True

    def _made(self) -> Path:
        """Make the folder, in place of whatever a command may have put at its path. Raises OSError."""
        aside = self._set_aside()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.lstat().st_uid != os.geteuid():
            raise OSError(errno.EPERM, "another account makes it again and again")
        self._folder.chmod(0o700)
        if aside is not None:
            self.take(aside)
        return self._folder

    def _set_aside(self) -> Path | None:
        """Free the folder's path of what is not this account's; return the new path if it is a folder. Raises OSError.

        Its owner could reach what is in it.
        """
        with contextlib.suppress(FileNotFoundError):
            found = self._folder.lstat()
            if not stat.S_ISDIR(found.st_mode):
                self._folder.unlink()
            elif found.st_uid != os.geteuid():
                return self._folder.rename(f"{self._folder}.{secrets.token_hex(8)}")
        return None

    def _put(self, name: str) -> None:
        with self._lock:
            self._waiting.append(_Entry(name))
            if self._thread is None:
                thread = threading.Thread(target=self._empty, name="removal", daemon=True)
                # Without a thread, as where a command forks without end, the next one empties the trash.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def _empty(self) -> None:
        while True:
            with self._lock:
                if self._stopping or not self._waiting:
                    self._thread = None
                    break
                entry = self._waiting.popleft()
            try:
                with _opened(self._folder) as trash:
                    done = entry.remove(trash, clock.monotonic() + _TURN)
            except Exception as error:
                self._leave(entry.name, error)
                continue
            if not done:
                self._waiting.append(entry)
            elif entry.failure is not None:
                self._leave(entry.name, entry.failure)
        self._tell()

    def _leave(self, name: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        self._left[name] = reason or type(error).__name__

    def _tell(self) -> None:
        with self._lock:
            news, self._told = self._told < self.left, self.left
        if news:
            _log.warning(
                "directories of ended commands cannot be removed; they stay until an operator removes them",
                directories=self.left,
                folder=str(self._folder),
                reason=next(reversed(self._left.values())),
            )


class _Entry:
    """One entry of the trash, with the entries that its folders became."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Why some part could not be removed; None while all of it could.
        self.failure: OSError | None = None
        self._parts = [name]
        #: How many files and folders were removed or moved so far.
        self._steps = 0
        self._idle = 0

    def remove(self, trash: int, until: float) -> bool:
        """Remove as much as can be removed until `until` (monotonic); return True when nothing is left to try."""
        before, mount = self._steps, _mount(trash)
        while self._parts and clock.monotonic() < until:
            part = self._parts.pop()
            try:
                if not self._remove_part(trash, part, mount, until):
                    self._parts.insert(0, part)
            except OSError as error:
                self.failure = error
        self._idle = 0 if self._steps > before else self._idle + 1
        if self._parts and self._idle >= _IDLE_TURNS:
            self.failure = self.failure or OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            return True
        return not self._parts

    def _remove_part(self, trash: int, part: str, mount: str, until: float) -> bool:
        """Remove one entry of the trash; return False if time ran out. Raises OSError if some of it cannot go."""
        try:
            if not stat.S_ISDIR(os.stat(part, dir_fd=trash, follow_symlinks=False).st_mode):
                _unlink(trash, part)
                self._steps += 1
                return True
            for _ in range(_PASSES):
                with contextlib.suppress(OSError):
                    os.rmdir(part, dir_fd=trash)
                    self._steps += 1
                    return True
                if not self._clear(trash, part, mount, until):
                    return False
            _loosen(trash, part)
            os.rmdir(part, dir_fd=trash)
        except FileNotFoundError:
            pass
        return True

    def _clear(self, trash: int, part: str, mount: str, until: float) -> bool:
        """Unlink the files in a folder and move its folders into the trash; return False if time ran out."""
        failure: OSError | None = None
        with _entered(trash, part, mount) as folder, os.scandir(folder) as found:
            for inner in found:
                if clock.monotonic() > until:
                    return False
                try:
                    if inner.is_dir(follow_symlinks=False):
                        self._move(folder, inner.name, trash)
                    else:
                        _unlink(folder, inner.name)
                    self._steps += 1
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
        return True

    def _move(self, folder: int, name: str, trash: int) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=folder)
            return
        part = f"{self.name[:16]}.{secrets.token_hex(8)}"
        _rename(folder, name, trash, part)
        self._parts.append(part)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _entered(trash: int, name: str, mount: str) -> Iterator[int]:
    """Open a folder in the trash with all rights of its owner. Raises OSError if something is mounted there."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=trash)
    except PermissionError:
        _loosen(trash, name)
        folder = os.open(name, _FOLDER, dir_fd=trash)
    try:
        if _mount(folder) != mount:
            raise OSError(errno.EBUSY, "a file system is mounted there")
        if os.fstat(folder).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            _loosen(trash, name)
        yield folder
    finally:
        os.close(folder)


def _mount(descriptor: int) -> str:
    """Return the kernel's id of the mount to which an open file belongs. Bind mounts differ in nothing else."""
    with open(f"/proc/self/fdinfo/{descriptor}") as facts:
        return next(line for line in facts if line.startswith("mnt_id:"))


def _rename(old: int, name: str, new: int, new_name: str) -> None:
    try:
        os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        with contextlib.suppress(OSError):
            _clear_flags(old)
            # Others keep their rights to it: it may be a folder of the whole machine, such as /dev/shm.
            os.fchmod(old, stat.S_IMODE(os.fstat(old).st_mode) | stat.S_IRWXU)
        # A folder that moves gets another "..", which needs the right to write to it.
        _loosen(old, name)
        os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _clear_flags(folder)
        _loosen(folder, name)
        os.unlink(name, dir_fd=folder)


def _loosen(parent: int, name: str) -> None:
    """Let a folder be changed and a file be unlinked, as far as this process may.

    The mode of a file stays as it is: it is no hindrance, and the file may have another name outside.
    """
    with contextlib.suppress(OSError):
        path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            mode = os.fstat(path).st_mode
            # O_PATH needs no right to read; this path leads to the same file, whatever is at its name now.
            itself = f"/proc/self/fd/{path}"
            if stat.S_ISDIR(mode):
                with contextlib.suppress(OSError):
                    os.chmod(itself, stat.S_IRWXU)
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                real = os.open(itself, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    _clear_flags(real)
                finally:
                    os.close(real)
            if stat.S_ISDIR(mode):
                os.chmod(itself, stat.S_IRWXU)
        finally:
            os.close(path)


def _clear_flags(descriptor: int) -> None:
    """Let an immutable or append-only file be changed again, where the file system knows such flags."""
    flags = array.array("i", [0, 0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
        if flags[0] & (_IMMUTABLE | _APPEND_ONLY):
            flags[0] &= ~(_IMMUTABLE | _APPEND_ONLY)
            fcntl.ioctl(descriptor, _SET_FLAGS, flags)
