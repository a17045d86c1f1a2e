"""Limits of memory, processes and CPU: for each attempt, by a cgroup (version 2) of its own, and those of the agent.

<parent>/                          made here if it is missing; its controllers are enabled for what is below it
<parent>/<bot>-<place>-<attempt>/  one cgroup for each running attempt; place: of the bot's directory, in hex
"""

import contextlib
import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from leasehold.errors import BadInput

from schema import clock

_log = structlog.get_logger("leasehold.agent")

#: The kernel's list of mounts, the cgroups of this process, and the name of the default parent below the mount of
#: version 2.
_MOUNTS, _OWN = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
_PARENT = "leasehold"
#: What the kernel writes for a limit that is not set.
_UNLIMITED = "max"
#: Microseconds in which a limit of CPU time is counted.
_PERIOD = 100_000
#: Seconds within which the kernel must let go of a cgroup whose processes have been killed.
_LEAVING = 5.0


@dataclass(frozen=True)
class Limits:
    """What the processes of one attempt may use together; None = no limit. cpu_milli: thousandths of a core."""

    memory_mib: int | None = None
    processes: int | None = None
    cpu_milli: int | None = None

    @property
    def settings(self) -> Mapping[str, str]:
        """The files of a cgroup and what belongs into them."""
        found: dict[str, str] = {}
        if self.memory_mib is not None:
            # One process that is killed for lack of memory would leave the others in an undefined state.
            found |= {"memory.max": str(self.memory_mib << 20), "memory.oom.group": "1"}
        if self.processes is not None:
            found["pids.max"] = str(self.processes)
        if self.cpu_milli is not None:
            found["cpu.max"] = f"{self.cpu_milli * _PERIOD // 1000} {_PERIOD}"
        return found

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers that these limits need, with the setting of the agent that asks for each."""
        return tuple(dict.fromkeys(name.split(".")[0] for name in self.settings))


class Cgroups:
    """Makes and removes the cgroups of attempts. Raises BadInput if the limits cannot be set here."""

    def __init__(self, parent: Path | None, limits: Limits) -> None:
        self._limits = limits
        self.parent = parent or _mount() / _PARENT
        try:
            self._enable()
            self.remove(self.make(f"trial-{os.getpid()}"))
        except OSError as error:
            raise BadInput(
                "cgroup",
                f"limits of memory, processes or CPU cannot be set in '{self.parent}': {error.strerror}; name a cgroup "
                "that is delegated to the agent and has no processes of its own",
            ) from None

    def make(self, name: str) -> Path:
        """Make a cgroup with the limits. Raises OSError."""
        made = self.parent / name
        made.mkdir()
        try:
            for file, value in self._limits.settings.items():
                (made / file).write_text(value)
            if self._limits.memory_mib is not None and (made / "memory.swap.max").exists():
                (made / "memory.swap.max").write_text("0")
        except OSError:
            made.rmdir()
            raise
        return made

    def remove(self, made: Path) -> bool:
        """Kill what is left in a cgroup and remove it; return True if it is gone."""
        give_up = clock.monotonic() + _LEAVING
        while True:
            try:
                made.rmdir()
                return True
            except FileNotFoundError:
                return True
            except OSError:
                if clock.monotonic() > give_up:
                    return False
            with contextlib.suppress(OSError):
                (made / "cgroup.kill").write_text("1")
            clock.sleep(0.01)

    def clear(self, prefix: str) -> None:
        """Kill what is in cgroups whose names begin so, and remove them. Never raises; what cannot go is logged."""
        for left in self.parent.glob(f"{glob.escape(prefix)}*/"):
            if not self.remove(left):
                _log.warning("a cgroup of an earlier agent cannot be removed", cgroup=str(left))

    def _enable(self) -> None:
        above = self.parent.parent
        source = self.parent if self.parent.exists() else above
        offered = (source / "cgroup.controllers").read_text().split()
        missing = [name for name in self._limits.controllers if name not in offered]
        if missing:
            raise BadInput(
                "cgroup",
                f"'{source}' does not have the controllers {', '.join(missing)}, which the limits of jobs need",
            )
        wanted = " ".join(f"+{name}" for name in self._limits.controllers)
        if not self.parent.exists():
            (above / "cgroup.subtree_control").write_text(wanted)
            self.parent.mkdir()
        (self.parent / "cgroup.subtree_control").write_text(wanted)


def exceeded_memory(cgroup: str) -> int | None:
    """Return the limit of memory, in MiB, if the kernel has killed processes of this cgroup because they reached it.

    `oom_kill` counts what any lack of memory has killed, as that of the machine; `oom` counts how often this limit was
    reached and no memory could be found. The files are those of the kernel's cgroup version 2.
    """
    made = Path(cgroup)
    try:
        events = dict(line.split() for line in (made / "memory.events").read_text().splitlines())
        limit = (made / "memory.max").read_text().strip()
    except FileNotFoundError:  # it has no controller of memory
        return None
    killed = int(events["oom"]) > 0 and int(events["oom_kill"]) > 0
    return int(limit) >> 20 if killed and limit != _UNLIMITED else None


def limits_here() -> Limits:
    """What the cgroups of this process leave to it, such as those of its container; none without version 2.

    memory_mib is what is left of the limit. What the kernel could drop of the files that it has read counts as free.
    """
    try:
        mount = _mount()
    except BadInput:
        return Limits()
    own = next(line.removeprefix("0::/") for line in _OWN.read_text().splitlines() if line.startswith("0::/"))
    cores, memory = list[int](), list[int]()
    # A limit holds for all that is below it. The root has none of these files.
    for each in [mount / own, *(mount / own).parents]:
        if not each.is_relative_to(mount):
            break
        with contextlib.suppress(FileNotFoundError):
            quota, period = (each / "cpu.max").read_text().split()
            if quota != _UNLIMITED:
                cores.append(1000 * int(quota) // int(period))
        with contextlib.suppress(FileNotFoundError):
            most = (each / "memory.max").read_text().strip()
            used = int((each / "memory.current").read_text())
            kept = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            if most != _UNLIMITED:
                memory.append(max(0, int(most) - used + int(kept["inactive_file"])))
    return Limits(memory_mib=min(memory) >> 20 if memory else None, cpu_milli=min(cores, default=None))


def _mount() -> Path:
    for line in _MOUNTS.read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] == "cgroup2":
            return Path(left.split()[4])
    raise BadInput("cgroup", "limits of memory, processes or CPU need cgroup version 2, which is not mounted here")
