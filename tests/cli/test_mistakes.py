"""Valid configurations with a mistake: `config check` warns with the line, or refuses what would wait for ever."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from assigner.cli import errors
from assigner.cli.main import cli
from schema.policy import priority_classes
from schema.policy.priority_classes import FIRST_CLASSES
from tests.support.pool import Pool

NIGHT = '[[windows]]\nname = "night"\nstart = 20\nend = 8\n'
METER = f'[[meters]]\nname = "plan"\ncommand = ["{Path("/bin/true")}"]\n'
GONE = METER.replace("/bin/true", "/does/not/exist")

WARNINGS = [
    (NIGHT + '[[windows]]\nname = "a"\nstart = 1\nend = 2\ntypes = ["critcal"]\n',
     "9: windows[1].types: 'critcal' is no class of a new pool, and jobs have it only after "
     "`leasehold class set critcal`; did you mean 'critical'?"),
    (NIGHT + 'exempt_types = ["nosuch"]\n',
     "5: windows[0].exempt_types: 'nosuch' is no class of a new pool, and jobs have it only after "
     "`leasehold class set nosuch`"),
    (NIGHT + 'types = ["serious", "random"]\nmatch = "prefix"\n',
     "5: windows[0].types: no window lets jobs of the classes 'critical', 'auto_generated', 'background' start: "
     "they would wait for ever"),
    (NIGHT + 'meter = "plan"\nusage_threshold = 9\n' + NIGHT.replace("night", "more")
     + 'meter = "plna"\nusage_threshold = 9\n' + METER,
     "11: windows[1].meter: nothing reads 'plna', and jobs of this window would wait for ever; did you mean 'plan'?"),
    (GONE, "3: meters[0].command: '/does/not/exist' is no program that can be run on this machine"),
    (METER + "timeout = 30\ninterval = 5\n",
     "4: meters[0].timeout: 30 s is longer than the interval of 5 s: the next reading would be due before this one is "
     "given up"),
    ("[[assigners]]\n[assigners.strategy]\nweights = { priority = 0, locality = 0, capacity = 0 }\n",
     "3: assigners[0].strategy.weights: all of them are 0: every bot has the same score, and chance decides"),
    ('[[assigners]]\n[assigners.strategy]\nkind = "round-robin"\nsampling = { enabled = false }\n',
     "3: assigners[0].strategy.kind: means nothing while sampling is off: a job goes to the first bot with room"),
    ("[bot]\ncapacity = 4\nauto_capacity = true\n", "2: bot.capacity: means nothing together with auto_capacity"),
    ('[service_levels]\ndefault = "standrad"\n',
     "2: service_levels.default: 'standrad' is no service level of a new pool, and gateways start only after "
     "`leasehold rule service-level set standrad`; did you mean 'standard'?"),
]  # fmt: skip
ERRORS = [
    (NIGHT + 'types = ["nosuch"]\n', "5: windows[0].types: no window lets jobs of the classes 'critical', "),
    (NIGHT + 'meter = "plna"\nusage_threshold = 9\n' + METER,
     "5: windows[0].meter: nothing reads 'plna', and jobs of this window would wait for ever; did you mean 'plan'?"),
    (NIGHT + 'meter = "plan"\nusage_threshold = 9\n' + GONE,
     "9: meters[0].command: '/does/not/exist' is no program that can be run on this machine, and jobs that wait for it "
     "would wait for ever"),
]  # fmt: skip
SOUND = [
    NIGHT + 'exempt_types = ["serious"]\nmeter = "elsewhere"\nusage_threshold = 9\n' + METER,
    NIGHT + 'types = ["serious"]\n' + NIGHT.replace("night", "every") + 'types = ["all"]\n',
    METER + "timeout = 5\ninterval = 5\n",
    "[bot]\ncapacity = 4\n",
    "[bot]\nauto_capacity = true\n",
    '[service_levels]\ndefault = "standard"\n',
]


@pytest.fixture
def check(
    tmp_path: Path, no_pool_of_our_own: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, list[str]]]:
    """Checks a configuration in this process; gives the exit code and the lines on standard error, without the file."""
    # What a program sets up for itself would outlive it here.
    monkeypatch.setattr(structlog, "configure", lambda **_: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    path = tmp_path / "leasehold.toml"

    def call(text: str) -> tuple[int, list[str]]:
        path.write_text(text)
        code = errors.run(cli, ["config", "check", str(path)])
        return code, capsys.readouterr().err.replace(f"{path}:", "").splitlines()

    return call


@pytest.mark.parametrize(("text", "said"), WARNINGS)
def test_a_mistake_is_warned_of_by_line(check: Callable[[str], tuple[int, list[str]]], text: str, said: str) -> None:
    assert check(text) == (0, [f"warning: {said}"])


@pytest.mark.parametrize(("text", "said"), ERRORS)
def test_what_would_let_jobs_wait_for_ever_is_an_error_with_its_line(
    check: Callable[[str], tuple[int, list[str]]], text: str, said: str
) -> None:
    code, lines = check(text)
    assert (code, [line.startswith("warning: ") for line in lines[:-1]]) == (2, [True] * (len(lines) - 1))
    assert lines[-1].startswith(f"error: {said}")


def test_each_problem_is_a_line_of_its_own(check: Callable[[str], tuple[int, list[str]]]) -> None:
    wrong = "".join(f"wrong_{n} = 1\n" for n in range(12))
    code, lines = check(f"[timing]\nsynk = 1\n{wrong}[[instances]]\nname = 'a'\ncredit_weight = 2")
    assert (code, len(lines)) == (2, 14)
    assert lines.pop() == "error: 17: instances[0].credit_weight: is now `weight`"
    assert lines[0] == "error: 2: timing.synk: is not a setting; did you mean 'sync'?"
    assert lines[-1] == "error: 14: timing.wrong_11: is not a setting"


@pytest.mark.parametrize("text", SOUND)
def test_what_is_sound_is_not_warned_of(check: Callable[[str], tuple[int, list[str]]], text: str) -> None:
    assert check(text) == (0, [])


def test_the_classes_that_it_knows_are_those_of_a_new_database(pool: Pool) -> None:
    found = pool.database.run(priority_classes.classes)
    assert {each.name for each in found} == set(FIRST_CLASSES)
