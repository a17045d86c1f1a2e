"""An agent's settings and the name it gives itself."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bots.agent.agent import AgentSettings, legal_name
from bots.agent.guardian import process_tree
from bots.agent.workspace import Workspace
from ops.chaos.members import bot_parts
from schema import clock, validation
from tests.support.agents import (
    NEEDS_PROC,
    RUNAWAY,
    TOKEN,
    Bot,
    Pool,
    processes,
    serving,
    settings,
    sleeping,
)
from tests.support.http import Gateway, ReceivedRequest, gateway, problem
from tests.support.patience import MINUTE


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
    assert validation.NAME.fullmatch(name)


def test_settings_have_defaults_and_refuse_what_is_unknown() -> None:
    assert AgentSettings().bot == legal_name(os.uname().nodename)
    assert AgentSettings().directory.name == f"leasehold-{os.getuid()}"
    assert AgentSettings(capacity=10_000).capacity == 10_000
    with pytest.raises(ValueError, match="capacity"):
        AgentSettings(capacity=10_001)
    with pytest.raises(ValueError, match="capacty"):
        AgentSettings.model_validate({"capacty": 2})


# An agent as a process of its own, with the signals that reach it.


pytestmark = NEEDS_PROC


PROGRAM = """
import sys
from pathlib import Path
from bots.agent.agent import Agent, AgentSettings
settings = AgentSettings(
    name="bot-1", work_dir=Path(sys.argv[2]), margin=float(sys.argv[3]), capacity=int(sys.argv[4]), job_user="agent"
)
sys.exit(Agent(settings, sys.argv[1], sys.stdin.read().strip(), adopt=True).run())
"""
#: Makes the kernel give SIGTERM to a thread that is not the main one: all others block it.
ANOTHER_THREAD_GETS_SIGTERM = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""


@contextmanager
def process(
    stands: Gateway,
    tmp_path: Path,
    *,
    margin: float = 3.0,
    capacity: int = 1,
    open_files: str = "unlimited",
    before: str = "",
) -> Iterator[subprocess.Popen[str]]:
    arguments = [stands.url, str(tmp_path / "work"), str(margin), str(capacity)]
    limited = ["sh", "-c", f'test {open_files} = unlimited || ulimit {open_files}; exec "$@"', "sh"]
    with open(tmp_path / "agent.log", "a") as log:
        started = subprocess.Popen(
            [*limited, sys.executable, "-c", before + PROGRAM, *arguments], stdin=subprocess.PIPE, stderr=log, text=True
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


def test_a_signal_that_another_thread_receives_drains_the_agent_too(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path, before=ANOTHER_THREAD_GETS_SIGTERM) as agent:
        pool.until(lambda: pool.held)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(MINUTE) == 0
    assert pool.syncs[-1].status == "gone"


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


def watchers(agent: subprocess.Popen[str]) -> list[int]:
    """The agent's guardian and the supervisor of its one command."""
    tree = process_tree()
    [guardian] = tree[agent.pid]
    [supervisor] = tree[guardian]
    return [guardian, supervisor]


def test_when_guardian_and_supervisor_are_killed_the_lease_ends_after_the_last_process_and_the_session_goes_on(
    tmp_path: Path,
) -> None:
    pool = Pool(sync_in=0.1)
    left: list[list[int]] = []

    def look(asked: ReceivedRequest) -> None:
        if any(lease["state"] == "completed" for lease in asked.body.get("leases", ())):
            left.append(sleeping("1011"))

    pool.instead = look
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        script = f'{sys.executable} -c "$RUNAWAY" 1011; setsid sleep 1011 & sleep 1011'
        payload = {"command": ["sh", "-c", script], "env": {"RUNAWAY": RUNAWAY}}
        key = pool.grant(payload=payload)
        pool.until(lambda: len(sleeping("1011")) == 3)
        for watcher in watchers(agent):
            os.kill(watcher, signal.SIGKILL)
        outcome = pool.until(lambda: pool.outcomes.get(key))
        assert (outcome["verdict"], outcome["reason"]) == (
            "error",
            "the process that supervised the command was killed",
        )
        assert left[0] == []
        following = pool.grant("true", job="following")
        assert pool.until(lambda: pool.outcomes.get(following))["verdict"] == "succeeded"
        assert len(pool.opened) == 1
        assert len(process_tree()[agent.pid]) == 1, "the agent has not collected what it adopted"


def test_fault_runs_take_no_supervisor_that_the_agent_has_adopted_for_a_guardian(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        pool.grant("sleep", "1015")
        pool.until(lambda: sleeping("1015"))
        before = bot_parts(agent.pid)
        os.kill(before.guardians[0], signal.SIGKILL)
        pool.until(lambda: bot_parts(agent.pid).guardians not in (before.guardians, []))
        after = bot_parts(agent.pid)
        assert (len(before.guardians), len(after.guardians)) == (1, 1)
        assert after.supervisors == before.supervisors
        assert after.commands == before.commands == sleeping("1015")


def test_children_that_an_agents_process_had_before_are_no_orphans(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    mate = "import subprocess; subprocess.Popen(['sleep', '1012'])"
    with gateway(pool) as stands, process(stands, tmp_path, before=mate) as agent:
        key = pool.grant("sleep", "1013")
        pool.until(lambda: sleeping("1013"))
        [mates] = sleeping("1012")
        guardian = next(child for child in process_tree()[agent.pid] if child != mates)
        for watcher in [guardian, *process_tree()[guardian]]:
            os.kill(watcher, signal.SIGKILL)
        pool.until(lambda: pool.outcomes.get(key))
        assert (sleeping("1012"), sleeping("1013")) == ([mates], [])
        os.kill(mates, signal.SIGKILL)


def test_a_command_that_stops_what_watches_over_it_dies_with_its_agent_and_the_next_agent_starts(
    tmp_path: Path,
) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        pool.grant("sh", "-c", "sleep 1014 & while :; do kill -STOP $PPID; done")
        pool.until(lambda: sleeping("1014"))
        guardian, _ = watchers(agent)
        os.kill(guardian, signal.SIGSTOP)
        agent.kill()
    later = Workspace(tmp_path / "work", "bot-1")
    later.clear()
    assert not sleeping("1014")
    later.close()


def test_an_agent_started_anew_in_its_place_says_that_its_last_session_is_dead(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, process(stands, tmp_path) as agent:
        pool.until(lambda: pool.syncs)
        agent.kill()
    with serving(pool, tmp_path):
        pool.until(lambda: len(pool.opened) == 2)
    assert [request.dead_session for request in pool.opened] == [None, hashlib.sha256(b"s").hexdigest()]
    assert not any(request.cut_off for request in pool.opened), "a job may have killed the first agent"


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
    pool = Pool(ttl=14, sync_in=0.1)
    with gateway(pool) as stands, process(stands, tmp_path, margin=10) as agent:
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


# How an agent stops: it is asked to drain, it runs out of time, or it is told a second time.


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
        flag = tmp_path / "flag"
        key = pool.grant("sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        pool.until(lambda: pool.syncs[-1].status == "draining")
        flag.touch()
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
        pool.until(lambda: pool.held)
        bot.agent.drain()
        assert bot.end() == 0
        assert pool.held == 1
        pool.change(closing=True)
    assert pool.syncs[-1].status == "gone"


def test_a_drain_while_the_gateway_is_away_ends_too(tmp_path: Path) -> None:
    with gateway(lambda _: problem(503, "starting")) as stands:
        bot = Bot(stands.url, settings(tmp_path))
        bot.agent.drain()
        assert bot.end() == 0


def test_a_drain_that_cannot_deliver_its_results_says_how_many_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.agent.session.STUCK_AFTER", 0.2)
    monkeypatch.setattr("bots.agent.session.FAREWELL", 0.2)
    pool = Pool(sync_in=0.1)
    limits = {"capacity": 3, "drain_seconds": 0.3, "kill_grace": 0.1}
    with capture_logs() as logs, serving(pool, tmp_path, **limits) as bot:
        flag = tmp_path / "flag"
        script = f"while ! test -e {flag}; do sleep 0.02; done"
        ended = [pool.grant("sh", "-c", script, job=f"job-{number}") for number in range(2)]
        endless = pool.grant("sleep", "60", job="endless")
        pool.until(lambda: all("active" in pool.reported(key) for key in [*ended, endless]))
        pool.change(instead=lambda _: problem(503, "away"))
        flag.touch()
        bot.agent.drain()
        assert bot.end() == 1
        assert not processes(tmp_path)
    assert pool.outcomes == {}
    assert [line["results"] for line in logs if "could not be delivered" in line["event"]] == [2]


def test_results_that_the_session_outlived_while_the_gateway_was_away_are_missed_when_the_agent_leaves(
    tmp_path: Path,
) -> None:
    pool = Pool(ttl=3, sync_in=0.1)
    with serving(pool, tmp_path) as bot:
        flag = tmp_path / "flag"
        key = pool.grant("sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done")
        pool.until(lambda: "active" in pool.reported(key))
        pool.change(instead=lambda _: problem(503, "away"))
        flag.touch()
        bot.agent.drain()
        assert bot.end() == 1


def test_an_agent_that_leaves_at_once_reports_what_had_ended_and_gives_the_rest_back(tmp_path: Path) -> None:
    pool = Pool(sync_in=10)
    with serving(pool, tmp_path, capacity=2) as bot:
        flag = tmp_path / "flag"
        ended = pool.grant("sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done", job="ended")
        endless = pool.grant("sleep", "60", job="endless")
        pool.until(lambda: all("active" in pool.reported(key) for key in (ended, endless)))
        pool.instead = lambda asked: None if asked.body.get("status") == "gone" else problem(503, "busy")
        running = len(processes(tmp_path))
        flag.touch()
        pool.until(lambda: len(processes(tmp_path)) < running)
        pool.until(lambda: len(list((tmp_path / "work" / "bot-1").iterdir())) == 1)
        bot.agent.leave()
        assert bot.end() == 130
    assert (pool.outcomes[ended]["verdict"], pool.outcomes[endless]["verdict"]) == ("succeeded", "released")
    assert pool.syncs[-1].status == "gone"


def test_a_second_wish_to_leave_kills_all_work_at_once(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, kill_grace=60) as bot:
        key = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        bot.agent.leave()
        assert bot.end() == 130
    assert pool.outcomes[key]["verdict"] == "released"
    assert pool.syncs[-1].status == "gone"
