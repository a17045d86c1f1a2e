"""Child processes: started with their output in files, started again when they die, stopped in order, never orphaned.

Children live in sessions of their own, so Ctrl-C in the terminal reaches only the parent. Each holds the read end of
a pipe whose write end only the parent has: when the parent is gone, however it went, the pipe ends and so do they.
"""

import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import structlog

from schema import clock
from schema.errors import LeaseholdError
from schema.validation import escaped

#: Set for a child whose standard input is the pipe to watch.
PARENT_VARIABLE = "LEASEHOLD_PARENT"
#: Seconds an orphan gets to end by itself before it is told again.
ORPHAN_GRACE = 5.0
#: Seconds between the second request to stop, which no child may take its time for, and the end.
HURRY = 5.0
#: Seconds before a child that died is started again: doubled each time it dies young, up to the last.
RESTART_FIRST, RESTART_LAST = 0.5, 30.0
#: Seconds of life after which earlier deaths are forgotten.
STABLE_AFTER = 30.0
MAX_LOG_BYTES = 10 * 1024 * 1024

log = structlog.get_logger()


class Role(IntEnum):
    """The order in which children are stopped: first those that would complain about the absence of the others."""

    BOT = 1
    GATEWAY = 2
    ASSIGNER = 3


@dataclass(frozen=True, kw_only=True)
class Child:
    """What to start: `environment` is added to the parent's. The name is also that of its log file."""

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


class Children:
    """A supervisor for one parent process; not thread-safe except that `stop` may follow anything.

    `directory` takes the logs; `tell` gets one short line for people whenever a child dies or is started again. Without
    `restart`, a dead child stays dead and `run_once` raises LeaseholdError with its last words.
    """

    def __init__(
        self,
        directory: Path,
        environ: Mapping[str, str],
        *,
        report: Callable[[str], None],
        chance: random.Random,
        restart: bool = True,
        monotonic: clock.Monotonic = clock.monotonic,
    ) -> None:
        self._directory, self._environ, self._report, self._chance = directory, dict(environ), report, chance
        self._restart, self._monotonic = restart, monotonic
        self._running: dict[str, _Running] = {}

    def start(self, child: Child) -> None:
        """Start one more child. Names must differ."""
        assert child.name not in self._running, child.name
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._running[child.name] = self._spawn(child)

    def processes(self) -> dict[str, int]:
        """Name → process id of those that live."""
        return {name: each.process.pid for name, each in self._running.items() if each.process.poll() is None}

    def check(self) -> None:
        """Raise LeaseholdError with the last words of a child that is dead."""
        for each in self._running.values():
            if each.process.poll() is not None:
                raise LeaseholdError(f"{each.child.name} {self._epitaph(each)}")

    def run_once(self) -> float:
        """Start again what died and is due; returns the seconds until the next look."""
        if not self._restart:
            self.check()
            return 0.2
        for name, each in list(self._running.items()):
            now = self._monotonic()
            if each.again_at is None and each.process.poll() is not None:
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

    def stop(self, *, patience: float = 10.0) -> None:
        """End every child, role after role: SIGTERM, after at most `patience` seconds a second one, which tells a bot
        to drop its work, at last SIGKILL. Idempotent."""
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
        """End what still lives at once, and with it the rest of its session's first process group."""
        for each in self._running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
            if each.process.stdin:
                each.process.stdin.close()
        self._running.clear()

    def _spawn(self, child: Child) -> _Running:
        path = self._directory / f"{child.name}.log"
        with suppress(FileNotFoundError):
            if path.stat().st_size > MAX_LOG_BYTES:
                path.replace(path.with_suffix(".log.1"))
        with path.open("ab") as output:
            process = subprocess.Popen(
                child.command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**self._environ, **child.environment, PARENT_VARIABLE: "stdin"},
            )
            return _Running(child, process, output.tell(), self._monotonic())

    def _epitaph(self, each: _Running) -> str:
        status = each.process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return f"{how}: {self._last_words(each)}"

    def _last_words(self, each: _Running) -> str:
        path = self._directory / f"{each.child.name}.log"
        with path.open("rb") as file:
            file.seek(max(each.log_start, path.stat().st_size - 4096))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return escaped(" / ".join(lines[-3:]), 400) if lines else f"it said nothing, see {path}"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def follow_parent(*, grace: float = ORPHAN_GRACE, hurry: float = HURRY) -> None:
    """In a child of `Children`: get SIGTERM when the parent is gone, a second one `grace` seconds later, and SIGKILL
    `hurry` seconds after that.

    Standard input becomes empty, so that what this process starts never holds the pipe. Elsewhere it does nothing.
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
        for seconds in (grace, hurry):
            os.kill(os.getpid(), signal.SIGTERM)
            clock.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
