"""How many units a bot offers if nobody says: by the cores and the memory of its machine, and by how loaded it is."""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schema.errors import BadInput

#: Share of the cores that is at work from which on the machine counts as loaded.
LOADED = 0.7

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, memory in MiB that is free for new work, and the share of the cores that was at
    work, on average over the last minute, 0 to 1 and above."""

    cores: int
    memory_mib: int
    load: float


def this_machine() -> Machine:
    """This one, now."""
    cores = len(os.sched_getaffinity(0))
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return Machine(cores, int(lines["MemAvailable"].split()[0]) // 1024, os.getloadavg()[0] / (os.cpu_count() or 1))


def units(cores: int, memory_mib: int, *, load: float, task_memory_mib: int, most: int) -> int:
    """min(cores - 1, memory // memory of a task, most), and half of that while the load is above 70 %; 1 at least
    (Sleepless Agent's parallelism choice)."""
    parallel = max(1, min(cores - 1, memory_mib // task_memory_mib, most))
    return max(1, parallel // 2) if load > LOADED else parallel


class Sizing:
    """The units of one session: cores and memory as they are at its beginning, when nothing of its own runs yet, and
    the load as it is whenever somebody asks."""

    def __init__(self, *, task_memory_mib: int, most: int, read_machine: Callable[[], Machine] = this_machine) -> None:
        self._task_memory_mib, self._most, self._read_machine = task_memory_mib, most, read_machine
        self._at_first = read_machine()

    def units(self) -> int:
        """What to offer now."""
        return units(
            self._at_first.cores,
            self._at_first.memory_mib,
            load=self._read_machine().load,
            task_memory_mib=self._task_memory_mib,
            most=self._most,
        )


# Room for the open files of many commands: pipes and sockets of the agent's own, some for each.


#: Of one command, while it is being started: its pipe, its control socket, its bell and its standard input.
_EACH = 8
#: Of the agent itself: modules, locks, the gateway.
_OWN = 128


def raise_file_limit(commands: int) -> int:
    """Raise the soft limit of open files so far that this process can run so many commands side by side.

    Returns the limit as it was. Raises BadInput where the hard limit is too low.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _OWN + _EACH * commands
    if before != resource.RLIM_INFINITY and before < need:
        if most != resource.RLIM_INFINITY and most < need:
            raise BadInput(
                "capacity", f"{commands} needs {need} open files, and the hard limit (RLIMIT_NOFILE) is {most}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, most))
    return before
