"""The directories of one agent: whose they are, and how they are cleared."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold.errors import BadInput, LeaseholdError

from bots.agent import agent
from bots.agent.agent import Agent, AgentSettings
from bots.agent.orphans import stopped
from bots.agent.workspace import Workspace, marked_processes
from tests.support.agents import NEEDS_PROC
from tests.support.patience import MINUTE, eventually

pytestmark = NEEDS_PROC


def test_one_name_in_one_work_directory_belongs_to_one_agent(tmp_path: Path, workplace: Workspace) -> None:
    with pytest.raises(BadInput, match="name: an agent named 'bot-1' already runs in"):
        Workspace(tmp_path, "bot-1")
    Workspace(tmp_path, "bot-2").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"work_dir: .* cannot be used"):
        Workspace(tmp_path / "file", "bot-1")


def test_leftovers_of_an_earlier_agent_are_killed_and_removed_but_nothing_else(tmp_path: Path) -> None:
    workplace, other = Workspace(tmp_path, "bot-1"), Workspace(tmp_path, "bot-10")
    ours, theirs = workplace.make(), other.make()
    left = subprocess.Popen(["sleep", "1009"], env={"LEASEHOLD_WORK": str(ours)}, start_new_session=True)
    kept = subprocess.Popen(["sleep", "1009"], env={"LEASEHOLD_WORK": str(theirs)}, start_new_session=True)
    eventually(lambda: marked_processes(workplace.root) and marked_processes(other.root))
    assert workplace.clear() == 1
    assert left.wait(MINUTE) == -signal.SIGKILL
    assert kept.poll() is None
    assert list(workplace.root.iterdir()) == []
    assert list(other.root.iterdir()) == [theirs]
    assert other.clear() == 1
    kept.wait(MINUTE)
    workplace.close()
    other.close()


def test_a_guardian_of_an_earlier_agent_ends_before_the_place_is_clear_even_if_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.agent.workspace._DYING", 1.0)
    earlier = Workspace(tmp_path, "bot-1")
    earlier.clear()
    guardian = subprocess.Popen(["sh", "-c", "while :; do kill -STOP $$; done"], pass_fds=[earlier.guard])
    eventually(lambda: stopped(guardian.pid))
    earlier.close()
    later = Workspace(tmp_path, "bot-1")
    assert later.clear() == 1
    assert guardian.wait(MINUTE) == -signal.SIGKILL
    later.close()


def test_a_guardian_that_cannot_be_killed_prevents_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bots.agent.workspace._DYING", 0.1)
    monkeypatch.setattr("bots.agent.workspace.kill", lambda _processes, _number: None)
    earlier = Workspace(tmp_path, "bot-1")
    earlier.clear()
    guardian = subprocess.Popen(["sleep", "1009"], pass_fds=[earlier.guard])
    earlier.close()
    later = Workspace(tmp_path, "bot-1")
    with pytest.raises(LeaseholdError, match="a guardian process of an earlier agent or session cannot be killed"):
        later.clear()
    guardian.kill()
    guardian.wait(MINUTE)
    assert later.clear() == 0
    later.close()


def test_a_place_remembers_the_last_session_for_as_long_as_the_kernel_runs(
    tmp_path: Path, workplace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workplace.predecessor() is None
    for session in ("a" * 64, "b" * 64):
        workplace.remember(session)
        assert workplace.predecessor() == session
    (other_kernel := tmp_path / "boot_id").write_text("another-run\n")
    with monkeypatch.context() as patched:
        patched.setattr("bots.agent.workspace._KERNEL", other_kernel)
        assert workplace.predecessor() is None
    (tmp_path / "bot-1.session").write_text("b" * 63)
    assert workplace.predecessor() is None


@pytest.mark.parametrize("harm", ["removed", "replaced by a file", "replaced by a link", "closed"])
def test_a_command_that_harms_the_work_directory_does_not_disable_its_bot(
    tmp_path: Path, workplace: Workspace, harm: str
) -> None:
    (outside := tmp_path / "outside").mkdir()
    if harm == "closed":
        workplace.root.chmod(0o000)
    else:
        workplace.root.rmdir()
    if harm == "replaced by a file":
        workplace.root.write_text("in the way")
    if harm == "replaced by a link":
        workplace.root.symlink_to(outside / "nowhere")
    made = workplace.make()
    assert made.parent == workplace.root
    assert not workplace.root.is_symlink()
    workplace.discard(made)
    assert workplace.clear() == 0
    assert list(workplace.root.iterdir()) == []
    assert list(outside.iterdir()) == []


def bot(tmp_path: Path) -> Agent:
    return Agent(
        AgentSettings(name="b1", work_dir=tmp_path / "work", job_user="agent"), "http://127.0.0.1:1", "lh_bot_x_y"
    )


def test_a_bot_on_another_system_says_so_before_it_does_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LeaseholdError, match=r"^a bot runs on Linux only, and this system is 'darwin'$"):
        bot(tmp_path).run()
    assert list(tmp_path.iterdir()) == []


def test_a_bot_that_could_not_find_processes_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PROC", tmp_path / "proc")
    with pytest.raises(LeaseholdError, match=r"^a bot needs /proc, which is not mounted here$"):
        bot(tmp_path).run()
