"""What a command leaves in files: its result and its checkpoint, read without trust in what it put there."""

import json
import os
from pathlib import Path

import pytest
from leasehold.errors import BadInput

from bots.agent.attempts.attempt import Assignment, RunContext, StopReason
from bots.agent.attempts.run import Run
from bots.agent.job_files import FILES, Checkpoint, ProgressFile, Unsent, read_result, read_usage
from bots.protocol import Progress
from schema import clock
from schema.validation import MAX_RESULT_BYTES
from tests.support.agents import NEEDS_PROC, Pool, finish, processes, serving, start, text_of
from tests.support.http import problem

pytestmark = NEEDS_PROC
SECRET = '{"token": "lh_operator_secret"}'


# Results


@pytest.mark.parametrize(("code", "verdict"), [(0, "succeeded"), (3, "failed")])
def test_a_result_is_reported_whatever_the_exit_code(place: RunContext, code: int, verdict: str) -> None:
    said = '{"b": [1.0, "é"], "a": null}'
    script = f"[ ! -e $LEASEHOLD_RESULT ] && echo '{said}' > $LEASEHOLD_RESULT; exit {code}"
    outcome = finish(start(place, "sh", "-c", script))
    assert (outcome.verdict, outcome.exit_code, outcome.result) == (verdict, code, said + "\n")


def test_a_command_that_is_stopped_may_leave_a_result_in_its_grace(place: RunContext) -> None:
    run = start(place, "sh", "-c", "trap 'echo 1 > $LEASEHOLD_RESULT; exit' TERM; echo up; sleep 60 & wait")
    while not text_of(run):
        assert not run.over.wait(0.01)
    run.stop(StopReason.CANCELLED)
    outcome = finish(run)
    assert (outcome.verdict, outcome.result) == ("stopped", "1\n")


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        ("echo nonsense >", "is not JSON"),
        (":>", "is not JSON"),
        ('printf \'{"a": 1, "a": 2}\' >', "repeats the key 'a'"),
        ("printf '\\377' >", "is not UTF-8"),
        (f"truncate -s {MAX_RESULT_BYTES + 1}", f"is larger than {MAX_RESULT_BYTES} bytes"),
        ("mkdir", "is no file"),
        ("mkfifo", "is no file"),
    ],
)
def test_what_is_no_result_is_not_stored_and_the_reason_says_so(place: RunContext, write: str, reason: str) -> None:
    for code, verdict, before in ((0, "succeeded", ""), (3, "failed", "exit code 3; ")):
        outcome = finish(start(place, "sh", "-c", f"{write} $LEASEHOLD_RESULT; exit {code}"))
        assert (outcome.verdict, outcome.exit_code, outcome.result) == (verdict, code, None)
        assert str(outcome.reason).startswith(f"{before}no result is stored, because it {reason}")


@pytest.mark.parametrize("name", [FILES.result, FILES.checkpoint])
def test_a_link_to_a_secret_file_is_refused(place: RunContext, tmp_path: Path, name: str) -> None:
    (secret := tmp_path / "secret").write_text(SECRET)
    run = start(place, "sh", "-c", f"ln -s {secret} $HOME/{name}; exit 3")
    outcome = finish(run)
    assert (outcome.verdict, outcome.result, run.checkpoint.unsent) == ("failed", None, None)
    assert outcome.reason is not None
    assert "because it cannot be read: Too many levels of symbolic links" in outcome.reason


def test_a_directory_that_was_replaced_by_a_link_is_not_followed(place: RunContext, tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    for name in (FILES.result, FILES.checkpoint, FILES.usage):
        (outside / name).write_text('{"tokens": 5}')
    run = start(place, "sh", "-c", f'cd /; rm -r "$HOME"; ln -s {outside} "$HOME"; exit 1')
    outcome = finish(run)
    assert (outcome.result, outcome.usage, run.checkpoint.unsent) == (None, None, None)
    assert len(list(outside.iterdir())) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root has other accounts' files")
def test_a_hard_link_to_a_file_of_another_account_is_refused(tmp_path: Path) -> None:
    for read, name in ((read_result, "result"), (read_usage, "usage")):
        (tmp_path / name).write_text('{"tokens": 1}')
        assert read(tmp_path / name) is not None
        with pytest.raises(BadInput, match="belongs to another account"):
            read(tmp_path / name, owner=65001)


# Checkpoints


def test_progress_is_told_once_a_second_and_what_is_none_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    progress, path = ProgressFile(), tmp_path / FILES.progress
    progress.place(str(path), None)
    found: list[Progress | None] = []
    for text in ("", "[1]", '{"share": 2}', '{"share": 0.', '{"share": 0.5, "text": "half"}   ', '{"share": 0.6}'):
        path.write_text(text)
        progress.look()
        found.append(progress.unsent)
        if progress.unsent is not None:
            progress.sent(progress.unsent)
    assert found == [None] * 4 + [Progress(share=0.5, text="half", number=1), None]
    now += 1.0
    progress.look()
    assert progress.unsent == Progress(share=0.6, number=2)
    progress.sent(progress.unsent)
    path.write_text('{"share": 1}')
    progress.look()
    assert progress.unsent is None
    progress.look(last=True)
    assert progress.unsent == Progress(share=1.0, number=3), "the command has ended, and nothing looks again"


def test_a_progress_that_comes_while_an_earlier_one_is_under_way_is_told_too(tmp_path: Path) -> None:
    progress, path = ProgressFile(), tmp_path / FILES.progress
    progress.place(str(path), None)
    path.write_text('{"share": 0.87}')
    progress.look()
    under_way = progress.unsent
    path.write_text('{"share": 1}')
    progress.look(last=True)
    assert under_way is not None
    progress.sent(under_way)
    assert progress.unsent == Progress(share=1.0, number=2)


def continued(place: RunContext, script: str, checkpoint: str | None) -> Run:
    """Run a script as an attempt that follows one which left this checkpoint."""
    payload = {"command": ["sh", "-c", script]}
    run = Run(Assignment("a-job", 8, 2, "tenant", None, payload, checkpoint=checkpoint), place, notify=lambda: None)
    run.start()
    return run


def test_a_command_finds_the_checkpoint_of_an_earlier_attempt_and_may_replace_it(place: RunContext) -> None:
    step = 'cat $LEASEHOLD_CHECKPOINT; echo "[2]" > $HOME/new; mv $HOME/new $LEASEHOLD_CHECKPOINT; exit 1'
    run = continued(place, step, "[1]")
    assert finish(run).verdict == "failed"
    assert (text_of(run), run.checkpoint.unsent) == ("[1]", Unsent(1, "[2]\n"))
    # One that was left alone is not sent again, and without an earlier one there is no file.
    for script, checkpoint in (("exit 1", "[1]"), ("[ -e $LEASEHOLD_CHECKPOINT ]", None)):
        run = continued(place, script, checkpoint)
        outcome = finish(run)
        assert (outcome.exit_code, outcome.result, run.checkpoint.unsent) == (1, None, None)


def test_a_bad_checkpoint_leaves_the_one_before_and_the_reason_says_so(tmp_path: Path, place: RunContext) -> None:
    checkpoint = Checkpoint(None)
    path = tmp_path / FILES.checkpoint
    checkpoint.place(str(path), None)
    path.write_text("[1]")
    checkpoint.look()
    path.write_text("[1, ")
    checkpoint.look()
    assert (checkpoint.unsent, checkpoint.refusal is None) == (Unsent(1, "[1]"), False)
    path.write_text(json.dumps("x" * MAX_RESULT_BYTES))
    checkpoint.look()
    assert (checkpoint.unsent, checkpoint.refusal) == (Unsent(1, "[1]"), f"is larger than {MAX_RESULT_BYTES} bytes")

    outcome = finish(continued(place, "echo [ > $LEASEHOLD_CHECKPOINT; exit 3", "[1]"))
    assert outcome.reason is not None
    assert outcome.reason.startswith("exit code 3; its last checkpoint is not kept, because it is not JSON")


def test_a_checkpoint_that_changes_while_another_is_sent_is_sent_too(tmp_path: Path) -> None:
    checkpoint = Checkpoint(None)
    path = tmp_path / FILES.checkpoint
    checkpoint.place(str(path), None)
    for number in (1, 2):
        path.write_text(f"[{number}]")
        checkpoint.look(last=True)
    assert checkpoint.unsent == Unsent(2, "[2]")
    checkpoint.sent(1)
    assert checkpoint.unsent == Unsent(2, "[2]")
    checkpoint.sent(2)
    checkpoint.sent(1)
    assert checkpoint.unsent is None


def test_an_agent_sends_a_checkpoint_while_the_command_runs(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    script = "echo 2 > $LEASEHOLD_CHECKPOINT.new; mv $LEASEHOLD_CHECKPOINT.new $LEASEHOLD_CHECKPOINT; sleep 60"
    with serving(pool, tmp_path):
        key = pool.grant("sh", "-c", script, checkpoint="1")
        pool.until(lambda: [report.checkpoint for report in pool.streamed] == ["2\n"])
        pool.cancel(key)
        pool.until(lambda: key in pool.outcomes)
        # After a success, none is sent.
        ended = pool.grant("sh", "-c", "echo 3 > $LEASEHOLD_CHECKPOINT", job="job-2", checkpoint="1")
        pool.until(lambda: ended in pool.outcomes)
    told = [report.checkpoint for sync in pool.syncs for report in sync.leases]
    assert set(told) == {None}, "what the gateway has is not sent again"


def test_what_a_gateway_did_not_take_between_syncs_goes_with_the_end(tmp_path: Path) -> None:
    pool = Pool()
    pool.instead = lambda asked: problem(422, "checkpoint: unknown") if asked.path == "/v1/output" else None
    with serving(pool, tmp_path):
        key = pool.grant("sh", "-c", "echo 2 > $LEASEHOLD_CHECKPOINT; echo 3 > $LEASEHOLD_RESULT; exit 1")
        pool.until(lambda: key in pool.outcomes)
    (end,) = [each for sync in pool.syncs for each in sync.leases if each.state == "completed"][:1]
    assert end.outcome is not None
    assert (end.checkpoint, end.outcome.result) == ("2\n", "3\n")
    assert not processes(tmp_path)


def test_results_that_do_not_fit_into_one_call_come_in_the_next(tmp_path: Path) -> None:
    pool = Pool()
    size = MAX_RESULT_BYTES - 2
    script = f"{{ printf '\"'; head -c {size} /dev/zero | tr '\\0' x; printf '\"'; }} > $LEASEHOLD_RESULT"
    jobs = 9
    with serving(pool, tmp_path, capacity=jobs):
        keys = [pool.grant("sh", "-c", script, job=f"job-{n}") for n in range(jobs)]
        pool.until(lambda: set(keys) <= set(pool.outcomes))
    assert {len(pool.outcomes[key]["result"]) for key in keys} == {MAX_RESULT_BYTES}
    for sync in pool.syncs:
        ended = [each for each in sync.leases if each.outcome is not None]
        assert len(ended) <= 6, "six results of this kind are what one call has room for"
