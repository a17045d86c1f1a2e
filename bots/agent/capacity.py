"""How much a bot takes: its capacity from its machine's cores, memory and load; short tasks in advance; open files."""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leasehold.errors import BadInput

from bots.agent.isolation.cgroups import limits_here

#: The machine counts as loaded while more than this share of its cores is busy.
LOADED = 0.7

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Machine:
    """Cores, memory and load of a machine, or what a container leaves of it.

    cores: those that this process may use. memory_mib: MiB available for new processes. load: the average share of
    busy cores of the whole machine over the last minute; it may exceed 1.
    """

    cores: int
    memory_mib: int
    load: float


def this_machine() -> Machine:
    """Read the state of the machine this process runs on, within the limits of its cgroups."""
    limits = limits_here()
    cores = len(os.sched_getaffinity(0))
    if limits.cpu_milli is not None:
        cores = min(cores, max(1, limits.cpu_milli // 1000))
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    memory_mib = int(lines["MemAvailable"].split()[0]) // 1024
    if limits.memory_mib is not None:
        memory_mib = min(memory_mib, limits.memory_mib)
    return Machine(cores, memory_mib, os.getloadavg()[0] / (os.cpu_count() or 1))


def units(cores: int, memory_mib: int, *, load: float, task_memory_mib: int, most: int) -> int:
    """Compute the capacity in units: min(cores - 1, memory // memory of a task, most), at least 1.

    Halves the result while the load is above 70 %. Sleepless Agent chooses its parallelism by the same rule.
    """
    parallel = max(1, min(cores - 1, memory_mib // task_memory_mib, most))
    return max(1, parallel // 2) if load > LOADED else parallel


class Sizing:
    """Computes the capacity of one session, in units.

    Cores and memory are read when the session begins, before it runs commands of its own. The load is read at each
    call of `units`.
    """

    def __init__(self, *, task_memory_mib: int, most: int, read_machine: Callable[[], Machine] = this_machine) -> None:
        self._task_memory_mib, self._most, self._read_machine = task_memory_mib, most, read_machine
        self._at_first = read_machine()

    def units(self) -> int:
        """Return the units to offer now."""
        return units(
            self._at_first.cores,
            self._at_first.memory_mib,
            load=self._read_machine().load,
            task_memory_mib=self._task_memory_mib,
            most=self._most,
        )


# Leases in advance


#: The run time, seconds, below which tasks are short: a bot takes leases of them in advance.
SHORT = 0.05
#: Seconds for which the leases in advance last. Doubling it doubles the time that an urgent task may wait behind them.
AHEAD = 0.1
#: The most leases in advance.
MOST_AHEAD = 512
#: Seconds of run time of the calls that wait in one process. While the agent reads an answer of the gateway, it looks
#: at a process only every few milliseconds.
QUEUE = 0.02
#: The most calls that wait in one process; of a bot with many processes fewer, because each has an output pipe.
MOST_QUEUED, LEAST_QUEUED, MOST_QUEUED_IN_ALL = 20, 8, 160
#: The share of the leases in advance whose ends are reported at once, while the rest keeps the bot busy.
TOGETHER = 0.4
#: A newly ended task counts with this share for the mean run time.
_WEIGHT = 1 / 16
#: The shortest run time that is believed, seconds.
_SHORTEST = 0.001


class Lookahead:
    """Computes how many units a bot announces beyond those that run at once, from the run times of its latest tasks.

    A bot whose tasks are shorter than a call to the gateway would otherwise be idle during each call. A bot of longer
    tasks takes nothing in advance, because another one could run it.
    """

    def __init__(self) -> None:
        self._mean = 1.0

    def note(self, seconds: float) -> None:
        """Take note of the run time of a task that has ended."""
        self._mean += (seconds - self._mean) * _WEIGHT

    def forget(self) -> None:
        """Take nothing in advance until many tasks have been short again."""
        self._mean = 1.0

    def queue(self, limit: int) -> int:
        """Return how many calls may wait in one process behind the one that it runs. limit: processes."""
        most = max(LEAST_QUEUED, MOST_QUEUED_IN_ALL // max(limit, 1))
        return min(MOST_QUEUED, most, int(QUEUE / max(self._mean, _SHORTEST)))

    def units(self, limit: int) -> int:
        """Return the units to announce in advance. limit: those that run at once."""
        return 0 if self._mean > SHORT else min(MOST_AHEAD, int(limit * AHEAD / max(self._mean, _SHORTEST)))

    def together(self, limit: int) -> int:
        """Return how many ends to report at once. limit: tasks that run at once."""
        return int(self.units(limit) * TOGETHER)


# Open files


#: Descriptors of one command while it starts: output pipe, control socket, waker and standard input.
_EACH = 8
#: More of a call of a task: its child, which has five, and an output pipe for each call that may wait there.
_EACH_TASK = 8
#: Descriptors of the agent itself: modules, locks, connections to the gateway.
_OWN = 128


def raise_file_limit(commands: int, *, tasks: bool = False) -> int:
    """Raise the soft limit of open files so that this process can run `commands` commands at once.

    tasks: they are calls of tasks in warm children. Returns the limit as it was. Raises BadInput if the hard limit is
    too low.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _OWN + _EACH * commands + (max(_EACH_TASK * commands, MOST_QUEUED_IN_ALL) if tasks else 0)
    if before != resource.RLIM_INFINITY and before < need:
        if most != resource.RLIM_INFINITY and most < need:
            raise BadInput(
                "capacity", f"{commands} needs {need} open files, and the hard limit (RLIMIT_NOFILE) is {most}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, most))
    return before
