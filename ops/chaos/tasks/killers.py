"""Killing clients: threads that choose a process of the pool's bots at random and kill or stop it."""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ops.chaos.faults.kills import send
from ops.chaos.members import BotParts, Member
from ops.chaos.pool import FAST
from ops.chaos.tasks.checker import Stop
from ops.chaos.tasks.pool import TaskPool
from schema import clock

#: What is hit, and how often each is drawn. What ends a whole bot is rarer: it takes seconds to start again.
KINDS = {"child": 6, "supervisor": 6, "guardian": 4, "agent": 4, "bot": 2, "stopped-agent": 1, "stopped-bot": 2}
#: Seconds between two kills of one client.
REST = (1.0, 8.0)
#: Seconds of a stop: longer than a session, and the upkeep that finds its end, so that the calls run elsewhere.
STOPPED = (FAST.ttl + 2.0, FAST.ttl + 4.0)
#: Seconds for which the tasks of a bot that was stopped go on before its guardian does, which then kills them.
HEAD_START = 0.3
#: How many bots may be stopped at once, so that the others get done.
MOST_STOPPED = 2


class Killers:
    """Clients that kill until they are told to leave off.

    counts: the hits by kind. seed: of all chance.
    """

    def __init__(self, pool: TaskPool, *, clients: int, seed: int) -> None:
        self._pool = pool
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MOST_STOPPED)
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        chance = random.Random(seed)
        self._threads = [
            threading.Thread(target=self._kill, args=(random.Random(chance.getrandbits(64)),), daemon=True)
            for _ in range(clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def leave_off(self) -> None:
        """Kill nothing more; what is stopped goes on. Raises what has ended a client."""
        self._leaving.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _kill(self, chance: random.Random) -> None:
        try:
            while not clock.wait(self._leaving, chance.uniform(*REST)):
                (kind,) = chance.choices(list(KINDS), weights=list(KINDS.values()))
                bot = chance.choice(self._pool.bots)
                if self.hit(kind, bot, chance):
                    with self._lock:
                        self.counts[kind] += 1
        except BaseException as error:
            self.errors.append(error)

    def hit(self, kind: str, bot: Member, chance: random.Random) -> bool:
        """Kill or stop a part of a bot; return False if it has none at the moment."""
        parts = bot.parts()
        if not parts.commands:
            return False  # it is still starting
        match kind:
            case "child":
                send([chance.choice(parts.commands)], signal.SIGKILL)
            case "supervisor":
                send([chance.choice(parts.supervisors)], signal.SIGKILL)
            case "guardian":
                send(parts.guardians, signal.SIGKILL)
            case "agent":
                bot.signal(signal.SIGKILL)
            case "bot":
                bot.expect_end()
                for process in everything(bot, parts):
                    kill_group(process)
            case "stopped-agent":
                return self._stopped([bot.pid], chance.uniform(*STOPPED))
            case "stopped-bot":
                return self._stopped_bot(bot, parts, chance.uniform(*STOPPED))
            case _:
                raise ValueError(f"no such kind of fault: {kind}")
        return True

    def _stopped(self, processes: Sequence[int], seconds: float, first: Sequence[int] = ()) -> bool:
        """Stop processes for so long. Those in `first` go on before all others."""
        if not self._room.acquire(blocking=False):
            return False
        try:
            send(processes, signal.SIGSTOP)
            clock.wait(self._leaving, seconds)
            if first:
                send(first, signal.SIGCONT)
                clock.sleep(HEAD_START)
        finally:
            send(processes, signal.SIGCONT)
            self._room.release()
        return True

    def _stopped_bot(self, bot: Member, parts: BotParts, seconds: float) -> bool:
        """Stop all of a bot as a virtual machine is stopped, so that nobody kills its tasks in time."""
        began = clock.monotonic()
        stopped = self._stopped(everything(bot, parts), seconds, first=parts.commands)
        if stopped:
            with self._lock:
                self._pool.stops.append(Stop(bot.name, began, clock.monotonic()))
        return stopped


def everything(bot: Member, parts: BotParts) -> list[int]:
    """The processes of a bot, the tasks last."""
    return [bot.pid, *parts.guardians, *parts.supervisors, *parts.commands]


def kill_group(process: int) -> None:
    """Kill the process, and its whole group if it leads one."""
    send_to: Callable[[int, int], None] = os.killpg if _leads(process) else os.kill
    try:
        send_to(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _leads(process: int) -> bool:
    try:
        return os.getpgid(process) == process
    except ProcessLookupError:
        return False
