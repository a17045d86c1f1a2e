"""How a command finds its pool and its token, and which it refuses."""

import os
from pathlib import Path

import click
import pytest
from leasehold.errors import BadInput, Unauthorised

from bots.cli import backlog, jobs, listing, submit
from tests.support.http import JOB_COMMANDING, Answer, Gateway, call, gateway, in_turn

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")


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
    for command in (submit.submit, *jobs.COMMANDS, *listing.COMMANDS, *backlog.COMMANDS):
        names = {name for parameter in command.params for name in parameter.opts}
        assert "--token" not in names
    assert os.environ["LEASEHOLD_TOKEN"]


# What every command refuses before anything is sent.


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
        (["submit", "--instance", "Not A Name", "--", "true"], "--instance"),
        (["submit", "--label", "x" * 65, "--", "true"], "--label"),
        (["submit", "--", "\udcff"], "command"),
        (["show", "x"], "id"),
        (["wait", JOB_COMMANDING, "x"], "id"),
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
