"""`leasehold submit` against a gateway that answers what the test says; every field of a request has an option."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from leasehold.errors import BadInput

from assigner.cli import errors
from assigner.cli.main import cli
from bots.cli import options
from schema.requests import GROUPS, JobRequest
from tests.support.http import JOB_COMMANDING, Answer, Gateway, call, in_turn, problem
from tests.support.requests import TAKEN

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")


def test_a_duration_of_more_than_a_year_is_told_as_one(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.run(cli, ["submit", "--in", "500d", "--", "true"]) == 2
    assert (capsys.readouterr().err, stands.asked) == ("error: --in: '500d' is more than a year\n", [])
    assert errors.run(cli, ["reschedule", "--in", "500d", JOB_COMMANDING]) == 2
    assert (capsys.readouterr().err, stands.asked) == ("error: --in: '500d' is more than a year\n", [])


def test_submit_reads_json_lines(stands: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('\ufeff{"command": ["a"], "timeout_seconds": 5}\n\n{"command": ["b"], "priority": 3}\n')
    call("submit", "--file", str(path), "--json")
    assert [job["command"] for job in stands.asked[0].body["jobs"]] == [["a"], ["b"]]
    assert json.loads(capsys.readouterr().out) == [{"id": JOB_COMMANDING, "created": True}] * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object: each line is the request of one job"),
        ('{"command": ["a"], "instance": "Größe"}', "instance: is not a name: use a-z"),
        ('{"command": ["a"], "locks": ["a b"]}', "locks.0: is neither a lock nor LOCK:SLOTS: use a-z"),
        ('{"priority": 1}', "command: is missing"),
        ('{"command": ["a"], "timeout_seconds": NaN}', "holds NaN"),
        ('{"command": ["a"], "command": ["b"]}', "repeats the key 'command'"),
        ('{"command": ["\\u0000"]}', "NUL"),
        ('{"command": "make test"}', "command: input should be a valid list"),
        ('{"command": ["a"], "label": "\\ud800"}', "holds a lone surrogate: no UTF-8 text has one"),
        ('{"comand": ["a"], "command": ["a"]}', "comand: there is no such field; did you mean 'command'?"),
    ],
)
def test_bad_lines_are_named_and_nothing_is_submitted(
    stands: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, reason: str
) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"command": ["a"]}\n\n' + line + "\n")
    with pytest.raises(BadInput) as caught:
        call("submit", "--file", str(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)
    path.write_text('{"command": ["a"]}\n' + f"{line}\n" * 12)
    assert errors.run(cli, ["submit", "--file", str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [each.split(": ")[1] for each in told[:-1]] == [f"{path}:{number}" for number in range(2, 12)]
    assert all(reason in each for each in told[:-1])
    assert told[-1] == "and 2 more"
    path.write_text("\n\n")
    with pytest.raises(BadInput, match="holds no job"):
        call("submit", "--file", str(path))
    assert stands.asked == []


def test_a_resource_that_there_is_not_is_named_with_those_that_there_are(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert errors.run(cli, ["submit", "--resource", "cpus=2", "--", "true"]) == 2
    told = "error: --resource: there is no 'cpus': take cpu_milli, memory_mib, disk_mib, gpu_milli, gpus\n"
    assert capsys.readouterr().err == told
    assert stands.asked == []


def test_a_graph_of_json_lines_is_refused_with_what_makes_a_graph_of_them(
    stands: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nodes.jsonl"
    path.write_text('{"node": 1, "command": ["a"]}\n{"node": 2, "command": ["b"], "after": [1]}\n')
    assert errors.run(cli, ["graph", "submit", str(path)]) == 2
    made = """`jq -s '{name: "crunch", nodes: .}'` makes of a node a line"""
    assert capsys.readouterr().err == f"error: {path}: is JSON lines: a graph is one object, which {made}\n"
    assert stands.asked == []


def test_what_only_the_gateway_refuses_is_told_by_file_and_line(stands: Gateway, tmp_path: Path) -> None:
    stands.script = in_turn(problem(400, "jobs.1.env: 'a=' is not the name of a variable", field="jobs.1.env"))
    path = tmp_path / "jobs.jsonl"
    path.write_text('\n{"command": ["a"]}\n\n{"command": ["b"], "env": {"a=": "1"}}\n')
    with pytest.raises(BadInput) as caught:
        call("submit", "--file", str(path))
    assert str(caught.value) == f"{path}:4: env: 'a=' is not the name of a variable"
    path.write_text('\n{"command": ["a"]}\n\n{"command": ["b"]}\n')
    refused = [{"field": f"jobs.{nth}.env", "detail": f"jobs.{nth}.env: is wrong"} for nth in (0, 1)]
    stands.script = in_turn(Answer({**refused[0], "status": 400, "errors": refused}, 400))
    with pytest.raises(BadInput) as several:
        call("submit", "--file", str(path))
    assert several.value.more == 0
    stands.script = in_turn(Answer({**refused[0], "status": 400, "errors": refused, "more": 7}, 400))
    with pytest.raises(BadInput) as several:
        call("submit", "--file", str(path))
    assert several.value.more == 7
    assert [str(each) for each in (several.value, *several.value.others)] == [
        f"{path}:{line}: env: is wrong" for line in (2, 4)
    ]


def test_a_job_that_is_too_large_for_what_is_on_the_way_is_told_as_such(stands: Gateway, tmp_path: Path) -> None:
    stands.script = in_turn(Answer(b"<html>Request Entity Too Large", 413))
    with pytest.raises(BadInput) as alone:
        call("submit", "true")
    path = tmp_path / "jobs.jsonl"
    path.write_text('\n{"command": ["a"]}\n{"command": ["b"]}\n')
    with pytest.raises(BadInput) as in_a_file:
        call("submit", "--file", str(path))
    assert str(alone.value) == "job: is larger than a proxy before the gateway accepts"
    assert str(in_a_file.value) == f"{path}:2: is larger than a proxy before the gateway accepts"


def test_advice_on_estimates_goes_to_standard_error(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    taken = {"jobs": [{"id": JOB_COMMANDING, "created": True}], "advice": [{"job": 0, "text": "it is\x1b far off"}]}
    stands.script = in_turn(Answer(taken))
    assert errors.run(cli, ["submit", "--estimated-seconds", "9", "--", "true"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{JOB_COMMANDING}\n", f"advice: job {JOB_COMMANDING}: it is\\x1b far off\n")


# Options, which are derived from the model


FIELDS = sorted(JobRequest.model_fields.keys() - {options.COMMAND})
#: Fields of which the last sample does not show everything: what stands on the command line, and the value it makes.
EXAMPLES: dict[str, tuple[Sequence[str], Any]] = {
    "retry": (["--retry-failed", "--retry-policy", "exit_code=3"], {"exit_codes": [3]}),
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


@pytest.fixture
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("hello\n")
    Path("jobs.jsonl").write_text('{"command": ["a"]}\n')


@pytest.mark.usefixtures("in_a_directory")
def test_the_option_of_a_field_sets_it_and_takes_no_file(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    for field in FIELDS:
        arguments, value = example(field)
        call("submit", *arguments, "--", "true", "--wait")
        sent = stands.asked[-1].body["jobs"][0]
        assert (sent[field], type(sent[field])) == (value, type(value))
        assert sent["command"] == ["true", "--wait"]
        assert sent.keys() <= {"command", "key", field, *TAKEN[field][-1]}, field
        own = options.option_name(field)
        before = len(stands.asked)
        capsys.readouterr()
        assert errors.run(cli, ["submit", "--file", "jobs.jsonl", *arguments[arguments.index(own) :]]) == 2
        assert capsys.readouterr().err.startswith(f"error: {own}: describes one job")
        assert len(stands.asked) == before


def test_help_shows_each_group_with_its_options_defaults_and_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    call("submit", "--help")
    shown = capsys.readouterr().out
    sections = {part.partition(":\n")[0]: " ".join(part.split()) for part in shown.split("\n\n")}
    for group, fields in GROUPS.items():
        for field in fields:
            assert (JobRequest.model_fields[field].description or "").endswith("."), field
            assert field == options.COMMAND or f" {options.option_name(field)} " in sections[group]
    assert "--file" in sections["What to run"]
    assert "--wait" in sections["Options"]
    assert "occupies. [default: 1; 1 to 1,000,000]" in sections["Where it may run"]
    assert "[above 0, at most 31,536,000; such as 90m or 1h30m" in sections["Retries and time-outs"]
    assert "[0 to 23; repeatable]" in sections["When and how urgently"]
