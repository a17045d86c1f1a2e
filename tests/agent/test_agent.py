"""An agent's settings, the units that it offers, the signals that reach its process, and how it stops."""

import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bots.agent.agent import AgentSettings, legal_name
from bots.agent.attempts.endings import Unable
from bots.agent.attempts.output import Output
from bots.agent.attempts.supervisor_reader import SupervisorReader
from bots.agent.capacity import Lookahead, Machine, Sizing, this_machine, units
from bots.agent.guardian import Guardian, descendants, process_tree
from bots.agent.isolation import cgroups, privileges
from bots.agent.isolation.cgroups import Limits, limits_here
from bots.agent.workspace import Workspace
from schema import validation
from tests.support.agents import (
    NEEDS_PROC,
    RUNAWAY,
    TOKEN,
    Bot,
    Pool,
    agent_process,
    processes,
    serving,
    settings,
    sleeping,
)
from tests.support.http import ReceivedRequest, gateway, problem
from tests.support.patience import MINUTE, eventually

pytestmark = NEEDS_PROC


def waiting_for(flag: Path) -> list[str]:
    """A command that stays until the file is there."""
    return ["sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done"]


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


#: Makes the kernel give SIGTERM to a thread that is not the main one: all others block it.
ANOTHER_THREAD_GETS_SIGTERM = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""


def test_sigterm_drains_also_if_another_thread_receives_it_and_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, agent_process(stands.url, tmp_path, before=ANOTHER_THREAD_GETS_SIGTERM) as agent:
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


@pytest.mark.parametrize("detached", [False, True])
def test_an_agent_whose_terminal_closes_drains_unless_nohup_has_detached_it(tmp_path: Path, detached: bool) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" * detached
    pool, go = Pool(), tmp_path / "go"
    with gateway(pool) as stands, agent_process(stands.url, tmp_path, before=ignoring) as agent:
        pool.grant("sh", "-c", f"until test -e {go}; do sleep 0.05; done")
        pool.until(lambda: processes(tmp_path))
        agent.send_signal(signal.SIGHUP)
        if not detached:
            pool.until(lambda: pool.syncs[-1].status == "draining")
        # The shell and the kernel both tell it that the terminal is gone.
        agent.send_signal(signal.SIGTERM if detached else signal.SIGHUP)
        pool.until(lambda: pool.syncs[-1].status == "draining")
        go.touch()
        assert agent.wait(MINUTE) == 0
        assert [each["verdict"] for each in pool.outcomes.values()] == ["succeeded"]


class ScarceThreads:
    """Lets no thread of some names start, as the kernel does where a job has taken all processes that there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: How many of them are still refused, by the beginning of their names.
        self.left: dict[str, int] = {}
        start = threading.Thread.start

        def start_unless_scarce(thread: threading.Thread) -> None:
            for name, left in self.left.items():
                if thread.name.startswith(name) and left:
                    self.left[name] -= 1
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_unless_scarce)


def test_a_bot_goes_on_where_a_job_leaves_it_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scarce, pool = ScarceThreads(monkeypatch), Pool(sync_in=0.1)
    with serving(pool, tmp_path, capacity=3) as bot:
        running = pool.grant("sh", "-c", "until test -e go; do sleep 0.05; done; echo goes on", job="running")
        # Not earlier: the agent has made a directory for a trial before its session.
        pool.until(lambda: "active" in pool.reported(running))
        (work,) = (tmp_path / "work" / "bot-1").glob("attempt-*/tmp")
        scarce.left |= {"call": 2, "run-waits": 3, "run-cancelled": 1000, "removal": 1}
        waits, cancelled = pool.grant("true", job="waits"), pool.grant("true", job="cancelled")
        pool.until(lambda: waits in pool.outcomes)
        pool.until(lambda: "pending" in pool.reported(cancelled))
        pool.cancel(cancelled)
        pool.until(lambda: cancelled in pool.outcomes)
        (work.parent / "go").touch()
        pool.until(lambda: running in pool.outcomes)
        later = pool.grant("true", job="later")
        pool.until(lambda: later in pool.outcomes)
        # What the first could not remove for want of a thread went with the next.
        eventually(lambda: not list((tmp_path / "work" / "bot-1.trash").iterdir()))
    assert bot.failure is None
    assert {name: left for name, left in scarce.left.items() if name != "run-cancelled"} == {
        "call": 0, "run-waits": 0, "removal": 0
    }  # fmt: skip
    assert [pool.outcomes[key]["verdict"] for key in (running, waits, later)] == ["succeeded"] * 3
    assert pool.outcomes[cancelled]["verdict"] == "stopped"
    assert len(pool.opened) == 1


def test_a_session_that_opens_while_there_are_no_threads_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce, pool = ScarceThreads(monkeypatch), Pool(sync_in=0.1)
    scarce.left |= {"heartbeat": 2, "output": 2}
    with serving(pool, tmp_path) as bot:
        job = pool.grant("true")
        pool.until(lambda: job in pool.outcomes)
    assert (bot.failure, scarce.left, len(pool.opened)) == (None, {"heartbeat": 0, "output": 0}, 1)


def test_a_guardian_goes_on_where_a_job_leaves_it_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    opened = len(os.listdir("/proc/self/fd"))
    channel, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair()
    with channel, agents, ours:
        with theirs, monkeypatch.context() as patched:
            patched.setattr("os.fork", refuse)
            socket.send_fds(agents, [b"R"], [theirs.fileno(), theirs.fileno(), theirs.fileno()])
            assert Guardian(channel)._obey()
            assert privileges.kill_account(61184, 61185) == os.strerror(errno.EAGAIN)
        reader, writer = os.pipe()
        watch = SupervisorReader(ours, reader, waker=agents, output=Output())
        watch.step(MINUTE)
        os.close(reader)
        os.close(writer)
        assert (watch.over, watch.unable) == (True, Unable(errno.EAGAIN, "[Errno 11] Resource temporarily unavailable"))
    assert len(os.listdir("/proc/self/fd")) == opened


def test_kill_9_leaves_no_process_and_the_next_agent_starts_clean_and_says_its_session_died(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, agent_process(stands.url, tmp_path, capacity=2) as agent:
        script = f"{sys.executable} -c \"$RUNAWAY\" 1008; trap '' TERM; setsid sleep 1008 & sleep 1008"
        for job in ("one", "two"):
            pool.grant(job=job, payload={"command": ["sh", "-c", script], "env": {"RUNAWAY": RUNAWAY}})
        pool.until(lambda: len(sleeping("1008")) == 6)
        below = descendants([agent.pid], process_tree())
        agent.kill()
        pool.until(lambda: not sleeping("1008") and not any(Path(f"/proc/{process}").exists() for process in below))
    left = list((tmp_path / "work" / "bot-1").iterdir())
    assert len(left) == 2
    pool.leases.clear()
    with serving(pool, tmp_path):
        pool.until(lambda: len(pool.opened) == 2 and not any(each.exists() for each in left))
    assert [request.dead_session for request in pool.opened] == [None, hashlib.sha256(b"s").hexdigest()]
    assert not any(request.cut_off for request in pool.opened), "a job may have killed the first agent"


def watchers(agent: subprocess.Popen[str]) -> list[int]:
    """The agent's guardian and the supervisor of its one command."""
    tree = process_tree()
    [guardian] = tree[agent.pid]
    [supervisor] = tree[guardian]
    return [guardian, supervisor]


def test_when_guardian_and_supervisor_are_killed_the_lease_ends_after_the_last_process(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    left: list[list[int]] = []

    def look(asked: ReceivedRequest) -> None:
        if any(lease["state"] == "completed" for lease in asked.body.get("leases", ())):
            left.append(sleeping("1011"))

    pool.instead = look
    with gateway(pool) as stands, agent_process(stands.url, tmp_path) as agent:
        script = f'{sys.executable} -c "$RUNAWAY" 1011; setsid sleep 1011 & sleep 1011'
        payload = {"command": ["sh", "-c", script], "env": {"RUNAWAY": RUNAWAY}}
        key = pool.grant(payload=payload)
        pool.until(lambda: len(sleeping("1011")) == 3)
        for watcher in watchers(agent):
            os.kill(watcher, signal.SIGKILL)
        outcome = pool.until(lambda: pool.outcomes.get(key))
        reason = "the process that supervised the command was killed"
        assert (outcome["verdict"], outcome["reason"]) == ("error", reason)
        assert left[0] == []
        following = pool.grant("true", job="following")
        assert pool.until(lambda: pool.outcomes.get(following))["verdict"] == "succeeded"
        assert len(pool.opened) == 1
        assert len(process_tree()[agent.pid]) == 1, "the agent has not collected what it adopted"


def test_children_that_an_agents_process_had_before_are_no_orphans(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    mate = "import subprocess; subprocess.Popen(['sleep', '1012'])"
    with gateway(pool) as stands, agent_process(stands.url, tmp_path, before=mate) as agent:
        key = pool.grant("sleep", "1013")
        pool.until(lambda: sleeping("1013"))
        [mates] = sleeping("1012")
        guardian = next(child for child in process_tree()[agent.pid] if child != mates)
        for watcher in [guardian, *process_tree()[guardian]]:
            os.kill(watcher, signal.SIGKILL)
        pool.until(lambda: pool.outcomes.get(key))
        assert (sleeping("1012"), sleeping("1013")) == ([mates], [])
        os.kill(mates, signal.SIGKILL)


def test_a_command_that_stops_what_watches_over_it_dies_with_its_agent_and_the_next_starts(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, agent_process(stands.url, tmp_path) as agent:
        pool.grant("sh", "-c", "sleep 1014 & while :; do kill -STOP $PPID; done")
        pool.until(lambda: sleeping("1014"))
        guardian, _ = watchers(agent)
        os.kill(guardian, signal.SIGSTOP)
        agent.kill()
    later = Workspace(tmp_path / "work", "bot-1")
    later.clear()
    assert not sleeping("1014")
    later.close()


def test_an_agent_makes_room_for_its_commands_files_but_leaves_their_limit_as_it_was(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, agent_process(stands.url, tmp_path, capacity=40, open_files="-Sn 64"):
        keys = [pool.grant("sh", "-c", "ulimit -Sn; sleep 1", job=f"job-{number}") for number in range(40)]
        pool.until(lambda: set(keys) <= set(pool.outcomes))
    assert {outcome["verdict"] for outcome in pool.outcomes.values()} == {"succeeded"}
    assert {bytes(pool.output[key]) for key in keys} == {b"64\n"}


def test_an_agent_that_may_not_open_as_many_files_as_its_commands_need_does_not_start(tmp_path: Path) -> None:
    pool = Pool()
    with gateway(pool) as stands, agent_process(stands.url, tmp_path, capacity=40, open_files="-n 300") as agent:
        assert agent.wait(MINUTE) == 1
    said = "capacity: 40 needs 448 open files, and the hard limit (RLIMIT_NOFILE) is 300"
    assert said in (tmp_path / "agent.log").read_text()
    assert pool.opened == []


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
        key = pool.grant(*waiting_for(flag))
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


def test_a_drain_that_cannot_deliver_says_how_many_and_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bots.agent.session.STUCK_AFTER", 0.2)
    monkeypatch.setattr("bots.agent.session.FAREWELL", 0.2)
    pool = Pool(sync_in=0.1)
    limits = {"capacity": 3, "drain_seconds": 0.3, "kill_grace": 0.1}
    with capture_logs() as logs, serving(pool, tmp_path, **limits) as bot:
        flag = tmp_path / "flag"
        ended = [pool.grant(*waiting_for(flag), job=f"job-{number}") for number in range(2)]
        endless = pool.grant("sleep", "60", job="endless")
        pool.until(lambda: all("active" in pool.reported(key) for key in [*ended, endless]))
        pool.change(instead=lambda _: problem(503, "away"))
        flag.touch()
        bot.agent.drain()
        assert bot.end() == 1
        assert not processes(tmp_path)
    assert pool.outcomes == {}
    assert [line["results"] for line in logs if "could not be delivered" in line["event"]] == [2]


def test_results_that_outlived_their_session_while_the_gateway_was_away_are_missed(tmp_path: Path) -> None:
    pool = Pool(ttl=3, sync_in=0.1)
    with serving(pool, tmp_path) as bot:
        flag = tmp_path / "flag"
        key = pool.grant(*waiting_for(flag))
        pool.until(lambda: "active" in pool.reported(key))
        pool.change(instead=lambda _: problem(503, "away"))
        flag.touch()
        bot.agent.drain()
        assert bot.end() == 1


def test_an_agent_that_leaves_at_once_reports_what_had_ended_and_gives_the_rest_back(tmp_path: Path) -> None:
    pool = Pool(sync_in=10)
    with serving(pool, tmp_path, capacity=2, kill_grace=60) as bot:
        flag = tmp_path / "flag"
        ended = pool.grant(*waiting_for(flag), job="ended")
        endless = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done", job="endless")
        pool.until(lambda: all("active" in pool.reported(key) for key in (ended, endless)))
        pool.instead = lambda asked: None if asked.body.get("status") == "gone" else problem(503, "busy")
        flag.touch()
        pool.until(lambda: len(list((tmp_path / "work" / "bot-1").iterdir())) == 1)
        bot.agent.drain()
        bot.agent.leave()
        assert bot.end() == 130
    assert (pool.outcomes[ended]["verdict"], pool.outcomes[endless]["verdict"]) == ("succeeded", "released")
    assert pool.syncs[-1].status == "gone"


# How many units a bot offers if nobody says, and how many leases of short tasks it holds in advance


@pytest.mark.parametrize(
    ("cores", "slots", "load", "offered"),
    [
        (4, 3, 0.0, 3),
        (4, 3, 0.70, 3),
        (4, 3, 0.71, 1),
        (16, 100, 0.0, 8),
        (16, 100, 0.9, 4),
        (16, 5, 0.0, 5),
        (1, 100, 0.0, 1),
        (1, 100, 2.0, 1),
        (4, 0, 0.0, 1),
    ],
)
def test_units_are_those_of_the_scarcest_and_half_under_load(cores: int, slots: int, load: float, offered: int) -> None:
    memory = slots * 512 + 511
    assert units(cores, memory, load=load, task_memory_mib=512, most=8) == offered


def test_the_load_counts_as_it_is_and_memory_as_it_was_before_anything_ran() -> None:
    seen = [Machine(4, 2048, 0.0), Machine(4, 2048, 0.0), Machine(4, 10, 0.1), Machine(4, 10, 0.8)]
    sizing = Sizing(task_memory_mib=512, most=8, read_machine=lambda: seen.pop(0))
    assert [sizing.units() for _ in range(3)] == [3, 3, 1]


def test_this_machine_can_be_measured() -> None:
    found = this_machine()
    assert (found.cores >= 1, found.memory_mib > 0, found.load >= 0) == (True, True, True)
    assert (AgentSettings().task_memory_mib, AgentSettings().max_parallel, AgentSettings().auto_capacity) == (
        512,
        8,
        False,
    )


def test_a_bot_in_a_container_offers_what_the_limits_of_its_cgroups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "mount" / "pod" / "bot").mkdir(parents=True)
    (tmp_path / "mounts").write_text(f"30 1 0:26 / {tmp_path / 'mount'} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "own").write_text("3:cpu:/other\n0::/pod/bot\n")
    monkeypatch.setattr(cgroups, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    assert limits_here() == Limits(), "no controller is enabled"
    usage = {"memory.current": str(300 << 20), "memory.stat": f"anon 1\ninactive_file {100 << 20}"}
    limits = {own: {"cpu.max": "max 100000", "memory.max": "max"}, own.parent: {"cpu.max": "50000 100000"}}
    limits[own.parent]["memory.max"] = str(264 << 20)
    for cgroup, files in limits.items():
        for name, text in {**usage, **files}.items():
            (cgroup / name).write_text(f"{text}\n")
    assert limits_here() == Limits(memory_mib=64, cpu_milli=500)
    machine = this_machine()
    assert (machine.cores, machine.memory_mib) == (1, 64)
    (tmp_path / "mounts").write_text("")
    assert limits_here() == Limits(), "version 2 is not mounted"


def test_an_agent_says_with_every_call_what_its_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Machine(4, 8192, 0.0)
    monkeypatch.setattr("bots.agent.agent.Sizing", partial(Sizing, read_machine=lambda: now))
    pool = Pool(sync_in=0.05)
    with serving(pool, tmp_path, auto_capacity=True, capacity=77, resources={"memory_mib": 100}):
        pool.grant("sleep", "60")
        pool.until(lambda: pool.syncs and pool.syncs[-1].capacity == 3)
        now = Machine(4, 16, 0.9)
        pool.until(lambda: pool.syncs[-1].capacity == 1)
        now = Machine(4, 16, 0.2)
        pool.until(lambda: pool.syncs[-1].capacity == 3)
    (opened,) = pool.opened
    assert (opened.capacity, opened.resources) == (3, {"memory_mib": 100})


@pytest.mark.parametrize(("seconds", "ahead", "together"), [(0.0005, 512, 204), (0.0041, 195, 78), (0.06, 0, 0)])
def test_two_fifths_of_the_leases_in_advance_are_reported_at_once(seconds: float, ahead: int, together: int) -> None:
    lookahead = Lookahead()
    for _ in range(400):
        lookahead.note(seconds)
    assert (lookahead.units(8), lookahead.together(8)) == (ahead, together)
    if seconds < 0.001:
        assert [lookahead.queue(processes) for processes in (1, 8, 16, 200)] == [20, 20, 10, 8]
