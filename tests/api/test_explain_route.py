"""`explain` over HTTP and on the command line."""

import json
from typing import Any

import httpx
import pytest
from leasehold.errors import NotFound

from tests.support.explain import preempted
from tests.support.http import AT, JOB_COMMANDING, Answer, Gateway, call, in_turn, problem, submitted
from tests.support.http import JOB as REQUEST
from tests.support.pool import Pool
from tests.support.servers import Bot, Served
from tests.support.tenancy import Tenancy

ANSWER: dict[str, Any] = {
    "id": JOB_COMMANDING, "state": "queued", "instance": "ci", "cohort": "linux", "label": "gpu", "priority": 0,
    "units": 1,
    "sentence": "it does not run because none of 1 bot has 1 free unit: the most is 0",
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


def test_a_submitter_is_told_of_its_own_jobs_and_of_no_others(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    (own,) = submitted(mine, REQUEST)
    (foreign,) = submitted(operator, REQUEST | {"instance": "qa"})
    Bot(served, "bot-one")
    answer = mine.get(f"/v1/jobs/{own}/explain")
    assert answer.status_code == 200
    assert answer.json()["sentence"].startswith("nothing stands in its way: 1 bot with room")
    assert "bot-one" not in answer.text
    assert "bot-one" in operator.get(f"/v1/jobs/{own}/explain").text
    absent = "0" * 8 + foreign[8:]
    hidden, missing = mine.get(f"/v1/jobs/{foreign}/explain"), mine.get(f"/v1/jobs/{absent}/explain")
    assert (hidden.status_code, missing.status_code) == (404, 404)
    assert hidden.text.replace(foreign, "") == missing.text.replace(absent, "")
    assert operator.get("/v1/jobs/nonsense/explain").status_code == 404
    assert operator.get(f"/v1/jobs/{foreign}/explain").json()["instance"] == "qa"


def test_show_keeps_other_tenants_out_of_a_receipt(served: Served, pool: Pool, operator: httpx.Client) -> None:
    job, victim = preempted(pool, Tenancy(pool))
    for own, other, instance in ((job, victim, "team-a"), (victim, job, "team-b")):
        mine = served.client(served.token("submitter", instance=instance))
        events = mine.get(f"/v1/jobs/{own}").json()["events"]
        (receipt,) = [event["details"] for event in events if event["move"].startswith("preempt")]
        assert receipt["rule"] == "lower_priority_only"
        assert other not in str(events)
        assert other in operator.get(f"/v1/jobs/{own}").text


def test_show_names_the_quota_that_a_queued_job_waits_for(pool: Pool, operator: httpx.Client) -> None:
    Tenancy(pool).quota("ci", maximum=0)
    pool.bot()
    (job,) = pool.submit(instance="ci")
    waiting = operator.get(f"/v1/jobs/{job}").json()["waiting"]
    assert waiting == {
        "unmatchable": False,
        "sentence": "'ci' in cohort 'default' uses 0 of 0, this job needs 1: 0 + 1 > 0",
    }


@pytest.mark.usefixtures("no_pool_of_our_own")
def test_explain_prints_gates_order_and_what_would_start_the_job(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    stands.script = in_turn(Answer(ANSWER))
    call("explain", JOB_COMMANDING)
    told = capsys.readouterr().out
    assert stands.asked[0].path == f"/v1/jobs/{JOB_COMMANDING}/explain"
    lines = [line.split() for line in told.splitlines()]
    assert ["room", "closed", "none\\x1b[2J"] in lines
    assert ["quota", "open", "any", "number", "of", "units"] in lines
    assert "1 job like it, more than 10,000 jobs of its instance" in told
    assert "starts  release it\n  and   1 more free unit on a matching bot\n" in told
    assert "was lost with its bot" in told
    assert "it was asked to stop" in told
    assert "\x1b" not in told


@pytest.mark.usefixtures("no_pool_of_our_own")
def test_explain_prints_the_answer_as_json(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(ANSWER))
    call("explain", "--json", JOB_COMMANDING)
    assert json.loads(capsys.readouterr().out) == ANSWER


@pytest.mark.usefixtures("no_pool_of_our_own")
def test_an_absent_job_is_not_explained(stands: Gateway) -> None:
    stands.script = in_turn(problem(404, f"id: there is no job '{JOB_COMMANDING}'"))
    with pytest.raises(NotFound, match="there is no job"):
        call("explain", JOB_COMMANDING)


@pytest.mark.usefixtures("no_pool_of_our_own")
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
    job = {
        "id": JOB_COMMANDING, "instance": "ci", "label": "", "state": "queued", "priority": 0,
        "units": 1, "attempts": 0,
        "max_attempts": 5, "reason": None, "created_at": f"{AT}0Z", "queued_at": f"{AT}0Z", "schedule_after": None,
        "started_at": None, "finished_at": None, "bot": None, "properties": {}, "timeout_seconds": None,
        "locality_hint": None, "retry_failed": False, "kills": 0, "considered": 0, "payload": None, "result": None,
        "waiting": None, "events": events,
    }  # fmt: skip
    stands.script = in_turn(Answer(job))
    call("show", JOB_COMMANDING)
    told = capsys.readouterr().out
    for expected in (
        "asked to stop: V of qa (1 units); on b1; rule any; usage 0 below the minimum of 2; waited 21.5 s",
        "asked to stop for job P of ci; on b1; rule any",
        "asked to stop for a job of another instance; rule any",
        "priority=-1 priority_before=0",
        "reason=disk",
        "parts.0.a=1 parts.1.a=- names=x,y deep.yes=yes",
    ):
        assert expected in told
