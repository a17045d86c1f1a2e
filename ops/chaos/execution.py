"""The execution log: what commands did, written by themselves into a file outside of the pool.

Every attempt writes `start`, `beat` again and again, and `end` as its last act. The lines are in the order of writing,
whichever process wrote them, so that two attempts of one job overlapped exactly if a line of the earlier one follows
a line of the later one. No clock is needed for that.
"""

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ops.chaos import records
from schema import clock

#: Variables of the commands: the file of the log, how many beats, and the seconds before each.
LOG_VARIABLE, BEATS_VARIABLE, PAUSE_VARIABLE = "CHAOS_LOG", "CHAOS_BEATS", "CHAOS_PAUSE"
#: The run that a process belongs to. Whatever carries it was started for that run.
RUN_VARIABLE = "CHAOS_RUN"

# A shell starts in a millisecond. /proc/uptime is the one clock that it can read without another process.
_SAY = """
say() {
    read -r now _ < /proc/uptime
    echo "$1 $LEASEHOLD_JOB $LEASEHOLD_FENCE $LEASEHOLD_ATTEMPT $LEASEHOLD_BOT $$ $now" >> "$CHAOS_LOG"
}
"""
_WORK = """
say start
left=$CHAOS_BEATS
while [ "$left" -gt 0 ]; do sleep "$CHAOS_PAUSE"; say beat; left=$((left - 1)); done
say end
"""
_HIDDEN = _SAY + 'while sleep "$CHAOS_PAUSE"; do say beat; done'
_SCRIPTS = {
    # Ends when it is asked to.
    "plain": _SAY + _WORK,
    # Only SIGKILL ends it.
    "deaf": "trap '' TERM HUP INT" + _SAY + _WORK,
    # A child in a session of its own, which never ends by itself, writes too.
    "hiding": _SAY + f"setsid sh -c '{_HIDDEN}' &" + _WORK,
}


class Kind(StrEnum):
    """How a command behaves towards those who want to end it."""

    PLAIN = "plain"
    DEAF = "deaf"
    HIDING = "hiding"


def payload(log: Path, run: str, *, kind: Kind = Kind.PLAIN, beats: int = 4, pause: float = 0.05) -> dict[str, Any]:
    """Return the command and the environment of a job that runs for about `beats` x `pause` seconds."""
    environment = {LOG_VARIABLE: str(log), RUN_VARIABLE: run, BEATS_VARIABLE: str(beats), PAUSE_VARIABLE: f"{pause:g}"}
    return {"command": ["sh", "-c", _SCRIPTS[kind]], "env": environment}


def make_log(path: Path) -> None:
    """Make an empty log that commands may write to, whatever their accounts are."""
    path.touch()
    path.chmod(0o666)


@dataclass(frozen=True)
class Line:
    """One line of the log. `place` is its number; `at` the seconds since the machine started, to a hundredth."""

    place: int
    what: str
    job: str
    fence: int
    attempt: int
    bot: str
    pid: int
    at: float


@dataclass(frozen=True)
class Attempt:
    """What one attempt wrote: its first line, its last line, how often it started and whether it came to its end."""

    job: str
    fence: int
    first: Line
    last: Line
    starts: int
    ended: bool


def read(path: Path) -> list[Line]:
    """Read a log that may still be written."""
    found = []
    for place, (what, job, fence, attempt, bot, pid, at) in enumerate(records.lines(path)):
        found.append(Line(place, what, job, int(fence), int(attempt), bot, int(pid), float(at)))
    return found


def attempts(log: Iterable[Line]) -> Mapping[str, list[Attempt]]:
    """Return the attempts of every job, in the order of their first lines."""
    lines: dict[tuple[str, int], list[Line]] = {}
    for line in log:
        lines.setdefault((line.job, line.fence), []).append(line)
    found: dict[str, list[Attempt]] = {}
    for (job, fence), written in lines.items():
        said = [line.what for line in written]
        found.setdefault(job, []).append(
            Attempt(job, fence, written[0], written[-1], said.count("start"), "end" in said)
        )
    return found


# Processes of commands, whatever became of the bot that started them


@dataclass(frozen=True)
class Running:
    """A living process of an attempt."""

    pid: int
    job: str
    fence: int
    bot: str


def processes(run: str) -> list[Running]:
    """Return the living processes of the commands of a run, found by their environment. Zombies have none."""
    found = []
    mark = f"{RUN_VARIABLE}={run}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if mark in environment:
                    own = dict(line.split(b"=", 1) for line in environment if b"=" in line)
                    job, fence = own.get(b"LEASEHOLD_JOB", b"").decode(), int(own.get(b"LEASEHOLD_FENCE", b"-1"))
                    found.append(Running(int(entry.name), job, fence, own.get(b"LEASEHOLD_BOT", b"").decode()))
    return found


def kill_all(run: str, *, within: float = 10.0) -> None:
    """Kill what is left of the processes of a run, for so many seconds as they start others."""
    deadline = clock.monotonic() + within
    while (left := processes(run)) and clock.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        clock.sleep(0.05)


def hidden(running: Iterable[Running], log: Iterable[Line]) -> list[int]:
    """Return the processes that are not the command of their own attempt. Process ids repeat within a long run."""
    commands = {(line.job, line.fence, line.pid) for line in log if line.what == "start"}
    return [each.pid for each in running if (each.job, each.fence, each.pid) not in commands]
