"""The commands that wait for, show and change jobs and bots, against a gateway that answers what the test says."""

import base64
import json
from typing import Any

import pytest
from leasehold.errors import LeaseholdError, NotFound

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

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")

RATES = ("granted", "started", "finished", "succeeded", "cancelled", "dead")

STORY: dict[str, Any] = {
    "id": JOB_COMMANDING, "instance": "ci", "label": "nightly", "state": "queued", "priority": -3,
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


def test_wait_succeeds_if_all_jobs_did(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(
        Answer({"jobs": [final(JOB_COMMANDING, "succeeded", exit_code=0, seconds=2.0)], "done": True})
    )
    call("wait", JOB_COMMANDING, JOB_COMMANDING)
    assert capsys.readouterr().out == f"{JOB_COMMANDING} succeeded after 2.0 s\n"
    assert stands.asked[0].body["ids"] == [JOB_COMMANDING]


def test_wait_fails_in_one_line_if_a_job_did_not_succeed(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [final(JOB_COMMANDING, "succeeded"), final(OTHER, "failed", exit_code=3)]
    stands.script = in_turn(Answer({"jobs": jobs, "done": True}))
    with pytest.raises(LeaseholdError) as caught:
        call("wait", JOB_COMMANDING, OTHER)
    assert str(caught.value) == f"1 of 2 jobs did not succeed; the first: {OTHER} failed exit 3"
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_wait_gives_up_after_its_time(stands: Gateway) -> None:
    stands.script = in_turn(Answer({"jobs": [{"id": JOB_COMMANDING, "state": "running"}], "done": False}))
    with pytest.raises(LeaseholdError, match=rf"not final after 0\.01 s: {JOB_COMMANDING}$"):
        call("wait", JOB_COMMANDING, "--timeout", "0.01")


def test_show_tells_the_story_and_why_the_job_waits(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(STORY))
    call("show", JOB_COMMANDING)
    told = capsys.readouterr().out
    assert "unmatchable: no bot that serves the instance 'ci' offers os=linux" in told
    assert "os=linux" in told
    assert "1.5 s" in told
    assert "queued -> leased" in told
    assert "bot=b1 score.total=6 score.locality=5" in told
    assert "\x1b" not in told


def test_show_tells_who_shares_the_job_and_how_long_it_may_wait(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"joined": OTHER, "submissions": 3, "dedup_key": "all\x1b", "queue_deadline": f"{AT}9Z"}
    stands.script = in_turn(Answer(STORY | shared))
    call("show", JOB_COMMANDING)
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"joined {OTHER}" in told
    assert "submissions 3 want it, with the deduplication key 'all\\x1b'" in told
    assert f"queue timeout 9.0 s, until {AT}9Z" in told


def test_cancel_asks_for_all_submissions_only_if_it_was_told_to(stands: Gateway) -> None:
    stands.script = in_turn(Answer({"jobs": [{"id": JOB_COMMANDING, "state": "cancelled", "changed": True}]}))
    call("cancel", JOB_COMMANDING)
    call("cancel", "--all-submissions", JOB_COMMANDING)
    assert [asked.body for asked in stands.asked] == [
        {"ids": [JOB_COMMANDING]},
        {"ids": [JOB_COMMANDING], "all_submissions": True},
    ]


def test_show_prints_the_gateways_answer_as_json(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(STORY))
    call("show", "--json", JOB_COMMANDING)
    assert json.loads(capsys.readouterr().out) == STORY


def test_show_prints_the_beginning_of_the_result(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    ended = STORY | {"state": "succeeded", "waiting": None, "has_result": True}
    stands.script = in_turn(Answer(ended), Answer({"result": {"answer": ["x" * 3000]}, "fence": 1}))
    call("show", JOB_COMMANDING)
    assert stands.paths() == [f"GET /v1/jobs/{JOB_COMMANDING}", f"GET /v1/jobs/{JOB_COMMANDING}/result"]
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result ")]
    assert shown.endswith("xxx…")
    assert shown.split(maxsplit=1)[1].startswith('{"answer": ["xxx')
    assert len(shown) < 2100


def test_show_says_why_a_job_that_succeeded_has_no_result(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    why = "no result is stored, because it is not JSON"
    told = {"exit_code": 0, "reason": why}
    stands.script = in_turn(
        Answer(STORY | {"state": "succeeded", "waiting": None, "has_result": False, "result": told})
    )
    call("show", JOB_COMMANDING)
    assert f" {why}\n" in capsys.readouterr().out


def test_result_prints_the_result_and_nothing_else(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer({"result": {"a": [1, "é\x1b"]}, "fence": 1}))
    call("result", JOB_COMMANDING)
    assert capsys.readouterr().out == '{"a":[1,"é\\u001b"]}\n'
    stands.script = in_turn(problem(404, f"id: job '{JOB_COMMANDING}' is queued and has no result: it is not final"))
    with pytest.raises(NotFound, match="it is not final"):
        call("result", JOB_COMMANDING)


def test_an_absent_job_is_not_found(stands: Gateway) -> None:
    stands.script = in_turn(problem(404, f"id: there is no job '{JOB_COMMANDING}'"))
    with pytest.raises(NotFound, match="there is no job"):
        call("show", JOB_COMMANDING)


def test_list_shows_one_line_for_each_job(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer({"jobs": [STORY, STORY | {"id": OTHER, "started_at": f"{AT}3Z"}]}))
    call("list", "--instance", "ci", "--limit", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["id", JOB_COMMANDING, OTHER]
    assert "3.0 s" in lines[2]
    assert stands.asked[0].query == {"instance": "ci", "limit": "2"}


@pytest.mark.parametrize("arguments", [["logs", JOB_COMMANDING], ["logs", "-f", JOB_COMMANDING]])
def test_logs_writes_the_bytes_as_they_are(
    stands: Gateway, capfdbinary: pytest.CaptureFixture[bytes], arguments: list[str]
) -> None:
    written = bytes(range(256)) + b"no newline"

    def script(asked: ReceivedRequest) -> Answer:
        data = written[int(asked.query["start"]) :]
        encoded = base64.b64encode(data).decode()
        return Answer(
            {"start": 0, "data": encoded, "next": len(written), "state": "failed", "attempt": 1, "final": True}
        )

    stands.script = script
    call(*arguments)
    assert capfdbinary.readouterr().out == written


@pytest.mark.parametrize("options", [[], ["-f"]])
def test_logs_as_json_is_one_line_for_each_piece(
    stands: Gateway, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    written = b"one\n\xff\x00\n"

    def script(asked: ReceivedRequest) -> Answer:
        start = int(asked.query["start"])
        data = base64.b64encode(written[start : start + 4]).decode()
        rest = {"state": "succeeded", "attempt": 2, "final": start + 4 > len(written)}
        return Answer({"start": start, "data": data, "next": min(start + 4, len(written))} | rest)

    stands.script = script
    call("logs", "--json", *options, JOB_COMMANDING)
    pieces = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert b"".join(base64.b64decode(piece["data"]) for piece in pieces) == written
    assert pieces[0] == {
        "start": 0, "data": "b25lCg==", "next": 4, "state": "succeeded", "attempt": 2, "final": False
    }  # fmt: skip
    assert pieces[-1]["final"]


def test_the_help_of_logs_tells_what_its_json_is(capsys: pytest.CaptureFixture[str]) -> None:
    call("logs", "--help")
    assert "in base64" in " ".join(capsys.readouterr().out.split())


def test_cancel_tells_what_became_of_each(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        {"id": JOB_COMMANDING, "state": "cancelling", "changed": True},
        {"id": OTHER, "state": None, "changed": False},
    ]
    stands.script = in_turn(Answer({"jobs": answers}))
    with pytest.raises(NotFound, match=OTHER):
        call("cancel", JOB_COMMANDING, OTHER)
    assert capsys.readouterr().out == f"{JOB_COMMANDING} cancelling\n"


def test_status_and_bots_are_shown(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(
        Answer(
            {
                "jobs": {"queued": 3, "running": 1},
                "instances": {"ci": {"queued": 3}, "web": {"running": 1}},
                "oldest_queued_seconds": 90.0,
                "unmatchable": 2,
                "bots": {"ok": {"bots": 1, "capacity": 4, "in_use": 1}},
                "swarm": [],
                "capacity": 4,
                "in_use": 1,
                "upkeep": [{"name": "reap", "age_seconds": 0.5, "grace": False}],
                "rates": dict.fromkeys(RATES, 0.0) | {"submitted": 1.5, "failed": 0.25, "span": 12.5},
                "waits": {"jobs": 9, "p50": 0.004, "p95": 1.25, "p99": 200.0},
                "at_least": ["queued", "unmatchable"],
                "finished_estimate": 1_200_000,
                "quotas": [
                    {
                        "cohort": "default",
                        "instance": "ci",
                        "usage": 1,
                        "min_quota": 1,
                        "max_quota": 7,
                        "effective_max": 6,
                    }
                ],
            }
        ),
        Answer(
            {
                "bots": [
                    {
                        "name": "b1",
                        "status": "ok",
                        "draining": True,
                        "instance": None,
                        "pool": "builds",
                        "labels": ["gpu"],
                        "cohort": "gpus",
                        "priority": 0,
                        "capacity": 4,
                        "in_use": 1,
                        "leases": 1,
                        "properties": {"os": ["linux"]},
                        "epoch": 1,
                        "opened_at": f"{AT}0Z",
                        "expires_in": 29.0,
                        "probation": None,
                    }
                ]
            }
        ),
        Answer({"name": "b1", "draining": True}),
    )
    call("status")
    told = capsys.readouterr().out
    assert "1 ok; 1 of 4 units in use" in told
    assert "at least 2 queued jobs are unmatchable" in told
    assert "3+" in told
    assert "about 1,200,000 finished jobs are kept" in told
    assert "last 12.5 s: 1.5 submitted" in told
    assert "0.25 failed" in told
    assert "9 jobs: p50 4 ms, p95 1.2 s, p99 3 min" in told
    assert "oldest queued job: 90.0 s" in told
    assert "effective max" in told
    call("bots", "list")
    told = capsys.readouterr().out
    assert all(word in told for word in ("draining", "gpus", "builds"))
    call("bots", "drain", "b1", "--reason", "disk")
    assert capsys.readouterr().out == "b1 takes no more work\n"
