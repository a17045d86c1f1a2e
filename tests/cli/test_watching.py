"""`--watch` against a gateway that answers what the test says, and at times does not."""

import json

import pytest

from assigner.cli import errors
from assigner.cli.main import cli
from tests.support.http import JOB_COMMANDING, Answer, Gateway, in_turn, problem
from tests.support.patience import wait_instead
from tests.support.screens.terminal import on_a_terminal

pytestmark = pytest.mark.usefixtures("no_pool_of_our_own")

BOT = {
    "status": "ok", "draining": False, "host": "build-7", "pid": 4711, "instance": None, "pool": None, "labels": [],
    "cohort": "default", "priority": 0, "capacity": 4, "in_use": 1, "leases": 1, "properties": {}, "epoch": 1,
    "opened_at": None, "expires_in": 29.0, "probation": None,
}  # fmt: skip
FIRST, SECOND = ({"bots": [{"name": name, **BOT}]} for name in ("bot-one", "bot-two"))
AWAY = problem(503, "the database is not there")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the pause after the third look; the pauses between others take no time."""
    left = [0.0, 0.0]

    def sleep(_: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()

    wait_instead(monkeypatch, "sleep", sleep)
    monkeypatch.setattr("bots.cli.watching.PATIENCE", 0.0)


@pytest.mark.usefixtures("looks")
def test_each_look_stands_below_the_time_and_an_outage_is_told_and_survived(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    stands.script = in_turn(Answer(FIRST), AWAY, Answer(SECOND))
    assert errors.run(cli, ["bots", "list", "--watch"]) == 130
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line[:4] for line in lines] == ["--- ", "bot ", "bot-", "--- ", "bot ", "bot-"]
    assert "build-7" in lines[2]
    assert lines[-1].startswith("bot-two")
    assert "\x1b" not in said.out
    assert said.err.strip().endswith("the database is not there; trying again")


@pytest.mark.usefixtures("looks")
def test_json_is_one_document_for_each_look(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = in_turn(Answer(FIRST), Answer(SECOND))
    assert errors.run(cli, ["bots", "list", "--watch", "5", "--json"]) == 130
    names = [json.loads(line)[0]["name"] for line in capsys.readouterr().out.splitlines()]
    assert names == ["bot-one", "bot-two", "bot-two"]


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("answer", [problem(404, "the job is not there"), problem(401, "the token is not valid")])
def test_what_another_look_would_not_change_ends_the_watch(
    stands: Gateway, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    for script in ([answer], [Answer(FIRST), answer]):
        stands.script = in_turn(*script)
        assert errors.run(cli, ["bots", "list", "--watch"]) == 2
        assert capsys.readouterr().err.startswith("error: the")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "--watch", JOB_COMMANDING], "is no number of seconds: put --watch last"),
        (["list", "--watch", "0"], "0.0 is not in the range"),
        (["status", "--watch=nan"], "'nan' is no number of seconds"),
    ],
)
def test_seconds_that_are_none_are_refused(
    stands: Gateway, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert errors.run(cli, arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --watch: ")
    assert said in told
    assert stands.asked == []


def test_a_terminal_shows_the_latest_answer_in_one_place_also_during_an_outage(stands: Gateway) -> None:
    stands.script = in_turn(Answer(FIRST), AWAY)
    code, text = on_a_terminal(stands, "bots", "list", "--watch", "0.1", until=lambda: len(stands.asked) > 9)
    assert code == 130
    last = text.rpartition("\x1b[2K")[2]
    assert "the database is not there; this is from 20" in last
    assert "bot-one" in last, "what was read before stays"
