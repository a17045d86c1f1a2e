"""What every command refuses before anything is sent."""

import click
import pytest

from schema.errors import BadInput
from tests.commanding import JOB, call
from tests.scripted import Gateway

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit"],
        ["submit", "--file", "-", "--", "true"],
        ["submit", "--priority", "2000", "--", "true"],
        ["submit", "--units", "0", "--", "true"],
        ["submit", "--timeout", "-1", "--", "true"],
        ["submit", "--timeout", "nan", "--", "true"],
        ["submit", "--file", "/nowhere/jobs.jsonl"],
        ["submit", "--colour", "red", "--", "true"],
        ["wait"],
        ["list", "--state", "asleep"],
        ["list", "--limit", "0"],
        ["cancel"],
        ["bots", "drain"],
        ["graph", "submit", "/nowhere/graph.json"],
        ["graph", "list", "--limit", "101"],
        ["graph", "show"],
    ],
)
def test_wrong_usage_is_refused_before_anything_is_sent(stands: Gateway, arguments: list[str]) -> None:
    with pytest.raises((click.UsageError, click.FileError, BadInput)):
        call(*arguments)
    assert stands.asked == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["submit", "--property", "os", "--", "true"], "--property"),
        (["submit", "--env", "=x", "--", "true"], "--env"),
        (["submit", "--instance", "Not A Name", "--", "true"], "instance"),
        (["submit", "--label", "x" * 65, "--", "true"], "label"),
        (["submit", "--", "\udcff"], "command"),
        (["show", "x"], "id"),
        (["wait", JOB, "x"], "id"),
        (["cancel", "../bots"], "id"),
        (["logs", ""], "id"),
        (["bots", "drain", "../x"], "NAME"),
        (["bots", "show", "../x"], "NAME"),
    ],
)
def test_wrong_input_is_one_clear_line_before_anything_is_sent(
    stands: Gateway, arguments: list[str], field: str
) -> None:
    with pytest.raises(BadInput) as caught:
        call(*arguments)
    assert caught.value.field == field
    assert str(caught.value).isprintable()
    assert stands.asked == []
