"""The commands that wait for, show, explain and change jobs and bots, against a gateway that answers what the test
says; how they find their pool and their token."""

import base64
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from leasehold.errors import BadInput, LeaseholdError, NotFound
from rich.text import Text

from schema.readable import Column, fitted, short_ids, table, tell
from tests.support.http import (
    AT,
    JOB_COMMANDING,
    OTHER,
    Answer,
    Gateway,
    ReceivedRequest,
    call,
    final,
    in_turn,
    problem,
)
from tests.support.screens.terminal import on_a_terminal

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")
RATES = ("granted", "started", "finished", "succeeded", "cancelled", "dead")
STORY: dict[str, Any] = {
    "id": JOB_COMMANDING, "instance": "ci", "label": "nightly", "state": "queued", "priority": -3, "has_result": False,
    "units": 2, "attempts": 1,
    "max_attempts": 5, "reason": None, "created_at": f"{AT}0Z", "queued_at": f"{AT}0Z", "schedule_after": None,
    "started_at": None, "finished_at": None, "bot": "b1", "properties": {"os": ["linux"]}, "timeout_seconds": 60.0,
    "locality_hint": "repo", "retry_failed": False, "kills": 0, "considered": 2,
    "payload": {"command": ["echo", "a b", "\x1b[2J"]}, "result": None,
    "waiting": {"unmatchable": True, "sentence": "no bot that serves the instance 'ci' offers os=linux"},
    "events": [
        {"move": "submit", "from": None, "to": "queued", "at": f"{AT}0Z", "actor": "op", "fence": 0, "details": None},
        {"move": "grant", "from": "queued", "to": "leased", "at": f"{AT}1.5Z", "actor": "assigner-1", "fence": 1,
         "details": {"bot": "b1", "score": {"total": 6.0, "locality": 5.0}}},
    ],
}  # fmt: skip


def test_wait_succeeds_if_all_did_or_fails_in_one_line(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    done = final(JOB_COMMANDING, "succeeded", exit_code=0, seconds=2.0)
    stands.script = in_turn(Answer({"jobs": [done], "done": True}))
    call("wait", JOB_COMMANDING, JOB_COMMANDING)
    assert capsys.readouterr().out == f"{JOB_COMMANDING} succeeded after 2.0 s\n"
    assert stands.asked[0].body["ids"] == [JOB_COMMANDING]
    stands.script = in_turn(Answer({"jobs": [done, final(OTHER, "failed", exit_code=3)], "done": True}))
    with pytest.raises(LeaseholdError, match=f"^1 of 2 jobs did not succeed; the first: {OTHER} failed exit 3$"):
        call("wait", JOB_COMMANDING, OTHER)
    assert len(capsys.readouterr().out.splitlines()) == 2
    stands.script = in_turn(Answer({"jobs": [{"id": JOB_COMMANDING, "state": "running"}], "done": False}))
    with pytest.raises(LeaseholdError, match=rf"not final after 0\.01 s: {JOB_COMMANDING}\n"):
        call("wait", JOB_COMMANDING, "--timeout", "0.01")


def test_a_wait_on_a_terminal_shows_what_a_job_says_of_its_progress(
    stands: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.cli.output.terminal", lambda: True)
    drawn: list[str] = []
    monkeypatch.setattr("bots.cli.waiting.Bar.update", lambda bar: drawn.append(f"{bar._tally} {bar._tally.share}"))
    told = {"id": JOB_COMMANDING, "state": "running", "progress": {"share": 0.4, "text": "loading", "at": AT}}
    script = [{"jobs": [told], "done": False}, {"jobs": [final(JOB_COMMANDING, "succeeded")], "done": True}]
    stands.script = in_turn(*map(Answer, script))
    call("wait", JOB_COMMANDING)
    assert [asked.body["progress"] for asked in stands.asked] == [True, True]
    assert any("40% loading 0.4" in line for line in drawn)


def test_show_tells_who_shares_the_job_and_why_it_waits(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"joined": OTHER, "submissions": 3, "dedup_key": "all\x1b", "queue_deadline": f"{AT}9Z"}
    shared["dedup_key_until"] = f"{AT}9Z"
    shared["progress"] = {"share": 0.4, "text": "loading\x1b", "at": f"{AT}9Z"}
    stands.script = in_turn(Answer(STORY | shared))
    call("show", JOB_COMMANDING)
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for expected in (
        "why it waits no bot that serves the instance 'ci' offers os=linux",
        "queued -> leased",
        "bot=b1 score.total=6 score.locality=5",
        "progress 40% loading\\x1b",
        f"joined {OTHER}",
        f"submissions 3 want it, with the deduplication key 'all\\x1b', which it keeps until {AT}9Z",
        f"queue timeout 9.0 s, until {AT}9Z",
    ):
        assert expected in "\n".join(told)
    assert "\x1b" not in "".join(told)
    call("show", "--json", JOB_COMMANDING)
    assert json.loads(capsys.readouterr().out) == STORY | shared


def test_cancel_tells_what_became_of_each_and_asks_for_all_submissions_only_if_it_was_told_to(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    cancelling = {"id": JOB_COMMANDING, "state": "cancelling", "changed": True}
    stands.script = in_turn(Answer({"jobs": [cancelling]}))
    call("cancel", "--all-submissions", JOB_COMMANDING)
    stands.script = in_turn(Answer({"jobs": [cancelling, {"id": OTHER, "state": None, "changed": False}]}))
    with pytest.raises(NotFound, match=OTHER):
        call("cancel", JOB_COMMANDING, OTHER)
    assert capsys.readouterr().out == f"{JOB_COMMANDING} cancelling\n" * 2
    assert [asked.body for asked in stands.asked] == [
        {"ids": [JOB_COMMANDING], "all_submissions": True}, {"ids": [JOB_COMMANDING, OTHER]}
    ]  # fmt: skip
    stands.script = in_turn(Answer({"jobs": [], "next": None}))
    call("cancel", "--all", "--task", "shop.charge")
    assert stands.asked[-1].body["where"] == {"task": "shop.charge"}
    assert capsys.readouterr().err == "no job that this could change passes the filter\n"


def test_show_prints_the_beginning_of_the_result(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    ended = STORY | {"state": "succeeded", "waiting": None, "has_result": True}
    error = {"type": "ValueError", "message": "no", "traceback": "", "bases": []}
    results = [{"result": each, "fence": 1} for each in ({"answer": ["x" * 3000]}, {"error": error})]
    stands.script = in_turn(*(Answer(each) for result in results for each in (ended, result)))
    call("show", JOB_COMMANDING)
    assert stands.paths() == [f"GET /v1/jobs/{JOB_COMMANDING}", f"GET /v1/jobs/{JOB_COMMANDING}/result"]
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result ")]
    assert shown.endswith("xxx…")
    assert shown.split(maxsplit=1)[1].startswith('{"answer": ["xxx')
    assert len(shown) < 2100
    call("show", JOB_COMMANDING)
    assert " ValueError: no\n" in capsys.readouterr().out, "the error of a task is told as Python tells it"


def test_show_says_why_a_job_that_succeeded_has_no_result(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    why = "no result is stored, because it is not JSON"
    told = {"exit_code": 0, "reason": why}
    ended = STORY | {"state": "succeeded", "waiting": None, "has_result": False, "result": told}
    stands.script = in_turn(Answer(ended))
    call("show", JOB_COMMANDING)
    assert f" {why}\n" in capsys.readouterr().out


def test_result_prints_the_result_and_nothing_else(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer({"result": {"a": [1, "é\x1b"]}, "fence": 1}))
    call("result", JOB_COMMANDING)
    assert capsys.readouterr().out == '{"a":[1,"é\\u001b"]}\n'
    stands.script = in_turn(problem(404, f"id: job '{JOB_COMMANDING}' has no result: it is queued and has not ended"))
    with pytest.raises(NotFound, match="has not ended"):
        call("result", JOB_COMMANDING)


def test_results_of_several_jobs_are_a_line_each(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"state": "succeeded", "exit_code": 0, "reason": None, "has_result": True, "result": 7}
    found = [{"id": JOB_COMMANDING, **ended}, {"id": SEVENTH, "state": "queued", "has_result": False, "result": None}]
    stands.script = in_turn(Answer({"jobs": found[:1], "more": True}), Answer({"jobs": found[1:], "more": False}))
    call("result", JOB_COMMANDING, SEVENTH)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found
    stands.script = in_turn(Answer({"jobs": found[:1], "more": False}))
    call("result", "--lines", JOB_COMMANDING)
    assert json.loads(capsys.readouterr().out) == found[0], "of the last job of a long list the same as of the others"


def test_a_list_with_results_has_a_line_for_each_job_of_all_pages(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {"state": "succeeded", "exit_code": 0, "reason": None, "has_result": True, "result": {"energy": 0.5}}
    found = [{"id": LISTED["id"], **ended}, {"id": SEVENTH, "state": "queued"}]
    stands.script = in_turn(
        Answer({"jobs": [LISTED | {"metadata": {"n": "1"}}], "next": "c"}),
        Answer({"jobs": [LISTED | {"id": SEVENTH}]}),
        Answer({"jobs": found, "more": False}),
    )
    call("list", "--meta", "run=a", "--results")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["id"], first["metadata"], first["result"]) == (LISTED["id"], {"n": "1"}, {"energy": 0.5})
    assert (second["id"], second["has_result"], second["result"]) == (SEVENTH, False, None)
    assert [asked.query.get("cursor") for asked in stands.asked if asked.path == "/v1/jobs"] == [None, "c"]
    with pytest.raises(BadInput, match="does not go with --columns"):
        call("list", "--results", "--columns", "id")


def test_a_list_with_results_leaves_out_jobs_that_are_deleted_meanwhile_and_tells_the_next_page(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [f"{LISTED['id'][:-2]}0{number}" for number in range(5)]
    gone = {ids[1], ids[4]}

    def answered(asked: ReceivedRequest) -> Answer:
        if asked.path == "/v1/jobs":
            return Answer({"jobs": [LISTED | {"id": id} for id in ids], "next": "c"})
        for id in asked.body["ids"]:
            if id in gone:
                return problem(404, f"id: there is no job '{id}'")
        return Answer({"jobs": [{"id": id, "state": "queued"} for id in asked.body["ids"]], "more": False})

    stands.script = answered
    call("list", "--results", "--limit", "5", "--sort", "ended")
    told = capsys.readouterr()
    assert [json.loads(line)["id"] for line in told.out.splitlines()] == [id for id in ids if id not in gone]
    assert told.err == "next page: --cursor c\n"
    gone |= set(ids)
    call("list", "--results", "--limit", "5")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"next page: --before {short_ids(ids)[-1]}\n")


SEVENTH = "01932c8a-4f21-7000-8abc-0123456789ab"
LISTED = STORY | {"command": ["make", "a b\x1b"], "waited_seconds": 3.0, "ran_seconds": None, "why": "no such bot"}


def test_list_shows_one_line_for_each_job(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["leasehold-task", "shop:pool", "shop.mail"]
    task = {"id": SEVENTH, "command": command, "arguments": "7, cents=5", "ran_seconds": 61.0}
    stands.script = in_turn(Answer({"jobs": [LISTED, LISTED | task]}))
    call("list", "--instance", "ci", "--limit", "2")
    heading, *lines = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert heading == "id state command waited ran reason bot instance label priority attempts"
    assert lines == [
        f"{JOB_COMMANDING} queued make 'a b\\x1b' 3.0 s - no such bot b1 ci nightly -3 1 of 5",
        "2c8a-6789ab queued shop.mail(7, cents=5) 3.0 s 1 min 1 s no such bot b1 ci nightly -3 1 of 5",
    ]
    assert stands.asked[0].query == {"instance": "ci", "limit": "2"}
    stands.script = in_turn(Answer({"jobs": [LISTED | task], "next": "c"}))
    call("list", "--columns", "command,id", "--limit", "1")
    told = capsys.readouterr()
    assert told.out.split() == ["command", "id", "shop.mail(7,", "cents=5)", "2c8a-6789ab"]
    assert told.err == "next page: --before 2c8a-6789ab\n"


@pytest.mark.parametrize(
    "command",
    [
        "show",
        "explain",
        "result",
        "logs",
        "wait",
        "cancel",
        "hold",
        "release",
        "requeue",
        "priority 5",
        "list --before",
    ],
)
def test_every_command_takes_a_short_id_and_asks_the_gateway_for_the_whole_one(stands: Gateway, command: str) -> None:
    refused = problem(400, "id: '2c8a-6789ab' is short for 2 jobs: a, b", field="id")
    stands.script = in_turn(Answer({"ids": [SEVENTH]}), refused)
    with pytest.raises(BadInput, match="is short for 2 jobs"):
        call(*command.split(), "2c8a-6789ab")
    assert (stands.asked[0].path, stands.asked[0].body) == ("/v1/jobs/find", {"names": ["2c8a-6789ab"]})
    assert SEVENTH in f"{stands.asked[1].path} {stands.asked[1].query} {stands.asked[1].body}"


def test_columns_leave_and_texts_are_cut_on_a_narrow_terminal_but_no_id_is() -> None:
    columns = [Column("id"), Column("command", least=10), Column("bot", leaves=2), Column("priority", leaves=1)]
    rows = [[Text("2c8a-6789ab"), Text("make everything"), Text("b1"), Text("0")]]

    def shown(width: int) -> list[str]:
        of, (cells,), _ = fitted(columns, rows, width)
        return [f"{column.title}={each}" for column, each in zip(of, cells, strict=True)]

    whole = ["id=2c8a-6789ab", "command=make everything", "bot=b1", "priority=0"]
    assert shown(43) == whole
    assert shown(40) == ["id=2c8a-6789ab", "command=make everyt…", "bot=b1", "priority=0"]
    assert shown(36) == whole[:3]
    assert shown(23) == ["id=2c8a-6789ab", "command=make ever…"]
    assert shown(21) == shown(5) == ["id=2c8a-6789ab", "command=make ev…"]


def test_a_column_without_a_value_leaves_before_a_text_is_cut() -> None:
    columns = [Column("id"), Column("reason", least=6), Column("bot", leaves=2), Column("label", leaves=1)]
    rows = [[Text("2c8a-6789ab"), Text("no bot has room"), Text(bot), Text("a")] for bot in ("-", "-")]
    for width, titles in ((40, ["id", "reason", "bot", "label"]), (35, ["id", "reason", "label"])):
        of, (first, _), _ = fitted(columns, rows, width)
        assert ([column.title for column in of], first[1].plain) == (titles, "no bot has room")
    rows[1][2] = Text("b1")
    of, (first, _), _ = fitted(columns, rows, 35)
    assert ([column.title for column in of], first[1].plain) == (["id", "reason", "bot", "label"], "no bot ha…")


def test_no_row_is_wider_than_the_terminal_because_several_texts_have_their_least() -> None:
    columns = [Column("id"), Column("command", least=20, middle=True), Column("ran"), Column("reason", least=16)]
    row = [
        Text("263a-b06d7a"),
        Text('shop.flaky("/srv/missing")'),
        Text("9 min 53 s"),
        Text("FileNotFoundError: [Errno 2]"),
    ]
    for width in range(45, 100):
        _, (cells,), widths = fitted(columns, [row], width)
        assert sum(widths) + 2 * 3 <= width
        assert all(each.cell_len <= wide for each, wide in zip(cells, widths, strict=True))


@pytest.mark.parametrize("options", [[], ["-f"]])
def test_logs_writes_the_bytes_as_they_are_and_as_json_one_line_for_each_piece(
    stands: Gateway, capfdbinary: pytest.CaptureFixture[bytes], options: list[str]
) -> None:
    written = bytes(range(256)) + b"no newline"

    def script(asked: ReceivedRequest) -> Answer:
        start = int(asked.query["start"])
        data = base64.b64encode(written[start : start + 100]).decode()
        rest = {"state": "succeeded", "attempt": 2, "final": start + 100 > len(written), "lost": True}
        return Answer({"start": start, "data": data, "next": min(start + 100, len(written))} | rest)

    stands.script = script
    call("logs", *options, JOB_COMMANDING)
    told = capfdbinary.readouterr()
    assert (told.out, told.err.count(b"\n")) == (written, 2)
    assert b"attempt 2: its bot was lost before the end" in told.err
    assert f"`leasehold logs {JOB_COMMANDING} --attempt 1` shows" in told.err.decode()
    call("logs", "--json", *options, JOB_COMMANDING)
    pieces = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert b"".join(base64.b64decode(piece["data"]) for piece in pieces) == written
    first = {"start": 0, "next": 100, "state": "succeeded", "attempt": 2, "final": False}
    assert (pieces[0].items() >= first.items(), pieces[-1]["final"]) == (True, True)


STATUS = {
    "jobs": {"queued": 3, "running": 1}, "instances": {"ci": {"queued": 12345}, "web": {"running": 1}},
    "oldest_queued_seconds": 90.0, "later": 1200, "unmatchable": 2,
    "bots": {"ok": {"bots": 1, "capacity": 4, "in_use": 1}},
    "swarm": [], "capacity": 4, "in_use": 1, "upkeep": [{"name": "reap", "age_seconds": 0.5, "grace": False}],
    "rates": dict.fromkeys(RATES, 0.0) | {"submitted": 1.5, "failed": 0.25, "span": 12.5},
    "waits": {"jobs": 9, "p50": 0.004, "p95": 1.25, "p99": 200.0}, "at_least": ["queued", "unmatchable"],
    "finished_estimate": 1_200_000,
    "paused": [{"kind": "label", "name": "nightly", "instance": "ci", "reason": "disk full"}],
    "quotas": [
        {"cohort": "default", "instance": "ci", "usage": 17000, "min_quota": 1, "max_quota": 7, "effective_max": 6},
    ],
}  # fmt: skip


def test_a_watched_line_that_is_longer_than_the_terminal_is_folded_and_not_cut_off(stands: Gateway) -> None:
    stands.script = in_turn(Answer(STATUS))
    code, text = on_a_terminal(stands, "status", "--watch", "0.1", until=lambda: len(stands.asked) > 3)
    assert (code, "(leasehold list --unmatchable)" in re.sub(r"\s+", " ", text)) == (130, True)


BOT = {
    "name": "b1", "status": "ok", "draining": True, "instance": None, "pool": "builds", "labels": ["gpu"],
    "cohort": "gpus", "priority": 0, "capacity": 4, "in_use": 1, "leases": 1, "properties": {"os": ["linux"]},
    "epoch": 1, "opened_at": f"{AT}0Z", "expires_in": 29.0, "probation": None,
}  # fmt: skip


def test_status_and_bots_are_shown(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(
        Answer(STATUS),
        Answer({"bots": [BOT, BOT | {"name": "b2", "expires_in": -64.0}]}),
        Answer({"name": "b1", "draining": True}),
    )
    call("status")
    told = capsys.readouterr().out
    for expected in (
        "1 ok; 1 of 4 units in use",
        "1,200 queued jobs start later",
        "at least 2 queued jobs are unmatchable: no present bot could run them (leasehold list --unmatchable)",
        "3+",
        "12,345+",
        "ci        17,000  1    7    6",
        "about 1,200,000 finished jobs are kept",
        "last 12.5 s: 1.5 submitted",
        "0.25 failed",
        "9 jobs: p50 4 ms, p95 1.2 s, p99 3 min 20 s",
        "oldest queued job: 1 min 30 s",
        "effective max",
        "paused    label nightly of ci: disk full",
    ):
        assert expected in told
    call("bots", "list")
    told = capsys.readouterr().out
    assert all(word in told for word in ("draining", "gpus", "builds", "29.0 s", "1 min 4 s ago"))
    call("bots", "drain", "b1", "--reason", "disk")
    assert capsys.readouterr().out == "b1 takes no more work\n"


EXPLAINED: dict[str, Any] = {
    "id": JOB_COMMANDING, "state": "queued", "instance": "ci", "cohort": "linux", "label": "gpu", "priority": 0,
    "units": 1,
    "sentence": "it does not run because the only bot that could run it has no free unit",
    "change": ["release it", "1 more free unit on a matching bot"],
    "gates": [
        {"gate": "quota", "asks": "?", "open": True, "sentence": "any number of units", "evidence": {}},
        {"gate": "room", "asks": "?", "open": False, "sentence": "none\x1b[2J", "evidence": {"free_bots": 0}},
        {"gate": "units", "asks": "?", "open": None, "sentence": "no bot is left to ask it of", "evidence": {}},
    ],
    "order": {"in_queue": {"jobs": 1, "more": False}, "in_instance": {"jobs": 10_000, "more": True}},
    "attempts": [
        {"fence": 1, "bot": None, "assigner": None, "strategy": "capacity", "granted_at": f"{AT}1Z",
         "started_at": None, "ended_at": f"{AT}2Z", "decision": {}, "sentence": "was lost with its bot"},
    ],
    "receipts": [{"move": "preempted", "at": f"{AT}1Z", "receipt": {}, "sentence": "it was asked to stop"}],
}  # fmt: skip


def test_explain_prints_gates_and_what_would_start_the_job(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(EXPLAINED))
    call("explain", JOB_COMMANDING)
    told = capsys.readouterr().out
    assert stands.asked[0].path == f"/v1/jobs/{JOB_COMMANDING}/explain"
    lines = [line.split() for line in told.splitlines()]
    assert ["room", "closed", "none\\x1b[2J"] in lines
    assert [line for line in lines if line[1:2] == ["open"]] == []
    assert "2 further gates are not closed: --all shows them\n" in told
    assert "1 job like it, more than 10,000 jobs of its instance" in told
    assert "starts   release it\n  and    1 more free unit on a matching bot\n" in told
    assert "was lost with its bot" in told
    assert "it was asked to stop" in told
    assert "\x1b" not in told
    call("explain", "--all", JOB_COMMANDING)
    told = capsys.readouterr().out
    assert [line.split()[:2] for line in told.splitlines() if line.split()[1:2] == ["open"]] == [["quota", "open"]]
    assert "--all" not in told
    call("explain", "--json", JOB_COMMANDING)
    assert json.loads(capsys.readouterr().out) == EXPLAINED


def test_show_prints_every_move_also_one_it_does_not_know(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = {
        "rule": "any", "bot": "b1",
        "preemptor": {"job": "P", "instance": "ci", "usage": 0, "min_quota": 2, "waited_seconds": 21.5},
        "victims": [{"job": "V", "instance": "qa", "units": 1}],
    }  # fmt: skip
    moves: list[tuple[str, dict[str, Any] | None]] = [
        ("preempt", receipt), ("preempted", receipt), ("preempted", {"rule": "any"}),
        ("join", {"priority": -1, "priority_before": 0}), ("hold", {"reason": "disk"}), ("release", None),
        ("unheard_of", {"parts": [{"a": 1.0}, {"a": None}], "names": ["x", "y"], "deep": {"yes": True}}),
    ]  # fmt: skip
    events = [
        {"move": move, "from": "queued", "to": "queued", "at": f"{AT}{n}Z", "actor": "op", "fence": 0, "details": told}
        for n, (move, told) in enumerate(moves)
    ]
    stands.script = in_turn(Answer(STORY | {"events": events}))
    call("show", JOB_COMMANDING)
    told = capsys.readouterr().out
    for expected in (
        "asked to stop: V of qa (1 unit); on b1; rule any; usage 0 below the minimum of 2; waited 21.5 s",
        "asked to stop for job P of ci; on b1; rule any",
        "asked to stop for a job of another instance; rule any",
        "priority=-1 priority_before=0",
        "reason=disk",
        "parts.0.a=1 parts.1.a=- names=x,y deep.yes=yes",
    ):
        assert expected in told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (40, ["gate  details", "room  no bot has room for it at all and", "      none will"]),
        (24, ["gate", "    details", "room", "    no bot has room for", "    it at all and none", "    will"]),
    ],
)
def test_a_long_text_folds_beside_the_other_columns_or_below_them(
    monkeypatch: pytest.MonkeyPatch, width: int, lines: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stdout(Terminal()) as shown:
        table(["gate", Column("details", folds=True)], [["room", "no bot has room for it at all and none will"]])
    assert re.sub(r"\x1b\[\d*m", "", shown.getvalue()).splitlines() == lines


def test_a_sentence_for_a_person_goes_on_between_two_words_and_for_a_file_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    sentence = "error: [no] bot of cohort 'default' offers gpu=a100"
    tell(sentence)
    assert capsys.readouterr().err == sentence + "\n"
    with redirect_stderr(Terminal()) as shown:
        tell(f"{sentence}\n\nnext: `leasehold wait --timeout 5`, or `leasehold cancel`")
    lines = ["error: [no] bot of cohort", "'default' offers gpu=a100", ""]
    lines += ["next:", "`leasehold wait --timeout 5`,", "or `leasehold cancel`"]
    assert shown.getvalue().splitlines() == lines


# The pool and the token


def write_private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_local_pool_is_found_by_its_data_directory_and_a_token_file_goes_before_the_environment(
    stands: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands.script = in_turn(Answer({"jobs": []}))
    (tmp_path / "gateway.url").write_text(stands.url + "\n")
    write_private(tmp_path / "operator.token", "lh_operator_a_b\n")
    path = write_private(tmp_path / "token", "lh_submitter_c_d")
    call("list", "--token-file", str(path))
    for name in ("LEASEHOLD_URL", "LEASEHOLD_TOKEN"):
        monkeypatch.delenv(name)
    call("list", "--data", str(tmp_path))
    call("--data", str(tmp_path), "list", "--json")
    found = ["lh_submitter_c_d", *["lh_operator_a_b"] * 2]
    assert [asked.token for asked in stands.asked] == [f"Bearer {token}" for token in found]


def test_a_pool_or_a_token_that_is_missing_or_no_secret_is_told_in_one_line(
    stands: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_private(tmp_path / "token", "lh_submitter_c_d", 0o604)
    with pytest.raises(BadInput, match=f"chmod 600 {path}"):
        call("list", "--token-file", str(path))
    with pytest.raises(BadInput, match="in clear to another machine"):
        call("status", "--url", "http://example.invalid:7411")
    monkeypatch.delenv("LEASEHOLD_TOKEN")
    with pytest.raises(BadInput, match="give --token-file or set LEASEHOLD_TOKEN"):
        call("status", "--data", str(tmp_path))
    monkeypatch.delenv("LEASEHOLD_URL")
    with pytest.raises(BadInput, match="start `leasehold up`, or give --url"):
        call("status", "--data", str(tmp_path))
    assert stands.asked == []
