"""The sum of all jobs with a value of metadata, and the values of a key, for callers and on the command line."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

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


def test_a_summary_of_very_many_jobs_says_that_there_are_more(
    operator: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_queries, "MOST_JOBS", 2)
    submitted(operator, JOB | BUILD, JOB | BUILD)
    assert summed(operator, "build=1")["more"] is False
    submitted(operator, JOB | BUILD)
    assert summed(operator, "build=1")["more"] is True


def test_the_values_of_a_key_come_in_pages_and_by_a_text_in_them(
    operator: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_submitter_sees_only_its_instance(served: Served, operator: httpx.Client) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    submitted(mine, JOB | BUILD)
    submitted(operator, JOB | {"instance": "qa"} | BUILD, JOB | {"instance": "qa", "metadata": {"build": "secret"}})
    assert summed(mine, "build=1")["jobs"] == {"queued": 1}
    assert summed(mine, "build=secret")["jobs"] == summed(mine, "build=1", instance="qa")["jobs"] == {}
    assert mine.get("/v1/metadata?key=build").json()["values"] == ["1"]
    assert operator.get("/v1/metadata?key=build").json()["values"] == ["1", "secret"]
    assert operator.get("/v1/metadata?key=build&instance=ci").json()["values"] == ["1"]
    assert summed(operator, "build=1")["jobs"] == {"queued": 2}


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("metadata", SUMMARY),
        ("metadata.0", f"{SUMMARY}?metadata=build"),
        ("metadata.0", f"{SUMMARY}?metadata=%3D1"),
        ("metadata", f"{SUMMARY}?metadata=a%3D1&metadata=a%3D2"),
        ("instance", f"{SUMMARY}?metadata=a%3D1&instance=CI"),
        ("key", "/v1/metadata"),
        ("key", "/v1/metadata?key=a%20b"),
        ("contains", "/v1/metadata?key=a&contains=%00"),
        ("limit", "/v1/metadata?key=a&limit=0"),
    ],
)
def test_a_bad_question_is_refused_by_its_field(operator: httpx.Client, field: str, path: str) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cancel",), "give either ids, or --all with a filter"),
        (("cancel", "--all"), "give either ids, or --all with a filter"),
        (("cancel", "--meta", "build=1"), "give either ids, or --all with a filter"),
        (("cancel", "0" * 32, "--all", "--meta", "build=1"), "give either ids, or --all with a filter"),
        (("cancel", "--all", "--meta", "build"), "error: --meta: 'build' is not KEY=VALUE"),
        (("list", "--ended-after", "noon"), "error: --ended-after: 'noon' is not a time with its zone"),
        (("list", "--owner", "Ü"), "error: --owner: "),
        (("list", "--cursor", "x"), "error: cursor: is not the `next` of a page"),
        (("list", "--sort", "size"), "'size' is not one of"),
        (("status", "--instance", "ci"), "error: --instance: goes with --meta"),
        (("submit", "--meta", "build", "--", "true"), "error: --meta: 'build' is not KEY=VALUE"),
        (("submit", "--meta", "a=1", "--meta", "a=2", "--", "true"), "error: --meta: names 'a' twice"),
        (("submit", "--meta", "traceparent=1", "--", "true"), "error: metadata.traceparent: is not a traceparent"),
        (("metadata", "a b"), "error: KEY: 'a b' is not a key"),
    ],
)
def test_bad_options_are_refused_with_exit_code_2(
    operate: Callable[..., tuple[int, str]], arguments: tuple[str, ...], said: str
) -> None:
    code, told = operate(*arguments)
    assert (code, said in told) == (2, True), told
