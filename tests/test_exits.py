from collections.abc import Iterator
from typing import NoReturn

import click
import pytest

from assigner import exits
from bots.commands import COMMANDS
from schema.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotFound, NotReady, Unauthorised
from tests.scripted import Gateway, gateway, in_turn, problem

JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A gateway that says of every job that it is over."""
    detail = f"job '{JOB}' is succeeded already; results are kept"
    with gateway(in_turn(problem(409, detail, code="already_final"))) as opened:
        monkeypatch.setenv("LEASEHOLD_URL", opened.url)
        monkeypatch.setenv("LEASEHOLD_TOKEN", "lh_operator_x_y")
        yield opened


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("--data", "is not there"), 2),
        (NotFound("id: there is no job 'x'"), 2),
        (Conflict("key_reused", "jobs[0].key: 'k' was used before for a different request"), 2),
        (NotReady("the database cannot be reached"), 3),
        (Forbidden("operators only"), 1),
        (Unauthorised("no token"), 2),
        (LeaseholdError("it failed"), 1),
        (click.exceptions.Abort(), 130),
    ],
)
def test_every_error_has_its_exit_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def failing() -> NoReturn:
        raise error

    assert exits.run(failing, []) == code
    assert capsys.readouterr().err == ("" if code == 130 else f"error: {error}\n")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_cancelling_what_is_over_is_one_line_and_exit_2(
    refusing: Gateway, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (cancel,) = (command for command in COMMANDS if command.name == "cancel")
    assert exits.run(cancel, [*options, JOB]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"error: job '{JOB}' is succeeded already; results are kept\n")
    assert refusing.asked[0].body == {"ids": [JOB]}
