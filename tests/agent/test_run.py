"""One command of a lease, with real processes: what it gets, what it gives back, and why it may not start."""

import base64
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from leasehold.errors import NoAnswer
from leasehold.states import EndKind, end_kind

from bots.agent import agent
from bots.agent.attempts.attempt import Assignment, RunContext, StopReason
from bots.agent.attempts.output import CHUNK_BYTES, Output
from bots.agent.attempts.run import Run
from bots.agent.attempts.supervisor_reader import SupervisorReader
from bots.agent.guardian import process_tree
from bots.agent.inputs import InputReader
from bots.agent.orphans import Orphans
from schema import clock, validation
from schema.timing import KILL_ALLOWANCE, STUCK_AFTER
from tests.support.agents import NEEDS_PROC, RUNAWAY, finish, sleeping, start, text_of
from tests.support.patience import MINUTE, eventually

pytestmark = NEEDS_PROC


def test_a_command_that_exits_with_0_succeeded_and_its_output_keeps_the_order_of_writing(place: RunContext) -> None:
    run = start(place, "sh", "-c", "echo one; echo two >&2; echo three")
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("succeeded", 0, None)
    assert text_of(run) == "one\ntwo\nthree\n"
    assert (outcome.output_bytes, outcome.output_truncated) == (14, False)
    assert outcome.seconds is not None


def test_another_exit_code_is_a_failure_and_a_signal_is_negative(place: RunContext) -> None:
    outcome = finish(start(place, "sh", "-c", "exit 3"))
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("failed", 3, "exit code 3")
    outcome = finish(start(place, "sh", "-c", "kill -SEGV $$"))
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("failed", -11, "killed by SIGSEGV")
    assert end_kind(outcome.verdict, outcome.reason) is EndKind.KILLED


@pytest.mark.parametrize(
    ("payload", "script", "told"),
    [
        ({}, "echo '{\"again\": 60}' > $LEASEHOLD_RESULT; exit 75", ("released", 60.0, None, None)),
        ({}, "exit 75", ("failed", None, None, None)),
        ({}, "echo '{\"again\": -1}' > $LEASEHOLD_RESULT; exit 75", ("failed", None, None, None)),
        ({}, "echo '{\"again\": 60}' > $LEASEHOLD_RESULT; exit 7", ("failed", None, None, None)),
        ({"retry": {"base": 5}}, "exit 3", ("failed", None, 10.0, None)),
        ({"retry": {"exit_codes": [3]}}, "exit 3", ("failed", None, 2.0, None)),
        ({"retry": {"exit_codes": [4]}}, "exit 3", ("failed", None, None, True)),
        ({"retry": {"exceptions": ["OSError"]}}, "exit 3", ("failed", None, None, True)),
    ],
)
def test_a_command_asks_to_be_run_again_and_a_policy_says_when_it_is_tried_again(
    place: RunContext, payload: dict[str, Any], script: str, told: tuple[Any, ...]
) -> None:
    outcome = finish(start(place, "sh", "-c", script, **payload))
    assert (outcome.verdict, outcome.again, outcome.retry_in, outcome.final) == told


def test_a_command_that_is_stopped_for_its_timeout_cannot_ask_to_be_run_again(place: RunContext) -> None:
    script = "trap 'echo {\\\"again\\\": 5} > $LEASEHOLD_RESULT; exit 75' TERM; while :; do sleep 0.05; done"
    outcome = finish(start(place, "sh", "-c", script, timeout=0.3))
    assert (outcome.verdict, outcome.again, outcome.exit_code) == ("failed", None, 75)


#: What an agent knows of its session when it reads the results of other nodes.
SESSION: Any = SimpleNamespace(bot="bot-1", epoch=1, secret="s")


def read_late(place: RunContext, call: Callable[..., Any], script: str, nodes: int) -> Run:
    """A run that begins once the results of so many nodes have been read by `call`."""
    payload = {"command": ["sh", "-c", script]}
    run = Run(Assignment("a-job", 7, 1, "tenant", None, payload), place, notify=lambda: None)
    InputReader(SESSION, call).start(run, range(nodes))
    return run


def test_the_results_of_other_nodes_are_in_a_file_and_have_a_bound(place: RunContext) -> None:
    def call(_: str, body: Any, size: int = 2) -> Any:
        return {"results": {str(node): {"state": "succeeded", "result": "x" * size} for node in body["nodes"]}}

    run = read_late(place, call, "cat $LEASEHOLD_INPUTS", nodes=40)
    assert finish(run).verdict == "succeeded"
    assert json.loads(text_of(run)).keys() == {str(node) for node in range(40)}
    large = finish(read_late(place, partial(call, size=65_000), "true", nodes=300))
    assert (large.verdict, large.exit_code) == ("failed", None)
    assert large.reason == "inputs: have more than 16,777,216 bytes of JSON together"


def test_a_run_that_has_read_the_results_of_other_nodes_needs_no_further_thread(
    place: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, start = threading.Event(), threading.Thread.start

    def start_none(thread: threading.Thread) -> None:
        if answered.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    def call(_: str, __: Any) -> Any:
        answered.set()
        return {"results": {}}

    monkeypatch.setattr(threading.Thread, "start", start_none)
    assert finish(read_late(place, call, "true", nodes=1)).verdict == "succeeded"


def test_an_attempt_whose_bot_leaves_while_the_results_are_read_is_not_charged(place: RunContext) -> None:
    asked = threading.Event()

    def call(_: str, __: Any) -> Any:
        asked.set()
        raise NoAnswer("the gateway is away")

    run = read_late(place, call, "true", nodes=1)
    assert asked.wait(MINUTE)
    run.stop(StopReason.RELEASED)
    assert finish(run).verdict == "released"


def test_the_environment_is_the_allow_list_the_payload_and_what_leasehold_says(place: RunContext) -> None:
    given = {"COLOUR": "blue", "LEASEHOLD_JOB": "forged", "LEASEHOLD_X": "x", "LEASEHOLD_TICK": "t", "TZ": "UTC"}
    run = start(place, "env", env=given, timeout=1_000_000.0)
    finish(run)
    seen = dict(line.split("=", 1) for line in text_of(run).splitlines())
    directory = seen.pop("LEASEHOLD_WORK")
    assert Path(directory).parent == place.workplace.root
    for name in ("LEASEHOLD_USAGE", "LEASEHOLD_RESULT", "LEASEHOLD_CHECKPOINT"):
        assert seen.pop(name).startswith(f"{directory}/")
    own = {"JOB": "a-job", "FENCE": "7", "ATTEMPT": "2", "INSTANCE": "tenant", "BOT": "bot-1", "TICK": "t"}
    own |= {"TIMEOUT": "1000000"}
    assert seen == {f"LEASEHOLD_{name}": value for name, value in own.items()} | {
        "PATH": os.defpath, "HOME": directory, "TMPDIR": f"{directory}/tmp", "COLOUR": "blue", "TZ": "UTC"
    }  # fmt: skip


def test_a_command_works_in_a_private_directory_with_its_own_session_and_default_signals(place: RunContext) -> None:
    program = (
        "import os,signal; print(os.getcwd() == os.environ['HOME'], oct(os.stat('.').st_mode & 0o777), os.getsid(0) =="
        " os.getpid() == os.getpgrp(), [n for n in signal.Signals if signal.getsignal(n) == signal.SIG_IGN])"
    )
    run = start(place, sys.executable, "-S", "-c", program)
    finish(run)
    # Python itself ignores SIGPIPE and SIGXFSZ.
    assert text_of(run) == f"True 0o700 True {[signal.SIGPIPE, signal.SIGXFSZ]}\n"


def test_standard_input_is_the_payloads_or_empty(place: RunContext) -> None:
    run = start(place, "cat", stdin="käse\n" * 20_000)
    finish(run)
    assert text_of(run) == "käse\n" * 20_000
    run = start(place, "cat")
    assert finish(run).verdict == "succeeded"
    assert text_of(run) == ""


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("no-such-program", 127, "command not found: 'no-such-program' (or the interpreter it names)"),
        ("/etc/passwd/program", 127, "command not found: '/etc/passwd/program' (or the interpreter it names)"),
        ("/etc/passwd", 126, "command is not executable: '/etc/passwd'"),
    ],
)
def test_an_absent_command_fails_with_a_shells_code(place: RunContext, command: str, code: int, reason: str) -> None:
    run = start(place, command)
    outcome = finish(run)
    assert (outcome.verdict, outcome.reason, outcome.exit_code) == ("failed", reason, code)
    assert text_of(run) == f"{reason}\n"


def test_a_command_without_its_directory_is_a_bots_error(place: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = place.launcher.launch

    def vanish(output: int, stdin: int) -> socket.socket:
        control = launch(output, stdin)
        for directory in place.workplace.root.iterdir():
            shutil.rmtree(directory)
        return control

    monkeypatch.setattr(place.launcher, "launch", vanish)
    assert finish(start(place, "true")).verdict == "error"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, "payload: input should be an object"),
        ({}, "command: field required"),
        ({"command": []}, "command: list should have at least 1 item after validation, not 0"),
        ({"command": [""]}, "command.0: is empty"),
        ({"command": ["echo", "\0"]}, "command or env holds a NUL character"),
        ({"command": ["env"], "env": {"A=B": "c"}}, "env: a name is empty or holds '='"),
        ({"command": ["env"], "shell": True}, "shell: there is no such field"),
    ],
)
def test_a_payload_that_no_bot_can_run_failed(place: RunContext, payload: Any, reason: str) -> None:
    assignment = Assignment(job="j", fence=1, attempt=1, instance="i", timeout=None, payload=payload)
    run = Run(assignment, place, notify=lambda: None)
    run.start()
    outcome = finish(run)
    assert (outcome.verdict, outcome.reason) == ("failed", f"invalid payload: {reason}")


def test_a_directory_that_cannot_be_made_is_a_bots_error(place: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(place.workplace, "root", Path("/proc/self/no-such-place"))
        outcome = finish(start(place, "true"))
    assert outcome.verdict == "error"
    assert outcome.reason == "the work directory cannot be made: No such file or directory"


def test_of_long_output_the_first_and_the_last_bytes_are_kept_and_all_are_counted(place: RunContext) -> None:
    half, size = validation.MAX_OUTPUT_BYTES // 2, 3 * validation.MAX_OUTPUT_BYTES
    run = start(place, "sh", "-c", f"head -c {size} /dev/zero | tr '\\0' 'x'; echo; echo why it failed")
    outcome = finish(run)
    assert (outcome.verdict, outcome.output_bytes, outcome.output_truncated) == ("succeeded", size + 15, True)
    text = text_of(run)
    assert text.startswith("x" * half + "\n[")
    assert text.endswith("x\nwhy it failed\n")
    left_out = int(text.partition("[")[2].partition(" bytes left out]\n")[0].replace(",", ""))
    assert len(text) <= validation.MAX_OUTPUT_BYTES
    assert left_out + len(text) - len(f"\n[{left_out:,} bytes left out]\n") == size + 15


@pytest.mark.parametrize("size", [10, 500, 1000])
def test_output_that_fits_is_kept_whole_whatever_was_sent_before(size: int) -> None:
    output, wanted = Output(cap=1000), random.Random(size).randbytes(size)
    for place in range(0, size, 7):
        output.write(wanted[place : place + 7])
        output.sent(output.pending(validation.MAX_OUTPUT_BYTES).end)
    begun = output.pending(validation.MAX_OUTPUT_BYTES).end
    output.end()
    rest = b"".join(base64.b64decode(chunk.data) for chunk in output.pending(validation.MAX_OUTPUT_BYTES).chunks)
    assert wanted[:begun] + rest == wanted
    assert begun == min(size, 500)


# However a command ends, its whole tree of processes ends with it.


def test_a_timeout_kills_the_whole_tree_also_what_ran_away(place: RunContext) -> None:
    tree = f"trap '' TERM; {sys.executable} -c \"$RUNAWAY\" 1001 & setsid sleep 1001 & sleep 1001"
    run = start(place, "sh", "-c", tree, timeout=0.5, env={"RUNAWAY": RUNAWAY})
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("failed", -9, "timeout after 0.5 s")
    assert end_kind(outcome.verdict, outcome.reason) is EndKind.TIMEOUT
    assert not sleeping("1001")


def test_a_command_may_use_its_grace_which_a_second_stop_can_shorten_for_the_same_reason(place: RunContext) -> None:
    run = start(place, "sh", "-c", "trap 'echo bye; exit 5' TERM; echo hello; while :; do sleep 0.01; done")
    deaf = start(place, "sh", "-c", "trap '' TERM; echo; while :; do sleep 0.01; done")
    for each in (run, deaf):
        eventually(lambda each=each: each.output.written)
        each.stop(StopReason.CANCELLED, grace=60.0)
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code) == ("stopped", 5)
    assert (text_of(run)[:6], text_of(run)[-4:]) == ("hello\n", "bye\n")
    deaf.stop(StopReason.RELEASED, grace=0.0)
    assert finish(deaf).verdict == "stopped"


def test_what_a_command_leaves_in_the_background_dies_and_does_not_hold_up_the_job(place: RunContext) -> None:
    script = f"{sys.executable} -c \"$RUNAWAY\" 1002 & (trap '' TERM; sleep 1002) & wait %1; echo done"
    run = start(place, "sh", "-c", script, env={"RUNAWAY": RUNAWAY})
    outcome = finish(run)
    assert (outcome.verdict, outcome.exit_code) == ("succeeded", 0)
    assert text_of(run) == "done\n"
    assert not sleeping("1002")


def test_a_stranger_that_holds_the_pipe_open_does_not_hang_the_job(place: RunContext) -> None:
    run = start(place, "sh", "-c", "echo $$; sleep 1003")
    pid = int(eventually(lambda: text_of(run).strip()))
    stranger = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY)
    run.stop(StopReason.CANCELLED)
    assert finish(run).verdict == "stopped"
    os.close(stranger)


def test_a_lost_lease_is_killed_and_says_nothing(place: RunContext) -> None:
    run = start(place, "sleep", "1004")
    eventually(lambda: run.has_started)
    run.stop(StopReason.CANCELLED)
    run.stop(StopReason.LOST, grace=0.0)
    assert run.over.wait(MINUTE)
    assert run.outcome is None
    assert not sleeping("1004")


def test_a_run_stopped_before_it_began_starts_nothing(place: RunContext) -> None:
    first = start(place, "sleep", "1005")
    second = Run(first.assignment, place, notify=lambda: None, after=first)
    second.start()
    second.stop(StopReason.RELEASED)
    assert not second.over.is_set()
    first.stop(StopReason.CANCELLED)
    assert finish(second).verdict == "released"
    assert not second.has_started


def test_the_run_time_of_a_command_is_right_although_the_agent_reads_of_its_start_and_end_at_once() -> None:
    ours, supervisor = socket.socketpair()
    waker, _waking = socket.socketpair()
    pipe, writer = os.pipe()
    with ours, supervisor, waker, _waking, open(pipe, "rb"), open(writer, "wb"):
        supervisor.sendall(b'{"ready": 1}\n{"started": 2, "at": 10.5}\n{"exit": 0, "at": 12.0}\n')
        reader = SupervisorReader(ours, pipe, waker=waker, output=Output())
        reader.step(MINUTE)
    assert (reader.started_at, reader.ended_at, reader.exit_code) == (10.5, 12.0, 0)


def test_a_killed_guardian_is_replaced_and_running_commands_go_on(place: RunContext) -> None:
    run = start(place, "sleep", "1010")
    eventually(lambda: run.has_started)
    assert place.launcher.pid is not None
    os.kill(place.launcher.pid, signal.SIGKILL)
    assert finish(start(place, "true")).verdict == "succeeded"
    assert sleeping("1010")
    run.stop(StopReason.CANCELLED)
    assert finish(run).verdict == "stopped"
    assert not sleeping("1010")


def test_a_command_dies_with_its_guardian_and_supervisor_even_if_no_agent_is_left_to_kill_it(
    place: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.launcher, "sweep", lambda *_, **__: [])
    run = start(place, "sleep", "1019")
    eventually(lambda: run.has_started)
    assert place.launcher.pid is not None
    for process in [place.launcher.pid, *process_tree()[place.launcher.pid]]:
        os.kill(process, signal.SIGKILL)
    assert finish(run).verdict == "error"
    eventually(lambda: not sleeping("1019"))


def test_a_stopped_command_of_which_something_does_not_die_is_over_before_the_server_closes_the_session(
    place: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a disk that does not answer does not even die by SIGKILL."""
    short = 0.3
    monkeypatch.setattr("bots.agent.attempts.run.STUCK_AFTER", short)
    monkeypatch.setattr(SupervisorReader, "ask", lambda *_: None)
    find, stuck = Orphans._find, 1 << 22  # the first number that is no process id
    monkeypatch.setattr(Orphans, "_find", lambda *about: [*find(*about), stuck])
    run = start(place, "sleep", "1020")
    eventually(lambda: run.has_started)
    began = clock.monotonic()
    run.stop(StopReason.CANCELLED, grace=0.1)
    assert finish(run).verdict == "stopped"
    beyond = clock.monotonic() - began - (0.1 + 2 * short)
    assert beyond < KILL_ALLOWANCE - 2 * STUCK_AFTER
    assert not sleeping("1020")


def test_a_command_that_stops_its_supervisor_again_and_again_has_its_timeout_all_the_same(
    place: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.agent.attempts.run.STUCK_AFTER", 1.0)
    script = f'{sys.executable} -c "$RUNAWAY" 1016; trap "" TERM; while :; do kill -STOP $PPID; done'
    run = start(place, "sh", "-c", script, timeout=0.3, env={"RUNAWAY": RUNAWAY})
    outcome = finish(run)
    assert not sleeping("1016")
    assert (outcome.verdict, outcome.reason) == ("failed", "timeout after 0.3 s")
    assert finish(start(place, "true")).verdict == "succeeded"


def test_a_stopped_guardian_does_not_hold_up_timeouts_and_is_continued_for_the_next_command(place: RunContext) -> None:
    run = start(place, "sleep", "1017", timeout=0.5)
    eventually(lambda: run.has_started)
    assert place.launcher.pid is not None
    os.kill(place.launcher.pid, signal.SIGSTOP)
    assert finish(run).reason == "timeout after 0.5 s"
    assert not sleeping("1017")
    before = place.launcher.pid
    assert finish(start(place, "true")).verdict == "succeeded"
    assert place.launcher.pid == before


def test_a_guardian_that_starts_nothing_is_replaced(place: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(place, "sleep", "1018")
    eventually(lambda: run.has_started)
    monkeypatch.setattr("bots.agent.attempts.run.READY_AFTER", 0.3)
    replace = place.launcher.replace

    def replace_once(guardian: int | None) -> None:
        monkeypatch.setattr("bots.agent.attempts.run.READY_AFTER", MINUTE)
        replace(guardian)

    monkeypatch.setattr(place.launcher, "replace", replace_once)
    monkeypatch.setattr("bots.agent.launcher.stopped", lambda _process: False)
    assert place.launcher.pid is not None
    os.kill(place.launcher.pid, signal.SIGSTOP)
    assert finish(start(place, "true")).verdict == "succeeded"
    assert sleeping("1018")
    run.stop(StopReason.CANCELLED)
    assert finish(run).verdict == "stopped"
    assert not sleeping("1018")


def test_the_alarm_kills_everything_unless_it_is_put_off(place: RunContext) -> None:
    place.launcher.arm(clock.monotonic() + 2)
    doomed = start(place, "sleep", "1007")
    eventually(lambda: doomed.has_started)
    assert doomed.over.wait(MINUTE)
    assert doomed.outcome is None
    assert finish(start(place, "true")).verdict == "error"
    place.launcher.arm(clock.monotonic() + 2)
    place.launcher.arm(clock.monotonic() + 600)
    assert finish(start(place, "sleep", "2.5")).verdict == "succeeded"
    place.launcher.disarm()


# The output that waits to be sent.


def test_output_is_cut_into_chunks_whose_offsets_go_on_where_the_gateway_has_it() -> None:
    output = Output(cap=2 * CHUNK_BYTES + 20)
    output.write(b"a" * CHUNK_BYTES)
    output.write(b"b" * CHUNK_BYTES + b"c" * 40)
    pending = output.pending(validation.MAX_OUTPUT_BYTES)
    chunks = [(chunk.start, len(base64.b64decode(chunk.data))) for chunk in pending.chunks]
    assert chunks == [(0, CHUNK_BYTES), (CHUNK_BYTES, 10)]
    output.sent(CHUNK_BYTES + 3)
    output.sent(5)
    assert [chunk.start for chunk in output.pending(validation.MAX_OUTPUT_BYTES).chunks] == [CHUNK_BYTES + 3]
    assert (output.unsent, output.written, output.truncated) == (7, 2 * CHUNK_BYTES + 40, True)


def test_the_log_of_an_agent_has_the_stack_of_an_error_and_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    """As where a program runs an agent that has not said how it logs."""
    agent.log_to_stderr()
    secret = "hunter" * 2
    try:
        raise RuntimeError(f"{len(secret)} bytes")
    except RuntimeError:
        structlog.get_logger().exception("a run failed")
    told = capsys.readouterr().err
    assert "a run failed" in told
    assert "RuntimeError: 12 bytes" in told
    assert secret not in told
