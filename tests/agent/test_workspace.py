"""The directories of one agent: whose they are, how they are cleared, and how what commands leave is removed."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold.errors import BadInput, LeaseholdError
from structlog.testing import capture_logs

from bots.agent import agent
from bots.agent.agent import Agent, AgentSettings
from bots.agent.attempts.attempt import RunContext
from bots.agent.orphans import stopped
from bots.agent.removal import Trash
from bots.agent.workspace import Workspace, marked_processes
from tests.support.agents import NEEDS_PROC, finish, start
from tests.support.patience import MINUTE, eventually

pytestmark = NEEDS_PROC


def test_one_name_in_one_work_directory_belongs_to_one_agent(tmp_path: Path, workplace: Workspace) -> None:
    with pytest.raises(BadInput, match="name: an agent named 'bot-1' already runs in"):
        Workspace(tmp_path, "bot-1", open_to_others=True)
    assert workplace.root.stat().st_mode & 0o777 == 0o700, "what it runs needs the mode that it has set"
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
def test_a_command_that_harms_the_directory_disables_no_bot(tmp_path: Path, workplace: Workspace, harm: str) -> None:
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


def test_a_bot_on_another_system_or_without_its_processes_says_so_before_it_does_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AgentSettings(name="b1", work_dir=tmp_path / "work", job_user="agent")
    monkeypatch.setattr(agent, "_PROC", tmp_path / "proc")
    with pytest.raises(LeaseholdError, match=r"^a bot needs /proc, which is not mounted here$"):
        Agent(settings, "http://127.0.0.1:1", "lh_bot_x_y").run()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LeaseholdError, match=r"^a bot runs on Linux only, and this system is 'darwin'$"):
        Agent(settings, "http://127.0.0.1:1", "lh_bot_x_y").run()
    assert list(tmp_path.iterdir()) == []


# Removal, of whatever it is and of nothing beyond it


#: More folders than a process may open at once, on a path longer than the kernel takes.
DEEP = 1100


def nest(folder: Path) -> None:
    """Make a chain of folders in a folder."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("some-name", dir_fd=inner)
        outer, inner = inner, os.open("some-name", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(os.open("file", os.O_CREAT, dir_fd=inner))
    os.close(inner)


def as_root(*command: str) -> None:
    """Run a command that needs root; skip the test if it fails."""
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"'{command[0]}' is not possible here")


def test_a_tree_of_any_depth_and_names_is_removed_and_nothing_beyond_its_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    (tree := tmp_path / "tree").mkdir()
    for name in (b"a\nb", b"\xff\xfe", b"-rf", b"n" * 255):
        os.mkdir(os.fsencode(tree) + b"/" + name)
        (Path(os.fsdecode(os.fsencode(tree) + b"/" + name)) / "inner").mkdir()
    closed = tree / "closed"
    (closed / "inner").mkdir(parents=True)
    (closed / "link").symlink_to(outside)
    (closed / "dangling").symlink_to("nowhere")
    os.mkfifo(closed / "fifo")
    closed.chmod(0o000)
    nest(tree)
    tree.chmod(0o000)
    trash = Trash(tmp_path / "trash")
    assert trash.take(tree)
    assert not tree.exists()
    trash.close(MINUTE)
    assert list((tmp_path / "trash").iterdir()) == []
    assert trash.left == 0
    assert outside.stat().st_mode & 0o777 == 0o500


def test_a_deep_tree_is_left_and_its_bot_starts_again(place: RunContext, tmp_path: Path, workplace: Workspace) -> None:
    program = f"import os\nfor _ in range({DEEP}): os.mkdir('some-name'); os.chdir('some-name')"
    assert finish(start(place, sys.executable, "-S", "-c", program)).verdict == "succeeded"
    nest(workplace.make())
    (tmp_path / "bot-1.trash" / "of an earlier agent" / "inner").mkdir(parents=True)
    assert workplace.clear() == 0
    assert list(workplace.root.iterdir()) == []
    eventually(lambda: not list((tmp_path / "bot-1.trash").iterdir()))


def test_what_is_mounted_in_a_directory_stays_and_the_log_says_so_once(tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "precious").write_text("")
    tree = tmp_path / "tree"
    (inner := tree / "inner" / "mounted").mkdir(parents=True)
    (tree / "file").write_text("")
    as_root("mount", "--bind", str(outside), str(inner))
    with capture_logs() as logs:
        trash = Trash(tmp_path / "trash")
        try:
            assert trash.take(tree)
            trash.close(MINUTE)
            [left] = (tmp_path / "trash").iterdir()
        finally:
            subprocess.run(["umount", *(tmp_path / "trash").glob("*/mounted")], check=True)
    assert (outside / "precious").exists()
    assert os.listdir(left) == ["mounted"]
    assert trash.left == 1
    assert [(line["directories"], line["reason"]) for line in logs] == [(1, "Device or resource busy")]
    again = Trash(tmp_path / "trash")
    again.resume()
    again.close(MINUTE)
    assert (list((tmp_path / "trash").iterdir()), again.left) == ([], 0)


def test_immutable_files_and_folders_are_removed_if_the_agent_may(tmp_path: Path) -> None:
    (inner := tmp_path / "tree" / "inner").mkdir(parents=True)
    (inner / "file").write_text("")
    trash = Trash(tmp_path / "trash")
    as_root("chattr", "-R", "+i", str(tmp_path / "tree"))
    assert trash.take(tmp_path / "tree")
    trash.close(MINUTE)
    assert (list((tmp_path / "trash").iterdir()), trash.left) == ([], 0)


def test_what_cannot_be_moved_away_takes_no_rights_to_its_folder_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    (shared / "left").touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    trash = Trash(tmp_path / "trash")
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", refuse)
        assert not trash.take(shared / "left")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    assert trash.take(shared / "left")
    trash.close(MINUTE)


def test_what_no_one_may_remove_is_counted_and_others_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def refuse(name: str, *, dir_fd: int) -> None:
        if name == "stubborn":
            raise PermissionError(1, "Operation not permitted")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr("bots.agent.removal.os.unlink", refuse)
    for name in ("stubborn", "other"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / name).write_text("")
    trash = Trash(tmp_path / "trash")
    assert trash.take(tmp_path / "stubborn")
    assert trash.take(tmp_path / "other")
    trash.close(MINUTE)
    assert trash.left == 1
    [left] = (tmp_path / "trash").iterdir()
    assert os.listdir(left) == ["stubborn"]


def test_a_trash_that_another_account_made_first_is_not_used_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "trash"
    folder.mkdir(mode=0o777)
    as_root("chown", "1234", str(folder))
    (tmp_path / "tree").mkdir()
    trash = Trash(folder)
    assert trash.take(tmp_path / "tree")
    trash.close(MINUTE)
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777, trash.left) == (0, 0o700, 0)
    assert ([*tmp_path.iterdir()], [*folder.iterdir()]) == ([folder], [])
