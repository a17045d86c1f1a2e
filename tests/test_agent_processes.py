"""An agent as a process of its own, with the signals that reach it."""

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schema import clock
from tests.agents import TOKEN, Pool, processes, serving
from tests.patience import MINUTE
from tests.proc import NEEDS_PROC
from tests.scripted import Gateway, gateway

pytestmark = NEEDS_PROC


PROGRAM = """
import sys
from pathlib import Path
from bots.agent import Agent, AgentSettings
settings = AgentSettings(
    name="bot-1", work_dir=Path(sys.argv[2]), margin=float(sys.argv[3]), capacity=int(sys.argv[4])
)
sys.exit(Agent(settings, sys.argv[1], sys.stdin.read().strip()).run())
"""


@contextmanager
def process(
    stands: Gateway, tmp_path: Path, *, margin: float = 3.0, capacity: int = 1, open_files: str = "unlimited"
) -> Iterator[subprocess.Popen[str]]:
    arguments = [stands.url, str(tmp_path / "work"), str(margin), str(capacity)]
    limited = ["sh", "-c", f'test {open_files} = unlimited || ulimit {open_files}; exec "$@"', "sh"]
    with open(tmp_path / "agent.log", "a") as log:
        started = subprocess.Popen(
            [*limited, sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stderr=log, text=True
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
        pool.until(lambda: processes(tmp_path))
        agent.send_signal(signal.SIGTERM)
        pool.until(lambda: pool.syncs[-1].status == "draining")
        assert processes(tmp_path)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(MINUTE) == 130
        assert not processes(tmp_path)
    log = (tmp_path / "agent.log").read_text()
    assert "lease started" in log
    assert "private" not in log
    assert TOKEN not in log


def test_kill_9_leaves_no_process_and_the_next_agent_starts_clean(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        pool.grant("sh", "-c", "trap '' TERM; setsid sleep 60 & sleep 60")
        pool.until(lambda: len(processes(tmp_path)) >= 3)
        agent.kill()
        pool.until(lambda: not processes(tmp_path))
    [left] = (tmp_path / "work" / "bot-1").iterdir()
    with serving(Pool(), tmp_path):
        pool.until(lambda: not left.exists())


def test_an_agent_started_anew_in_its_place_says_that_its_last_session_is_dead(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        pool.until(lambda: pool.syncs)
        agent.kill()
    with serving(pool, tmp_path):
        pool.until(lambda: len(pool.opened) == 2)
    assert [request.dead_session for request in pool.opened] == [None, hashlib.sha256(b"s").hexdigest()]


def test_an_agent_makes_room_for_its_commands_files_but_leaves_their_limit_as_it_was(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path, capacity=40, open_files="-Sn 64"):
        keys = [pool.grant("sh", "-c", "ulimit -Sn; sleep 1", job=f"job-{number}") for number in range(40)]
        pool.until(lambda: set(keys) <= set(pool.outcomes))
    assert {outcome["verdict"] for outcome in pool.outcomes.values()} == {"succeeded"}
    assert {bytes(pool.output[key]) for key in keys} == {b"64\n"}


def test_an_agent_that_may_not_open_as_many_files_as_its_commands_need_does_not_start(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path, capacity=40, open_files="-n 300") as agent:
        assert agent.wait(MINUTE) == 1
    assert (
        "capacity: 40 needs 448 open files, and the hard limit (RLIMIT_NOFILE) is 300"
        in (tmp_path / "agent.log").read_text()
    )
    assert pool.opened == []


def test_a_stopped_agents_work_is_killed_before_its_session_ends(tmp_path: Path) -> None:
    pool = Pool(ttl=40, sync_in=0.1)
    with gateway(pool) as stands, process(stands, tmp_path, margin=36) as agent:
        key = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
        pool.until(lambda: "active" in pool.reported(key))
        agent.send_signal(signal.SIGSTOP)
        began = clock.monotonic()
        pool.until(lambda: not processes(tmp_path))
        assert clock.monotonic() - began < pool.ttl
        with pool.changed:
            pool.leases = {}
        agent.send_signal(signal.SIGCONT)
        pool.until(lambda: len(pool.opened) == 2)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(MINUTE) == 0
    assert "completed" not in pool.reported(key)
