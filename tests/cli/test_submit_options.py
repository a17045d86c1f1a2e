"""Every field of a job request has an option of `leasehold submit`, derived from the model."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from assigner.cli import errors
from assigner.cli.main import cli
from bots.cli import options
from schema.requests import GROUPS, JobRequest
from tests.support.http import Gateway, call
from tests.support.requests import TAKEN

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")

FIELDS = sorted(JobRequest.model_fields.keys() - {options.COMMAND})
#: Fields of which the last sample does not show everything: what stands on the command line, and the value it makes.
EXAMPLES: dict[str, tuple[Sequence[str], Any]] = {
    "env": (["--env", "A=1", "--env", "B=x=y", "--env", "A=2"], {"A": "2", "B": "x=y"}),
    "label": (["--label", "nightly build"], "nightly build"),
    "preferred_properties": (["--prefer", "gpu=a", "--prefer", "gpu=b"], {"gpu": ["a", "b"]}),
    "priority": (["--priority", "-5"], -5),
    "properties": (["--property", "gpu=a", "--property", "gpu=b"], {"gpu": ["a", "b"]}),
    "stdin": (["--stdin-file", "in.txt"], "hello\n"),
}


def example(field: str) -> tuple[Sequence[str], Any]:
    """The options that set a field, its own last, and its value: by hand, or from the field's last sample."""
    if field in EXAMPLES:
        return EXAMPLES[field]
    sample = TAKEN[field][-1]
    arguments: list[str] = []
    for name in sorted(sample, key=lambda name: name == field):
        for value in _spelled(sample[name]):
            arguments += [options.option_name(name), *value]
    return arguments, getattr(JobRequest.model_validate({"command": ["true"], **sample}), field)


def _spelled(value: Any) -> list[list[str]]:
    if value is True:
        return [[]]
    if isinstance(value, dict):
        return [[f"{name}={each}"] for name, each in value.items()]
    return [[str(each)] for each in (value if isinstance(value, list) else [value])]


@pytest.fixture(autouse=True)
def an_input_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("hello\n")
    Path("jobs.jsonl").write_text('{"command": ["a"]}\n')


@pytest.mark.parametrize("field", FIELDS)
def test_the_option_of_a_field_sets_it(stands: Gateway, field: str) -> None:
    arguments, value = example(field)
    call("submit", *arguments, "--", "true")
    sent = stands.asked[0].body["jobs"][0]
    assert (sent[field], type(sent[field])) == (value, type(value))


@pytest.mark.parametrize("field", FIELDS)
def test_the_option_of_a_field_does_not_go_with_a_file(
    stands: Gateway, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = options.option_name(field)
    arguments = list(example(field)[0])
    arguments = arguments[arguments.index(own) :]
    assert errors.run(cli, ["submit", "--file", "jobs.jsonl", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {options.option_name(field)}: describes one job")
    assert stands.asked == []


def test_every_field_has_its_place_in_one_group_of_the_help() -> None:
    grouped = [field for fields in GROUPS.values() for field in fields]
    assert sorted(grouped) == sorted(JobRequest.model_fields), "schema/requests.py: GROUPS names each field once"


def test_every_field_of_a_request_is_described() -> None:
    undescribed = [
        name for name, field in JobRequest.model_fields.items() if not (field.description or "").endswith(".")
    ]
    assert undescribed == []


def test_help_shows_each_group_with_its_options_defaults_and_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    call("submit", "--help")
    shown = capsys.readouterr().out
    sections = {part.partition(":\n")[0]: " ".join(part.split()) for part in shown.split("\n\n")}
    for group, fields in GROUPS.items():
        for field in fields:
            assert field == options.COMMAND or f" {options.option_name(field)} " in sections[group]
    assert "--file" in sections["What to run"]
    assert "--wait" in sections["Options"]
    assert "occupies. [default: 1; 1 to 1,000,000]" in sections["Where it may run"]
    assert "[above 0, at most 31,536,000]" in sections["Retries and time-outs"]
    assert "[0 to 23; repeatable]" in sections["When and how urgently"]


@pytest.mark.parametrize(
    "wrong",
    ["--user-priority 11", "--graph-priority 0", "--urgency 1101", "--deadline 0", "--estimated-cost -1", "--units 0"],
)
def test_a_number_out_of_its_range_is_refused_by_its_option(
    stands: Gateway, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option, number = wrong.split()
    assert errors.run(cli, ["submit", *wrong.split(), "true"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option}: {number}")
    assert stands.asked == []


def test_submit_starts_without_what_only_a_server_needs() -> None:
    program = "import sys, assigner.cli.main; print(*sys.modules.keys() & {'sqlalchemy', 'psycopg', 'fastapi'})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
