"""An agent as a process of its own, with the signals that reach it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schema import clock
from tests.agents import TOKEN, Pool, processes, serving
from tests.proc import NEEDS_PROC
from tests.scripted import Gateway, gateway

pytestmark = NEEDS_PROC


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
