"""Many agents in few processes: the real `Agent`, whose commands are simulated and whose requests are noted.

Sessions, syncs, long polls, streamed output and back-off are the agent's own. Only its guardian is replaced: a command
writes one line, takes its time and ends, without a process.
"""

import heapq
import itertools
import json
import multiprocessing
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import structlog
from leasehold.errors import Conflict, LeaseholdError, NotReady
from leasehold.transport import Record, Transport

from bots.agent.agent import Agent, AgentSettings
from bots.agent.attempts.attempt import RunContext
from bots.agent.launcher import Launcher
from bots.agent.workspace import Workspace
from schema import clock

#: Seconds after which a silent process fails the benchmark.
PATIENCE = 180.0
#: The exit code of a command that was stopped.
STOPPED = -15
#: The run time of each command is the given one multiplied by a random number between these.
SHORTEST, LONGEST = 0.5, 1.5
#: Seconds for which a thread of an agent runs before another that waits may ask for its turn. Each waiting thread wakes
#: up once in this time, and with hundreds of them the usual 0.005 s costs more than the agents' work.
SWITCH_INTERVAL = 0.1
OPEN, SYNC = "/v1/sessions", "/v1/sync"


@dataclass(frozen=True, slots=True)
class Noted:
    """One request of an agent. Times are monotonic, the same in all processes of a machine.

    call: epoch and number of the sync; equal for requests that repeat each other. held: the gateway could hold it.
    outcome: `ok`, `refused` (503), `conflict`, `closed` (the end of a session) or `failed`. done: when the latest job
    came to the agent of those that the server now knows as done.
    """

    bot: str
    path: str
    call: tuple[int, int]
    held: bool
    began: float
    ended: float
    outcome: str
    done: float | None = None


class NotingTransport(Transport):
    """A transport that adds each request to `notes`. seen: when each job came to the agent."""

    def __init__(self, *given: Any, notes: list[Noted], seen: dict[str, float], **named: Any) -> None:
        super().__init__(*given, **named)
        self._notes, self._seen = notes, seen

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | float] | None = None,
        body: Record | bytes | None = None,
        held: float = 0.0,
    ) -> Record:
        assert body is not None
        message: Record = json.loads(body) if isinstance(body, bytes) else body
        began, outcome, done = clock.monotonic(), "failed", None
        try:
            answer = super().call(method, path, query=query, body=body, held=held)
            outcome, done = "closed" if message.get("status") == "gone" else "ok", self._settled(message, answer)
            return answer
        except NotReady:
            outcome = "refused"
            raise
        except Conflict:
            outcome = "conflict"
            raise
        finally:
            call = (message.get("epoch", 0), message.get("seq", 0))
            self._notes.append(Noted(message["bot"], path, call, held > 0, began, clock.monotonic(), outcome, done))

    def _settled(self, body: Record, answer: Record) -> float | None:
        """Note the jobs that came, and return when the latest came of those that are done."""
        listed = {work["job"] for work in answer.get("leases", ())}
        reported = [each["job"] for each in body.get("leases", ()) if each["state"] == "completed"]
        came = [self._seen.pop(job) for job in reported if job in self._seen and job not in listed]
        now = clock.monotonic()
        for job in listed:
            self._seen.setdefault(job, now)
        return max(came, default=None)


class SimulatedCommands(Launcher):
    """Takes the place of the guardian of all agents of a process: a command takes about `seconds`, and is a timer.

    One thread says what the supervisors of all commands would say.
    """

    def __init__(self, *, seconds: float, chance: Random) -> None:
        super().__init__(-1, open_files=0)
        self._seconds, self._chance = seconds, chance
        self._sources = selectors.DefaultSelector()
        self._ends: list[tuple[float, int, socket.socket]] = []
        self._numbers = itertools.count()
        self._guarding = threading.Lock()
        self._begun: list[socket.socket] = []
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._sources.register(self._woken, selectors.EVENT_READ)
        # Agents may send signals to what they take for a supervisor.
        self._supervisor = subprocess.Popen(["sleep", "infinity"])
        threading.Thread(target=self._work, name="commands", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    def launch(self, output: int, stdin: int) -> socket.socket:
        del stdin
        ours, theirs = socket.socketpair()
        os.write(output, b"a line of output\n")
        with self._guarding:
            self._begun.append(theirs)
        self._waker.send(b"!")
        return ours

    def arm(self, deadline: float) -> None:
        pass

    def disarm(self) -> None:
        pass

    def replace(self, guardian: int | None) -> None:
        pass

    def close(self) -> None:
        self._supervisor.kill()
        self._supervisor.wait()

    def _work(self) -> None:
        while True:
            left = self._ends[0][0] - clock.monotonic() if self._ends else None
            for key, _ in self._sources.select(None if left is None else max(0.0, left)):
                if key.fileobj is self._woken:
                    self._begin()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
            while self._ends and self._ends[0][0] <= clock.monotonic():
                self._end(heapq.heappop(self._ends)[2], 0)

    def _begin(self) -> None:
        self._woken.recv(65_536)
        with self._guarding:
            begun, self._begun = self._begun, []
        for control in begun:
            self._sources.register(control, selectors.EVENT_READ)
            self._say(control, {"ready": self.pid}, {"started": self.pid, "at": clock.monotonic()})
            end = clock.monotonic() + self._seconds * self._chance.uniform(SHORTEST, LONGEST)
            heapq.heappush(self._ends, (end, next(self._numbers), control))

    def _hear(self, control: socket.socket) -> None:
        """Read the request of a command, which ends with a line feed, or the wish to stop it: one letter."""
        try:
            asked = control.recv(65_536)
        except ConnectionResetError:  # the agent has given up, and left something unread
            asked = b""
        if not asked or asked.rpartition(b"\n")[2] in (b"T", b"K", b"TK"):
            self._end(control, STOPPED)

    def _end(self, control: socket.socket, code: int) -> None:
        if control.fileno() >= 0:
            self._say(control, {"exit": code, "at": clock.monotonic()}, {"over": True, "expired": False})
            self._sources.unregister(control)
            control.close()

    def _say(self, control: socket.socket, *facts: Record) -> None:
        with suppress(OSError):  # the agent has given up
            control.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in facts))


class NotedAgent(Agent):
    """An agent with simulated commands. Its requests are added to `notes`."""

    def __init__(self, settings: AgentSettings, url: str, token: str, *, chance: Random, notes: list[Noted]) -> None:
        super().__init__(settings, url, token, chance=chance)
        self._notes, self._seen = notes, dict[str, float]()

    def serve(self, commands: SimulatedCommands) -> None:
        """Serve until the process ends."""
        workplace = Workspace(self._settings.directory, self._settings.bot)
        self._serve_in_thread(
            RunContext(workplace=workplace, launcher=commands, grace=self._settings.kill_grace, environment={})
        )

    def _clear(self, workplace: Workspace) -> None:
        """Do nothing: no command has a process, and all agents would search the same machine for some."""

    def _transport(self, timeout: float) -> Transport:
        return NotingTransport(
            self._url,
            self._token,
            chance=self._chance,
            timeout=timeout,
            patience=0.0,
            notes=self._notes,
            seen=self._seen,
        )


@dataclass(frozen=True)
class AgentGroup:
    """The agents of one process. seconds: how long a command takes. work: the directory of all agents."""

    url: str
    token: str
    names: Sequence[str]
    properties: dict[str, str | list[str]]
    seconds: float
    work: Path
    seed: int


class AgentProcesses:
    """Processes with agents, which work until the end of the block that has started them."""

    def __init__(self, pids: Sequence[int], channels: Sequence[Connection]) -> None:
        self.pids, self._channels = pids, channels

    def start(self) -> None:
        """Let all agents start at once."""
        for channel in self._channels:
            channel.send("start")

    def notes(self) -> list[Noted]:
        """Return what the agents have noted since the last time."""
        for channel in self._channels:
            channel.send("notes")
        return [each for channel in self._channels for each in _received(channel)]


@contextmanager
def agent_processes(groups: Sequence[AgentGroup]) -> Iterator[AgentProcesses]:
    """Make a process for each of these groups; their agents do not start yet."""
    context = multiprocessing.get_context("spawn")
    children, channels = [], []
    for group in groups:
        ours, theirs = context.Pipe()
        children.append(context.Process(target=_main, args=(group, theirs), daemon=True))
        channels.append(ours)
    try:
        for child in children:
            child.start()
        for channel in channels:
            _received(channel)
        yield AgentProcesses([child.pid or 0 for child in children], channels)
    finally:
        for channel in channels:
            with suppress(OSError):
                channel.send("stop")
        for child in children:
            child.join(5.0)
            child.kill()
            child.join()


def _received(channel: Connection) -> Any:
    if not channel.poll(PATIENCE):
        raise LeaseholdError(f"a process with agents has said nothing for {PATIENCE:.0f} s")
    return channel.recv()


def _main(group: AgentGroup, channel: Connection) -> None:
    """Run the agents of a group and answer the messages of the parent: the main function of a process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL)
    structlog.configure(processors=[_dropped])
    chance = Random(group.seed)
    commands, notes = SimulatedCommands(seconds=group.seconds, chance=Random(group.seed)), list[Noted]()
    agents = [
        NotedAgent(
            AgentSettings(name=name, work_dir=group.work, properties=group.properties),
            group.url,
            group.token,
            chance=Random(chance.random()),
            notes=notes,
        )
        for name in group.names
    ]
    channel.send("ready")
    while (wish := channel.recv()) != "stop":
        if wish == "start":
            for agent in agents:
                threading.Thread(target=agent.serve, args=(commands,), daemon=True).start()
        else:
            taken = len(notes)
            channel.send(notes[:taken])
            del notes[:taken]
    commands.close()
    os._exit(0)


def _dropped(_logger: object, _method: str, _event: Any) -> Any:
    raise structlog.DropEvent
