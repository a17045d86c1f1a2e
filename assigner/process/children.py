"""Child processes: started with their output in files, restarted when they die, stopped in order, never orphaned.

Each child has a session of its own, so Ctrl-C in the terminal reaches only the parent. Each child holds the read end
of a pipe whose write end only the parent has. When the parent ends, for whatever reason, the pipe closes and the
children end too.
"""

import math
import os
import random
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import structlog
from leasehold.errors import LeaseholdError
from leasehold.wire import escaped

from schema import clock

#: Environment variable that tells a child that its standard input is the parent's pipe.
PARENT_VARIABLE = "LEASEHOLD_PARENT"
#: Seconds that an orphan gets to end after the first SIGTERM, before the second.
ORPHAN_GRACE = 5.0
#: Seconds between the second SIGTERM, after which a child must end at once, and SIGKILL.
HURRY = 5.0
#: Seconds before a dead child is restarted: the first delay, doubled for each early death, and the largest delay.
RESTART_FIRST, RESTART_LAST = 0.5, 30.0
#: Seconds that a child which is to be started again has for its work, before the second SIGTERM.
RENEWED_WITHIN = 10.0
#: A child that ran for more than this many seconds restarts with the first delay.
STABLE_AFTER = 30.0
#: Bytes of a child's log, above which they move to `NAME.log.1` and the log begins anew.
MAX_LOG_BYTES = 10 * 1024 * 1024

#: In a line of a log: it tells of nothing that went wrong.
_ORDINARY = re.compile(r'\blevel"?[=:] ?"?(?:info|debug)\b')

log = structlog.get_logger()


class Role(IntEnum):
    """The order in which children are stopped: those that depend on the others come first."""

    CONSOLE = 0
    BOT = 1
    GATEWAY = 2
    ASSIGNER = 3


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process to start. `environment` is added to the parent's; `name` is also the name of the log file."""

    name: str
    role: Role
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    log_start: int
    born: float
    deaths: int = 0
    again_at: float | None = None
    #: When a child that was asked to end, to be started again, is asked for the last time; None = it was not asked.
    hurried_at: float | None = None


class Children:
    """Supervises the child processes of one parent. Not thread-safe; `stop` may be called in any state.

    directory: where the log files go.
    report: receives one short line for people whenever a child dies or is restarted.
    """

    def __init__(
        self,
        directory: Path,
        environ: Mapping[str, str],
        *,
        report: Callable[[str], None],
        chance: random.Random,
        monotonic: clock.Monotonic = clock.monotonic,
    ) -> None:
        self._directory, self._environ, self._report, self._chance = directory, dict(environ), report, chance
        self._monotonic = monotonic
        self._running: dict[str, _Running] = {}

    def start(self, child: Child) -> None:
        """Start one more child. Names must differ."""
        assert child.name not in self._running, child.name
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._running[child.name] = self._spawn(child)

    def restart_with(self, name: str, environment: Mapping[str, str]) -> None:
        """Start this child with these variables too, when it is started again."""
        each = self._running[name]
        each.child = replace(each.child, environment={**each.child.environment, **environment})

    def processes(self) -> dict[str, int]:
        """Process ids of living children by name."""
        return {name: each.process.pid for name, each in self._running.items() if each.process.poll() is None}

    def check(self) -> None:
        """Raise LeaseholdError with the end of the log if a child is dead."""
        for each in self._running.values():
            if each.process.poll() is not None:
                raise LeaseholdError(f"{each.child.name} {self._epitaph(each)}")

    def run_once(self) -> float:
        """Restart the dead children that are due, and bound all logs. Returns the seconds until the next call."""
        for each in self._running.values():
            if _bound(self._directory / f"{each.child.name}.log"):
                each.log_start = 0
        for name, each in list(self._running.items()):
            now = self._monotonic()
            if each.hurried_at is not None:
                self._renew(name, each, now)
            elif each.again_at is None and each.process.poll() is not None:
                each.deaths = 0 if now - each.born > STABLE_AFTER else each.deaths + 1
                pause = min(RESTART_LAST, RESTART_FIRST * 2.0 ** min(each.deaths, 30)) * self._chance.uniform(0.5, 1.0)
                each.again_at = now + pause
                log.warning("child died", child=name, status=each.process.returncode, restart_in=round(pause, 2))
                self._report(f"{name} {self._epitaph(each)}; starting it again in {pause:.1f} s")
            elif each.again_at is not None and each.again_at <= now:
                reborn = self._spawn(each.child)
                reborn.deaths = each.deaths
                self._running[name] = reborn
                self._report(f"{name} runs again")
        return 0.2

    def renew(self, name: str) -> None:
        """Ask a child to end, and start it again once it has, by `run_once`. One that has ended is left to that."""
        each = self._running[name]
        if each.hurried_at is None and each.process.poll() is None:
            each.hurried_at = self._monotonic() + RENEWED_WITHIN
            _signal(each.process, signal.SIGTERM)

    def _renew(self, name: str, each: _Running, now: float) -> None:
        if each.process.poll() is not None:
            self._running[name] = self._spawn(each.child)
            self._report(f"{name} runs again")
        elif each.hurried_at is not None and now >= each.hurried_at:
            # A bot drops its work, which is then run again.
            each.hurried_at = math.inf
            _signal(each.process, signal.SIGTERM)

    def stop(self, *, patience: float = 10.0) -> None:
        """Stop every child, role after role. Idempotent.

        A child receives SIGTERM; after at most `patience` seconds a second SIGTERM, on which a bot drops its work; and
        at last SIGKILL.
        """
        for role in sorted(Role):
            for seconds in (patience, HURRY):
                group = [
                    each for each in self._running.values() if each.child.role is role and each.process.poll() is None
                ]
                for each in group:
                    _signal(each.process, signal.SIGTERM)
                deadline = self._monotonic() + seconds
                for each in group:
                    with suppress(subprocess.TimeoutExpired):
                        each.process.wait(max(0.0, deadline - self._monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill every living child and its process group at once."""
        for each in self._running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
            if each.process.stdin:
                each.process.stdin.close()
        self._running.clear()

    def _spawn(self, child: Child) -> _Running:
        path = self._directory / f"{child.name}.log"
        _bound(path)
        with path.open("ab") as output:
            # Before the start, because a child shares the file's position and may write at once.
            log_start = output.tell()
            process = subprocess.Popen(
                child.command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**self._environ, **child.environment, PARENT_VARIABLE: "stdin"},
            )
            return _Running(child, process, log_start, self._monotonic())

    def _epitaph(self, each: _Running) -> str:
        status = each.process.returncode
        known = {number.value: number.name for number in signal.Signals}
        killed = f"was killed by {known.get(-status, f'signal {-status}')}"
        how = killed if status < 0 else f"ended with exit status {status}"
        return f"{how}: {self._last_words(each)}"

    def _last_words(self, each: _Running) -> str:
        path = self._directory / f"{each.child.name}.log"
        with path.open("rb") as file:
            file.seek(max(each.log_start, path.stat().st_size - 4096))
            lines = [line.removeprefix("error: ") for line in file.read().decode(errors="replace").splitlines()]
            lines = [line for line in lines if line.strip() and not _ORDINARY.search(line)]
        return escaped(" / ".join(lines[-3:]), 400) if lines else f"it said nothing of it, see {path}"


def _bound(path: Path) -> bool:
    """Move what a log holds aside if it is too much; return True if it was. The file stays, open to its writer.

    A log that cannot be kept, on a full disk, is cut.
    """
    with suppress(OSError):
        if path.stat().st_size > MAX_LOG_BYTES:
            with suppress(OSError):
                shutil.copyfile(path, path.with_suffix(".log.1"))
            os.truncate(path, 0)
            return True
    return False


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def follow_parent() -> None:
    """Make this child of `Children` end when its parent is gone; in any other process do nothing.

    The child sends itself SIGTERM at once, a second SIGTERM after ORPHAN_GRACE, and SIGKILL a time of HURRY later.
    Standard input becomes empty, so that processes which this one starts never hold the pipe.
    """
    if os.environ.pop(PARENT_VARIABLE, None) is None:
        return
    pipe = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        while os.read(pipe, 64):
            pass
        for seconds in (ORPHAN_GRACE, HURRY):
            os.kill(os.getpid(), signal.SIGTERM)
            clock.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
