"""The processes that watch over commands: what happens when one of them, or the agent, is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from bots.guardian import descendants, process_tree
from bots.runner import Place, Stop
from schema import clock
from tests.patience import MINUTE, eventually
from tests.proc import NEEDS_PROC
from tests.runs import RUNAWAY, finish, sleeping, start

pytestmark = NEEDS_PROC


def test_a_killed_supervisor_leaves_nothing_and_is_an_error_of_the_bot(place: Place) -> None:
    run = start(place, "sh", "-c", f'{sys.executable} -c "$RUNAWAY" 1006; sleep 1006', env={"RUNAWAY": RUNAWAY})
    eventually(lambda: len(sleeping("1006")) == 2)
    assert place.launcher.pid is not None
    [supervisor] = process_tree()[place.launcher.pid]
    os.kill(supervisor, signal.SIGKILL)
    outcome = finish(run)
    assert (outcome.verdict, outcome.reason) == ("error", "the process that supervised the command was killed")
    eventually(lambda: not sleeping("1006"))


def test_a_killed_guardian_is_replaced_and_running_commands_go_on(place: Place) -> None:
    run = start(place, "sleep", "1010")
    assert run.started.wait(MINUTE)
    assert place.launcher.pid is not None
    os.kill(place.launcher.pid, signal.SIGKILL)
    assert finish(start(place, "true")).verdict == "succeeded"
    assert sleeping("1010")
    run.stop(Stop.CANCELLED)
    assert finish(run).verdict == "stopped"
    assert not sleeping("1010")


def test_the_alarm_kills_everything_unless_it_is_put_off(place: Place) -> None:
    place.launcher.arm(clock.monotonic() + 3)
    doomed = start(place, "sleep", "1007")
    assert doomed.started.wait(MINUTE)
    assert doomed.over.wait(MINUTE)
    assert doomed.outcome is None
    assert finish(start(place, "true")).verdict == "error"
    place.launcher.arm(clock.monotonic() + 2)
    place.launcher.arm(clock.monotonic() + 600)
    assert finish(start(place, "sleep", "2.5")).verdict == "succeeded"
    place.launcher.disarm()


AGENT = """
import sys, threading
from pathlib import Path
from bots.launcher import Launcher
from bots.runner import Assignment, Place, Run
from bots.workplace import Workplace
workplace = Workplace(Path(sys.argv[1]), "bot-2")
launcher = Launcher(workplace.guard, open_files=1024)
place = Place(workplace=workplace, launcher=launcher, grace=2.0, environment={})
for number in range(3):
    script = f"{sys.argv[3]} -c '{sys.argv[4]}' {sys.argv[2]}; trap '' TERM; sleep {sys.argv[2]}"
    command = ["/bin/sh", "-c", script]
    run = Run(Assignment(job=f"j{number}", fence=1, attempt=1, instance="i", timeout=None,
              payload={"command": command}), place, notify=lambda: None)
    run.start()
threading.Event().wait()
"""


def test_after_kill_9_of_the_agent_all_its_commands_die(tmp_path: Path) -> None:
    runaway = RUNAWAY.replace("'", '"')
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path), "1008", sys.executable, runaway])
    eventually(lambda: len(sleeping("1008")) == 6)
    below = descendants([agent.pid], process_tree())
    agent.kill()
    agent.wait()
    eventually(lambda: not sleeping("1008"))
    eventually(lambda: not any(Path(f"/proc/{process}").exists() for process in below))
