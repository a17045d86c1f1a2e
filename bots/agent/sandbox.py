"""The sandbox of a command: bubblewrap, with a read-only view of the machine and no network."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schema.errors import BadInput

#: The program of the package bubblewrap.
PROGRAM = "bwrap"
#: Directories that are empty in every sandbox: other commands leave files in them, and services their sockets.
EMPTY = (Path("/tmp"), Path("/var/tmp"), Path("/run"))
_RESOLVER = Path("/etc/resolv.conf")


@dataclass(frozen=True)
class Sandbox:
    """Puts commands into a sandbox of their own.

    The command sees the files of the machine read-only and its own directory writable. It sees neither other processes
    nor shared memory, and has a session of its own. The sandbox ends with the process that started it, and every
    process in it ends with the sandbox.

    program: the path of bubblewrap. network: the command may use the machine's network; otherwise it has none.
    hidden: directories that are empty for the command, in addition to EMPTY.
    """

    program: str
    network: bool
    hidden: tuple[Path, ...]

    def wrap(self, command: Sequence[str], directory: Path) -> list[str]:
        """Return the command line that runs `command` in a sandbox, with `directory` as its own."""
        words = [self.program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for place in dict.fromkeys([*EMPTY, *self.hidden]):
            if place.is_dir():
                words += ["--tmpfs", str(place)]
        resolver = _RESOLVER.resolve()
        if self.network and resolver.is_file() and any(resolver.is_relative_to(place) for place in EMPTY):
            words += ["--ro-bind", str(resolver), str(resolver)]
        words += ["--bind", str(directory), str(directory), "--chdir", str(directory)]
        words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"]
        return [*words, *([] if self.network else ["--unshare-net"]), "--", *command]


def find(*, network: bool, hidden: Sequence[Path]) -> Sandbox:
    """Return the sandbox of this machine. Raises BadInput if bubblewrap is not installed."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise BadInput("sandbox", f"'{PROGRAM}' is not on the PATH of the agent; install the package bubblewrap")
    return Sandbox(os.path.abspath(program), network, tuple(place.absolute() for place in hidden))
