"""Acts on all jobs that pass a filter: what is chosen, in bounded calls, within what the token allows."""

from typing import Any

import httpx
import pytest

from assigner.api import selection
from tests.support.http import JOB, submitted
from tests.support.servers import Served

BUILD = {"metadata": {"build": "1"}}
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
    assert held["jobs"] == [{"id": job, "state": "parked", "changed": True} for job in (two, one)]
    (urgent,) = act(operator, "priority", where=OF_BUILD | {"label": "x"}, priority=-7)
    assert (urgent["jobs"], urgent["changed"]) == (
        [{"id": two, "state": "parked", "changed": True, "priority": -7}], 1
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


def test_an_act_takes_calls_of_bounded_size_and_leaves_what_comes_later(
    operator: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert act(operator, "priority", where=OF_BUILD, priority=1) == [
        {"jobs": [], "changed": 0, "more": False, "next": None}
    ]


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


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("ids", {}),
        ("ids", {"ids": ["0" * 32], "where": OF_BUILD}),
        ("where", {"where": {}}),
        ("where.state.0", {"where": {"state": ["asleep"]}}),
        ("where.metadata.0", {"where": {"metadata": ["build"]}}),
        ("where.ended_after", {"where": {"ended_after": "now"}}),
        ("where.nonsense", {"where": {"nonsense": 1}}),
        ("cursor", {"where": OF_BUILD, "cursor": "nonsense"}),
        ("cursor", {"ids": ["0" * 32], "cursor": "nonsense"}),
    ],
)
@pytest.mark.parametrize("act", ["cancel", "hold", "release", "requeue"])
def test_a_bad_selection_is_refused_by_its_field(
    operator: httpx.Client, act: str, field: str, body: dict[str, Any]
) -> None:
    refused = operator.post(f"/v1/jobs/{act}", json=body)
    assert (refused.status_code in (400, 422), refused.json()["field"]) == (True, field)
