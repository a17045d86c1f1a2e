"""The source files of an app: which they are, and whether one has changed that a bot's processes have imported."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from leasehold.wire import printable

from schema import clock

#: Seconds between two looks at the files.
LOOK_EVERY = 0.5
#: Imports the app as a bot's process does, and prints the files of what it has imported, and what failed.
_IMPORT = """
import json, os, sys
said = os.dup(1)
os.dup2(2, 1)
from leasehold.runtime.task_runner import import_failure, load
failed = None
try:
    load(sys.argv[1])
except BaseException as error:
    failed = import_failure(error)
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
os.write(said, json.dumps({"failed": failed, "files": [each for each in files if each]}).encode())
"""


class AppFiles:
    """Watches the files that an app imports, except those of Python and of installed packages.

    place: `MODULE:POOL`. report: receives a line for people. rest: waits for some seconds while the app is imported; it
    may raise to give up.
    """

    def __init__(
        self,
        place: str,
        environ: Mapping[str, str],
        *,
        report: Callable[[str], None],
        rest: Callable[[float], object],
    ) -> None:
        self._place, self._environ, self._report, self._rest = place, dict(environ), report, rest
        self._stamps: dict[str, int | None] = {}
        self._import()
        self._next = clock.monotonic() + LOOK_EVERY

    def run_once(self) -> bool:
        """Look at the files, if the last look is old enough; return whether what has changed can be imported.

        What cannot is reported, and looked at again when it changes again.
        """
        if clock.monotonic() < self._next:
            return False
        self._next = clock.monotonic() + LOOK_EVERY
        changed = sorted(file for file, stamp in self._stamps.items() if _stamp(file) != stamp)
        if not changed:
            return False
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        what = f"{printable(Path(changed[0]).name)}{others} changed"
        failed = self._import()
        if failed is not None:
            self._report(f"{what}, and {self._place} cannot be imported; its bot stays as it is: {printable(failed)}")
            return False
        self._report(f"{what}; starting the bot of {self._place} again")
        return True

    def _import(self) -> str | None:
        """Import the app in a process of its own and note its files; return why it cannot be imported, or None."""
        # As they are before the import: what changes while it goes on is seen by the next look.
        before = {file: _stamp(file) for file in self._stamps}
        process = subprocess.Popen(
            [sys.executable, "-c", _IMPORT, self._place],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            while process.poll() is None:
                self._rest(0.05)
        finally:
            process.kill()
            said = process.communicate()[0]
        found = json.loads(said) if said else {"failed": "its process ended without a word", "files": []}
        installed = tuple({f"{path}/" for path in sysconfig.get_paths().values()})
        own = [file for file in found["files"] if not file.startswith(installed)]
        # Those of a module that cannot be imported are known from before.
        self._stamps = {file: before[file] if file in before else _stamp(file) for file in [*before, *own]}
        return None if found["failed"] is None else str(found["failed"])


def _stamp(file: str) -> int | None:
    """When the file was changed; None if it is not there."""
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return None
