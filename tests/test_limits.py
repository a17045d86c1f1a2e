"""Values are refused before PostgreSQL or Python would disagree about them, and the refusal names the field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema import limits
from schema.errors import BadInput

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("name", ["a", "0", "team-a.linux_x", "a" * 63])
def test_a_legal_name_is_returned(name: str) -> None:
    assert limits.check_name("instance", name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "ä", "a\n", "a" * 64, "a\x00"])
def test_an_illegal_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(BadInput, match=r"^instance: '[ -~…]*' is not a name: .+$") as refused:
        limits.check_name("instance", name)
    assert refused.value.field == "instance"


def test_text_is_measured_in_bytes() -> None:
    assert limits.check_text("label", "ä" * 32, 64) == "ä" * 32
    with pytest.raises(BadInput, match="label: is 66 bytes long, at most 64 are allowed"):
        limits.check_text("label", "ä" * 33, 64)


@pytest.mark.parametrize(("value", "said"), [("a\x00b", "NUL"), ("a\ud800b", "lone surrogate")])
def test_text_that_postgresql_cannot_store_is_refused(value: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"label: holds a {said}"):
        limits.check_text("label", value, 64)


def test_properties_have_one_form_however_they_are_spelled() -> None:
    normal = {"arch": ["arm", "x86"], "os": ["linux"]}
    assert limits.normal_properties("properties", {"os": "linux", "arch": ["x86", "arm", "x86"]}) == normal
    assert limits.normal_properties("properties", normal) == normal
    assert list(limits.normal_properties("properties", {"os": "linux", "arch": "arm"})) == ["arch", "os"]


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
        limits.normal_properties("properties", raw)


@given(documents)
def test_ordinary_json_comes_back_as_it_was(document: object) -> None:
    assert limits.parse_json(json.dumps(document)) == document
    assert limits.parse_json(json.dumps(document, ensure_ascii=False).encode()) == document


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
        (b'{"\\ud800": 1}', "holds a lone surrogate"),
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
def test_json_that_python_and_postgresql_would_read_differently_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(BadInput, match=f"^body: {said}"):
        limits.parse_json(raw)


def test_json_may_be_nested_64_deep() -> None:
    assert limits.parse_json("[" * 64 + "]" * 64)


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
        assert nodes(document) <= limits.count_nodes(raw) <= 2 * nodes(document)


def test_signs_within_texts_are_not_counted() -> None:
    text = '[{,:"\\' * 1_000_000
    assert limits.count_nodes(json.dumps([text, text])) == 3
    assert limits.parse_json(json.dumps([text, text])) == [text, text]


def test_what_is_shown_in_messages_is_short_and_printable() -> None:
    assert limits.escaped("a\n\x1b[31m") == "a\\n\\x1b[31m"
    assert len(limits.escaped("x" * 1000, 80)) == 80
    assert limits.escaped(7) == "7"
