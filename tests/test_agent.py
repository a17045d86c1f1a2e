"""The reference bot against a gateway whose side of the protocol is scripted; commands and HTTP are real."""

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scripted import Answer, Asked, Gateway, gateway, problem

from bots.agent import Agent, AgentSettings, legal_name
from bots.heartbeat import Heartbeat
from bots.output import CHUNK_BYTES
from bots.protocol import OpenSession, OutputReport, Sync
from bots.workplace import marked_processes
from schema import clock, limits
from schema.errors import BadInput

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are watched through /proc")

TOKEN = "lh_bot_1_secret"


class Pool:
    """The gateway's side: hands out the leases a test grants and writes down what the bot says."""

    def __init__(self, *, ttl: float = 30.0, sync_in: float = 5.0) -> None:
        self.ttl, self.sync_in = ttl, sync_in
        self.changed = threading.Condition()
        self.leases: dict[tuple[str, int], dict[str, Any]] = {}
        self.drain = False
        self.opened: list[OpenSession] = []
        self.syncs: list[Sync] = []
        self.streamed: list[OutputReport] = []
        self.outcomes: dict[tuple[str, int], dict[str, Any]] = {}
        self.output: dict[tuple[str, int], bytearray] = {}
        #: A test may answer instead: return None to go on.
        self.instead: Callable[[Asked], Answer | None] = lambda _: None
        self.closing = False

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

    def cancel(self, key: tuple[str, int]) -> None:
        with self.changed:
            self.leases[key]["state"] = "cancelling"
            self.changed.notify_all()

    def revoke(self, key: tuple[str, int]) -> None:
        with self.changed:
            del self.leases[key]
            self.changed.notify_all()

    def until(self, condition: Callable[[], Any], *, within: float = 5.0) -> Any:
        give_up = clock.monotonic() + within
        with self.changed:
            while not (found := condition()):
                assert self.changed.wait(min(0.05, give_up - clock.monotonic())) or clock.monotonic() < give_up, (
                    self.syncs[-3:]
                )
            return found

    def reported(self, key: tuple[str, int]) -> list[str]:
        """The states a lease was reported in, one after the other."""
        states: list[str] = []
        for sync in self.syncs:
            for report in sync.leases:
                if (report.job, report.fence) == key and [report.state] != states[-1:]:
                    states.append(report.state)
        return states

    def __call__(self, asked: Asked) -> Answer:
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
        if sync.wait:
            give_up = clock.monotonic() + sync.wait
            while not (self.leases or drain != self.drain or self.closing) and clock.monotonic() < give_up:
                self.changed.wait(give_up - clock.monotonic())
        leases = [] if sync.status == "gone" else list(self.leases.values())
        clocks = {"expires_in": self.ttl, "sync_in": self.sync_in}
        return Answer({"seq": sync.seq, "leases": leases, "drain": self.drain, **clocks})

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

    def end(self, *, within: float = 5.0) -> int | None:
        self.thread.join(within)
        assert not self.thread.is_alive(), "the agent still runs"
        return self.code


def settings(tmp_path: Path, **more: Any) -> AgentSettings:
    basics = {"name": "bot-1", "work_dir": tmp_path / "work", "kill_grace": 0.3, "output_interval": 0.05}
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
            bot.end(within=15)
            assert not marked_processes(tmp_path / "work" / "bot-1"), "something is left running"


def processes(tmp_path: Path, name: str = "bot-1") -> set[int]:
    return marked_processes(tmp_path / "work" / name)


def test_a_lease_is_acknowledged_when_it_runs_and_reported_when_it_has_ended(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, capacity=3, properties={"os": "linux"}, instance="tenant", priority=4):
        key = pool.grant("sh", "-c", "echo hello; sleep 0.2; echo $LEASEHOLD_JOB $LEASEHOLD_BOT")
        outcome = pool.until(lambda: pool.outcomes.get(key))
        pool.until(lambda: pool.syncs[-1].wait)
    assert (outcome["verdict"], outcome["exit_code"], outcome["output_bytes"]) == ("succeeded", 0, 18)
    assert bytes(pool.output[key]) == b"hello\njob-1 bot-1\n"
    assert pool.reported(key)[-2:] == ["active", "completed"]
    [opened] = pool.opened
    assert (opened.bot, opened.capacity, opened.properties, opened.instance, opened.priority) == (
        "bot-1",
        3,
        {"os": "linux"},
        "tenant",
        4,
    )
    assert [sync.seq for sync in pool.syncs] == list(range(1, len(pool.syncs) + 1))
    assert all((sync.wait > 0) == (not sync.leases) for sync in pool.syncs if sync.status == "ok")
    assert max(sync.wait for sync in pool.syncs) <= pool.ttl / 3


def test_ten_short_jobs_one_after_the_other_need_no_timer(tmp_path: Path) -> None:
    pool = Pool(sync_in=10)
    with serving(pool, tmp_path):
        began = clock.monotonic()
        for number in range(10):
            key = pool.grant("true", job=f"job-{number}")
            pool.until(lambda key=key: key in pool.outcomes)
        assert clock.monotonic() - began < 3
        assert len(pool.syncs) < 40


def test_a_bot_with_room_gets_another_lease_at_its_next_sync(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path, capacity=2):
        long = pool.grant("sleep", "60", job="long")
        pool.until(lambda: "active" in pool.reported(long))
        short = pool.grant("true", job="short")
        pool.until(lambda: short in pool.outcomes)
        assert long not in pool.outcomes


def test_a_call_without_an_answer_is_repeated_word_for_word(tmp_path: Path) -> None:
    pool = Pool()
    failures = [Answer(cut=True), problem(503, "starting"), problem(500, "internal"), Answer(b"<html>")]
    seen: list[Any] = []

    def instead(asked: Asked) -> Answer | None:
        if asked.path == "/v1/sync" and any(lease["state"] == "completed" for lease in asked.body["leases"]):
            seen.append(asked.body)
            return failures.pop() if failures else None
        return None

    pool.instead = instead
    with serving(pool, tmp_path):
        key = pool.grant("true")
        pool.until(lambda: key in pool.outcomes)
    assert len(seen) == 5
    assert all(body == seen[0] for body in seen)


def test_a_cancelled_lease_is_killed_and_confirmed(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path):
        key = pool.grant("sh", "-c", "trap '' TERM; setsid sleep 60 & sleep 60")
        pool.until(lambda: len(processes(tmp_path)) >= 3)
        pool.cancel(key)
        outcome = pool.until(lambda: pool.outcomes.get(key))
        assert outcome["verdict"] == "stopped"
        assert not processes(tmp_path)


def test_a_lease_that_is_cancelled_before_the_bot_knew_it_is_confirmed_without_running(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path):
        key = pool.grant("touch", str(tmp_path / "ran"), state="cancelling")
        assert pool.until(lambda: pool.outcomes.get(key)) == {"verdict": "stopped", "output_truncated": False}
    assert not (tmp_path / "ran").exists()


def test_a_lease_that_is_not_listed_any_more_is_killed_and_forgotten(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path):
        key = pool.grant("sleep", "60")
        pool.until(lambda: processes(tmp_path))
        pool.revoke(key)
        pool.until(lambda: not processes(tmp_path))
        pool.until(lambda: pool.syncs[-1].wait and not pool.syncs[-1].leases)
    assert "completed" not in pool.reported(key)


def test_the_next_grant_of_a_job_waits_until_the_last_one_is_dead(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.05)
    log = tmp_path / "log"
    command = ["sh", "-c", f"echo start $LEASEHOLD_FENCE >> {log}; trap 'sleep 0.1; exit' TERM; sleep 0.2; exit 0"]
    with serving(pool, tmp_path):
        first = pool.grant("sh", "-c", "sleep 60")
        pool.until(lambda: processes(tmp_path))
        with pool.changed:
            pool.leases = {}
            second = pool.grant(*command, fence=3)
        pool.until(lambda: second in pool.outcomes)
        assert log.read_text() == "start 3\n"
        assert first not in pool.outcomes


def test_a_payload_that_cannot_run_and_a_missing_one_are_reported(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, capacity=2):
        bad = pool.grant(job="bad")
        missing = pool.grant(job="missing", payload=None)
        pool.until(lambda: {bad, missing} <= set(pool.outcomes))
    assert pool.outcomes[bad]["verdict"] == "failed"
    assert pool.outcomes[bad]["reason"].startswith("invalid payload: command")
    assert pool.outcomes[missing]["reason"] == "the lease came without a payload"


def test_output_is_streamed_while_the_command_runs(tmp_path: Path) -> None:
    pool = Pool(sync_in=30)
    with serving(pool, tmp_path):
        key = pool.grant("sh", "-c", "echo one; sleep 0.3; echo two; sleep 60")
        pool.until(lambda: bytes(pool.output.get(key, b"")) == b"one\ntwo\n")
        assert [chunk.start for report in pool.streamed for chunk in report.output] == [0, 4]


def test_output_that_could_not_be_streamed_travels_with_the_reports_of_the_ends(tmp_path: Path) -> None:
    pool = Pool()
    pool.instead = lambda asked: problem(503, "busy") if asked.path == "/v1/output" else None
    size = limits.MAX_OUTPUT_BYTES - CHUNK_BYTES // 2
    with serving(pool, tmp_path, capacity=3):
        keys = [pool.grant("head", "-c", str(size), "/dev/zero", job=f"job-{number}") for number in range(3)]
        pool.until(lambda: set(keys) <= set(pool.outcomes))
    assert [len(pool.output[key]) for key in keys] == [size] * 3
    for sync in pool.syncs:
        assert sum(len(chunk.data) for lease in sync.leases for chunk in lease.output) < 1.4 * limits.MAX_OUTPUT_BYTES


def test_a_bot_that_is_asked_to_drain_takes_no_new_work_until_it_is_asked_to_go_on(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path, capacity=2):
        running = pool.grant("sleep", "60", job="running")
        pool.until(lambda: processes(tmp_path))
        with pool.changed:
            pool.drain = True
            refused = pool.grant("true", job="refused")
        assert pool.until(lambda: pool.outcomes.get(refused))["verdict"] == "released"
        pool.until(lambda: pool.syncs[-1].status == "draining")
        assert running not in pool.outcomes
        pool.change(drain=False)
        pool.until(lambda: pool.syncs[-1].status == "ok")
        taken = pool.grant("true", job="taken")
        assert pool.until(lambda: pool.outcomes.get(taken))["verdict"] == "succeeded"


def test_a_drained_agent_ends_its_work_closes_its_session_and_exits_with_0(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path) as bot:
        key = pool.grant("sh", "-c", "sleep 0.5; echo done")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        assert bot.end() == 0
    assert pool.outcomes[key]["verdict"] == "succeeded"
    assert [sync.status for sync in pool.syncs][-2:] == ["draining", "gone"]
    assert pool.syncs[-1].leases == []


def test_work_that_outlasts_the_drain_is_killed_and_given_back(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, drain_seconds=0.3) as bot:
        key = pool.grant("sleep", "60")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        assert bot.end() == 0
    assert pool.outcomes[key]["verdict"] == "released"
    assert pool.syncs[-1].status == "gone"


def test_an_idle_agent_leaves_without_waiting_for_its_long_poll(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path) as bot:
        pool.until(lambda: pool.syncs and pool.syncs[-1].wait)
        bot.agent.drain()
        assert bot.end(within=2) == 0
        pool.change(closing=True)
    assert pool.syncs[-1].status == "gone"


def test_a_drain_while_the_gateway_is_away_ends_too(tmp_path: Path) -> None:
    with gateway(lambda _: problem(503, "starting")) as stands:
        bot = Bot(stands.url, settings(tmp_path))
        bot.agent.drain()
        assert bot.end() == 0


def test_a_second_wish_to_leave_kills_all_work_at_once(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, kill_grace=60) as bot:
        key = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        bot.agent.leave()
        assert bot.end() == 130
    assert key not in pool.outcomes
    assert pool.syncs[-1].status == "gone"


def test_the_older_of_two_agents_kills_its_work_and_stops(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path, kill_grace=60) as bot:
        pool.grant("sleep", "60")
        pool.until(lambda: processes(tmp_path))
        pool.change(instead=lambda _: problem(409, "a newer session is open", code="session_superseded"))
        assert bot.end() == 4
        assert not processes(tmp_path)
    assert len(pool.opened) == 1


@pytest.mark.parametrize("code", ["session_over", "stale_seq"])
def test_a_session_the_server_does_not_know_any_more_is_replaced(tmp_path: Path, code: str) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path):
        lost = pool.grant("sleep", "60")
        pool.until(lambda: processes(tmp_path))
        first = processes(tmp_path)
        alive_at_opening: list[set[int]] = []

        def instead(asked: Asked) -> Answer | None:
            if asked.path == "/v1/sync" and asked.body["epoch"] == 1:
                pool.leases.pop(lost, None)
                return problem(409, "this session is over", code=code)
            if asked.path == "/v1/sessions":
                alive_at_opening.append(first & processes(tmp_path))
            return None

        pool.change(instead=instead)
        pool.until(lambda: len(pool.opened) == 2 and pool.syncs[-1].epoch == 2)
        assert alive_at_opening == [set()]
    assert next(sync.seq for sync in pool.syncs if sync.epoch == 2) == 1
    assert lost not in pool.outcomes


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sync"])
def test_an_agent_that_is_refused_stops_with_2(tmp_path: Path, status: int, path: str) -> None:
    pool = Pool()
    pool.instead = lambda asked: problem(status, "this token is not yours") if asked.path == path else None
    with serving(pool, tmp_path) as bot:
        assert bot.end() == 2


def test_work_is_killed_before_the_server_gives_it_away_also_while_a_call_hangs(tmp_path: Path) -> None:
    pool = Pool(ttl=1.0, sync_in=0.1)
    hanging, released = threading.Event(), threading.Event()
    with serving(pool, tmp_path, kill_grace=60) as bot:
        key = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
        pool.until(lambda: "active" in pool.reported(key))

        def instead(asked: Asked) -> Answer | None:
            if asked.path == "/v1/sync" and not released.is_set() and not hanging.is_set():
                hanging.set()
                pool.changed.wait_for(released.is_set, 10)
                return Answer(cut=True)
            return None if released.is_set() else Answer(cut=True)

        pool.change(instead=instead)
        assert hanging.wait(5)
        began = clock.monotonic()
        pool.until(lambda: not processes(tmp_path))
        assert clock.monotonic() - began < 1.0
        with pool.changed:
            pool.leases = {}
            released.set()
            pool.changed.notify_all()
        pool.until(lambda: len(pool.opened) == 2)
        assert bot.code is None
    assert "completed" not in pool.reported(key)
    last_of_the_old = [sync for sync in pool.syncs if sync.epoch == 1][-1]
    assert (last_of_the_old.status, last_of_the_old.leases) == ("gone", [])


def test_an_agent_whose_session_expired_does_not_take_over_from_a_newer_one(tmp_path: Path) -> None:
    pool = Pool(ttl=0.6, sync_in=0.1)
    with serving(pool, tmp_path) as bot:
        pool.until(lambda: pool.syncs)

        def instead(asked: Asked) -> Answer:
            if asked.path == "/v1/sync" and asked.body["status"] == "gone":
                return problem(409, "a newer session is open", code="session_superseded")
            return problem(503, "away")

        pool.change(instead=instead, closing=True)
        assert bot.end() == 4
    assert len(pool.opened) == 1


def test_a_margin_as_long_as_the_session_is_refused(tmp_path: Path) -> None:
    with serving(Pool(ttl=1.0), tmp_path, margin=1.0) as bot:
        bot.end()
        assert isinstance(bot.failure, BadInput)
        assert str(bot.failure) == "margin: 1 s is not less than the 1 s of a session"


PROGRAM = """
import sys
from pathlib import Path
from bots.agent import Agent, AgentSettings
settings = AgentSettings(name="bot-1", work_dir=Path(sys.argv[2]), margin=float(sys.argv[3]))
sys.exit(Agent(settings, sys.argv[1], sys.stdin.read().strip()).run())
"""


@contextmanager
def process(stands: Gateway, tmp_path: Path, *, margin: float = 3.0) -> Iterator[subprocess.Popen[str]]:
    arguments = [stands.url, str(tmp_path / "work"), str(margin)]
    with open(tmp_path / "agent.log", "a") as log:
        started = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert started.stdin is not None
        started.stdin.write(TOKEN)
        started.stdin.close()
        yield started
    finally:
        started.kill()
        started.wait()


def test_sigterm_drains_and_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        script = "echo private-output; sleep 60"
        pool.grant(payload={"command": ["sh", "-c", script], "env": {"SECRET": "private-environment"}})
        pool.until(lambda: processes(tmp_path), within=10)
        agent.send_signal(signal.SIGTERM)
        pool.until(lambda: pool.syncs[-1].status == "draining")
        assert processes(tmp_path)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(5) == 130
        assert not processes(tmp_path)
    log = (tmp_path / "agent.log").read_text()
    assert "lease started" in log
    assert "private" not in log
    assert TOKEN not in log


def test_kill_9_leaves_no_process_and_the_next_agent_starts_clean(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        pool.grant("sh", "-c", "trap '' TERM; setsid sleep 60 & sleep 60")
        pool.until(lambda: len(processes(tmp_path)) >= 3, within=10)
        agent.kill()
        pool.until(lambda: not processes(tmp_path), within=2)
    [left] = (tmp_path / "work" / "bot-1").iterdir()
    with serving(Pool(), tmp_path):
        pool.until(lambda: not left.exists())


def test_a_stopped_agents_work_is_killed_before_its_session_ends(tmp_path: Path) -> None:
    pool = Pool(ttl=1.5, sync_in=0.1)
    with gateway(pool) as stands, process(stands, tmp_path, margin=0.8) as agent:
        key = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
        pool.until(lambda: "active" in pool.reported(key), within=10)
        agent.send_signal(signal.SIGSTOP)
        began = clock.monotonic()
        pool.until(lambda: not processes(tmp_path))
        assert clock.monotonic() - began < 1.5
        with pool.changed:
            pool.leases = {}
        agent.send_signal(signal.SIGCONT)
        pool.until(lambda: len(pool.opened) == 2)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(5) == 0
    assert "completed" not in pool.reported(key)


def test_a_beat_after_the_deadline_does_not_revive_the_session() -> None:
    now = [100.0]
    lost = threading.Event()
    heart = Heartbeat(1.0, on_lost=lost.set, now=lambda: now[0])
    assert heart.beat(100.0, expires_in=10.0)
    now[0] = 108.9
    assert not heart.lost
    assert heart.beat(105.0, expires_in=10.0)
    now[0] = 114.0
    assert not heart.beat(113.0, expires_in=10.0)
    assert heart.lost
    heart.start()
    assert lost.wait(5)
    heart.stop()


def test_an_answer_that_took_longer_than_the_session_lives_is_late() -> None:
    heart = Heartbeat(1.0, on_lost=lambda: None, now=lambda: 100.0)
    assert not heart.beat(80.0, expires_in=10.0)


@pytest.mark.parametrize(
    ("host", "suffix", "name"),
    [
        ("Build_Farm.Example.ORG", "", "build_farm.example.org"),
        ("Käse host", "2", "k-se-host-2"),
        ("-._", "", "bot"),
        ("h" * 80, "worker-1", "h" * 54 + "-worker-1"),
    ],
)
def test_a_host_name_becomes_a_legal_bot_name(host: str, suffix: str, name: str) -> None:
    assert legal_name(host, suffix) == name
    assert limits.NAME.fullmatch(name)


def test_settings_have_defaults_and_refuse_what_is_unknown() -> None:
    assert AgentSettings().bot == legal_name(os.uname().nodename)
    assert AgentSettings().directory.name == f"leasehold-{os.getuid()}"
    with pytest.raises(ValueError, match="capacty"):
        AgentSettings.model_validate({"capacty": 2})
