"""One table of refused requests: the same words in Python, over HTTP, on the command line, in graphs and in SQL."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput

from bots.cli import options
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from tests.support.http import JOB, Gateway, call
from tests.support.requests import REFUSED, complete, refusal, samples
from tests.support.servers import counts

SUBMIT = Statement("SELECT * FROM leasehold.submit(CAST(:requests AS jsonb))")
GRAPH = Statement("SELECT * FROM leasehold.submit_graph(CAST(:request AS jsonb))")
#: Fields that a node of a graph has from its graph.
OF_A_GRAPH = ("instance", "key", "dedup_key")


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[dict[str, Any], str]]:
    """Name of a sample → the request, and the words of Python for it."""
    found = {}
    for name, flat in samples(REFUSED).items():
        with pytest.raises(BadInput) as refused:
            options.check(flat)
        found[name] = (flat, str(refused.value))
    return found


Refusals = dict[str, tuple[dict[str, Any], str]]


def test_over_http_by_the_place_in_the_batch(refusals: Refusals, operator: httpx.Client, database: Database) -> None:
    before = counts(database)
    for name, (flat, said) in refusals.items():
        answer = operator.post("/v1/jobs", json={"jobs": [complete({}), flat]})
        assert answer.status_code in (400, 422), (name, answer.text)
        assert (name, answer.json()["detail"]) == (name, f"jobs.1.{said}")
        assert answer.json()["field"] == f"jobs.1.{said.partition(': ')[0]}"
        assert len(answer.json()["detail"]) < 500
    for field, number in (("priority", 10**40), ("timeout_seconds", 10**400), ("units", 2**31)):
        answer = operator.post("/v1/jobs", json={"jobs": [JOB | {field: number}]})
        assert (answer.status_code, answer.json()["field"]) == (422, f"jobs.0.{field}")
    for wrong, said in (
        ({"comand": ["a"]}, "comand: there is no such field; did you mean 'command'?"),
        ({"env": {"a=": "1"}}, "env: "),
    ):
        told = operator.post("/v1/jobs", json={"jobs": [JOB, *[JOB | wrong] * 12]}).json()
        assert [each["field"].split(".")[1] for each in told["errors"]] == [str(place) for place in range(1, 11)]
        assert all(each["detail"].startswith(f"{each['field']}: ") for each in told["errors"])
        assert said in told["detail"] == told["errors"][0]["detail"]
        assert told["more"] == 2
    assert operator.post("/v1/jobs", json={"jobs": []}).json()["field"] == "jobs"
    assert operator.post("/v1/jobs", json={"jobs": [JOB] * 10_001}).status_code == 422
    assert counts(database) == before


def test_on_the_command_line_by_file_and_line(refusals: Refusals, stands: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    for name, (flat, said) in refusals.items():
        path.write_text(f"{json.dumps(complete({}))}\n\n{json.dumps(flat)}\n")
        with pytest.raises(BadInput) as refused:
            call("submit", "--file", str(path))
        assert (name, str(refused.value)) == (name, f"{path}:3: {said}")
    assert stands.asked == []


def test_in_sql_by_the_place_in_the_list(refusals: Refusals, database: Database) -> None:
    for name, (flat, said) in refusals.items():
        for batch, place in (([flat], 0), ([complete({}), flat], 1)):
            told = refusal(database, SUBMIT, {"requests": json.dumps(batch)})
            assert (name, told) == (name, f"jobs.{place}.{said.partition('; did you mean')[0]}")


def test_what_is_no_list_of_jobs_is_refused_over_http_and_in_sql_alike(
    operator: httpx.Client, database: Database
) -> None:
    for jobs in (JOB, 5, "x", None, [5], [[]], [{"priority": 1}]):
        said = operator.post("/v1/jobs", json={"jobs": jobs}).json()["detail"]
        assert (jobs, refusal(database, SUBMIT, {"requests": json.dumps(jobs)})) == (jobs, said)


def test_in_a_graph_by_the_place_of_the_node(refusals: Refusals, operator: httpx.Client, database: Database) -> None:
    before = counts(database)
    for name, (flat, said) in refusals.items():
        if flat.keys() & OF_A_GRAPH:
            continue
        nodes = [complete({"node": 1}), flat | {"node": 2}]
        answer = operator.post("/v1/graphs", json={"name": "build", "nodes": nodes})
        assert answer.status_code in (400, 422), (name, answer.text)
        assert (name, answer.json()["detail"]) == (name, f"nodes.1.{said}")
    assert counts(database) == before


def test_a_graph_is_refused_over_http_and_in_sql_alike(operator: httpx.Client, database: Database) -> None:
    plain: dict[str, Any] = {"name": "g", "nodes": [JOB | {"node": 1}]}
    for change in (
        *({"callback": []}, {"priority": "x"}, {"priority": 10**12}, {"name": None}, {"more": 1}),
        *({"nodes": bad} for bad in ([], 5, [5], [{"node": 1}], [{"node": 1, "payload": {}}])),
    ):
        said = operator.post("/v1/graphs", json=plain | change).json()["detail"]
        assert (change, refusal(database, GRAPH, {"request": json.dumps(plain | change)})) == (change, said)
    for field in plain:
        lacking = {name: value for name, value in plain.items() if name != field}
        said = operator.post("/v1/graphs", json=lacking).json()["detail"]
        assert refusal(database, GRAPH, {"request": json.dumps(lacking)}) == said == f"{field}: field required"
    assert refusal(database, GRAPH, {"request": "[]"}) == "request: input should be an object"


def test_what_should_be_an_object_is_refused_as_such(operator: httpx.Client) -> None:
    for path, body, said in (
        ("/v1/graphs", [], "body: input should be an object"),
        (
            "/v1/graphs",
            {"name": "g", "nodes": [JOB | {"node": 1}], "callback": []},
            "callback: input should be an object",
        ),
        ("/v1/jobs", {"jobs": [5]}, "jobs.0: input should be an object"),
        ("/v1/jobs", {"jobs": [JOB | {"env": []}]}, "jobs.0.env: input should be an object"),
        ("/v1/jobs/cancel", {"where": 5}, "where: input should be an object"),
    ):
        assert (operator.post(path, json=body).json()["detail"], body) == (said, body)
