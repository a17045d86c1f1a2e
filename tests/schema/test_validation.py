"""Values are refused before PostgreSQL or Python would disagree about them, and the refusal names the field."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold import wire
from leasehold.errors import BadInput, Forbidden
from pydantic import ValidationError

from assigner.api import submission
from bots.cli import options
from schema import validation
from schema.moves.submit import Submitted, submit
from schema.postgres.engine import Database
from schema.requests import JobRequest
from schema.tenancy import tokens
from tests.support.requests import FULL

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("name", ["a", "0", "team-a.linux_x", "a" * 63])
def test_a_legal_name_is_returned(name: str) -> None:
    assert validation.check_name("instance", name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "ä", "a\n", "a" * 64, "a\x00"])
def test_an_illegal_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(BadInput, match=r"^instance: '[ -~…]*' is not a name: .+$") as refused:
        validation.check_name("instance", name)
    assert refused.value.field == "instance"


def test_text_is_measured_in_bytes() -> None:
    assert validation.check_text("label", "ä" * 32, 64) == "ä" * 32
    with pytest.raises(BadInput, match="label: is 66 bytes long, at most 64 are allowed"):
        validation.check_text("label", "ä" * 33, 64)


@pytest.mark.parametrize(("value", "said"), [("a\x00b", "NUL"), ("a\ud800b", "lone surrogate")])
def test_text_that_postgresql_cannot_store_is_refused(value: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"label: holds a {said}"):
        validation.check_text("label", value, 64)


def test_properties_have_one_form_however_they_are_spelled() -> None:
    normal = {"arch": ["arm", "x86"], "os": ["linux"]}
    assert validation.normal_properties("properties", {"os": "linux", "arch": ["x86", "arm", "x86"]}) == normal
    assert validation.normal_properties("properties", normal) == normal
    assert list(validation.normal_properties("properties", {"os": "linux", "arch": "arm"})) == ["arch", "os"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({str(n): "x" for n in range(65)}, r"properties: has 65 keys, at most 64"),
        ({"": "x"}, r"properties\.: key and values must not be empty"),
        ({"os": ""}, r"properties\.os: key and values must not be empty"),
        ({"os": []}, r"properties\.os: key and values must not be empty"),
        ({"os": ["linux", ""]}, r"properties\.os: key and values must not be empty"),
        ({"os": "x" * 1023}, r"properties\.os: is 1025 bytes long, at most 1024"),
        ({"os": "a\x00"}, r"properties\.os: holds a NUL"),
        ({"a\nb": ""}, r"properties\.a\\nb: key"),
    ],
)
def test_properties_out_of_bounds_are_refused(raw: dict[str, str | list[str]], said: str) -> None:
    with pytest.raises(BadInput, match=f"^{said}"):
        validation.normal_properties("properties", raw)


@given(documents)
def test_ordinary_json_comes_back_as_it_was(document: object) -> None:
    assert validation.parse_json(json.dumps(document)) == document
    assert validation.parse_json(json.dumps(document, ensure_ascii=False).encode()) == document


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"{} {}", "is not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "repeats the key 'a'"),
        (b"[NaN]", "holds NaN"),
        (b"[-Infinity]", "holds -Infinity"),
        (b"[1e999]", "holds 1e999, which is too large"),
        (b"[" + b"9" * 5000 + b"]", "is not JSON"),
        (b'["\\u0000"]', "holds a NUL"),
        (b'["\x00"]', "is not JSON"),
        (b'["\xed\xa0\x80"]', "is not UTF-8"),
        ('["\ud800"]', "holds a lone surrogate"),
        (b"[" * 64 + b'{"a":0}' + b"]" * 64, "is nested deeper than 64"),
        (b'{"\\ud800": 1}', "holds a lone surrogate"),
        (b"[" * 64 + b"0" + b"]" * 64, "is nested deeper than 64"),
        (b"[" * 65 + b"]" * 65, "is nested deeper than 64"),
        (b"[" * 100_000 + b"]" * 100_000, "is nested deeper than 64"),
        (b"[" + b"[]," * 1_000_000 + b"[]]", "holds more than 1000000 values and keys"),
        (b"[" + b'"",' * 1_000_000 + b"0]", "holds more than 1000000 values and keys"),
        (b'"\\"' * 3_000_000, "holds more than 1000000 values and keys"),
        (json.dumps(dict.fromkeys(map(str, range(10_001)), 0)).encode(), "has an object of 10001 keys, at most 10000"),
        (b"{" + b'"a":0,' * 9_000 + b'"b":0}', "repeats the key 'a'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_json_that_python_and_postgresql_would_read_differently_is_refused(raw: bytes | str, said: str) -> None:
    with pytest.raises(BadInput, match=f"^body: {said}"):
        validation.parse_json(raw)


def test_json_may_be_nested_64_deep() -> None:
    assert validation.parse_json("[" * 64 + "]" * 64)


@given(documents)
def test_no_more_values_and_keys_are_counted_than_one_for_each_sign_and_no_fewer_than_there_are(
    document: object,
) -> None:
    def nodes(value: object) -> int:
        match value:
            case dict():
                return 1 + len(value) + sum(map(nodes, value.values()))
            case list():
                return 1 + sum(map(nodes, value))
            case _:
                return 1

    for raw in (json.dumps(document), json.dumps(document, ensure_ascii=False, separators=(",", ":"))):
        assert nodes(document) <= wire.count_nodes(raw) <= 2 * nodes(document)


def test_signs_within_texts_are_not_counted() -> None:
    text = '[{,:"\\' * 1_000_000
    assert wire.count_nodes(json.dumps([text, text])) == 3
    assert validation.parse_json(json.dumps([text, text])) == [text, text]


def test_what_is_shown_in_messages_is_short_and_printable() -> None:
    assert wire.escaped("a\n\x1b[31m") == "a\\n\\x1b[31m"
    assert len(wire.escaped("x" * 1000, 80)) == 80
    assert wire.escaped(7) == "7"


OPERATOR = tokens.Principal(tokens.Kind.OPERATOR, "x")
# What both sides refuse with the same words, by the field that they name.
REFUSED: Sequence[tuple[str, dict[str, Any]]] = [
    ("command", {"command": [""]}),
    ("command", {"command": ["a\x00"]}),
    ("command", {"command": ["\udcff"]}),
    ("command", {"command": ["x" * validation.MAX_PAYLOAD_BYTES]}),
    ("command", {"command": ["a"], "env": {"A": "x" * 200_000}, "stdin": "y" * 100_000}),
    ("env", {"env": {"A=B": "1"}}),
    ("env", {"env": {"": "1"}}),
    ("env", {"env": {"A": "\x00"}}),
    ("stdin", {"stdin": "\x00"}),
    ("stdin", {"stdin": "é" * (validation.MAX_PAYLOAD_BYTES // 2 + 1)}),
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
        lambda c: [submit(c, [each], actor="t")[0] for each in (json.loads(document), normal)]
    )
    assert (first.public_id, first.created, again.created) == (again.public_id, True, False)


def test_what_is_normal_can_be_submitted(database: Database) -> None:
    def work(connection: Any) -> list[Submitted]:
        return submit(connection, [JobRequest(**FULL).normal(), JobRequest(command=["true"]).normal()], actor="t")

    assert [job.created for job in database.run(work)] == [True, True]


@pytest.mark.parametrize(("field", "change"), REFUSED)
def test_both_sides_refuse_the_same_with_the_same_words(field: str, change: dict[str, Any]) -> None:
    job = {"command": ["true"]} | change
    with pytest.raises(BadInput) as here:
        options.check(job)
    with pytest.raises(BadInput) as there:
        submission.normalised_requests([JobRequest(command=["true"]), JobRequest(**job)], caller=OPERATOR)
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
        options.check(job)
    assert refused.value.field == next(iter(change))


def test_a_token_bounds_instance_and_priority() -> None:
    caller = tokens.Principal(tokens.Kind.SUBMITTER, "x", instance="ci", priority_ceiling=0)
    (normal,) = submission.normalised_requests([JobRequest(command=["true"])], caller=caller)
    assert normal["instance"] == "ci"
    for change in ({"instance": "qa"}, {"priority": -1}):
        with pytest.raises(Forbidden, match=r"^jobs\.0\."):
            submission.normalised_requests([JobRequest.model_validate({"command": ["true"]} | change)], caller=caller)
