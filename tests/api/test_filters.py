"""Filters of jobs: sums and values of metadata, and acts on all jobs that pass, in bounded calls."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from assigner.api import selection
from assigner.queries import metadata as metadata_queries
from tests.support.http import JOB, submitted
from tests.support.pool import Pool, active, completed
from tests.support.requests import TRACE
from tests.support.servers import Served

BUILD = {"metadata": {"build": "1"}}
SUMMARY = "/v1/metadata/summary"


def summed(client: httpx.Client, *pairs: str, **query: str) -> dict[str, Any]:
    answer = client.get(SUMMARY, params={"metadata": list(pairs), **query})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_summary_counts_the_jobs_of_a_value_and_estimates_what_is_left(operator: httpx.Client, pool: Pool) -> None:
    pool.change("UPDATE job_classes SET seconds = 40, seconds_high = 50 WHERE name = 'random'")
    done, running = submitted(operator, JOB | BUILD, JOB | BUILD)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    works = {work["job"]: work for work in bot.take()}
    bot.sync(completed(works[done]), active(works[running]))
    pool.change(
        "UPDATE leases SET acknowledged_at = now() - interval '30 s', ended_at = now() - interval '20 s'"
        " WHERE ended_at IS NOT NULL"
    )
    pool.change("UPDATE jobs SET started_at = finished_at - interval '10 s' WHERE state = 'succeeded'")
    pool.change("UPDATE jobs SET started_at = now() - interval '4 s' WHERE state = 'running'")
    submitted(operator, *[JOB | BUILD | own for own in ({}, {"estimated_seconds": 100}, {"job_class": "random"})])
    submitted(operator, JOB, JOB | {"metadata": {"build": "2"}}, JOB | {"metadata": {"other": "1"}})

    found = summed(operator, "build=1")
    assert (found["jobs"], found["unfinished"]) == ({"succeeded": 1, "running": 1, "queued": 3}, 4)
    assert (found["more"], found["unestimated"]) == (False, 0)
    # 10 s on average, of which 4 s have passed; 10 s; 100 s; 40 s.
    assert found["remaining_seconds"] == pytest.approx(6 + 10 + 100 + 40, abs=3)
    assert found["run_seconds"] == pytest.approx(10, abs=3)
    shown = {job: operator.get(f"/v1/jobs/{job}").json() for job in (done, running)}
    assert found["first_queued_at"] == min(job["queued_at"] for job in shown.values())
    assert found["last_ended_at"] == shown[done]["finished_at"]


def test_a_summary_of_nothing_and_one_without_estimates(operator: httpx.Client) -> None:
    nothing = {
        "jobs": {}, "more": False, "unfinished": 0, "first_queued_at": None, "last_ended_at": None,
        "run_seconds": 0, "remaining_seconds": 0, "unestimated": 0,
    }  # fmt: skip
    assert summed(operator, "build=1") == nothing
    submitted(operator, JOB | {"metadata": {"build": "1", "target": "//a"}}, JOB | BUILD)
    found = summed(operator, "build=1")
    assert (found["unfinished"], found["remaining_seconds"], found["unestimated"]) == (2, 0, 2)
    assert summed(operator, "build=1", "target=//a")["jobs"] == {"queued": 1}
    assert summed(operator, "target=//a", "build=2") == nothing


def test_a_summary_of_many_jobs_says_there_are_more(operator: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_queries, "MOST_JOBS", 2)
    submitted(operator, JOB | BUILD, JOB | BUILD)
    assert summed(operator, "build=1")["more"] is False
    submitted(operator, JOB | BUILD)
    assert summed(operator, "build=1")["more"] is True


def test_values_of_a_key_come_in_pages_and_by_a_text(operator: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_queries, "MOST_VALUES", 4)
    named = ["", "alpha", "beta", "Beta-2", "gamma", "gamma-beta", "omega"]
    submitted(operator, *[JOB | {"metadata": {"branch": name, "x": "y"}} for name in [*named, *named]])

    def listed(**query: Any) -> list[str]:
        found: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = operator.get("/v1/metadata", params={"key": "branch", "limit": 3, **query, **after}).json()
            found += page["values"]
            if page["next"] is None:
                return found
            after = {"after": page["next"]}

    assert sorted(listed()) == sorted(named)
    assert sorted(listed(contains="BETA")) == ["Beta-2", "beta", "gamma-beta"]
    assert listed(contains="%") == []
    assert operator.get("/v1/metadata?key=absent").json() == {"values": [], "next": None}


def test_a_bad_question_is_refused_by_its_field(operator: httpx.Client) -> None:
    for field, path in (
        ("metadata", SUMMARY),
        ("metadata.0", f"{SUMMARY}?metadata=build"),
        ("metadata.0", f"{SUMMARY}?metadata=%3D1"),
        ("metadata", f"{SUMMARY}?metadata=a%3D1&metadata=a%3D2"),
        ("instance", f"{SUMMARY}?metadata=a%3D1&instance=CI"),
        ("key", "/v1/metadata"),
        ("key", "/v1/metadata?key=a%20b"),
        ("contains", "/v1/metadata?key=a&contains=%00"),
        ("limit", "/v1/metadata?key=a&limit=0"),
    ):
        refused = operator.get(path)
        assert (refused.status_code in (400, 422), refused.json()["field"]) == (True, field)


def test_the_command_line_lists_sums_up_and_cancels_by_metadata(operate: Callable[..., tuple[int, str]]) -> None:
    meta = ("--meta", "build=7", "--meta", f"traceparent={TRACE}")
    first, second = (operate("submit", *meta, "--", "true")[1].strip() for _ in range(2))
    (other,) = (operate("submit", "--meta", "build=8", "--", "true")[1].strip(),)
    code, said = operate("list", "--meta", "build=7", "--order", "asc", "--json")
    assert code == 0, said
    listed = json.loads(said)
    assert [job["id"] for job in listed] == [first, second]
    shown = json.loads(operate("show", first, "--json")[1])
    assert shown["metadata"] == {"build": "7", "traceparent": TRACE}
    assert shown["payload"]["env"] == {"TRACEPARENT": TRACE}
    assert operate("metadata", "build") == (0, "7\n8\n")
    assert operate("metadata", "build", "--contains", "8", "--json") == (0, '["8"]\n')
    assert operate("hold", "--all", "--meta", "build=7") == (0, f"{second} parked\n{first} parked\n")
    assert "  parked      2\n" in operate("status", "--meta", "build=7")[1]
    assert operate("priority", "-3", "--all", "--meta", "build=7", "--label", "none") == (0, "")
    assert operate("cancel", "--all", "--meta", "build=7") == (0, f"{second} cancelled\n{first} cancelled\n")
    assert json.loads(operate("status", "--meta", "build=7", "--json")[1])["jobs"] == {"cancelled": 2}
    assert json.loads(operate("list", "--state", "queued", "--sort", "priority", "--json")[1])[0]["id"] == other


def test_bad_options_are_refused_with_exit_code_2(operate: Callable[..., tuple[int, str]]) -> None:
    for arguments, said in (
        (("cancel",), "give either ids, or --all with a filter"),
        (("cancel", "--all"), "give either ids, or --all with a filter"),
        (("cancel", "--meta", "build=1"), "give either ids, or --all with a filter"),
        (("cancel", "0" * 32, "--all", "--meta", "build=1"), "give either ids, or --all with a filter"),
        (("cancel", "--all", "--meta", "build"), "error: --meta: 'build' is not KEY=VALUE"),
        (("list", "--ended-after", "noon"), "error: --ended-after: 'noon' is not a time, such as 10:00, "),
        (("list", "--owner", "Ü"), "error: --owner: "),
        (("list", "--cursor", "x"), "error: cursor: is not the `next` of a page"),
        (("list", "--sort", "size"), "'size' is not one of"),
        (("status", "--instance", "ci"), "error: --instance: goes with --meta"),
        (("submit", "--meta", "build", "--", "true"), "error: --meta: 'build' is not KEY=VALUE"),
        (("submit", "--meta", "a=1", "--meta", "a=2", "--", "true"), "error: --meta: names 'a' twice"),
        (("submit", "--meta", "traceparent=1", "--", "true"), "error: metadata.traceparent: is not a traceparent"),
        (("metadata", "a b"), "error: KEY: 'a b' is not a key"),
    ):
        code, told = operate(*arguments)
        assert (code, said in told) == (2, True), told


# Acts on all jobs that pass a filter


OF_BUILD = {"metadata": ["build=1"]}


def states(client: httpx.Client) -> dict[str, str]:
    return {job["id"]: job["state"] for job in client.get("/v1/jobs?limit=1000").json()["jobs"]}


def act(client: httpx.Client, name: str, **body: Any) -> list[dict[str, Any]]:
    """The answers of all calls that the filter needs."""
    answers = []
    while True:
        answer = client.post(f"/v1/jobs/{name}", json=body)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
        if answers[-1]["next"] is None:
            return answers
        body["cursor"] = answers[-1]["next"]


def test_what_passes_the_filter_is_changed_and_nothing_else(operator: httpx.Client) -> None:
    one, two = submitted(operator, JOB | BUILD, JOB | BUILD | {"label": "x"})
    others = submitted(operator, JOB, JOB | {"metadata": {"build": "2"}}, JOB | {"metadata": {"target": "1"}})
    before = dict.fromkeys(others, "queued")

    (held,) = act(operator, "hold", where=OF_BUILD, reason="later")
    assert held["jobs"] == [{"id": job, "state": "parked", "changed": True, "why": None} for job in (two, one)]
    (urgent,) = act(operator, "priority", where=OF_BUILD | {"label": "x"}, priority=-7)
    assert (urgent["jobs"], urgent["changed"]) == (
        [{"id": two, "state": "parked", "changed": True, "why": None, "priority": -7}], 1
    )  # fmt: skip
    act(operator, "release", where=OF_BUILD | {"label": "x"})
    assert states(operator) == before | {one: "parked", two: "queued"}
    (cancelled,) = act(operator, "cancel", where=OF_BUILD)
    assert [job["id"] for job in cancelled["jobs"]] == [two, one]
    assert states(operator) == before | {one: "cancelled", two: "cancelled"}
    (again,) = act(operator, "requeue", where=OF_BUILD, key="k")
    assert [job["state"] for job in again["jobs"]] == ["cancelled", "cancelled"]
    new = [job["job"] for job in again["jobs"]]
    assert states(operator) == before | {one: "cancelled", two: "cancelled"} | dict.fromkeys(new, "queued")
    assert [operator.get(f"/v1/jobs/{job}").json()["metadata"] for job in new] == [{"build": "1"}] * 2
    for key, changed, left_out in (("k", [False] * 2, [False] * 2), ("l", [False] * 2, [True] * 2)):
        (once,) = act(operator, "requeue", where=OF_BUILD, key=key)
        told = [(job["job"], job["changed"], job["left_out"]) for job in once["jobs"]]
        assert told == [*zip(new, changed, left_out, strict=True)], "a filter makes no second copy"
    (copied,) = operator.post("/v1/jobs/requeue", json={"ids": [one]}).json()["jobs"]
    assert copied["job"] not in (None, *new)
    assert copied["changed"], "an id does"


def test_lists_and_acts_take_the_calls_of_one_task(operator: httpx.Client) -> None:
    calls = [["leasehold-task", "app:pool", f"app.{name}"] for name in ("charge", "tell")]
    charge, tell, other = submitted(operator, *[JOB | {"command": command} for command in (*calls, ["app.charge"])])
    listed = operator.get("/v1/jobs", params={"task": "app.charge"}).json()
    assert [job["id"] for job in listed["jobs"]] == [charge]
    act(operator, "cancel", where={"task": "app.charge"})
    act(operator, "hold", where={"task": "app.tell"})
    assert states(operator) == {charge: "cancelled", tell: "parked", other: "queued"}


def test_an_act_takes_bounded_calls_and_no_new_jobs(operator: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_SELECTED", 3)
    jobs = submitted(operator, *[JOB | BUILD for _ in range(8)])
    first = operator.post("/v1/jobs/cancel", json={"where": OF_BUILD}).json()
    (later,) = submitted(operator, JOB | BUILD)
    rest = act(operator, "cancel", where=OF_BUILD, cursor=first["next"])
    done = [job["id"] for answer in [first, *rest] for job in answer["jobs"]]
    assert done == jobs[::-1]
    assert [len(answer["jobs"]) for answer in [first, *rest]] == [3, 3, 2]
    assert states(operator) == dict.fromkeys(jobs, "cancelled") | {later: "queued"}


def test_an_act_that_finds_nothing_is_no_error(operator: httpx.Client) -> None:
    for name in ("cancel", "hold", "release", "requeue"):
        assert act(operator, name, where=OF_BUILD) == [{"jobs": [], "next": None}]
    nothing = {"jobs": [], "changed": 0, "more": False, "next": None}
    assert act(operator, "priority", where=OF_BUILD, priority=1) == [nothing]


def test_a_submitter_changes_only_jobs_of_its_instance(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", instance="ci", priority_ceiling=-10))
    (own,) = submitted(mine, JOB | BUILD)
    (foreign,) = submitted(operator, JOB | BUILD | {"instance": "qa"})
    for where in (OF_BUILD, OF_BUILD | {"instance": "qa"}):
        act(mine, "priority", where=where, priority=-10)
    assert mine.post("/v1/jobs/priority", json={"where": OF_BUILD, "priority": -11}).status_code == 403
    for name in ("hold", "release", "requeue"):
        assert mine.post(f"/v1/jobs/{name}", json={"where": OF_BUILD}).status_code == 403
    act(mine, "cancel", where=OF_BUILD | {"instance": "qa"})
    assert states(operator) == {own: "queued", foreign: "queued"}
    act(mine, "cancel", where=OF_BUILD)
    assert states(operator) == {own: "cancelled", foreign: "queued"}
    assert operator.get(f"/v1/jobs/{foreign}").json()["priority"] == 0


def test_a_bad_selection_is_refused_by_its_field(operator: httpx.Client) -> None:
    for field, body in (
        ("ids", {}),
        ("ids", {"ids": ["0" * 32], "where": OF_BUILD}),
        ("where", {"where": {}}),
        ("where.state.0", {"where": {"state": ["asleep"]}}),
        ("where.metadata.0", {"where": {"metadata": ["build"]}}),
        ("where.ended_after", {"where": {"ended_after": "now"}}),
        ("where.nonsense", {"where": {"nonsense": 1}}),
        ("cursor", {"where": OF_BUILD, "cursor": "nonsense"}),
        ("cursor", {"ids": ["0" * 32], "cursor": "nonsense"}),
    ):
        for name in ("cancel", "hold", "release", "requeue"):
            refused = operator.post(f"/v1/jobs/{name}", json=body)
            assert (refused.status_code in (400, 422), refused.json()["field"]) == (True, field)


def test_a_misspelt_filter_is_told_what_was_meant(operator: httpx.Client) -> None:
    answer = operator.get("/v1/jobs", params={"lable": "x"})
    assert answer.json()["detail"] == "lable: there is no such field; did you mean 'label'?"
    answer = operator.post("/v1/jobs/cancel", json={"where": {"lable": "x"}})
    assert answer.json()["detail"] == "where.lable: there is no such field; did you mean 'label'?"
