import sys
from pathlib import Path

import pytest

from bots import agent
from bots.agent import Agent, AgentSettings
from schema.errors import LeaseholdError


def bot(tmp_path: Path) -> Agent:
    return Agent(AgentSettings(name="b1", work_dir=tmp_path / "work"), "http://127.0.0.1:1", "lh_bot_x_y")


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
