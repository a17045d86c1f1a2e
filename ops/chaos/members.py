"""The processes of the pool under test: started from any tree of the product, killed, and at once started again."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bots.agent.guardian import descendants, process_tree
from ops.chaos.versions import search_path
from schema import clock

#: The root of this tree.
ROOT = Path(__file__).parent.parent.parent
#: Seconds between two looks at the members, and between the death of one and its next start.
LOOK, PAUSE = 0.05, 0.05
#: Seconds within which a member must end after SIGTERM before it is killed.
LEAVE_WITHIN = 20.0


class Role(StrEnum):
    """What a member does."""

    GATEWAY = "gateway"
    ASSIGNER = "assigner"
    BOT = "bot"


@dataclass(frozen=True)
class Birth:
    """How a member is started. `tree`: the tree of the product that it runs; `extra`: added to its environment."""

    tree: Path = ROOT
    extra: Mapping[str, str] = field(default_factory=dict)


class Member:
    """One process that should run. The keeper of its group starts it again whenever it is dead."""

    def __init__(self, name: str, role: Role, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.role, self.log = name, role, log
        self.birth = Birth()
        self.starts = 0
        #: Exit codes of ends that nobody had caused, by kill or by SIGTERM.
        self.surprises: list[int] = []
        self._arguments, self._environment = arguments, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._expected = False
        self._lock = threading.RLock()
        self._born = 0.0

    @property
    def pid(self) -> int:
        """The id of the process, which may be dead."""
        return 0 if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, unless it lives."""
        with self._lock:
            if self.alive or clock.monotonic() < self._born + PAUSE:
                return
            if self._process is not None:
                if not self._expected:
                    self.surprises.append(self._process.returncode)
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._expected = False
            self._born = clock.monotonic()
            environment = {**self._environment, "PYTHONPATH": search_path(self.birth.tree), **self.birth.extra}
            with self.log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "assigner.cli.main", *self._arguments],
                    cwd=self.birth.tree, env=environment, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=output, stderr=output,
                )  # fmt: skip
            self.starts += 1

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process only."""
        with self._lock:
            self._expected |= number in (signal.SIGKILL, signal.SIGTERM)
            if self._process is not None:
                self._process.send_signal(number)

    def expect_end(self) -> None:
        """Note that the process is about to be killed, and not by itself."""
        with self._lock:
            self._expected = True

    def kill(self) -> None:
        """SIGKILL, and nothing to the processes that it has started."""
        self.signal(signal.SIGKILL)
        self.wait()

    def leave(self) -> None:
        """SIGTERM; SIGKILL if the process does not end."""
        self.signal(signal.SIGTERM)
        if not self.wait(LEAVE_WITHIN):
            self.kill()

    def wait(self, within: float = 10.0) -> bool:
        """Wait for the end of the process; False if it lives on."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(within)
        return not self.alive

    def restart(self, birth: Birth) -> None:
        """End the process politely and start it in another way."""
        with self._lock:
            self.birth = birth
            self.leave()
            self._born = 0.0
            self.start()

    def below(self) -> list[int]:
        """The processes below this one, parents first."""
        return descendants([self.pid], process_tree()) if self.alive else []

    def parts(self) -> "BotParts":
        """The processes of a bot at this moment."""
        return bot_parts(self.pid) if self.alive else BotParts([], [], [])


@dataclass(frozen=True)
class BotParts:
    """The processes below an agent: guardian, supervisors, also those of guardians before, and their commands."""

    guardians: list[int]
    supervisors: list[int]
    commands: list[int]


def bot_parts(agent: int) -> BotParts:
    """The processes below the agent with this process id, at this moment."""
    # One look at all processes: many commands end before a second one.
    tree = process_tree()
    # The agent adopts the supervisors of a guardian that was killed. Only guardians lead a session of their own.
    own = [child for child in tree.get(agent, []) if _watches(child)]
    guardians = [child for child in own if _leads_session(child)]
    below = [child for guardian in guardians for child in tree.get(guardian, []) if _watches(child)]
    supervisors = [*below, *(child for child in own if child not in guardians)]
    return BotParts(guardians, supervisors, [child for each in supervisors for child in tree.get(each, [])])


def _watches(process: int) -> bool:
    with suppress(OSError):
        return b"/bots/agent/guardian.py" in Path("/proc", str(process), "cmdline").read_bytes()
    return False


def _leads_session(process: int) -> bool:
    with suppress(OSError):
        return os.getsid(process) == process
    return False


class Keeper:
    """A thread that starts dead members again until it is closed."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._away: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self) -> None:
        for member in self.members:
            member.start()
        self._thread.start()

    @contextmanager
    def away(self, members: Sequence[Member]) -> Iterator[None]:
        """End these members politely, and start them again, in this version, when the block is left."""
        self.keep_away(members)
        try:
            for member in members:
                member.signal(signal.SIGTERM)
            for member in members:
                member.leave()
                member.birth = Birth()
            yield
        finally:
            self.call_back()

    def keep_away(self, members: Sequence[Member]) -> None:
        """Leave these members dead, and start all others."""
        self._away = {member.name for member in members}

    def call_back(self) -> None:
        """Start all members again."""
        self._away = set()

    def close(self) -> None:
        """Stop starting members, and kill all that live, bots with everything below them."""
        self._stopping.set()
        self._thread.join()
        for member in self.members:
            below = member.below()
            member.signal(signal.SIGKILL)
            for process in below:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            member.wait()

    def _keep(self) -> None:
        while not clock.wait(self._stopping, LOOK):
            for member in self.members:
                if member.name not in self._away:
                    member.start()
