"""JobRequest takes the nested form, in which requests are stored, as well as the flat one, with the same errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leasehold.errors import BadInput
from pydantic import ValidationError

from assigner.api.submission import SubmitRequest
from bots.cli import options
from schema.requests import GraphRequest, JobRequest, NodeRequest, flat
from tests.support.http import Gateway, call
from tests.support.requests import TAKEN

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,9}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=9)
SECONDS = st.floats(min_value=0.5, max_value=1e6) | st.integers(1, 1000)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "command": st.lists(TEXTS.filter(bool), min_size=1, max_size=3),
    "env": st.dictionaries(TEXTS.filter(lambda name: bool(name) and "=" not in name), TEXTS, max_size=2),
    "stdin": TEXTS | st.none(),
    "label": TEXTS,
    "properties": st.dictionaries(
        TEXTS.filter(bool), TEXTS.filter(bool) | st.lists(TEXTS.filter(bool), min_size=1, max_size=3), max_size=3
    ),
    "resources": st.dictionaries(st.sampled_from(["cpu_milli", "disk_mib"]), st.integers(1, 9), max_size=2),
    "locality_hint": TEXTS.filter(bool) | st.none(),
    "priority": st.integers(-1000, 1000),
    "deadline_seconds": SECONDS,
    "estimated_seconds": SECONDS,
    "preferred_hours": st.lists(st.integers(0, 23), max_size=4),
    "locks": st.lists(NAMES, max_size=3),
    "estimated_cost": st.floats(0, 1e6),
    "timeout_seconds": SECONDS,
    "queue_timeout_seconds": SECONDS,
}
#: Fields that a node has from its graph.
OF_A_GRAPH = ("instance", "key", "dedup_key")


def _possible(job: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that do not go with another one of the request."""
    if "urgency" in job:
        job.pop("priority", None)
    if "job_class" not in job:
        job.pop("user_priority", None)
    if "resource_class" not in job:
        job.pop("model", None)
    if not job.get("preferred_hours"):
        job.pop("preferred_zone", None)
    if not job.get("preferred_properties"):
        job.pop("prefer_seconds", None)
    if "job_class" in job or "service_level" in job:
        job.pop("dedup_key", None)
    return job


def _values(field: str) -> st.SearchStrategy[Any]:
    return (
        VALUES[field] if field in VALUES else st.sampled_from([each[field] for each in TAKEN[field] if field in each])
    )


FLAT = st.fixed_dictionaries(
    {"command": VALUES["command"]},
    optional={field: _values(field) for field in JobRequest.model_fields if field != "command"},
).map(_possible)


@settings(deadline=None, max_examples=30)
@given(FLAT)
def test_the_nested_form_of_a_request_means_the_same_as_the_flat_one(job: dict[str, Any]) -> None:
    normal = JobRequest.model_validate(job).normal()
    stored = json.loads(json.dumps(normal))
    assert JobRequest.model_validate(flat(stored)).normal() == normal


@settings(deadline=None, max_examples=30)
@given(FLAT)
def test_so_does_the_nested_form_of_a_node_of_a_graph(job: dict[str, Any]) -> None:
    job = {field: value for field, value in job.items() if field not in OF_A_GRAPH}
    after = [1, {"node": 2, "on_failure": "run"}]
    normal = NodeRequest.model_validate(job | {"node": 7, "after": after}).normal()
    graph = GraphRequest.model_validate({"name": "g", "nodes": [normal]}).normal()
    assert graph["nodes"] == [normal]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("payload", "command", []),
        ("payload", "command", "true"),
        ("payload", "env", {"A=B": "1"}),
        ("payload", "stdin", "\x00"),
        ("terms", "locks", ["NO"]),
        ("terms", "graph_priority", 0),
        ("terms", "resources", {"cpu": 1}),
        ("terms", "model", "opus"),
        ("terms", "preferred_hours", [24]),
        ("own", "user_priority", 11),
        ("own", "user_priority", 3),
    ],
)
def test_a_bad_value_is_refused_with_the_same_words_in_both_forms(part: str, name: str, value: Any) -> None:
    nested: dict[str, Any] = {"payload": {"command": ["true"]}}
    nested[part] = nested.get(part, {}) | {name: value}
    with pytest.raises(BadInput) as of_flat:
        options.check({"command": ["true"]} | {name: value})
    with pytest.raises(BadInput) as of_nested:
        options.check(nested)
    assert str(of_nested.value) == str(of_flat.value)
    assert of_nested.value.field.split(".")[0] == name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"payload": ["true"]}, "payload: is not an object"),
        ({"terms": "x"}, "terms: is not an object"),
        ({"payload": None}, "command: is missing"),
        ({"payload": {"command": ["a"], "priority": 1}}, "payload.priority: is not a field of a job"),
        ({"terms": {"class": "x"}}, "terms.class: is not a field of a job"),
        ({"terms": {"own": "x"}}, "terms.own: is not a field of a job"),
        ({"command": ["b"]}, "payload: is not a field of a job"),
        ({"units": 2, "terms": {"units": 3}}, "units: is given twice, with different values"),
        ({"terms": {"job_class": "x"}, "own": {"class": "y"}}, "job_class: is given twice, with different values"),
        ({"own": {"level": "gold", "fixed": True}}, "priority: is missing, although own.fixed is true"),
        ({"own": {"class": "x", "project": True}}, "project: is missing, although own.project is true"),
    ],
)
def test_what_the_nested_form_cannot_mean_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        options.check({"payload": {"command": ["true"]}} | change)
    assert str(refused.value) == said


def test_the_gateway_names_the_job_and_the_field_of_the_flat_form() -> None:
    jobs = [{"command": ["true"]}, {"payload": {"command": ["true"], "stdin": 5}}]
    with pytest.raises(ValidationError) as refused:
        SubmitRequest.model_validate({"jobs": jobs})
    assert refused.value.errors()[0]["loc"] == ("jobs", 1, "stdin")
    with pytest.raises(ValidationError) as mixed:
        SubmitRequest.model_validate({"jobs": [{"command": ["a"], "payload": {"command": ["b"]}}]})
    assert mixed.value.errors()[0]["loc"] == ("jobs", 0, "payload")


@pytest.mark.usefixtures("no_pool_of_our_own")
def test_json_lines_take_both_forms(stands: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    nested = {"payload": {"command": ["ship", "42"]}, "terms": {"locks": ["dock"]}}
    path.write_text('{"command": ["a"]}\n' + json.dumps(nested) + "\n")
    call("submit", "--file", str(path))
    assert stands.asked[0].body["jobs"][1].items() >= nested.items()
    path.write_text('{"command": ["a"]}\n{"payload": {"command": []}}\n')
    with pytest.raises(BadInput, match=":2: command: list should have at least 1 item"):
        call("submit", "--file", str(path))
