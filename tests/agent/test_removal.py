"""What commands leave behind is removed, whatever it is, and nothing beyond it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bots.agent.removal import Trash
from bots.agent.run import RunContext
from bots.agent.workspace import Workspace
from tests.support.agents import NEEDS_PROC, finish, start
from tests.support.patience import MINUTE, eventually

pytestmark = NEEDS_PROC
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


def test_a_command_that_leaves_a_deep_tree_succeeds_and_its_bot_starts_again(
    place: RunContext, tmp_path: Path, workplace: Workspace
) -> None:
    program = f"import os\nfor _ in range({DEEP}): os.mkdir('some-name'); os.chdir('some-name')"
    assert finish(start(place, sys.executable, "-S", "-c", program)).verdict == "succeeded"
    nest(workplace.make())
    assert workplace.clear() == 0
    assert list(workplace.root.iterdir()) == []
    eventually(lambda: not list((tmp_path / "bot-1.trash").iterdir()))


def test_what_an_earlier_agent_left_in_the_trash_is_removed_at_the_next_start(
    tmp_path: Path, workplace: Workspace
) -> None:
    (left := tmp_path / "bot-1.trash" / "left" / "inner").mkdir(parents=True)
    (left / "file").write_text("")
    workplace.clear()
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


def test_a_file_that_no_one_may_remove_now_is_counted_and_the_next_directory_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
