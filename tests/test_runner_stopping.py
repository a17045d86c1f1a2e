"""However a command ends, its whole tree of processes ends with it."""

import os
import sys

from bots.runner import Place, Run, Stop
from tests.patience import MINUTE, eventually
from tests.proc import NEEDS_PROC
from tests.runs import RUNAWAY, finish, sleeping, start, text_of

pytestmark = NEEDS_PROC


def test_a_timeout_kills_the_whole_tree_also_what_ran_away(place: Place) -> None:
    tree = f"trap '' TERM; {sys.executable} -c \"$RUNAWAY\" 1001 & setsid sleep 1001 & sleep 1001"
    run = start(place, "sh", "-c", tree, timeout=0.5, env={"RUNAWAY": RUNAWAY})
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("failed", -9, "timeout after 0.5 s")
    assert not sleeping("1001")


def test_a_command_may_use_its_grace_to_end_by_itself(place: Place) -> None:
    run = start(place, "sh", "-c", "trap 'echo bye; exit 5' TERM; echo hello; while :; do sleep 0.01; done")
    eventually(lambda: run.output.written)
    run.stop(Stop.CANCELLED, grace=5.0)
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code) == ("stopped", 5)
    assert text_of(run).startswith("hello\n")
    assert text_of(run).endswith("bye\n")


def test_a_second_stop_can_shorten_the_grace_but_not_change_the_reason(place: Place) -> None:
    run = start(place, "sh", "-c", "trap '' TERM; echo; while :; do sleep 0.01; done")
    eventually(lambda: run.output.written)
    run.stop(Stop.CANCELLED, grace=60.0)
    run.stop(Stop.RELEASED, grace=0.0)
    assert finish(run).verdict == "stopped"


def test_what_a_command_leaves_in_the_background_dies_and_does_not_hold_up_the_job(place: Place) -> None:
    run = start(
        place,
        "sh",
        "-c",
        f"{sys.executable} -c \"$RUNAWAY\" 1002 & (trap '' TERM; sleep 1002) & wait %1; echo done",
        env={"RUNAWAY": RUNAWAY},
    )
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code) == ("succeeded", 0)
    assert text_of(run) == "done\n"
    assert not sleeping("1002")


def test_a_stranger_that_holds_the_pipe_open_does_not_hang_the_job(place: Place) -> None:
    run = start(place, "sh", "-c", "echo $$; sleep 1003")
    pid = int(eventually(lambda: text_of(run).strip()))
    stranger = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY)
    run.stop(Stop.CANCELLED)
    assert finish(run).verdict == "stopped"
    os.close(stranger)


def test_a_lost_lease_is_killed_and_says_nothing(place: Place) -> None:
    run = start(place, "sleep", "1004")
    assert run.started.wait(MINUTE)
    run.stop(Stop.CANCELLED)
    run.stop(Stop.LOST, grace=0.0)
    assert run.over.wait(MINUTE)
    assert run.outcome is None
    assert not sleeping("1004")


def test_a_run_stopped_before_it_began_starts_nothing(place: Place) -> None:
    first = start(place, "sleep", "1005")
    second = Run(first.assignment, place, notify=lambda: None, after=first)
    second.start()
    second.stop(Stop.RELEASED)
    assert not second.over.is_set()
    first.stop(Stop.CANCELLED)
    assert finish(second).verdict == "released"
    assert not second.started.is_set()
