"""The agent in a thread, a gateway whose answers the test decides, and helpers that run one command of a lease."""

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bots import protocol
from bots.agent.agent import Agent, AgentSettings
from bots.agent.attempts.attempt import Assignment, RunContext
from bots.agent.attempts.run import Run
from bots.agent.workspace import marked_processes
from bots.protocol import OpenSession, OutputReport, Sync
from schema import clock
from schema.validation import MAX_OUTPUT_BYTES
from tests.support.http import Answer, ReceivedRequest, gateway
from tests.support.patience import MINUTE

TOKEN = "lh_bot_1_secret"


class Pool:
    """The gateway's side of the protocol: hands out the leases that a test grants, and records the agent's calls."""

    def __init__(self, *, ttl: float = 30.0, sync_in: float = 5.0) -> None:
        self.ttl, self.sync_in = ttl, sync_in
        self.changed = threading.Condition()
        self.leases: dict[tuple[str, int], dict[str, Any]] = {}
        #: Those that the latest answer has told the agent of.
        self.told: set[tuple[str, int]] = set()
        self.drain = False
        self.opened: list[OpenSession] = []
        self.syncs: list[Sync] = []
        self.streamed: list[OutputReport] = []
        self.outcomes: dict[tuple[str, int], dict[str, Any]] = {}
        self.output: dict[tuple[str, int], bytearray] = {}
        #: A test's own answer to a request; None for the usual one.
        self.instead: Callable[[ReceivedRequest], Answer | None] = lambda _: None
        self.closing = False
        #: Calls that wait for news at the moment.
        self.held = 0

    def grant(self, *command: str, job: str = "job-1", fence: int = 1, **more: Any) -> tuple[str, int]:
        work = {"payload": {"command": list(command)}, "timeout": None} | more
        lease = {"job": job, "fence": fence, "state": "pending", "instance": "tenant", "attempt": 1, **work}
        with self.changed:
            self.leases[job, fence] = lease
            self.changed.notify_all()
        return job, fence

    def change(self, **facts: Any) -> None:
        with self.changed:
            for name, value in facts.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def cancel(self, key: tuple[str, int], *, reason: str = "cancel") -> None:
        with self.changed:
            self.leases[key] |= {"state": "cancelling", "stop_reason": reason}
            self.changed.notify_all()

    def revoke(self, key: tuple[str, int]) -> None:
        with self.changed:
            del self.leases[key]
            self.changed.notify_all()

    def until(self, condition: Callable[[], Any], *, within: float = MINUTE) -> Any:
        give_up = clock.monotonic() + within
        with self.changed:
            while not (found := condition()):
                assert self.changed.wait(min(0.05, give_up - clock.monotonic())) or clock.monotonic() < give_up, (
                    self.syncs[-3:]
                )
            return found

    def reported(self, key: tuple[str, int]) -> list[str]:
        """The states in which the agent reported a lease, in order, without repetitions."""
        states: list[str] = []
        for sync in self.syncs:
            for report in sync.leases:
                if (report.job, report.fence) == key and [report.state] != states[-1:]:
                    states.append(report.state)
        return states

    def __call__(self, asked: ReceivedRequest) -> Answer:
        assert asked.token == f"Bearer {TOKEN}"
        with self.changed:
            answer = self.instead(asked)
            if answer is None:
                match asked.path:
                    case "/v1/sessions":
                        answer = self._open(OpenSession.model_validate(asked.body))
                    case "/v1/sync":
                        answer = self._sync(Sync.model_validate(asked.body))
                    case "/v1/output":
                        answer = self._output(OutputReport.model_validate(asked.body))
                    case other:
                        raise AssertionError(other)
            self.changed.notify_all()
            return answer

    def _open(self, request: OpenSession) -> Answer:
        self.opened.append(request)
        session = {"bot": request.bot, "epoch": len(self.opened), "secret": "s"}
        return Answer({**session, "expires_in": self.ttl, "sync_in": self.sync_in})

    def _sync(self, sync: Sync) -> Answer:
        self.syncs.append(sync)
        self.changed.notify_all()
        for report in sync.leases:
            key = (report.job, report.fence)
            self._keep(key, report.output)
            if report.state == "completed" and self.leases.pop(key, None):
                assert report.outcome is not None
                self.outcomes[key] = report.outcome.model_dump(exclude_none=True)
            elif report.state == "active" and self.leases.get(key, {}).get("state") == "pending":
                self.leases[key] |= {"state": "active", "payload": None}
        drain = self.drain
        began = clock.monotonic()
        if sync.wait:
            give_up = began + sync.wait
            self.held += 1
            while not (self.leases or drain != self.drain or self.closing) and clock.monotonic() < give_up:
                self.changed.wait(give_up - clock.monotonic())
            self.held -= 1
        leases = [] if sync.status == "gone" else list(self.leases.values())
        left_out = self._left_out(sync)
        leases = [lease for lease in leases if (lease["job"], lease["fence"]) not in left_out]
        clocks = {"expires_in": clock.monotonic() - began + self.ttl, "sync_in": self.sync_in}
        self.told = set(self.leases)
        return Answer({"seq": sync.seq, "leases": leases, "drain": self.drain, "unlisted": len(left_out), **clocks})

    def _left_out(self, sync: Sync) -> set[tuple[str, int]]:
        """The leases that neither the bot nor the answer lists: it was told of them before, and they are pending."""
        listed = {(report.job, report.fence) for report in sync.leases}
        left_out = {key for key in self.told & set(self.leases) - listed if self.leases[key]["state"] == "pending"}
        return left_out if len(left_out) == sync.unlisted else set()

    def _output(self, report: OutputReport) -> Answer:
        self.streamed.append(report)
        self._keep((report.job, report.fence), report.output)
        return Answer(b"", 204)

    def _keep(self, key: tuple[str, int], chunks: Any) -> None:
        kept = self.output.setdefault(key, bytearray())
        for chunk in chunks:
            data = base64.b64decode(chunk.data)
            assert chunk.start <= len(kept), "a gap in the output"
            kept[chunk.start : chunk.start + len(data)] = data


class Bot:
    """An agent in a thread."""

    def __init__(self, url: str, settings: AgentSettings) -> None:
        self.agent = Agent(settings, url, TOKEN, chance=Random(1))
        self.code: int | None = None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.code = self.agent.run()
        except BaseException as failure:
            self.failure = failure

    def end(self, *, within: float = MINUTE) -> int | None:
        self.thread.join(within)
        assert not self.thread.is_alive(), "the agent still runs"
        return self.code


def settings(tmp_path: Path, **more: Any) -> AgentSettings:
    basics = {"name": "bot-1", "work_dir": tmp_path / "work", "kill_grace": 0.3, "output_interval": 0.05}
    # Other accounts can enter neither pytest's directories nor, always, the one of the interpreter.
    basics["job_user"] = "agent"
    return AgentSettings.model_validate(basics | more)


@contextmanager
def serving(pool: Pool, tmp_path: Path, **more: Any) -> Iterator[Bot]:
    with gateway(pool) as stands:
        bot = Bot(stands.url, settings(tmp_path, **more))
        try:
            yield bot
        finally:
            pool.change(closing=True)
            bot.agent.leave()
            bot.end()
            assert not marked_processes(tmp_path / "work" / "bot-1"), "something is left running"


#: An agent in a process of its own; its arguments are the URL of the gateway and its settings.
PROGRAM = """
import sys
from bots.agent.agent import Agent, AgentSettings
settings = AgentSettings.model_validate_json(sys.argv[2])
sys.exit(Agent(settings, sys.argv[1], sys.stdin.read().strip(), adopt=True).run())
"""


@contextmanager
def agent_process(
    url: str, directory: Path, *, before: str = "", open_files: str = "unlimited", **more: Any
) -> Iterator["subprocess.Popen[str]"]:
    """Run an agent with these settings, and kill it at the end. It writes `agent.log`. before: what it does first."""
    given = {"name": "bot-1", "work_dir": str(directory / "work"), "job_user": "agent", **more}
    limited = ["sh", "-c", f'test {open_files} = unlimited || ulimit {open_files}; exec "$@"', "sh"]
    command = [*limited, sys.executable, "-c", before + PROGRAM, url, json.dumps(given)]
    with open(directory / "agent.log", "a") as log:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log, text=True)
    try:
        assert started.stdin is not None
        started.stdin.write(TOKEN)
        started.stdin.close()
        yield started
    finally:
        started.kill()
        started.wait()


def processes(tmp_path: Path, name: str = "bot-1") -> set[int]:
    return marked_processes(tmp_path / "work" / name)


# Running one command of a lease


#: A program that leaves its session, drops its environment and closes its files, to escape from its parent.
RUNAWAY = (
    "import os,sys\n"
    "if os.fork(): os._exit(0)\n"
    "os.setsid()\n"
    "if os.fork(): os._exit(0)\n"
    "os.chdir('/'); os.closerange(0, 64)\n"
    "os.execve('/bin/sleep', ['sleep', sys.argv[1]], {})\n"
)


def start(place: RunContext, *command: str, timeout: float | None = None, **payload: Any) -> Run:
    assignment = Assignment(
        job="a-job",
        fence=7,
        attempt=2,
        instance="tenant",
        timeout=timeout,
        payload={"command": list(command), **payload},
    )
    run = Run(assignment, place, notify=lambda: None)
    run.start()
    return run


def finish(run: Run, *, within: float = MINUTE) -> protocol.Outcome:
    assert run.over.wait(within), "the run is not over"
    assert run.outcome is not None
    return run.outcome


def text_of(run: Run) -> str:
    return b"".join(base64.b64decode(chunk.data) for chunk in run.output.pending(MAX_OUTPUT_BYTES).chunks).decode()


def sleeping(seconds: str) -> list[int]:
    """Ids of processes that run `sleep <seconds>`. Each test uses another number of seconds."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


#: The `pytestmark` of modules that read the kernel's list of processes.
NEEDS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="process trees are watched through /proc")
