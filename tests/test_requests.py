import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from assigner import submission
from bots import requests
from schema import limits, moves, tokens
from schema.engine import Database
from schema.errors import BadInput, Forbidden
from schema.requests import JobRequest

OPERATOR = tokens.Principal(tokens.Kind.OPERATOR, "x")
FULL: dict[str, Any] = {
    "command": ["make", "-j"],
    "env": {"A": "1"},
    "stdin": "",
    "instance": "ci",
    "properties": {"os": "linux", "arch": ["x86", "arm", "x86"]},
    "key": "k",
    "priority": -3,
    "units": 2,
    "label": "nightly",
    "locality_hint": "core",
    "timeout_seconds": 60,
    "queue_timeout_seconds": 3600,
    "dedup_key": "nightly",
    "max_attempts": 7,
    "retry_failed": True,
}
# What both sides refuse with the same words, by the field that they name.
REFUSED: Sequence[tuple[str, dict[str, Any]]] = [
    ("command", {"command": [""]}),
    ("command", {"command": ["a\x00"]}),
    ("command", {"command": ["\udcff"]}),
    ("command", {"command": ["x" * limits.MAX_PAYLOAD_BYTES]}),
    ("command", {"command": ["a"], "env": {"A": "x" * 200_000}, "stdin": "y" * 100_000}),
    ("env", {"env": {"A=B": "1"}}),
    ("env", {"env": {"": "1"}}),
    ("env", {"env": {"A": "\x00"}}),
    ("stdin", {"stdin": "\x00"}),
    ("stdin", {"stdin": "é" * (limits.MAX_PAYLOAD_BYTES // 2 + 1)}),
    ("properties.k", {"properties": {"k": []}}),
    ("key", {"key": "é" * 101}),
    ("label", {"label": "é" * 33}),
    ("locality_hint", {"locality_hint": "h" * 201}),
    ("dedup_key", {"dedup_key": "é" * 101}),
    ("dedup_key", {"dedup_key": "\x00"}),
]


def test_a_request_becomes_what_submit_takes() -> None:
    assert JobRequest(**FULL).normal() == {
        **{name: value for name, value in FULL.items() if name not in ("command", "env", "stdin")},
        "properties": {"arch": ["arm", "x86"], "os": ["linux"]},
        "payload": {"command": ["make", "-j"], "env": {"A": "1"}, "stdin": ""},
    }


def test_unset_fields_have_their_defaults_and_the_instance_is_the_one_given() -> None:
    normal = JobRequest(command=["true"]).normal(instance="qa")
    assert (normal["instance"], normal["payload"]) == ("qa", {"command": ["true"]})
    assert JobRequest(command=["true"]).normal()["instance"] == "default"
    assert JobRequest(command=["true"], instance="ci").normal(instance="qa")["instance"] == "ci"


def test_a_request_without_the_later_fields_has_the_digest_it_had_before_there_were_any(database: Database) -> None:
    normal = JobRequest(command=["true"], key="k").normal()
    document = (
        '{"instance": "default", "properties": {}, "key": "k", "priority": 0, "units": 1, "label": "",'
        ' "locality_hint": null, "timeout_seconds": null, "max_attempts": 5, "retry_failed": false,'
        ' "payload": {"command": ["true"]}}'
    )
    assert normal == json.loads(document)
    (first, again) = database.run(
        lambda c: [moves.submit(c, [each], actor="t")[0] for each in (json.loads(document), normal)]
    )
    assert (first.public_id, first.created, again.created) == (again.public_id, True, False)


def test_what_is_normal_can_be_submitted(database: Database) -> None:
    def work(connection: Any) -> list[moves.Submitted]:
        return moves.submit(connection, [JobRequest(**FULL).normal(), JobRequest(command=["true"]).normal()], actor="t")

    assert [job.created for job in database.run(work)] == [True, True]


@pytest.mark.parametrize(("field", "change"), REFUSED)
def test_both_sides_refuse_the_same_with_the_same_words(field: str, change: dict[str, Any]) -> None:
    job = {"command": ["true"]} | change
    with pytest.raises(BadInput) as here:
        requests.check(job)
    with pytest.raises(BadInput) as there:
        submission.normalised([JobRequest(command=["true"]), JobRequest(**job)], caller=OPERATOR)
    assert here.value.field == field
    assert (there.value.field, there.value.reason) == (f"jobs.1.{field}", here.value.reason)
    assert len(here.value.reason) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"command": []},
        {"command": "true"},
        {"priority": "0"},
        {"priority": True},
        {"units": 0},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": 31_536_001},
        {"queue_timeout_seconds": 0},
        {"queue_timeout_seconds": 31_536_001},
        {"dedup_key": ""},
        {"max_attempts": 101},
        {"instance": "ci\n"},
        {"comand": ["true"]},
    ],
)
def test_values_of_another_kind_or_range_are_refused_by_their_field(change: dict[str, Any]) -> None:
    job = {"command": ["true"]} | change
    with pytest.raises(ValidationError):
        JobRequest.model_validate(job)
    with pytest.raises(BadInput) as refused:
        requests.check(job)
    assert refused.value.field == next(iter(change))


def test_a_token_bounds_instance_and_priority() -> None:
    caller = tokens.Principal(tokens.Kind.SUBMITTER, "x", instance="ci", priority_ceiling=0)
    (normal,) = submission.normalised([JobRequest(command=["true"])], caller=caller)
    assert normal["instance"] == "ci"
    for change in ({"instance": "qa"}, {"priority": -1}):
        with pytest.raises(Forbidden, match=r"^jobs\.0\."):
            submission.normalised([JobRequest.model_validate({"command": ["true"]} | change)], caller=caller)
