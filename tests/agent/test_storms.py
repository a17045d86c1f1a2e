"""Jobs that stop every process that they may signal: their agent kills them all the same, and other jobs run on."""

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bots.agent.guardian import process_tree
from bots.agent.isolation.containment import PROGRAM
from bots.agent.isolation.job_accounts import JobAccounts
from bots.agent.isolation.privileges import become_killer
from bots.agent.workspace import marked_processes
from schema import clock
from tests.support.agents import NEEDS_PROC, Pool, agent_process
from tests.support.http import gateway
from tests.support.patience import MINUTE

#: An account of Debian under which nothing runs. The storms would stop other processes of it.
NAMED = "games"
pytestmark = [
    NEEDS_PROC,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives commands an account of their own"),
]
#: Settings of the agent, by what contains its commands.
KINDS = {
    "dynamic": {"job_user": "dynamic"},
    "sandbox": {"job_user": "dynamic", "sandbox": "bubblewrap"},
    "named": {"job_user": NAMED},
}
LIMITS = {"capacity": 4, "kill_grace": 0.2, "drain_seconds": 0}
STORMS_VARIABLE = "LEASEHOLD_TEST_STORMS"
STORMS = int(os.environ.get(STORMS_VARIABLE, "3"))
#: How many storms at once, beside one neighbour. Those that share an account may stop each other before they begin.
AT_ONCE = {"dynamic": 3, "sandbox": 3, "named": 1}
#: Seconds of run time of a storm, and those after which it is over at the latest: before its supervisor is given up.
TIMEOUT, BOUND = 0.5, 4.5
#: Stops every process of its account but itself, without end. As root it would stop the machine, so it refuses.
STORM = "test $(id -u) -gt 0 || exit 9; trap '' TERM; sleep 1031 & while :; do kill -STOP -1; done 2>/dev/null"


def skip_unless_possible(kind: str) -> None:
    if kind != "dynamic" and STORMS_VARIABLE not in os.environ:
        pytest.skip(f"only with {STORMS_VARIABLE}, to save time")
    if kind == "sandbox" and shutil.which(PROGRAM) is None:
        pytest.skip("bubblewrap is not installed")
    if kind == "named":
        try:
            user = pwd.getpwnam(NAMED).pw_uid
        except KeyError:
            pytest.skip(f"there is no account '{NAMED}'")
        if any(Path("/proc", entry).stat().st_uid == user for entry in os.listdir("/proc") if entry.isdigit()):
            pytest.skip(f"something runs as '{NAMED}'")


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_that_stop_all_they_may_signal_are_killed_and_their_neighbour_runs_on(kind: str, scratch: Path) -> None:
    """3 at once, beside a job that does nothing; `LEASEHOLD_TEST_STORMS=30` makes ten rounds of them."""
    skip_unless_possible(kind)
    pool = Pool(ttl=10.0, sync_in=0.1)
    with gateway(pool) as stands, agent_process(stands.url, scratch, **KINDS[kind], **LIMITS) as agent:
        neighbour = pool.grant("sleep", "1032", job="neighbour")
        pool.until(lambda: "active" in pool.reported(neighbour))
        seconds = []
        for first in range(0, STORMS, AT_ONCE[kind]):
            names = [f"storm-{first + number}" for number in range(AT_ONCE[kind])]
            storms = {pool.grant("sh", "-c", STORM, job=name, timeout=TIMEOUT) for name in names}
            began = clock.monotonic()
            pool.until(lambda storms=storms: storms <= set(pool.outcomes))
            seconds.append(round(clock.monotonic() - began, 2))
        print(f"{kind}: rounds of {AT_ONCE[kind]} storms took {seconds} s")
        assert {outcome["reason"] for outcome in pool.outcomes.values()} == {f"timeout after {TIMEOUT} s"}
        assert max(seconds) < BOUND, seconds
        assert len(pool.opened) == 1
        # Those who share an account may stop each other.
        assert pool.outcomes.get(neighbour) is None
        following = pool.grant("true", job="following")
        assert pool.until(lambda: pool.outcomes.get(following))["verdict"] == "succeeded"
        pool.change(closing=True)
        agent.terminate()
        agent.wait(MINUTE)
    assert not marked_processes(scratch / "work")


@pytest.mark.parametrize("kind", KINDS)
def test_after_agent_guardian_and_supervisors_died_the_next_agent_kills_the_storms(kind: str, scratch: Path) -> None:
    skip_unless_possible(kind)
    pool = Pool(ttl=10.0, sync_in=0.1)
    with gateway(pool) as stands:
        with agent_process(stands.url, scratch, **KINDS[kind], **LIMITS) as agent:
            storms = [pool.grant("sh", "-c", STORM, job=f"storm-{number}") for number in range(AT_ONCE[kind])]
            pool.until(lambda: all("active" in pool.reported(key) for key in storms))
            [guardian] = process_tree()[agent.pid]
            for process in [agent.pid, guardian, *process_tree()[guardian]]:
                os.kill(process, signal.SIGKILL)
        with pool.changed:
            pool.leases = {}
        began = clock.monotonic()
        with agent_process(stands.url, scratch, **KINDS[kind], **LIMITS) as agent:
            pool.until(lambda: len(pool.opened) == 2)
            print(f"{kind}: the next agent started after {clock.monotonic() - began:.2f} s")
            assert not marked_processes(scratch / "work")
            following = pool.grant("true", job="following")
            assert pool.until(lambda: pool.outcomes.get(following))["verdict"] == "succeeded"
            pool.change(closing=True)
            agent.terminate()
            agent.wait(MINUTE)


def as_user(users: tuple[int, int, int], group: int, function: Callable[[], object]) -> int:
    """Fork a process with these user ids that calls the function; return its exit code."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(*users)
            function()
            code = 0
        except PermissionError:
            code = 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_what_kills_everything_of_an_account_cannot_be_signalled_by_it_and_reaches_nothing_else() -> None:
    accounts = JobAccounts("dynamic")
    account, other = accounts.take(), accounts.take()
    assert account is not None
    assert account.killer is not None
    assert other is not None
    processes = [
        subprocess.Popen(["sleep", "1033"], user=each.user, group=each.group, extra_groups=[])
        for each in (account, other)
    ]
    (reader, writer), (begin, told) = os.pipe(), os.pipe()
    killer = os.fork()
    if killer == 0:
        try:
            become_killer(account.user, account.killer)
            os.write(writer, b"!")
            os.read(begin, 1)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    try:
        assert os.read(reader, 1) == b"!"
        everything = (account.user, account.user, account.user)
        assert as_user(everything, account.group, lambda: os.kill(killer, signal.SIGSTOP)) == 2
        os.write(told, b"!")
        assert processes[0].wait(MINUTE) == -signal.SIGKILL
        assert os.waitstatus_to_exitcode(os.waitpid(killer, 0)[1]) == 0
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for descriptor in (reader, writer, begin, told):
            os.close(descriptor)
        for each in (account, other):
            accounts.give_back(each, silent=True)
        accounts.close()
