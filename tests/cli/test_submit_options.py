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

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")

FIELDS = sorted(JobRequest.model_fields.keys() - {options.COMMAND})
#: For each field what stands on the command line and the value that the request then has.
EXAMPLES: dict[str, tuple[Sequence[str], Any]] = {
    "batch_key": (["--batch-key", "compile"], "compile"),
    "deadline_seconds": (["--deadline", "90"], 90.0),
    "dedup_key": (["--dedup-key", "nightly"], "nightly"),
    "env": (["--env", "A=1", "--env", "B=x=y", "--env", "A=2"], {"A": "2", "B": "x=y"}),
    "estimated_cost": (["--estimated-cost", "2.5"], 2.5),
    "estimated_seconds": (["--estimated-seconds", "30"], 30.0),
    "graph_priority": (["--graph-priority", "2"], 2),
    "instance": (["--instance", "ci"], "ci"),
    "job_class": (["--job-class", "serious"], "serious"),
    "key": (["--key", "order-42"], "order-42"),
    "label": (["--label", "nightly build"], "nightly build"),
    "locality_hint": (["--locality", "core"], "core"),
    "locks": (["--lock", "db", "--lock", "disk"], ["db", "disk"]),
    "max_attempts": (["--max-attempts", "7"], 7),
    "model": (["--resource-class", "claude", "--model", "opus"], "opus"),
    "owner": (["--owner", "ada"], "ada"),
    "preferred_hours": (["--preferred-hour", "22", "--preferred-hour", "3"], [22, 3]),
    "preferred_zone": (["--preferred-zone", "Europe/Berlin"], "Europe/Berlin"),
    "priority": (["--priority", "-5"], -5),
    "project": (["--project", "site"], "site"),
    "properties": (["--property", "gpu=a", "--property", "gpu=b"], {"gpu": ["a", "b"]}),
    "queue_timeout_seconds": (["--queue-timeout", "600"], 600.0),
    "resource_class": (["--resource-class", "claude"], "claude"),
    "resources": (["--resource", "cpu_milli=500", "--resource", "memory_mib=64"], {"cpu_milli": 500, "memory_mib": 64}),
    "retry_failed": (["--retry-failed"], True),
    "service_level": (["--service-level", "gold"], "gold"),
    "stdin": (["--stdin-file", "in.txt"], "hello\n"),
    "timeout_seconds": (["--timeout", "1.5"], 1.5),
    "units": (["--units", "2"], 2),
    "urgency": (["--urgency", "60"], 60),
    "user_priority": (["--job-class", "serious", "--user-priority", "3"], 3),
}


@pytest.fixture(autouse=True)
def an_input_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("hello\n")
    Path("jobs.jsonl").write_text('{"command": ["a"]}\n')


@pytest.mark.parametrize("field", FIELDS)
def test_the_option_of_a_field_sets_it(stands: Gateway, field: str) -> None:
    arguments, value = EXAMPLES[field]
    call("submit", *arguments, "--", "true")
    sent = stands.asked[0].body["jobs"][0]
    assert (sent[field], type(sent[field])) == (value, type(value))


@pytest.mark.parametrize("field", FIELDS)
def test_the_option_of_a_field_does_not_go_with_a_file(
    stands: Gateway, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = EXAMPLES[field][0][-2:]
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
