"""What surrounds a call in a warm child that runs one at a time: directory, variables and output; what a call has left.

All of this is done for each call, so it avoids what would take longer than a task that does nothing.
"""

import contextlib
import ctypes
import os
import sys
import tempfile
import time

_libc = ctypes.CDLL(None)
#: The prefix of variables whose values differ from attempt to attempt.
_OF_ATTEMPTS = "LEASEHOLD_"
#: Seconds after which the clock of a file system has moved on: most have a tick of 4 ms, some of 1 s or 2 s.
TICK = 2.5
#: The variables of this process as `os.environ` holds them. Comparing these takes a twentieth of the time in which
#: `os.environ` decodes all of them.
_variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]


class AttemptDirectory:
    """The directory of one attempt after another, until one has changed something in it. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._places: list[int] = []
        try:
            for place in (path, f"{path}/tmp"):
                self._places.append(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._as_made = self._status()
        except OSError:
            self.close()
            raise
        self.opened_at = time.monotonic()

    def close(self) -> None:
        for place in self._places:
            os.close(place)
        self._places = []

    def enter(self) -> None:
        """Make it the current directory."""
        os.fchdir(self._places[0])

    def is_untouched(self, since: float) -> bool:
        """Return whether it is as it was made. since: when the attempt began, on the monotonic clock.

        A change of any entry or mode changes the time of its directory, which nobody can set. If the time is another,
        or if the clock of the file system may still show the same, its entries are looked at. Looking at them after
        each call takes a fifth of the time of a task that does nothing.
        """
        found = self._status()
        if found == self._as_made and since - self.opened_at > TICK:
            return True
        if [mode for _, mode in found] != [mode for _, mode in self._as_made] or not self._is_empty():
            return False
        if found != self._as_made:
            # The attempt has removed what it had made.
            self._as_made, self.opened_at = found, time.monotonic()
        return True

    def _status(self) -> list[tuple[int, int]]:
        return [(found.st_ctime_ns, found.st_mode) for found in map(os.fstat, self._places)]

    def _is_empty(self) -> bool:
        """Return whether nothing else is in it, and it is still at its path."""
        for path, place in zip((self.path, f"{self.path}/tmp"), self._places, strict=True):
            if not os.path.samestat(os.lstat(path), os.fstat(place)):
                return False
        return [os.listdir(place) for place in self._places] == [["tmp"], []]


class Surroundings:
    """Directory, environment and output of this process: those of an attempt while it runs, else its own."""

    def __init__(self) -> None:
        self._home, self._log = os.getcwd(), os.dup(2)
        self._streams = sys.stdout, sys.stderr
        self._own = dict(os.environ)
        self._set: dict[str, str] = {}
        self._expected = dict(_variables)
        #: What the C library holds of the variables of the attempt.
        self._texts: dict[str, bytes] = {}
        self._directory: AttemptDirectory | None = None

    def enter(self, environment: dict[str, str], directory: str, output: int) -> None:
        """Give this process the environment, the directory and the output of an attempt. Raises OSError."""
        self._set_environment(environment)
        # It was derived from the environment of the attempt before.
        tempfile.tempdir = None
        self._opened(directory).enter()
        os.dup2(output, 1)
        os.dup2(output, 2)

    def leave(self) -> None:
        """Give this process its own output back."""
        for stream in (sys.stdout, sys.stderr):
            # A task may have put anything in their place.
            with contextlib.suppress(BaseException):
                stream.flush()
        sys.stdout, sys.stderr = self._streams
        # Of the C library: what an extension has printed belongs to this output, not to that of the next task.
        _libc.fflush(None)
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)

    def is_untouched(self, since: float) -> bool:
        """Return whether the directory is as it was made; see AttemptDirectory. Raises OSError."""
        return self._directory is not None and self._directory.is_untouched(since)

    def _opened(self, path: str) -> AttemptDirectory:
        found = self._directory
        if found is None or found.path != path:
            self._directory = None
            if found is not None:
                found.close()
            found = self._directory = AttemptDirectory(path)
        return found

    def rest(self) -> None:
        """Give this process its own directory and variables back, before it waits."""
        os.chdir(self._home)
        tempfile.tempdir = None
        self._restore_environment()

    def _restore_environment(self) -> None:
        if self._set or _variables != self._expected:
            for name in os.environ.keys() - self._own.keys():
                del os.environ[name]
            for name, value in self._own.items():
                if os.environ.get(name) != value:
                    os.environ[name] = value
            self._set, self._expected = {}, dict(_variables)
            self._texts.clear()

    def _set_environment(self, wanted: dict[str, str]) -> None:
        """Set the variables of an attempt: of two attempts in a row, most are the same."""
        if _variables != self._expected or not self._set.keys() <= wanted.keys():
            self._restore_environment()
        was = self._set
        for name, value in wanted.items():
            if was.get(name) != value:
                if name.startswith(_OF_ATTEMPTS):
                    self._set_own(name, value)
                else:
                    os.environ[name] = value
        self._set, self._expected = wanted, dict(_variables)

    def _set_own(self, name: str, value: str) -> None:
        """Set a variable whose value differs from attempt to attempt.

        Not as `os.environ` does, because the C library would keep all values for ever.
        """
        key, encoded = name.encode(), os.fsencode(value)
        text = key + b"=" + encoded
        _libc.putenv(text)
        # Now the C library has no other text, so that the one before may go.
        self._texts[name] = text
        _variables[key] = encoded


class ProcessesLeft:
    """Looks for processes that a call has left behind."""

    def __init__(self) -> None:
        # The supervisor adopts what has lost its parent.
        above = os.getppid()
        self._adopted = os.open(f"/proc/{above}/task/{above}/children", os.O_RDONLY | os.O_CLOEXEC)
        self._alone = [str(os.getpid()).encode()]

    def none(self) -> bool:
        """Return whether there are none. Raises OSError."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return os.pread(self._adopted, 4096, 0).split() == self._alone
        return False
