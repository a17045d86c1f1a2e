"""`leasehold submit` against a gateway that answers what the test says."""

import json
from pathlib import Path

import pytest
from leasehold.errors import BadInput

from assigner.cli import errors
from assigner.cli.main import cli
from tests.support.http import JOB_COMMANDING, Answer, Gateway, call, final, in_turn, problem

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")


def test_submit_sends_exactly_what_the_options_say(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    call(
        "submit", "--instance", "ci", "--priority", "-5", "--property", "os=linux", "--property", "gpu=a",
        "--property", "gpu=b", "--units", "2", "--label", "x", "--key", "k", "--locality", "repo", "--timeout", "1.5",
        "--max-attempts", "3", "--retry-failed", "--env", "A=b=c", "--", "make", "-j4", "--wait",
    )  # fmt: skip
    assert capsys.readouterr().out == f"{JOB_COMMANDING}\n"
    assert stands.asked[0].body == {
        "jobs": [
            {
                "command": ["make", "-j4", "--wait"],
                "env": {"A": "b=c"},
                "instance": "ci",
                "properties": {"os": ["linux"], "gpu": ["a", "b"]},
                "key": "k",
                "priority": -5,
                "units": 2,
                "label": "x",
                "locality_hint": "repo",
                "timeout_seconds": 1.5,
                "max_attempts": 3,
                "retry_failed": True,
            }
        ]
    }


def test_submit_sends_when_a_job_may_start_and_what_it_takes(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    call(
        "submit", "--job-class", "serious_project", "--preferred-hour", "22", "--preferred-hour", "3",
        "--preferred-zone", "Europe/Berlin", "--resource", "cpu_milli=500", "--resource", "memory_mib=64",
        "--batch-key", "x", "true",
    )  # fmt: skip
    sent = stands.asked[0].body["jobs"][0]
    assert sent["job_class"] == "serious_project"
    assert (sent["preferred_hours"], sent["preferred_zone"]) == ([22, 3], "Europe/Berlin")
    assert (sent["resources"], sent["batch_key"]) == ({"cpu_milli": 500, "memory_mib": 64}, "x")
    capsys.readouterr()
    for wrong, said in {
        "--resource cpu_milli=half": "--resource: 'cpu_milli=half' is not KIND=AMOUNT",
        "--preferred-hour 24": "--preferred-hour: 24 is not in the range",
        "--preferred-zone Mars": "--preferred-zone: 'Mars' is not a time zone",
        "--preferred-zone UTC": "--preferred-zone: means nothing without preferred_hours",
        "--resource memory_mib=1 --resource memory_mib=2": "--resource: names 'memory_mib' twice",
        "--resource cpu=4": "resources",
    }.items():
        assert errors.run(cli, ["submit", *wrong.split(), "true"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {said}")


def test_submit_says_nothing_of_what_was_not_given(stands: Gateway) -> None:
    call("submit", "true")
    job = stands.asked[0].body["jobs"][0]
    assert job.keys() == {"command", "key"}


def test_submit_takes_standard_input_for_the_command_from_a_file(stands: Gateway, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("hello\n")
    call("submit", "--stdin-file", str(tmp_path / "in.txt"), "--", "cat")
    assert stands.asked[0].body["jobs"][0]["stdin"] == "hello\n"


def test_submit_reads_json_lines(stands: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"command": ["a"], "timeout_seconds": 5}\n\n{"command": ["b"], "priority": 3}\n')
    call("submit", "--file", str(path), "--json")
    assert [job["command"] for job in stands.asked[0].body["jobs"]] == [["a"], ["b"]]
    assert json.loads(capsys.readouterr().out) == [{"id": JOB_COMMANDING, "created": True}] * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"priority": 1}', "command: is missing"),
        ('{"command": []}', "command: list should have at least 1 item"),
        ('{"command": "ls"}', "command: "),
        ('{"command": ["a"], "colour": 1}', "colour: is not a field of a job"),
        ('{"command": ["a"], "priority": 1001}', "priority: "),
        ('{"command": ["a"], "priority": 1.5}', "priority: "),
        ('{"command": ["a"], "units": true}', "units: "),
        ('{"command": ["a"], "instance": "No"}', "instance: "),
        ('{"command": ["a"], "timeout_seconds": NaN}', "holds NaN"),
        ('{"command": ["a"], "label": "%s"}' % ("é" * 33), "label: is 66 bytes long"),
        ('{"command": ["a"], "properties": {"os": []}}', "properties.os: "),
        ('{"command": ["a"], "command": ["b"]}', "repeats the key 'command'"),
        ('{"command": ["\\u0000"]}', "NUL"),
        ('{"command": ["%s"]}' % ("x" * 300_000), "at most 262144 are allowed"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_submitted(stands: Gateway, tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"command": ["a"]}\n\n' + line + "\n")
    with pytest.raises(BadInput) as caught:
        call("submit", "--file", str(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert stands.asked == []


def test_what_only_the_gateway_refuses_is_told_by_file_and_line(stands: Gateway, tmp_path: Path) -> None:
    stands.script = in_turn(problem(400, "jobs.1.env: 'a=' is not the name of a variable", field="jobs.1.env"))
    path = tmp_path / "jobs.jsonl"
    path.write_text('\n{"command": ["a"]}\n\n{"command": ["b"], "env": {"a=": "1"}}\n')
    with pytest.raises(BadInput) as caught:
        call("submit", "--file", str(path))
    assert str(caught.value) == f"{path}:4: env: 'a=' is not the name of a variable"


def test_options_of_one_job_do_not_go_with_a_file(stands: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"command": ["a"]}\n')
    with pytest.raises(BadInput, match="--max-attempts: describes one job"):
        call("submit", "--file", str(path), "--max-attempts", "2")
    assert stands.asked == []


def test_an_empty_file_is_refused(stands: Gateway, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n\n")
    with pytest.raises(BadInput, match="holds no job"):
        call("submit", "--file", str(tmp_path / "none.jsonl"))


def test_submit_can_wait_for_its_jobs(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(
        Answer({"jobs": [{"id": JOB_COMMANDING, "created": True}]}),
        Answer({"jobs": [final(JOB_COMMANDING, "succeeded")], "done": True}),
    )
    call("submit", "--wait", "--json", "--", "true")
    assert [job["state"] for job in json.loads(capsys.readouterr().out)] == ["succeeded"]


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


def test_submit_takes_a_deduplication_key_and_a_queue_timeout(stands: Gateway) -> None:
    call("submit", "--dedup-key", "nightly", "--queue-timeout", "90", "--", "make")
    job = stands.asked[0].body["jobs"][0]
    assert (job["dedup_key"], job["queue_timeout_seconds"]) == ("nightly", 90)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"command": ["a"], "dedup_key": "%s"}' % ("é" * 101), "dedup_key: is 202 bytes long"),
        ('{"command": ["a"], "queue_timeout_seconds": 0}', "queue_timeout_seconds: "),
    ],
)
def test_lines_take_both_as_well_and_say_what_is_wrong_with_them(
    stands: Gateway, tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "jobs.jsonl"
    good = '{"command": ["a"], "dedup_key": "nightly", "queue_timeout_seconds": 90}\n'
    path.write_text(good)
    call("submit", "--file", str(path))
    assert stands.asked[0].body["jobs"][0].items() >= json.loads(good).items()
    path.write_text(good + line)
    with pytest.raises(BadInput) as refused:
        call("submit", "--file", str(path))
    assert str(refused.value).startswith(f"{path}:2: {reason}")
    with pytest.raises(BadInput, match="--dedup-key"):
        call("submit", "--file", str(path), "--dedup-key", "nightly")


def test_advice_on_estimates_goes_to_standard_error_and_the_ids_to_standard_output(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = {"jobs": [{"id": JOB_COMMANDING, "created": True}], "advice": [{"job": 0, "text": "it is\x1b far off"}]}
    stands.script = in_turn(Answer(taken))
    assert errors.run(cli, ["submit", "--estimated-seconds", "9", "--", "true"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{JOB_COMMANDING}\n", f"advice: job {JOB_COMMANDING}: it is\\x1b far off\n")
