"""The caller's side of the command line against a gateway that answers what the test says."""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from scripted import Answer, Asked, Gateway, gateway, in_turn, problem

from bots.commands import COMMANDS
from schema.errors import BadInput, LeaseholdError, NotFound, Unauthorised

JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"
OTHER = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0002"
AT = "2026-01-01T00:00:0"

STORY: dict[str, Any] = {
    "id": JOB, "instance": "ci", "label": "nightly", "state": "queued", "priority": -3, "units": 2, "attempts": 1,
    "max_attempts": 5, "reason": None, "created_at": f"{AT}0Z", "queued_at": f"{AT}0Z", "schedule_after": None,
    "started_at": None, "finished_at": None, "bot": "b1", "properties": {"os": ["linux"]}, "timeout_seconds": 60.0,
    "locality_hint": "repo", "retry_failed": False, "kills": 0, "considered": 2,
    "payload": {"command": ["echo", "a b", "\x1b[2J"]}, "result": None,
    "waiting": {"unmatchable": True, "sentence": "no bot that serves the instance 'ci' offers os=linux"},
    "events": [
        {"move": "submit", "from": None, "to": "queued", "at": f"{AT}0Z", "actor": "op", "fence": 0, "details": None},
        {"move": "grant", "from": "queued", "to": "leased", "at": f"{AT}1.5Z", "actor": "assigner-1", "fence": 1,
         "details": {"bot": "b1", "score": {"total": 6.0, "locality": 5.0}}},
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_pool_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEASEHOLD_URL", "LEASEHOLD_TOKEN", "LEASEHOLD_DATA", "LEASEHOLD_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A gateway that the environment names; a test gives it its script."""

    def accept(asked: Asked) -> Answer:
        return Answer({"jobs": [{"id": JOB, "created": True} for _ in asked.body["jobs"]]})

    with gateway(accept) as opened:
        monkeypatch.setenv("LEASEHOLD_URL", opened.url)
        monkeypatch.setenv("LEASEHOLD_TOKEN", "lh_operator_x_y")
        yield opened


@click.group()
@click.option("--data")
def program(data: str | None) -> None:
    """What stands around the commands."""


for _command in COMMANDS:
    program.add_command(_command)


def call(*arguments: str) -> None:
    program.main(list(arguments), prog_name="leasehold", standalone_mode=False)


def final(job: str, state: str, **result: Any) -> dict[str, Any]:
    return {"id": job, "state": state, "reason": None, "attempts": 1, "finished_at": f"{AT}9Z", "result": result}


def test_submit_sends_exactly_what_the_options_say(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    call(
        "submit", "--instance", "ci", "--priority", "-5", "--property", "os=linux", "--property", "gpu=a",
        "--property", "gpu=b", "--units", "2", "--label", "x", "--key", "k", "--locality", "repo", "--timeout", "1.5",
        "--max-attempts", "3", "--retry-failed", "--env", "A=b=c", "--", "make", "-j4", "--wait",
    )  # fmt: skip
    assert capsys.readouterr().out == f"{JOB}\n"
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
    assert json.loads(capsys.readouterr().out) == [{"id": JOB, "created": True}] * 2


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


def test_wait_succeeds_if_all_jobs_did(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer({"jobs": [final(JOB, "succeeded", exit_code=0, seconds=2.0)], "done": True}))
    call("wait", JOB, JOB)
    assert capsys.readouterr().out == f"{JOB} succeeded after 2.0 s\n"
    assert stands.asked[0].body["ids"] == [JOB]


def test_wait_fails_in_one_line_if_a_job_did_not_succeed(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [final(JOB, "succeeded"), final(OTHER, "failed", exit_code=3)]
    stands.script = in_turn(Answer({"jobs": jobs, "done": True}))
    with pytest.raises(LeaseholdError) as caught:
        call("wait", JOB, OTHER)
    assert str(caught.value) == f"1 of 2 jobs did not succeed; the first: {OTHER} failed exit 3"
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_wait_gives_up_after_its_time(stands: Gateway) -> None:
    stands.script = in_turn(Answer({"jobs": [{"id": JOB, "state": "running"}], "done": False}))
    with pytest.raises(LeaseholdError, match=rf"not final after 0\.01 s: {JOB}$"):
        call("wait", JOB, "--timeout", "0.01")


def test_submit_can_wait_for_its_jobs(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(
        Answer({"jobs": [{"id": JOB, "created": True}]}),
        Answer({"jobs": [final(JOB, "succeeded")], "done": True}),
    )
    call("submit", "--wait", "--json", "--", "true")
    assert [job["state"] for job in json.loads(capsys.readouterr().out)] == ["succeeded"]


def test_show_tells_the_story_and_why_the_job_waits(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(STORY))
    call("show", JOB)
    told = capsys.readouterr().out
    assert "unmatchable: no bot that serves the instance 'ci' offers os=linux" in told
    assert "os=linux" in told
    assert "1.5 s" in told
    assert "queued -> leased" in told
    assert "bot=b1 score.total=6 score.locality=5" in told
    assert "\x1b" not in told


def test_show_prints_the_gateways_answer_as_json(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(STORY))
    call("show", "--json", JOB)
    assert json.loads(capsys.readouterr().out) == STORY


def test_an_absent_job_is_not_found(stands: Gateway) -> None:
    stands.script = in_turn(problem(404, f"id: there is no job '{JOB}'"))
    with pytest.raises(NotFound, match="there is no job"):
        call("show", JOB)


def test_list_shows_one_line_for_each_job(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer({"jobs": [STORY, STORY | {"id": OTHER, "started_at": f"{AT}3Z"}]}))
    call("list", "--instance", "ci", "--limit", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["id", JOB, OTHER]
    assert "3.0 s" in lines[2]
    assert stands.asked[0].query == {"instance": "ci", "limit": "2"}


@pytest.mark.parametrize("arguments", [["logs", JOB], ["logs", "-f", JOB]])
def test_logs_writes_the_bytes_as_they_are(
    stands: Gateway, capfdbinary: pytest.CaptureFixture[bytes], arguments: list[str]
) -> None:
    written = bytes(range(256)) + b"no newline"

    def script(asked: Asked) -> Answer:
        data = written[int(asked.query["start"]) :]
        encoded = base64.b64encode(data).decode()
        return Answer(
            {"start": 0, "data": encoded, "next": len(written), "state": "failed", "attempt": 1, "final": True}
        )

    stands.script = script
    call(*arguments)
    assert capfdbinary.readouterr().out == written


def test_cancel_tells_what_became_of_each(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        {"id": JOB, "state": "cancelling", "changed": True},
        {"id": OTHER, "state": None, "changed": False},
    ]
    stands.script = in_turn(Answer({"jobs": answers}))
    with pytest.raises(NotFound, match=OTHER):
        call("cancel", JOB, OTHER)
    assert capsys.readouterr().out == f"{JOB} cancelling\n"


def test_status_and_bots_are_shown(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(
        Answer(
            {
                "jobs": {"queued": 3, "running": 1},
                "instances": {"ci": {"queued": 3}, "web": {"running": 1}},
                "oldest_queued_seconds": 90.0,
                "unmatchable": 2,
                "bots": {"ok": {"bots": 1, "capacity": 4, "in_use": 1}},
                "capacity": 4,
                "in_use": 1,
                "upkeep": [{"name": "reap", "age_seconds": 0.5, "grace": False}],
                "rates": {"submitted": 1.5, "granted": 1.0, "finished": 0.0},
            }
        ),
        Answer(
            {
                "bots": [
                    {
                        "name": "b1",
                        "status": "ok",
                        "draining": True,
                        "instance": None,
                        "priority": 0,
                        "capacity": 4,
                        "in_use": 1,
                        "leases": 1,
                        "properties": {"os": ["linux"]},
                        "epoch": 1,
                        "opened_at": f"{AT}0Z",
                        "expires_in": 29.0,
                    }
                ]
            }
        ),
        Answer({"name": "b1", "draining": True}),
    )
    call("status")
    told = capsys.readouterr().out
    assert "1 ok; 1 of 4 units in use" in told
    assert "2 queued jobs are unmatchable" in told
    call("bots", "list")
    assert "draining" in capsys.readouterr().out
    call("bots", "drain", "b1", "--reason", "disk")
    assert capsys.readouterr().out == "b1 takes no more work\n"


def write_private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_local_pool_is_found_by_its_data_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(in_turn(Answer({"jobs": []}))) as opened:
        (tmp_path / "gateway.url").write_text(opened.url + "\n")
        write_private(tmp_path / "operator.token", "lh_operator_a_b\n")
        call("list", "--data", str(tmp_path))
        call("--data", str(tmp_path), "list", "--json")
    assert [asked.token for asked in opened.asked] == ["Bearer lh_operator_a_b"] * 2


def test_a_token_file_goes_before_the_environment(stands: Gateway, tmp_path: Path) -> None:
    path = write_private(tmp_path / "token", "lh_submitter_c_d")
    call("submit", "--token-file", str(path), "--", "true")
    assert stands.asked[0].token == "Bearer lh_submitter_c_d"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_token_that_others_can_read_is_refused(stands: Gateway, tmp_path: Path, mode: int) -> None:
    path = write_private(tmp_path / "token", "lh_submitter_c_d", mode)
    with pytest.raises(BadInput, match=f"chmod 600 {path}"):
        call("submit", "--token-file", str(path), "--", "true")
    assert stands.asked == []


def test_without_any_pool_one_line_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="start `leasehold up`, or give --url"):
        call("status", "--data", str(tmp_path))


def test_without_a_token_one_line_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give --token-file or set LEASEHOLD_TOKEN"):
        call("status", "--data", str(tmp_path), "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize("token", ["  ", "a\nb", "é"])
def test_a_token_that_cannot_be_one_is_refused(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("LEASEHOLD_TOKEN", token)
    with pytest.raises(Unauthorised):
        call("status", "--url", "http://127.0.0.1:9")


def test_a_token_is_not_sent_in_clear_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_TOKEN", "lh_operator_x_y")
    with pytest.raises(BadInput, match="in clear to another machine"):
        call("status", "--url", "http://example.invalid:7411")


def test_no_option_takes_a_token(stands: Gateway) -> None:
    for command in COMMANDS:
        names = {name for parameter in command.params for name in parameter.opts}
        assert "--token" not in names
    assert os.environ["LEASEHOLD_TOKEN"]
