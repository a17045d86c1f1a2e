"""`help`, shell completion and the man page: they agree with the commands, and answer fast."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from assigner.cli import completion, errors, manual
from assigner.cli.main import cli
from ops import manual as man_page
from tests.support.patience import MINUTE

ROOT = Path(__file__).parent.parent.parent


def completed(line: str) -> list[str]:
    """What bash is answered for a line that ends where the cursor is; also what has been imported for it."""
    words = line.split(" ")
    script = (
        "import json, sys, atexit\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        "from assigner.cli.main import main\nmain()"
    )
    asked = {completion.VARIABLE: "bash_complete", "COMP_WORDS": line, "COMP_CWORD": f"{len(words) - 1}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **asked}, cwd=ROOT, capture_output=True, text=True,
        timeout=5 * MINUTE, check=True,
    )  # fmt: skip
    imported = set(json.loads(done.stderr.splitlines()[-1]))
    assert imported & {"sqlalchemy", "pydantic", "rich", "httpx", "psycopg"} == set()
    return [each.partition(",")[2] for each in done.stdout.splitlines()]


def test_completion_knows_commands_options_and_choices_and_imports_none_of_them() -> None:
    assert completed("leasehold requ") == ["requeue"]
    assert {"list", "set", "show", "rm", "drain"} <= set(completed("leasehold instance "))
    assert "--dedup-key" in completed("leasehold submit --de")
    assert completed("leasehold list --state canc") == ["cancelling", "cancelled"]
    assert "--assigners" in completed("leasehold --data x up --")
    assert completed("leasehold completion z") == ["zsh"]
    assert completed("leasehold help gloss") == ["glossary"]
    assert completed("leasehold config example grafana/d") == ["grafana/database.json"]


def test_the_table_of_commands_is_that_of_the_commands_themselves() -> None:
    assert json.loads(completion.TABLE.read_text()) == completion.table(cli, man_page.defined()), "run: make man"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_for_a_shell_calls_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.run(cli, ["completion", shell]) == 0
    assert f"{completion.VARIABLE}={shell}_complete" in capsys.readouterr().out


def test_bash_loads_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.run(cli, ["completion", "bash"]) == 0
    script = capsys.readouterr().out + "complete -p leasehold"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=MINUTE, check=True)
    assert "_leasehold_completion" in done.stdout
    assert errors.run(cli, ["completion", "tcsh"]) == 2


def test_help_lists_its_topics_shows_pages_and_commands_and_names_both_if_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert errors.run(cli, ["help"]) == 0
    listed = capsys.readouterr().out
    assert set(manual.topics()) == {"readme", "modules", *(page.stem for page in (ROOT / "ops/docs").glob("*.md"))}
    assert all(topic in listed for topic in manual.topics())
    assert errors.run(cli, ["help", "tenancy"]) == 0
    assert capsys.readouterr().out == (ROOT / "ops/docs/tenancy.md").read_text(), "what is piped is the page itself"
    assert errors.run(cli, ["help", "db", "upgrade"]) == 0
    assert capsys.readouterr().out.startswith("Usage: leasehold db upgrade")
    for wrong in (["nosuch"], ["db", "nosuch"], ["../secret"], ["submit", "x"]):
        assert errors.run(cli, ["help", *wrong]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: TOPIC: '{' '.join(wrong)}' is neither")
        assert "tenancy" in told
    for wrong, meant in ((["task"], "tasks"), (["schedulez"], "schedule"), (["db", "verifi"], "verify")):
        assert errors.run(cli, ["help", *wrong]) == 2
        assert capsys.readouterr().err.endswith(f"; did you mean '{meant}'?\n")


def test_an_installed_wheel_has_the_pages_where_help_looks_for_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    pages = manual._INSTALLED.relative_to(ROOT)
    assert included.items() >= {"ops/docs": str(pages), "README.md": str(pages / "readme.md")}.items()


def test_the_man_page_has_every_command_and_groff_has_no_complaint(tmp_path: Path) -> None:
    text = man_page.page()
    context = click.Context(cli)
    for name in cli.list_commands(context):
        assert f'.SS "leasehold {man_page.roff(name)} ' in text
    assert text.isascii()
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    written = tmp_path / "leasehold.1"
    written.write_text(text)
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tascii", written], capture_output=True, text=True, timeout=MINUTE, check=True
    )
    assert done.stderr == ""
    assert "\\-" not in done.stdout


@pytest.mark.parametrize(
    ("text", "escaped"),
    [(".TH", "\\&.TH"), ("'x\ny", "\\&'x\ny"), ("a\\n", "a\\en"), ("-x", "\\-x"), ("é …", "\\[u00E9] ...")],
)
def test_no_text_is_read_as_a_request_of_roff(text: str, escaped: str) -> None:
    assert man_page.roff(text) == escaped
