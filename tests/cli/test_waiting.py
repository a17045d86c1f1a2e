"""`--wait`, `--watch` and Ctrl-C, against a gateway that answers what the test says, and at times does not."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from leasehold.calls.backlog import MAX_REQUEUED
from leasehold.states import FINAL
from leasehold.transport import Transport
from leasehold.wire import MAX_LIST

from assigner.cli import errors
from assigner.cli.main import cli
from bots.cli import waiting
from tests.support.http import (
    JOB_COMMANDING,
    OTHER,
    Answer,
    Gateway,
    ReceivedRequest,
    client_for,
    final,
    in_turn,
    problem,
)
from tests.support.patience import wait_instead
from tests.support.screens.terminal import on_a_terminal

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")


def piece(data: bytes, *, state: str = "running", attempt: int = 1, last: bool = False) -> Answer:
    encoded = base64.b64encode(data).decode()
    return Answer({"start": 0, "data": encoded, "next": len(data), "state": state, "attempt": attempt, "final": last})


def ending_with(*pieces: Answer, state: str = "succeeded", **result: Any) -> Callable[[ReceivedRequest], Answer]:
    """A gateway that accepts every job as the same one, gives its output in these pieces, and says how it ended."""
    left = list(pieces)

    def answer(asked: ReceivedRequest) -> Answer:
        if asked.path.endswith("/output"):
            return left.pop(0) if len(left) > 1 else left[0]
        if asked.path == "/v1/jobs/wait":
            return Answer({"jobs": [final(id, state, **result) for id in asked.body["ids"]]})
        return Answer({"jobs": [{"id": JOB_COMMANDING, "created": True} for _ in asked.body["jobs"]]})

    return answer


def test_a_waiting_submit_prints_its_jobs_output(stands: Gateway, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    stands.script = ending_with(piece(b"4"), piece(b"2\xff\n", last=True), seconds=0.25)
    assert errors.run(cli, ["submit", "--wait", "--", "echo"]) == 0
    said = capfdbinary.readouterr()
    assert said.out == b"42\xff\n"
    assert said.err.decode() == f"{JOB_COMMANDING} succeeded after 250 ms\n"


@pytest.mark.parametrize(
    ("state", "result", "code"),
    [
        ("failed", {"exit_code": 7, "reason": "exit code 7"}, 7),
        ("failed", {"exit_code": -9}, 137),
        ("failed", {"exit_code": 0, "reason": "timeout after 1 s"}, 1),
        ("failed", {"exit_code": 256}, 1),
        ("failed", {}, 1),
        ("cancelled", {"exit_code": 3}, 1),
        ("dead", {}, 1),
    ],
)
def test_the_exit_code_is_that_of_the_command_and_never_0_without_success(
    stands: Gateway, capsys: pytest.CaptureFixture[str], state: str, result: dict[str, Any], code: int
) -> None:
    stands.script = ending_with(piece(b"", last=True), state=state, **result)
    assert errors.run(cli, ["submit", "--wait", "--", "false"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{JOB_COMMANDING} {state}")
    assert line.count("exit") <= 1, "one cause is told once"


def test_a_result_that_could_not_be_stored_is_told_with_the_end(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "no result is stored, because it is not JSON"
    stands.script = ending_with(piece(b"", last=True), exit_code=0, reason=why)
    assert errors.run(cli, ["submit", "--wait", "--", "true"]) == 0
    assert capsys.readouterr().err == f"{JOB_COMMANDING} succeeded ({why})\n"


def test_a_dead_job_is_told_with_what_its_last_attempt_said(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = final(JOB_COMMANDING, "dead", reason="command 'a' cannot be started: it is a task's bot")
    dead |= {"reason": "every attempt ended without a result"}
    stands.script = in_turn(Answer({"jobs": [dead]}))
    assert errors.run(cli, ["wait", JOB_COMMANDING]) == 1
    said = "every attempt ended without a result; its last attempt: command 'a' cannot be started: it is a task's bot"
    assert f"{JOB_COMMANDING} dead ({said})" in capsys.readouterr().out


def test_output_that_starts_again_is_announced(stands: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    stands.script = ending_with(piece(b"one"), piece(b"", attempt=2), piece(b"one two", attempt=2, last=True))
    assert errors.run(cli, ["submit", "--wait", "--", "work"]) == 0
    said = capfd.readouterr()
    assert said.out == "oneone two"
    assert "runs again, attempt 2" in said.err


def test_quiet_writes_only_the_outcome_and_needs_wait(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = ending_with(piece(b"loud", last=True))
    assert errors.run(cli, ["submit", "--wait", "--quiet", "--", "work"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{JOB_COMMANDING} succeeded\n")
    assert not [path for path in stands.paths() if path.endswith("/output")]
    asked = len(stands.asked)
    assert errors.run(cli, ["submit", "--quiet", "--", "work"]) == 2
    assert capsys.readouterr().err == "error: --quiet: goes with --wait\n"
    assert len(stands.asked) == asked, "nothing is submitted by a call that is refused"


def test_what_a_job_waits_for_is_told_until_a_bot_has_it_also_without_a_terminal(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.cli.waiting.SILENCE", 0.0)
    explained = {"state": "queued", "sentence": "it does not run because no bot\x1b", "change": ["add a bot"]}
    pieces = iter([piece(b"", state="queued"), piece(b"hi\n"), piece(b""), piece(b"", last=True)])

    def answer(asked: ReceivedRequest) -> Answer:
        if asked.path.endswith("/explain"):
            return Answer(explained)
        if asked.path.endswith("/output"):
            return next(pieces)
        if asked.path == "/v1/jobs/wait":
            return Answer({"jobs": [final(JOB_COMMANDING, "succeeded", exit_code=0)], "done": True})
        return Answer({"jobs": [{"id": JOB_COMMANDING, "created": True}]})

    stands.script = answer
    assert errors.run(cli, ["submit", "--wait", "--", "work"]) == 0
    (first, last) = capsys.readouterr().err.splitlines()
    assert first.startswith(f"job {JOB_COMMANDING} is queued, for ")
    assert first.endswith(": it does not run because no bot\\x1b; what would start it: add a bot")
    assert last == f"{JOB_COMMANDING} succeeded"


def test_waiting_for_a_file_is_brief(stands: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [f"6b1f6c1e-4a53-4f6b-9a53-{n:012}" for n in range(500)]
    looks = iter(range(25))

    def answer(asked: ReceivedRequest) -> Answer:
        if asked.path == "/v1/jobs/wait":  # 20 more of them have ended at each look
            next(looks)
            states = ["failed", *["succeeded"] * 9] * 2
            ended = zip(asked.body["ids"], states, strict=False)
            return Answer({"jobs": [final(id, state, exit_code=1) for id, state in ended]})
        return Answer({"jobs": [{"id": id, "created": True} for id in ids]})

    stands.script = answer
    (tmp_path / "jobs.jsonl").write_text('{"command": ["true"]}\n' * 500)
    assert errors.run(cli, ["submit", "--wait", "--file", str(tmp_path / "jobs.jsonl")]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == ids
    lines = said.err.splitlines()
    assert len(lines) <= 9 + 20 + 3
    assert "and 30 more that did not succeed" in lines
    assert lines[-2].startswith("500 of 500 jobs ended: 450 succeeded, 50 failed; in ")
    assert lines[-1].startswith("error: 50 of 500 jobs did not succeed")


def test_json_is_the_ended_jobs_and_nothing_else(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = ending_with(piece(b"loud", last=True), state="failed", exit_code=3)
    assert errors.run(cli, ["submit", "--wait", "--json", "--", "work"]) == 3
    assert [job["state"] for job in json.loads(capsys.readouterr().out)] == ["failed"]


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (["--", "sleep"], [f"leasehold logs --follow {JOB_COMMANDING}", f"leasehold cancel {JOB_COMMANDING}"]),
        (["--file", "jobs.jsonl"], ["2 jobs go on", JOB_COMMANDING, OTHER, "0 of 2 jobs ended"]),
    ],
)
def test_ctrl_c_ends_the_waiting_and_says_how_to_go_on(
    stands: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], hints: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs.jsonl").write_text('{"command": ["true"]}\n' * 2)

    def answer(asked: ReceivedRequest) -> Answer:
        if asked.path.endswith("/output"):
            return piece(b"")
        if asked.path == "/v1/jobs/wait":
            return Answer({"jobs": [{"id": id, "state": "running"} for id in asked.body["ids"]]})
        ids = [JOB_COMMANDING, OTHER][: len(asked.body["jobs"])]
        return Answer({"jobs": [{"id": id, "created": True} for id in ids]})

    stands.script = answer
    code, text = on_a_terminal(stands, "submit", "--wait", *arguments, until=lambda: len(stands.asked) > 3)
    assert code == 130
    assert [hint for hint in hints if hint not in text] == []
    assert not [path for path in stands.paths() if "cancel" in path], "the jobs stay"


@pytest.mark.parametrize("status", [401, 403, 400, 500, 502, 503])
def test_whatever_error_ends_a_wait_leaves_the_id_of_the_job_to_go_on_with(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("bots.cli.caller.Caller.client", lambda _: client_for(stands.url, patience=0.0))
    stands.script = in_turn(Answer({"jobs": [{"id": JOB_COMMANDING, "created": True}]}), problem(status, "it is so"))
    assert errors.run(cli, ["submit", "--wait", "--", "work"]) > 0
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert f"; job {JOB_COMMANDING} goes on: `leasehold logs --follow" in said


def test_an_error_that_ends_a_wait_says_of_nothing_that_it_goes_on_if_it_does_not(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["wait", JOB_COMMANDING], ["logs", "--follow", JOB_COMMANDING]):
        stands.script = in_turn(problem(404, f"there is no job '{JOB_COMMANDING}'"))
        assert errors.run(cli, command) == 2
        assert capsys.readouterr().err == f"error: there is no job '{JOB_COMMANDING}'\n"
    ended = Answer({"leases": 2, "draining": False})
    for command, answers in (
        ("bots drain b1", (ended, ended)),
        ("instance drain a", (ended, Answer({"leases": None}))),
    ):
        stands.script = in_turn(*answers)
        assert errors.run(cli, [*command.split(), "--wait"]) == 1
        assert capsys.readouterr().err.endswith("is no longer draining: another operator ended the drain\n")


def test_a_server_that_goes_away_leaves_the_id_of_the_job_to_go_on_with(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.cli.caller.Caller.client", lambda _: client_for(stands.url, patience=0.0))
    graph = {"id": OTHER, "name": "g", "state": "active", "nodes": 1, **dict.fromkeys(map(str, FINAL), 0)}
    stands.script = in_turn(Answer({"jobs": [{"id": JOB_COMMANDING, "created": True}]}), AWAY)
    assert errors.run(cli, ["submit", "--wait", "--", "work"]) == 3
    assert f"; job {JOB_COMMANDING} goes on: `leasehold logs --follow" in capsys.readouterr().err
    stands.script = in_turn(AWAY)
    assert errors.run(cli, ["wait", JOB_COMMANDING, OTHER]) == 3
    assert "; 2 jobs go on, from " in capsys.readouterr().err
    stands.script = in_turn(Answer(graph), AWAY)
    assert errors.run(cli, ["graph", "wait", "g"]) == 3
    assert f"; graph {OTHER} goes on: `leasehold graph wait {OTHER}`" in capsys.readouterr().err


def test_a_wait_for_a_filter_is_for_all_jobs_that_pass_it(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    page, last = ({"jobs": [{"id": each}], "next": cursor} for each, cursor in ((OTHER, "c"), (JOB_COMMANDING, None)))
    ended = [final(JOB_COMMANDING, "succeeded"), final(OTHER, "failed", exit_code=3)]
    stands.script = in_turn(Answer(page), Answer(last), Answer({"jobs": ended}))
    assert errors.run(cli, ["wait", "--all", "--meta", "build=7", "--state", "failed", "--state", "succeeded"]) == 1
    said = capsys.readouterr()
    assert [line.split()[:2] for line in said.out.splitlines()] == [[each["id"], each["state"]] for each in ended]
    assert said.err.startswith("error: 1 of 2 jobs did not succeed; the first: ")
    assert {asked.query["primary"] for asked in stands.asked[:2]} == {"true"}, "a standby may lack the newest jobs"
    assert stands.asked[-1].body["ids"] == [JOB_COMMANDING, OTHER], "the oldest first"
    stands.script = in_turn(Answer({"jobs": [], "next": None}))
    assert errors.run(cli, ["wait", "--all", "--meta", "build=a b", "--unmatchable"]) == 2
    assert capsys.readouterr().err == "error: --all: no job passes the filter --meta 'build=a b' --unmatchable\n"


def test_a_wait_for_a_filter_asks_an_older_gateway_without_what_it_does_not_know(stands: Gateway) -> None:
    unknown = problem(400, "primary: there is no such field", field="primary")
    listed = Answer({"jobs": [{"id": OTHER}], "next": None})
    stands.script = in_turn(unknown, listed, Answer({"jobs": [final(OTHER, "succeeded")]}))
    assert errors.run(cli, ["wait", "--all", "--meta", "build=7"]) == 0
    assert ["primary" in asked.query for asked in stands.asked] == [True, False, False]


def test_an_end_of_a_wait_names_the_jobs_that_are_left_and_the_filter(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.cli.caller.Caller.client", lambda _: client_for(stands.url, patience=0.0))
    third = str(UUID(int=UUID(OTHER).int + 1))
    listed = Answer({"jobs": [{"id": each} for each in (third, OTHER, JOB_COMMANDING)], "next": None})
    wait = ["wait", "--all", "--label", "x"]
    stands.script = in_turn(listed, Answer({"jobs": [final(JOB_COMMANDING, "succeeded")]}), AWAY)
    assert errors.run(cli, wait) == 3
    found = (
        "`leasehold list --label x` shows them, `leasehold wait --all --label x` waits again, `leasehold cancel --all "
    )
    assert f"; 2 jobs go on, from {OTHER} to {third}: {found}--label x` cancels" in capsys.readouterr().err
    stands.script = in_turn(
        listed, Answer({"jobs": [final(each, "succeeded") for each in (JOB_COMMANDING, OTHER)]}), AWAY
    )
    assert errors.run(cli, wait) == 3
    assert f"; job {third} goes on: " in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--all"], [OTHER, "--label", "x"], [OTHER, "--all", "--label", "x"]])
def test_a_wait_is_for_ids_or_for_a_filter(capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    assert errors.run(cli, ["wait", *given]) == 2
    assert "error: give either ids, or --all with a filter such as --meta" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bots drain b1", "instance drain team-a", "assigners drain a1"])
def test_ctrl_c_says_that_the_drain_goes_on(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    wait_instead(monkeypatch, "sleep", interrupted)
    stands.script = in_turn(Answer({"leases": 2, "draining": True, "state": "running"}))
    assert errors.run(cli, [*command.split(), "--wait"]) == 130
    assert capsys.readouterr().err.startswith("\nthe drain goes on: `leasehold ")


def test_ctrl_c_in_a_large_file_says_how_much_of_it_is_submitted(
    stands: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs.jsonl").write_text('\n{"command": ["true"]}' * 3)
    monkeypatch.setattr("leasehold.client.MAX_JOBS", 2)
    stands.script = in_turn(Answer({"jobs": [{"id": id, "created": True} for id in (JOB_COMMANDING, OTHER)]}))
    told: list[str] = []

    def interrupting(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("bots.cli.submit.tell", interrupting)
    assert errors.run(cli, ["submit", "--file", str(tmp_path / "jobs.jsonl")]) == 130
    ends = f"from {JOB_COMMANDING} to {OTHER}, that of line 3"
    assert told == [
        "2 of 3 jobs are submitted",
        f"\n2 jobs are submitted and go on, {ends}; those of the next lines may be, too",
    ]


def test_an_act_on_many_jobs_tells_how_far_it_is_and_what_ctrl_c_leaves(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.cli.backlog.SILENCE", 0.0)
    jobs = [{"id": id, "state": "cancelled", "changed": True} for id in (JOB_COMMANDING, OTHER)]
    parts = [
        Answer({"jobs": jobs, "next": "a"}),
        Answer({"jobs": jobs, "next": "b"}),
        Answer({"jobs": [], "next": None}),
    ]
    stands.script = in_turn(*parts)
    assert errors.run(cli, ["cancel", "--all", "--label", "x"]) == 0
    assert capsys.readouterr().err.splitlines() == ["2 jobs changed so far", "4 jobs changed so far"]
    told: list[str] = []

    def interrupting(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("bots.cli.backlog.tell", interrupting)
    stands.script = in_turn(*parts)
    assert errors.run(cli, ["hold", "--all", "--label", "x"]) == 130
    assert told[-1] == "\n4 jobs changed before; of those that pass the filter, some more may be"


@pytest.mark.parametrize("act", ["cancel", "hold", "release", "requeue", "priority 5", "reschedule --now"])
def test_ctrl_c_in_an_act_on_given_ids_counts_what_the_parts_before_have_changed(
    stands: Gateway, capsys: pytest.CaptureFixture[str], act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = MAX_REQUEUED if act == "requeue" else MAX_LIST
    ids = [str(UUID(int=number)) for number in range(2 * size + 1)]

    def answer(asked: ReceivedRequest) -> Answer:
        if len(asked.body["ids"]) < size:
            return Answer({"jobs": []})
        return Answer({"jobs": [{"id": id, "state": "queued", "changed": True} for id in asked.body["ids"]]})

    told: list[int] = []

    def interrupted(*given: Any, **body: Any) -> Any:
        told.append(len(body["body"]["ids"]))
        if len(told) == 3:
            raise KeyboardInterrupt
        return Transport.call(*given, **body)

    stands.script = answer
    monkeypatch.setattr("leasehold.client.Transport", type("Cut", (Transport,), {"call": interrupted}))
    assert errors.run(cli, [*act.split(), *ids]) == 130
    assert told == [size, size, 1]
    assert capsys.readouterr().err == f"\n{2 * size:,} jobs changed before; of the given ones, some more may be\n"


@pytest.mark.parametrize("act", ["cancel", "hold", "requeue"])
def test_ctrl_c_before_or_after_an_act_says_nothing_of_it(
    stands: Gateway, capsys: pytest.CaptureFixture[str], act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    stands.script = in_turn(Answer({"jobs": [{"id": OTHER, "state": "queued", "changed": True, "job": OTHER}]}))
    for step, id in (("bots.cli.backlog._print", OTHER), ("bots.cli.filters.whole_ids", OTHER[:8])):
        with monkeypatch.context() as patch:
            patch.setattr(step, interrupted)
            assert errors.run(cli, [act, id]) == 130
        assert "changed before" not in capsys.readouterr().err


# Watching


BOT = {
    "status": "ok", "draining": False, "host": "build-7", "pid": 4711, "instance": None, "pool": None, "labels": [],
    "cohort": "default", "priority": 0, "capacity": 4, "in_use": 1, "leases": 1, "properties": {}, "epoch": 1,
    "opened_at": None, "expires_in": 29.0, "probation": None,
}  # fmt: skip
FIRST, SECOND = ({"bots": [{"name": name, **BOT}]} for name in ("bot-one", "bot-two"))
AWAY = problem(503, "the database is not there")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the pause after the third look; the pauses between others take no time."""
    left = [0.0, 0.0]

    def sleep(_: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()

    wait_instead(monkeypatch, "sleep", sleep)
    monkeypatch.setattr("bots.cli.watching.PATIENCE", 0.0)


@pytest.mark.usefixtures("looks")
def test_each_look_has_its_time_and_survives_an_outage(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(FIRST), AWAY, Answer(SECOND))
    assert errors.run(cli, ["bots", "list", "--watch"]) == 130
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line[:4] for line in lines] == ["--- ", "bot ", "bot-", "--- ", "bot ", "bot-"]
    assert "build-7" in lines[2]
    assert "not known" in lines[2], "the gateway is older than versions of bots"
    assert lines[-1].startswith("bot-two")
    assert "\x1b" not in said.out
    assert said.err.strip().endswith("the database is not there; trying again")


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize(
    ("command", "first", "then"),
    [
        ("explain @last", "POST /v1/jobs/find", f"GET /v1/jobs/{JOB_COMMANDING}/explain"),
        ("graph show @last", "GET /v1/graphs/%40last", f"GET /v1/graphs/{JOB_COMMANDING}"),
        ("graph show g --instance i", "GET /v1/graphs/g", f"GET /v1/graphs/{JOB_COMMANDING}"),
    ],
)
def test_a_watch_keeps_to_what_a_word_or_name_meant_at_first(
    stands: Gateway, command: str, first: str, then: str
) -> None:
    counts = dict.fromkeys(("nodes", "blocked", "blocked_forever", "queued", "parked", "active", *map(str, FINAL)), 0)
    graph = {"id": JOB_COMMANDING, "name": "g", "state": "active", "edges": 0, "missing": [], "page": [], **counts}
    job = {"state": "queued", "cohort": "c", "instance": "i", "sentence": "it waits", "order": None, "gates": []}
    job |= {"change": [], "attempts": [], "receipts": [], "ids": [JOB_COMMANDING]}
    stands.script = in_turn(Answer({**graph, **job, "instance": "i"}))
    assert errors.run(cli, [*command.split(), "--watch"]) == 130
    asked = [path.partition("?")[0] for path in stands.paths()]
    assert asked[:3] == [first, then, then]
    assert set(asked[3:]) <= {then}


@pytest.mark.usefixtures("looks")
def test_json_is_one_document_for_each_look(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(FIRST), Answer(SECOND))
    assert errors.run(cli, ["bots", "list", "--watch", "5", "--json"]) == 130
    names = [json.loads(line)[0]["name"] for line in capsys.readouterr().out.splitlines()]
    assert names == ["bot-one", "bot-two", "bot-two"]


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("answer", [problem(404, "the job is not there"), problem(401, "the token is not valid")])
def test_what_is_final_ends_a_watch(stands: Gateway, capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    for script in ([answer], [Answer(FIRST), answer]):
        stands.script = in_turn(*script)
        assert errors.run(cli, ["bots", "list", "--watch"]) == 2
        assert capsys.readouterr().err.startswith("error: the")


@pytest.mark.parametrize(
    ("width", "said"), [(80, "1,848 of 10,000, 107 failed; "), (200, "1,848 of 10,000 jobs ended: ")]
)
def test_the_line_beside_a_bar_is_brief_enough_for_the_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, said: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    now = [0.0]
    monkeypatch.setattr("bots.cli.waiting.clock.monotonic", lambda: now[0])
    tally = waiting.Tally(10_000)
    now[0] = 9.7
    tally.ended.update({"succeeded": 1741, "failed": 107})
    told = waiting.Bar(tally)._progress.tasks[0].description
    assert told.startswith(said)
    assert told.endswith(" left")
    assert len(told) + waiting.BAR < width


def test_what_had_ended_before_a_wait_began_tells_nothing_of_the_time_that_is_left(stands: Gateway) -> None:
    def answer(asked: ReceivedRequest) -> Answer:
        ended = asked.body["ids"][-2 if len(stands.asked) == 1 else 0 :]
        return Answer({"jobs": [final(each, "succeeded") for each in ended], "done": True})

    stands.script = answer
    code, text = on_a_terminal(stands, "wait", str(UUID(int=UUID(OTHER).int + 1)), JOB_COMMANDING, OTHER)
    assert (code, len(stands.asked)) == (0, 2)
    assert "2 of 3 jobs ended: 2 succeeded; " in text
    assert not re.search(r"2 of 3 [^\r\n]*left", text)


def test_how_a_job_ended_has_a_line_of_its_own_beside_a_bar(stands: Gateway) -> None:
    def answer(asked: ReceivedRequest) -> Answer:
        if len(stands.asked) == 1:
            return Answer({"jobs": [{"id": each, "state": "running"} for each in asked.body["ids"]], "done": False})
        return Answer({"jobs": [final(each, "succeeded") for each in asked.body["ids"]], "done": True})

    stands.script = answer
    code, text = on_a_terminal(stands, "wait", JOB_COMMANDING, OTHER)
    told = [line for line in text.split("\n") if JOB_COMMANDING in line or OTHER in line]
    assert (code, len(told)) == (0, 2)
    for line in told:
        assert "of 2 jobs" not in line.rpartition("\x1b[2K")[2], "the bar has been erased from this line"


def test_a_terminal_shows_the_latest_answer_in_one_place_also_during_an_outage(stands: Gateway) -> None:
    stands.script = in_turn(Answer(FIRST), AWAY)
    code, text = on_a_terminal(stands, "bots", "list", "--watch", "0.1", until=lambda: len(stands.asked) > 9)
    assert code == 130
    last = text.rpartition("\x1b[2K")[2]
    assert "the database is not there; this is from 20" in last
    assert "bot-one" in last, "what was read before stays"
