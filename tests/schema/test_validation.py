"""Values are refused before PostgreSQL or Python would disagree about them, and the refusal names the field."""

import json
from pathlib import Path
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
from schema.moves.submit import submit
from schema.postgres.engine import Database
from schema.requests import JobRequest
from schema.tenancy import tokens
from tests.support.http import Gateway, call
from tests.support.requests import FULL, REFUSED, samples

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def test_a_legal_name_is_returned_and_an_illegal_one_refused_in_one_line() -> None:
    for name in ("a", "0", "team-a.linux_x", "a" * 63):
        assert validation.check_name("instance", name) == name
    for name in ("", "A", "-a", ".a", "a b", "ä", "a\n", "a" * 64, "a\x00"):
        with pytest.raises(BadInput, match=r"^instance: '[ -~ä…]*' is not a name: .+$") as refused:
            validation.check_name("instance", name)
        assert refused.value.field == "instance"


def test_text_is_measured_in_bytes_and_what_postgresql_cannot_store_is_refused() -> None:
    assert validation.check_text("label", "ä" * 32, 64) == "ä" * 32
    for value, said in (
        ("ä" * 33, "is 66 bytes long, at most 64 are allowed"),
        ("a\x00b", "holds a NUL"),
        ("a\ud800b", "holds a lone surrogate"),
    ):
        with pytest.raises(BadInput, match=f"label: {said}"):
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
    assert validation.parse_json("[" * 64 + "]" * 64), "64 deep"


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


@given(documents)
def test_values_and_keys_are_counted_by_their_signs_and_never_too_low(document: object) -> None:
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
#: What cannot be sent as JSON or stored, besides the samples of what every side refuses.
UNSTORABLE: dict[str, dict[str, Any]] = {
    "program": {"command": ["a\x00"]},
    "encoding": {"command": ["\udcff"]},
    "environment": {"command": ["a"], "env": {"A": "\x00"}},
    "input": {"command": ["a"], "stdin": "\x00"},
    "key": {"command": ["a"], "dedup_key": "\x00"},
    "time": {"command": ["a"], "timeout_seconds": float("nan")},
}


def test_a_request_becomes_what_submit_takes(database: Database) -> None:
    normal = JobRequest(**FULL).normal()
    assert normal == {
        **{name: value for name, value in FULL.items() if name not in ("command", "env", "stdin")},
        "properties": {"arch": ["arm", "x86"], "os": ["linux"]},
        "payload": {"command": ["make", "-j"], "env": {"A": "1"}, "stdin": ""},
    }
    plain = JobRequest(command=["true"]).normal()
    assert (plain["instance"], plain["payload"]) == ("default", {"command": ["true"]})
    taken = database.run(lambda c: submit(c, [normal, plain], actor="t"))
    assert [job.created for job in taken] == [True, True]
    assert JobRequest(command=["true"]).normal(instance="qa")["instance"] == "qa"
    assert JobRequest(command=["true"], instance="ci").normal(instance="qa")["instance"] == "ci"


def test_a_request_without_the_later_fields_has_the_digest_it_had_before_there_were_any(database: Database) -> None:
    normal = JobRequest(command=["true"], key="k").normal()
    document = (
        '{"instance": "default", "properties": {}, "key": "k", "priority": 0, "units": 1, "label": "",'
        ' "locality_hint": null, "timeout_seconds": null, "max_attempts": 5, "retry_failed": false,'
        ' "payload": {"command": ["true"]}}'
    )
    assert normal == json.loads(document)
    first, again = database.run(lambda c: [submit(c, [each], actor="t")[0] for each in (json.loads(document), normal)])
    assert (first.public_id, first.created, again.created) == (again.public_id, True, False)


def submitted(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
    models = submission.SubmitRequest.model_validate({"jobs": [*jobs]}).jobs
    return submission.normalised_requests(models, caller=OPERATOR)


def test_the_gateway_refuses_what_commands_refuse_by_the_same_field_and_with_the_same_words() -> None:
    for name, job in (samples(REFUSED) | UNSTORABLE).items():
        with pytest.raises(BadInput) as here:
            options.check(job)
        with pytest.raises((BadInput, ValidationError)) as there:
            submitted({"command": ["true"]}, job)
        assert name in UNSTORABLE or here.value.field.split(".")[0] in job
        assert len(here.value.reason) < 200
        if isinstance(there.value, BadInput):
            found = (there.value.field, there.value.reason)
            assert (name, found) == (name, (f"jobs.1.{here.value.field}", here.value.reason))
        else:
            place = ".".join(map(str, there.value.errors()[0]["loc"]))
            assert (name, place) == (name, f"jobs.1.{here.value.field}")


def test_a_token_bounds_instance_and_priority() -> None:
    caller = tokens.Principal(tokens.Kind.SUBMITTER, "x", instance="ci", priority_ceiling=0)
    (normal,) = submission.normalised_requests([JobRequest(command=["true"])], caller=caller)
    assert normal["instance"] == "ci"
    for change in ({"instance": "qa"}, {"priority": -1}):
        with pytest.raises(Forbidden, match=r"^jobs\.0\."):
            submission.normalised_requests([JobRequest.model_validate({"command": ["true"]} | change)], caller=caller)


# JobRequest takes the nested form, in which requests are stored, as well as the flat one, with the same errors.


def test_a_bad_value_is_refused_with_the_same_words_in_both_forms() -> None:
    for part, name, value in (
        *(("payload", "command", value) for value in ([], "true")),
        ("payload", "env", {"A=B": "1"}),
        ("payload", "stdin", "\x00"),
        ("terms", "locks", ["NO"]),
        ("terms", "graph_priority", 0),
        ("terms", "resources", {"cpu": 1}),
        ("terms", "model", "opus"),
        ("terms", "preferred_hours", [24]),
        *(("own", "user_priority", value) for value in (11, 3)),
    ):
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
        (
            {"payload": {"command": ["a"], "priority": 1}},
            "payload.priority: there is no such field; did you mean 'priority'?",
        ),
        ({"terms": {"class": "x"}}, "terms.class: there is no such field"),
        ({"terms": {"own": "x"}}, "terms.own: there is no such field"),
        ({"command": ["b"]}, "payload: there is no such field"),
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
        submission.SubmitRequest.model_validate({"jobs": jobs})
    assert refused.value.errors()[0]["loc"] == ("jobs", 1, "stdin")
    with pytest.raises(ValidationError) as mixed:
        submission.SubmitRequest.model_validate({"jobs": [{"command": ["a"], "payload": {"command": ["b"]}}]})
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
