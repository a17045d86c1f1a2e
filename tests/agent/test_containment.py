"""What a command can reach: with real processes under accounts of their own, in a sandbox, and as the agent itself."""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from leasehold.errors import BadInput, LeaseholdError
from leasehold.states import EndKind, end_kind

from bots.agent.agent import AgentSettings
from bots.agent.attempts.attempt import Assignment, RunContext, StopReason
from bots.agent.attempts.endings import describe_exit
from bots.agent.attempts.run import Run
from bots.agent.guardian import process_tree
from bots.agent.isolation import job_accounts
from bots.agent.isolation.cgroups import Cgroups, Limits
from bots.agent.isolation.containment import PROGRAM, Containment, Sandbox, Site, find_sandbox
from bots.agent.isolation.job_accounts import JobAccount, JobAccounts
from bots.agent.isolation.privileges import Privileges
from bots.agent.job_files import Unsent
from bots.agent.launcher import Launcher
from bots.agent.workspace import Workspace
from tests.support.agents import NEEDS_PROC, finish, start, text_of
from tests.support.patience import MINUTE, eventually

ROOT = os.geteuid() == 0
pytestmark = NEEDS_PROC
only_root = pytest.mark.skipif(not ROOT, reason="only root gives commands an account of their own")
boxed = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="bubblewrap is not installed")
#: An interpreter that every account can run; that of the tests may be in a directory of root.
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
REPOSITORY = Path(__file__).parents[2]
Made = Callable[[Containment], RunContext]


@pytest.fixture
def made(scratch: Path) -> Iterator[Made]:
    """Makes the context of an agent that contains its commands, in a directory that every account may enter."""
    opened: list[RunContext] = []

    def make(containment: Containment) -> RunContext:
        workplace = Workspace(scratch / "work", "bot-1", open_to_others=containment.accounts.own)
        launcher = Launcher(workplace.guard, open_files=1024)
        opened.append(RunContext(workplace, launcher, 0.3, {"PATH": os.defpath, "USER": "root"}, containment))
        containment.check(workplace)
        return opened[-1]

    yield make
    for place in opened:
        place.launcher.close()
        place.workplace.close()
        place.containment.close_all()
        assert not list(place.workplace.root.iterdir())


def hand_on(place: RunContext) -> None:
    """Run a command that finds the checkpoint of the attempt before, and leaves another one and a result."""
    script = (
        "stat -c '%a' $LEASEHOLD_CHECKPOINT; cat $LEASEHOLD_CHECKPOINT; echo 2 > $LEASEHOLD_CHECKPOINT.new;"
        " mv $LEASEHOLD_CHECKPOINT.new $LEASEHOLD_CHECKPOINT; echo 3 > $LEASEHOLD_RESULT; exit 1"
    )
    payload = {"command": ["sh", "-c", script]}
    run = Run(Assignment("job", 1, 1, "tenant", None, payload, checkpoint="1"), place, notify=lambda: None)
    run.start()
    assert (finish(run).result, run.checkpoint.unsent, text_of(run)) == ("3\n", Unsent(1, "2\n"), "600\n1")


@contextmanager
def accounts() -> Iterator[JobAccounts]:
    made = JobAccounts("dynamic")
    yield made
    made.close()


def taken(accounts: JobAccounts) -> JobAccount:
    account = accounts.take()
    assert account is not None
    return account


def ended(user: str | int) -> bool:
    """Whether nothing of an attempt is left, so that another one may have its user id."""
    return not Path("/run/leasehold/accounts", str(user)).exists()


def dynamic(limits: Limits | None = None, wrapper: Sandbox | None = None) -> Containment:
    return Containment(JobAccounts("dynamic"), limits=limits or Limits(), wrapper=wrapper)


def processes_of(user: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            # A process that has ended counts no more, even if its parent has not asked for it yet.
            if entry.name.isdigit() and entry.stat().st_uid == user and ") Z " not in (entry / "stat").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@only_root
def test_a_command_of_an_agent_that_is_root_has_an_account_of_its_own_and_no_rights(made: Made) -> None:
    place = made(dynamic())
    program = "id -u; id -G; umask; echo $USER; stat -c '%u %a' $HOME; grep -E '^(Cap|NoNew)' /proc/self/status"
    cores = "ulimit -c; ulimit -Hc; ulimit -c 1 2>&- || echo no"
    usage = "echo '{\"tokens\": 3}' > $LEASEHOLD_USAGE"
    run = start(place, "sh", "-c", f"{program}; {cores}; {usage}; cat", stdin="told\n")
    outcome = finish(run)
    assert (outcome.verdict, outcome.usage) == ("succeeded", {"tokens": 3})
    user, groups, mask, name, home, *rights, soft, hard, more, told = text_of(run).splitlines()
    assert job_accounts.FIRST <= int(user) <= job_accounts.LAST
    assert (groups, mask, name, home, told) == (user, "0077", f"leasehold-{user}", f"{user} 700", "told")
    assert [line.split()[1].strip("0") for line in rights] == [""] * 5 + ["1"]
    assert (soft, hard, more) == ("0", "0", "no"), "it leaves no core"
    hand_on(place)


@only_root
def test_a_command_reaches_neither_the_agent_nor_its_secrets_nor_other_commands(made: Made, scratch: Path) -> None:
    place = made(dynamic())
    token = scratch / "operator.token"
    token.touch(mode=0o600)
    token.write_text("lh_operator_secret")
    other = start(place, "sh", "-c", "echo secret > $HOME/file; echo $$ $HOME; exec sleep 60")
    eventually(lambda: "\n" in text_of(other))
    process, home = text_of(other).split()
    agent, guardian = os.getpid(), place.launcher.pid
    attempts = [
        f"cat {token}", f"cat {home}/file", f"ls {home}", f"ls {Path(home).parent}", f"touch {home}/mine",
        f"cat /proc/{process}/environ", f"cat /proc/{agent}/environ", f"head -c1 /proc/{agent}/mem",
        f"head -c1 /proc/{guardian}/environ", f"kill -9 {process}", f"kill -9 {agent}", f"kill -9 {guardian}",
        f"kill -STOP {agent}",
    ]  # fmt: skip
    run = start(place, "sh", "-c", "\n".join(f"{each} 2>/dev/null && echo '{each}'" for each in [*attempts, "true"]))
    assert finish(run).verdict == "succeeded"
    assert text_of(run) == "true\n"
    other.stop(StopReason.CANCELLED, grace=0.0)
    assert finish(other).verdict == "stopped"


@only_root
def test_a_fork_bomb_is_bounded_dies_with_its_job_or_its_supervisor_and_leaves_others_alone(made: Made) -> None:
    assert PYTHON is not None
    place = made(dynamic(Limits(processes=40)))
    # Each process has a session of its own, so that no signal to a group reaches them. Where there is no room it tries
    # again 200 times a second: so often is a process replaced that was killed, and other tests have the processors.
    bomb = "import os, time\nprint(os.getuid(), flush=True)\n" + (
        "while True:\n try: os.fork() or os.setsid()\n except OSError: time.sleep(0.005)"
    )
    for how in ("stopped", "supervisor killed"):
        run = start(place, PYTHON, "-c", bomb)
        eventually(lambda run=run: "\n" in text_of(run))
        user = int(text_of(run).split()[0])
        eventually(lambda user=user: len(processes_of(user)) == 40)
        beside = start(place, "sh", "-c", "echo $(id -u) works")
        assert finish(beside).verdict == "succeeded"
        assert text_of(beside) != f"{user} works\n"
        if how == "stopped":
            run.stop(StopReason.CANCELLED, grace=0.0)
        else:
            assert place.launcher.pid is not None
            for process in [place.launcher.pid, *process_tree()[place.launcher.pid]]:
                os.kill(process, signal.SIGKILL)
        assert finish(run).verdict == ("stopped" if how == "stopped" else "error")
        assert processes_of(user) == []
    # Nothing of it is left, so the user id may be used again.
    eventually(lambda: ended(user))


@only_root
def test_a_program_of_root_is_out_of_reach_and_one_that_is_nowhere_is_not_found(made: Made, scratch: Path) -> None:
    place = made(dynamic())
    (scratch / "closed").mkdir(mode=0o700)
    search = {"PATH": f"{scratch}/closed:/usr/bin"}
    outcome = finish(start(place, "tool", env=search))
    assert (outcome.verdict, outcome.exit_code) == ("failed", 127)
    assert outcome.reason == "command not found: 'tool' (or the interpreter it names)"
    shutil.copy("/bin/true", scratch / "closed" / "tool")
    assert finish(start(place, "tool", env=search)).exit_code == 126
    outcome = finish(start(place, str(scratch / "closed" / "tool")))
    assert (outcome.verdict, outcome.exit_code) == ("failed", 126)
    assert "out of reach for the job's account leasehold-6" in str(outcome.reason)


@only_root
def test_no_two_agents_use_one_user_id_and_that_of_an_ended_attempt_comes_again_late() -> None:
    with accounts() as first, accounts() as second:
        found = []
        for _ in range(3):
            both = [(each, taken(each)) for each in (first, second)]
            found += [account.user for _, account in both]
            for each, account in both:
                each.give_back(account, silent=True)
        assert len(set(found)) == 6


@only_root
def test_what_runs_under_the_user_id_of_a_dead_agent_is_killed_when_the_next_one_starts() -> None:
    dead = JobAccounts("dynamic")
    with accounts() as living:
        left, mine = taken(dead), taken(living)
        # Nothing of theirs tells where they come from: no mark in their environment, no ancestor.
        theirs, own = (
            subprocess.Popen(
                ["sleep", "1021"], env={}, start_new_session=True, user=each.user, group=each.group, extra_groups=[]
            )
            for each in (left, mine)
        )
        try:
            dead.close()
            living.clear()
            assert theirs.wait(MINUTE) == -signal.SIGKILL
            assert own.poll() is None
        finally:
            own.kill()
            own.wait()
            living.give_back(mine, silent=True)


@only_root
def test_an_agent_neither_waits_without_end_for_another_that_takes_a_user_id_nor_hides_why_nothing_can_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_accounts, "_TURN", 0.1)
    with accounts() as own:
        with open("/run/leasehold/accounts/next") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            with pytest.raises(LeaseholdError, match="another agent keeps '/run/leasehold/accounts/next' locked"):
                own.take()
        account = taken(own)
        with monkeypatch.context() as changed:
            changed.setattr(sys, "executable", "/nowhere")
            assert "No such file" in str(job_accounts.killing_trial(account))
        own.give_back(account, silent=True)


#: An agent in a container: a user namespace, whose user ids the test maps.
IN_CONTAINER = """
import ctypes, os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from bots.agent.agent import AgentSettings
from bots.agent.isolation import job_accounts
from bots.agent.workspace import Workspace
print(ctypes.CDLL(None).unshare(0x10000000), flush=True)
sys.stdin.readline()
os.setresgid(0, 0, 0), os.setresuid(0, 0, 0)
place = Path(sys.argv[1])
job_accounts._RESERVED = place / "accounts"
AgentSettings(job_user="dynamic").containment.check(Workspace(place / "work", "bot-1", open_to_others=True))
"""


@only_root
def test_where_the_user_id_of_what_kills_is_not_mapped_the_agent_says_so_when_it_starts(scratch: Path) -> None:
    container = subprocess.Popen(
        [sys.executable, "-c", IN_CONTAINER, str(scratch)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert container.stdout is not None
    if container.stdout.readline() != "0\n":
        container.kill()
        pytest.skip("the kernel gives no user namespaces here")
    for ids in ("uid_map", "gid_map"):
        # The first id for attempts, but not the one after it.
        Path("/proc", str(container.pid), ids).write_text(f"0 0 {job_accounts.FIRST + 1}")
    _, said = container.communicate("\n", timeout=MINUTE)
    assert "job_user: what runs under an account of its own cannot be killed: user id 61184 cannot be cleared" in said
    assert "as 61185: Invalid argument; use 'agent'" in said


#: More folders than a process may open at once, and than Python's stack holds.
DEEP = "import os\nname = 'deep-' + str(os.getuid())\nfor _ in range(1200): os.mkdir(name); os.chdir(name)"


@only_root
@pytest.mark.skipif(shutil.which("ipcmk") is None, reason="ipcmk is not installed")
def test_shared_memory_that_a_command_leaves_is_removed_with_it(made: Made) -> None:
    leave = "echo > left-$(id -u); mkdir -p dir-$(id -u)/a; ln -s /etc dir-$(id -u)/a/etc"
    deep = f'{PYTHON} -S -c "{DEEP}"'
    run = start(made(dynamic()), "sh", "-c", f"id -u; ipcmk -M 1000 -S 2 -Q; cd /dev/shm; {leave}; {deep}")
    assert finish(run).verdict == "succeeded"
    user = text_of(run).split()[0]
    assert "Shared memory id" in text_of(run)
    eventually(lambda: ended(user))
    assert [kind for kind in ("shm", "sem", "msg") if user in Path("/proc/sysvipc", kind).read_text().split()] == []
    assert not [*Path("/dev/shm").glob(f"*-{user}")]
    assert Path("/etc/passwd").exists()


@only_root
def test_a_deep_directory_of_a_dead_agent_in_shared_memory_does_not_keep_the_next_one_from_its_start() -> None:
    assert PYTHON is not None
    dead = JobAccounts("dynamic")
    left = taken(dead)
    subprocess.run([PYTHON, "-S", "-c", DEEP], cwd="/dev/shm", user=left.user, group=left.group, check=True)
    dead.close()
    with accounts() as living:
        # Nobody has it before the next agent that starts has cleared it.
        account = taken(living)
        assert account.user != left.user
        living.give_back(account, silent=True)
        living.clear()
        assert not Path(f"/dev/shm/deep-{left.user}").exists()
        assert ended(left.user)


@only_root
def test_a_job_that_takes_the_name_of_the_trash_in_shared_memory_keeps_neither_it_nor_its_user_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trash = tmp_path / "shm" / "leasehold-trash"
    trash.parent.mkdir()
    monkeypatch.setattr(job_accounts, "_POSIX", (trash.parent,))
    monkeypatch.setattr(job_accounts, "_TRASH", trash)
    with accounts() as own:
        own.clear()
        assert trash.stat().st_uid == 0, "made before any job runs"
        account = taken(own)
        trash.rmdir()
        (trash / "inner").mkdir(parents=True)
        os.chown(trash, *account.ids)
        own.give_back(account, silent=True)
        assert ended(account.user)
    eventually(lambda: not [*trash.iterdir()])
    assert [entry.name for entry in trash.parent.iterdir()] == [trash.name]
    assert trash.stat().st_uid == 0


@only_root
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are those of x86-64")
def test_a_command_does_not_have_the_keys_of_the_agents_session(made: Made) -> None:
    assert PYTHON is not None
    libc = ctypes.CDLL(None)
    if libc.syscall(250, 1, None) < 0 or libc.syscall(248, b"user", b"secret", b"lh", 2, -3) < 0:
        pytest.skip("the kernel has no keys here")
    look = "import ctypes; print(ctypes.CDLL(None).syscall(250, 10, -3, b'user', b'secret', 0) > 0)"
    assert subprocess.run([PYTHON, "-c", look], capture_output=True, check=True).stdout == b"True\n"
    run = start(made(dynamic()), PYTHON, "-c", look)
    finish(run)
    assert text_of(run) == "False\n"


@only_root
def test_a_directory_that_the_account_cannot_enter_is_named_when_the_agent_starts(scratch: Path) -> None:
    (scratch / "closed").mkdir(mode=0o700)
    workplace = Workspace(scratch / "closed" / "work", "bot-1", open_to_others=True)
    contained = dynamic()
    with pytest.raises(BadInput, match=r"work_dir: the account of jobs cannot enter '.*/closed'; .* chmod o\+x"):
        contained.check(workplace)
    contained.close_all()
    workplace.close()


def test_a_bot_for_actions_is_refused_if_its_jobs_cannot_run_the_program_for_actions(tmp_path: Path) -> None:
    workplace = Workspace(tmp_path / "work", "bot-1", open_to_others=False)
    contained = Containment.none()
    contained.check(workplace, path=str(tmp_path))
    with pytest.raises(BadInput, match=r"properties: .*leasehold\.farm runs 'leasehold-action', and"):
        contained.check(workplace, runs_actions=True, path=str(tmp_path))
    program = tmp_path / "leasehold-action"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    contained.check(workplace, runs_actions=True, path=str(tmp_path))
    contained.close_all()
    workplace.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no-such-account", "does not exist"), ("root", "is root")] if ROOT else [("dynamic", "runs as root")],
)
def test_an_account_that_cannot_be_used_is_refused(name: str, reason: str) -> None:
    with pytest.raises(BadInput, match=f"job_user: .*{reason}"):
        JobAccounts(name)


def test_no_variable_of_leasehold_itself_is_passed_on_to_commands() -> None:
    with pytest.raises(ValueError, match="may hold a secret"):
        AgentSettings(env_allow=("PATH", "LEASEHOLD_TOKEN"))


def test_limits_become_files_of_a_cgroup_and_are_refused_without_its_controllers(tmp_path: Path) -> None:
    limits = Limits(memory_mib=64, processes=10, cpu_milli=1500)
    assert limits.settings == {
        "memory.max": "67108864",
        "memory.oom.group": "1",
        "pids.max": "10",
        "cpu.max": "150000 100000",
    }
    (tmp_path / "cgroup.controllers").write_text("cpu hugetlb\n")
    with pytest.raises(BadInput, match=f"cgroup: '{tmp_path}' does not have the controllers memory, pids"):
        Cgroups(tmp_path / "leasehold", limits)


def test_an_agent_removes_the_cgroups_that_it_left_when_it_was_killed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cgroups, "_enable", lambda _: None)
    limits = Limits(cpu_milli=500)
    monkeypatch.setattr(Limits, "settings", {})
    (parent := tmp_path / "cgroup").mkdir()
    places = [Workspace(tmp_path / work, name) for work, name in (("one", "bot"), ("one", "bot-1"), ("two", "bot"))]

    def contained() -> Containment:
        made = Containment(JobAccounts("agent"), limits=limits)
        made._cgroups = Cgroups(parent, limits)
        return made

    killed = contained()
    left = {Path(str(killed.open(place).privileges.cgroup)): place for place in places}
    assert set(parent.iterdir()) == left.keys()
    for place in places:
        contained().clear(place)
        assert set(parent.iterdir()) == {
            path for path, each in left.items() if each in places[places.index(place) + 1 :]
        }
        place.close()


def test_a_command_that_the_kernel_killed_for_lack_of_memory_is_told_so(tmp_path: Path) -> None:
    kept = Privileges(cgroup=str(tmp_path))
    assert describe_exit(-9, kept) == "killed by SIGKILL", "the memory of its cgroup is not limited"
    (tmp_path / "memory.max").write_text("536870912\n")
    events = "low 0\nhigh 0\nmax 7\noom {}\noom_kill {}\noom_group_kill {}\n"
    (tmp_path / "memory.events").write_text(events.format(0, 0, 0))
    assert describe_exit(-9, kept) == "killed by SIGKILL", "it met its limit, and memory was found"
    (tmp_path / "memory.events").write_text(events.format(0, 1, 0))
    assert describe_exit(-9, kept) == "killed by SIGKILL", "it was the machine that had no memory left"
    (tmp_path / "memory.events").write_text(events.format(1, 3, 1))
    told = "killed by the kernel: it used all of its 512 MiB of memory (job_memory_mib)"
    assert describe_exit(-9, kept) == told
    assert describe_exit(-9, Privileges()) == "killed by SIGKILL"
    (tmp_path / "memory.max").write_text("max\n")
    assert describe_exit(-9, kept) == "killed by SIGKILL", "another setting than the limit has made the cgroup"
    assert end_kind("failed", told) is EndKind.KILLED


@pytest.fixture
def sandboxed(made: Made, scratch: Path) -> RunContext:
    """Where commands run in a sandbox that hides the agent's directory."""
    wrapper = find_sandbox(network=False, hidden=[scratch])
    try:
        return made(
            dynamic(wrapper=wrapper) if ROOT else Containment(JobAccounts("agent"), limits=Limits(), wrapper=wrapper)
        )
    except BadInput as refused:
        pytest.skip(str(refused))


def output_of(place: RunContext, script: str) -> str:
    run = start(place, "sh", "-c", script)
    assert finish(run).verdict == "succeeded", text_of(run)
    return text_of(run)


@boxed
def test_a_sandboxed_command_reaches_no_process_network_or_file(sandboxed: RunContext, scratch: Path) -> None:
    (scratch / "operator.token").write_text("secret")
    place = sandboxed
    assert output_of(place, "echo mine > file; cat file; ls /run") == "mine\n"
    seen = output_of(place, f"test -e {scratch}/operator.token || echo hidden; touch /etc/here || echo read-only")
    assert "hidden\n" in seen
    assert "read-only\n" in seen
    assert "lo" in (devices := output_of(place, "grep : /proc/net/dev"))
    assert len(devices.splitlines()) == 1
    # The first process of the sandbox, the shell, and what it starts to look.
    assert int(output_of(place, "ls -d /proc/[0-9]* | wc -l")) <= 5
    # 0, 1, 2, and the folder that is being listed.
    assert len(output_of(place, "ls /proc/self/fd").split()) == 4
    assert finish(start(place, "sh", "-c", "exit 3")).exit_code == 3
    hand_on(place)
    missing = finish(start(place, "no-such-program"))
    reason = "command 'no-such-program' cannot be started: the sandbox cannot run it, see the output"
    assert (missing.verdict, missing.reason) == ("error", reason)
    # SIGTERM reaches the command and not the sandbox around it, which would end both at once.
    run = start(place, "sh", "-c", "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.05; done")
    eventually(lambda: "up" in text_of(run))
    run.stop(StopReason.CANCELLED, grace=30.0)
    assert finish(run).exit_code == 4
    assert text_of(run).endswith("bye\n")


@boxed
def test_variables_of_a_job_do_not_act_on_what_makes_the_sandbox(sandboxed: RunContext, scratch: Path) -> None:
    traced = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": f"/tmp/{scratch.name}-trace", "SECRET": "lh_secret"}
    show = "env | grep -c -e ^SECRET=lh.secret$ -e ^LEASEHOLD_JOB="
    run = start(sandboxed, "sh", "-c", f"{show}; exec sleep 1022", env=traced)
    eventually(lambda: "\n" in text_of(run))
    assert text_of(run) == "2\n"
    # Inside the sandbox, /tmp is another one.
    assert list(Path("/tmp").glob(f"{scratch.name}-trace*")) == []
    lines = [each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline")]
    assert [line for line in lines if b"1022" in line]
    assert not [line for line in lines if b"lh_secret" in line and b"bwrap" in line]
    run.stop(StopReason.CANCELLED, grace=0.0)
    finish(run)


@boxed
def test_a_sandbox_hides_the_work_directory_and_is_refused_for_commands_of_root(tmp_path: Path) -> None:
    settings = AgentSettings(sandbox="bubblewrap", work_dir=tmp_path)
    line = settings.containment.command(["true"], Site(tmp_path / "b" / "attempt-1", None, Privileges()))
    assert line[line.index(str(tmp_path)) - 1] == "--tmpfs"
    if ROOT:
        with pytest.raises(BadInput, match="sandbox: a command that runs as root can leave it"):
            _ = settings.model_copy(update={"job_user": "agent"}).containment


#: Becomes an ordinary user as late as this, so that modules in directories of root are imported already.
ORDINARY = """
import ctypes, os, sys
from pathlib import Path
from random import Random
sys.path.insert(0, os.getcwd())
from bots.agent.isolation.privileges import hide_memory
from bots.agent.isolation.containment import PROGRAM, Containment, Sandbox, find_sandbox
from bots.agent.launcher import Launcher
from bots.agent.attempts.attempt import RunContext
from bots.agent.workspace import Workspace
from tests.support.agents import finish, start, text_of
work, python = Path(sys.argv[1]), sys.argv[2]
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65001), os.setuid(65001)
    sys.executable = python
# As if this process had always been that of an ordinary user.
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
workplace = Workspace(work, "bot-1")
place = RunContext(workplace, Launcher(workplace.guard, open_files=1024), 0.3, {"PATH": os.defpath})
def reached():
    run = start(place, "sh", "-c", f"head -c1 /proc/{os.getpid()}/environ 2>&- | wc -c; id -u")
    finish(run)
    return text_of(run).split()
print(reached())
hide_memory()
print(reached())
place.launcher.close()
"""


@pytest.mark.skipif(PYTHON is None, reason="there is no Python that an ordinary user can run")
def test_the_memory_of_an_agent_that_is_not_root_is_closed_to_its_own_account(scratch: Path) -> None:
    user = 65001 if ROOT else os.geteuid()
    work = scratch / "work"
    work.mkdir(mode=0o700)
    if ROOT:
        os.chown(work, user, user)
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY, str(work), str(PYTHON)],
        capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(["1", str(user)]), str(["0", str(user)])], done.stderr
