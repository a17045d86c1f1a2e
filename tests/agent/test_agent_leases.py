"""What an agent does with the leases it is given: run, report, kill, forget. Commands and HTTP are real."""

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from bots.agent.attempts.attempt import RunContext, StopReason
from bots.agent.attempts.output import CHUNK_BYTES
from bots.agent.leases import PROGRESS_BYTES, SYNC_JSON_BYTES, AgentLeases
from bots.protocol import Work
from schema import validation
from tests.support.agents import NEEDS_PROC, Pool, processes, serving
from tests.support.http import Answer, ReceivedRequest, problem
from tests.support.patience import eventually

pytestmark = NEEDS_PROC


def test_a_lease_is_acknowledged_when_it_runs_and_reported_when_it_has_ended_without_a_timer(tmp_path: Path) -> None:
    pool = Pool(ttl=7200, sync_in=3600)
    offer = {"capacity": 3, "properties": {"os": "linux"}, "instance": "tenant", "priority": 4}
    with serving(pool, tmp_path, **offer):
        key = pool.grant("sh", "-c", "echo hello; sleep 0.2; echo $LEASEHOLD_JOB $LEASEHOLD_BOT")
        outcome = pool.until(lambda: pool.outcomes.get(key))
        pool.until(lambda: pool.syncs[-1].wait)
        for number in range(9):
            short = pool.grant("true", job=f"short-{number}")
            pool.until(lambda short=short: short in pool.outcomes)
        assert len(pool.syncs) < 40
    assert (outcome["verdict"], outcome["exit_code"], outcome["output_bytes"]) == ("succeeded", 0, 18)
    assert bytes(pool.output[key]) == b"hello\njob-1 bot-1\n"
    assert pool.reported(key)[-2:] == ["active", "completed"]
    [opened] = pool.opened
    assert offer.items() <= opened.model_dump().items()
    assert {sync.capacity for sync in pool.syncs} == {None}, "a capacity of its own is said once"
    assert sorted(sync.seq for sync in pool.syncs) == list(range(1, len(pool.syncs) + 1))
    held = {tuple(report.state for report in sync.leases) for sync in pool.syncs if sync.wait > 0}
    assert held == {(), ("active",)}, "an end is answered at once"


def test_a_command_is_told_which_gpus_it_is_given(tmp_path: Path) -> None:
    pool = Pool()
    show = "echo ${CUDA_VISIBLE_DEVICES-unset} ${LEASEHOLD_GPUS-unset}"
    payload = {"command": ["sh", "-c", show], "env": {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}}
    with serving(pool, tmp_path, resources={"gpus": 4}):
        given = pool.grant(gpus=[1, 3], payload=payload)
        pool.until(lambda: pool.outcomes.get(given))
        without = pool.grant("sh", "-c", show, job="job-2")
        pool.until(lambda: pool.outcomes.get(without))
    assert (bytes(pool.output[given]), bytes(pool.output[without])) == (b"1,3 1,3\n", b"unset unset\n")
    assert pool.opened[0].resources == {"gpus": 4}


def test_a_call_without_an_answer_is_repeated_word_for_word(tmp_path: Path) -> None:
    pool = Pool()
    failures = [Answer(cut=True), problem(503, "starting"), problem(500, "internal"), Answer(b"<html>")]
    seen: list[Any] = []

    def instead(asked: ReceivedRequest) -> Answer | None:
        if asked.path == "/v1/sync" and any(lease["state"] == "completed" for lease in asked.body.get("leases", [])):
            seen.append(asked.body)
            return failures.pop() if failures else None
        return None

    pool.instead = instead
    with serving(pool, tmp_path):
        key = pool.grant("true")
        pool.until(lambda: key in pool.outcomes and not pool.syncs[-1].leases)
    assert len(seen) == 5
    assert all(body == seen[0] for body in seen)


def test_a_cancelled_lease_is_killed_and_confirmed_and_the_log_says_once_why(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.05)
    with capture_logs() as logs, serving(pool, tmp_path):
        key = pool.grant("sh", "-c", "trap '' TERM; setsid sleep 60 & sleep 60")
        pool.until(lambda: len(processes(tmp_path)) >= 3)
        pool.cancel(key, reason="preempt")
        assert pool.until(lambda: pool.outcomes.get(key))["verdict"] == "stopped"
        assert not processes(tmp_path)
    told = [(each["job"], each["reason"]) for each in logs if each["event"] == "lease is to be stopped"]
    assert told == [("job-1", "preempt")]


def test_a_lease_that_is_cancelled_before_the_bot_knew_it_is_confirmed_without_running(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path):
        key = pool.grant("touch", str(tmp_path / "ran"), state="cancelling")
        assert pool.until(lambda: pool.outcomes.get(key)) == {"verdict": "stopped", "output_truncated": False}
    assert not (tmp_path / "ran").exists()


def test_a_lease_that_is_not_listed_any_more_is_killed_and_forgotten(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path):
        key = pool.grant("sleep", "60")
        pool.until(lambda: processes(tmp_path))
        pool.revoke(key)
        pool.until(lambda: not processes(tmp_path))
        pool.until(lambda: pool.syncs[-1].wait and not pool.syncs[-1].leases)
    assert "completed" not in pool.reported(key)


def test_the_next_grant_of_a_job_waits_until_the_last_one_is_dead(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.05)
    log = tmp_path / "log"
    command = ["sh", "-c", f"echo start $LEASEHOLD_FENCE >> {log}; trap 'sleep 0.1; exit' TERM; sleep 0.2; exit 0"]
    with serving(pool, tmp_path):
        first = pool.grant("sh", "-c", "sleep 60")
        pool.until(lambda: processes(tmp_path))
        with pool.changed:
            pool.leases = {}
            second = pool.grant(*command, fence=3)
        pool.until(lambda: second in pool.outcomes)
        assert log.read_text() == "start 3\n"
        assert first not in pool.outcomes


def test_a_lease_that_a_server_offers_again_after_its_end_is_given_back(tmp_path: Path) -> None:
    """A promoted standby that lacks the last commits does so. The fence is of a late timeline, and below 2^53."""
    fence = ((2**21 - 1) << 32) + 7
    pool = Pool(sync_in=0.05)
    with serving(pool, tmp_path):
        key = pool.grant("sh", "-c", "echo $LEASEHOLD_FENCE", fence=fence)
        first = pool.until(lambda: pool.outcomes.get(key))
        with pool.changed:
            pool.outcomes.clear()
        assert pool.grant("echo", "again", fence=fence) == key
        second = pool.until(lambda: pool.outcomes.get(key))
    assert (first["verdict"], bytes(pool.output[key])) == ("succeeded", f"{fence}\n".encode())
    assert (second["verdict"], second["reason"]) == ("released", "the server has lost how this attempt ended")


def test_a_running_lease_that_the_bot_does_not_know_is_given_back_and_not_charged_to_its_job(tmp_path: Path) -> None:
    """It comes without a payload, as do all leases that run."""
    pool = Pool()
    with serving(pool, tmp_path):
        with pool.changed:
            key = pool.grant(payload=None)
            pool.leases[key]["state"] = "active"
        found = pool.until(lambda: pool.outcomes.get(key))
    assert (found["verdict"], found["reason"]) == ("released", "its bot does not know it any more")


def test_a_payload_that_cannot_run_and_a_missing_one_are_reported(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, capacity=2):
        bad = pool.grant(job="bad")
        missing = pool.grant(job="missing", payload=None)
        pool.until(lambda: {bad, missing} <= set(pool.outcomes))
    assert pool.outcomes[bad]["verdict"] == "failed"
    assert pool.outcomes[bad]["reason"].startswith("invalid payload: command")
    assert pool.outcomes[missing]["reason"] == "the lease came without a payload"


def test_output_is_streamed_while_the_command_runs(tmp_path: Path) -> None:
    pool = Pool(sync_in=30)
    with serving(pool, tmp_path):
        key = pool.grant("sh", "-c", "echo one; sleep 0.3; echo two; sleep 60")
        pool.until(lambda: bytes(pool.output.get(key, b"")) == b"one\ntwo\n")
        assert [chunk.start for report in pool.streamed for chunk in report.output] == [0, 4]


def test_output_that_could_not_be_streamed_travels_with_the_reports_of_the_ends(tmp_path: Path) -> None:
    pool = Pool()
    pool.instead = lambda asked: problem(503, "busy") if asked.path == "/v1/output" else None
    size = validation.MAX_OUTPUT_BYTES - CHUNK_BYTES // 2
    with serving(pool, tmp_path, capacity=3):
        keys = [pool.grant("head", "-c", str(size), "/dev/zero", job=f"job-{number}") for number in range(3)]
        pool.until(lambda: set(keys) <= set(pool.outcomes))
    assert [len(pool.output[key]) for key in keys] == [size] * 3
    for sync in pool.syncs:
        sent = sum(len(chunk.data) for lease in sync.leases for chunk in lease.output)
        assert sent < 1.4 * validation.MAX_OUTPUT_BYTES


def test_pages_of_a_proxy_end_no_bot_behind_whose_address_a_gateway_stands(tmp_path: Path) -> None:
    pool, pages = Pool(sync_in=0.1), Answer(b"<html>", 404)
    with serving(pool, tmp_path) as bot:
        key = pool.grant("sh", "-c", "until test -e go; do sleep 0.05; done")
        pool.until(lambda: "active" in pool.reported(key))
        left = [10]

        def instead(_: ReceivedRequest) -> Answer | None:
            left[0] -= 1
            return pages if left[0] >= 0 else None

        pool.instead = instead
        pool.until(lambda: left[0] < 0)
        (work,) = (tmp_path / "work" / "bot-1").glob("attempt-*/tmp")
        (work.parent / "go").touch()
        pool.until(lambda: key in pool.outcomes)
    assert (bot.failure, pool.outcomes[key]["verdict"], len(pool.opened)) == (None, "succeeded", 1)


def test_a_bot_ends_at_an_address_at_which_no_gateway_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bots.agent.gateway_calls.FIRST_CONTACT", 0.3)
    pool = Pool()
    pool.instead = lambda _: Answer(b"<html>", 404)
    with serving(pool, tmp_path) as bot, capture_logs() as logs:
        eventually(lambda: bot.code is not None)
    assert bot.code == 2
    assert any("is not a Leasehold gateway: it says 404 Not Found" in str(log.get("reason")) for log in logs)


class ScarceFiles:
    """The module `socket` for a process that has too many open files for a while."""

    left = 2

    def socketpair(self) -> tuple[socket.socket, socket.socket]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socketpair()

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


def test_a_command_waits_while_too_many_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scarce, pool = ScarceFiles(), Pool(sync_in=0.1)
    with serving(pool, tmp_path) as bot:
        monkeypatch.setattr("bots.agent.attempts.run.socket", scarce)
        key = pool.grant("true")
        pool.until(lambda: key in pool.outcomes)
    assert (scarce.left, bot.failure, pool.outcomes[key]["verdict"], len(pool.opened)) == (0, None, "succeeded", 1)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_proxy_that_takes_no_large_calls_ends_no_bot_and_loses_no_output(tmp_path: Path, streamed: bool) -> None:
    most, size = 100_000, 600_000

    def instead(asked: ReceivedRequest) -> Answer | None:
        if len(asked.raw) > most:
            return Answer(b"<html>", 413)
        return None if streamed or asked.path != "/v1/output" or (tmp_path / "ended").exists() else problem(503, "busy")

    pool = Pool(sync_in=0.2)
    pool.instead = instead
    with serving(pool, tmp_path):
        key = pool.grant("sh", "-c", f"head -c {size} /dev/zero; touch {tmp_path}/ended")
        pool.until(lambda: key in pool.outcomes)
    assert pool.outcomes[key]["verdict"] == "succeeded"
    assert len(pool.output[key]) == size


def test_checkpoints_that_do_not_fit_into_a_report_travel_with_a_later_one(tmp_path: Path) -> None:
    pool = Pool()
    pool.instead = lambda asked: problem(503, "busy") if asked.path == "/v1/output" else None
    # Each quotation mark takes two bytes in the body.
    text = "[" + ",".join(['""'] * (validation.MAX_CHECKPOINT_BYTES // 3 - 1)) + "]"
    (tmp_path / "large").write_text(text)
    fail = f"cp {tmp_path}/large $LEASEHOLD_CHECKPOINT; exit 1"
    with serving(pool, tmp_path / "bot", capacity=9):
        keys = [pool.grant("sh", "-c", fail, job=f"job-{number}") for number in range(9)]
        pool.until(lambda: set(keys) <= set(pool.outcomes))
    for sync in pool.syncs:
        sent = [(lease.state, lease.checkpoint) for lease in sync.leases if lease.checkpoint is not None]
        assert {state for state, _ in sent} <= {"completed"}
        assert sum(len(json.dumps(checkpoint)) for _, checkpoint in sent) <= SYNC_JSON_BYTES
    assert sum(lease.checkpoint == text for sync in pool.syncs for lease in sync.leases) >= len(keys)


def test_progress_that_comes_with_an_end_counts_toward_the_size_of_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2 * PROGRESS_BYTES
    monkeypatch.setattr("bots.agent.leases.SYNC_JSON_BYTES", most)
    pool = Pool()
    jobs = [f"job-{number}" for number in range(12)]

    def instead(asked: ReceivedRequest) -> Answer | None:
        ended = all((tmp_path / job).exists() for job in jobs)
        has_ends = any(lease["state"] == "completed" for lease in asked.body.get("leases", []))
        return problem(503, "busy") if asked.path == "/v1/output" or (has_ends and not ended) else None

    pool.instead = instead
    told = json.dumps({"share": 1, "text": "é" * 200}, ensure_ascii=False)
    command = f"printf %s '{told}' > $LEASEHOLD_CHECKPOINT.progress; touch {tmp_path}/$LEASEHOLD_JOB"
    with serving(pool, tmp_path / "bot", capacity=len(jobs)):
        keys = [pool.grant("sh", "-c", command, job=job) for job in jobs]
        pool.until(lambda: set(keys) <= set(pool.outcomes))
    carried = [
        [each.progress.model_dump_json() for each in sync.leases if each.progress is not None] for sync in pool.syncs
    ]
    assert all(sum(map(len, each)) <= most for each in carried)
    told_of = {each.job for sync in pool.syncs for each in sync.leases if each.progress is not None}
    assert told_of == set(jobs), "each comes with the end of its attempt"


def test_nothing_starts_or_is_held_once_the_session_is_lost(place: RunContext, tmp_path: Path) -> None:
    leases = AgentLeases(place, notify=lambda: None, inputs=None)  # type: ignore[arg-type]
    command = {"command": ["touch", str(tmp_path / "started")]}
    work = Work(job="job-1", fence=1, state="pending", instance="tenant", attempt=1, payload=command)
    leases.settle([work], accept=True)
    leases.stop(StopReason.LOST)
    leases.begin()
    with capture_logs() as logs:
        leases.settle([work], accept=True)
    leases.begin()
    assert leases.wait(10)
    assert (len(leases), (tmp_path / "started").exists(), logs) == (0, False, [])
