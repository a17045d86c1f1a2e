"""`help`, completion and the man page agree with the commands; what a command imports before it answers."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from assigner.cli import completion, errors, manual, names, operations
from assigner.cli.main import LOCAL, cli
from ops import manual as man_page
from tests.support.http import JOB_COMMANDING, Answer, ReceivedRequest, gateway
from tests.support.patience import MINUTE

ROOT = Path(__file__).parent.parent.parent
COMPLETE = """
import json, os, sys
from assigner.cli import completion
from assigner.cli.main import main
for line in json.loads(sys.argv[1]):
    os.environ[completion.VARIABLE] = "bash_complete"
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    try:
        main()
    except SystemExit:
        print("--")
sys.stderr.write(json.dumps(sorted(sys.modules)))
"""


def completed(*lines: str) -> list[list[str]]:
    """What bash is answered for lines that end where the cursor is; none of them may import what it completes."""
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE, json.dumps(lines)], cwd=ROOT, capture_output=True, text=True,
        timeout=5 * MINUTE, check=True,
    )  # fmt: skip
    assert set(json.loads(done.stderr)) & {"sqlalchemy", "pydantic", "rich", "httpx", "psycopg"} == set()
    return [[each.partition(",")[2] for each in part.splitlines()] for part in done.stdout.split("--\n")[:-1]]


def test_completion_knows_commands_options_and_choices_and_imports_none_of_them() -> None:
    found = completed(
        "leasehold requ",
        "leasehold instance ",
        "leasehold submit --de",
        "leasehold list --state canc",
        "leasehold --data x up --",
        "leasehold completion z",
        "leasehold help gloss",
        "leasehold config example grafana/d",
    )
    requeue, instance, submit, state, up, *others = found
    assert (requeue, state) == (["requeue"], ["cancelling", "cancelled"])
    assert {"list", "set", "show", "rm", "drain"} <= set(instance)
    assert "--dedup-key" in submit
    assert "--assigners" in up
    assert others == [["zsh"], ["glossary"], ["grafana/database.json"]]


def test_the_table_of_commands_is_that_of_the_commands_themselves() -> None:
    assert json.loads(completion.TABLE.read_text()) == completion.table(cli, man_page.defined()), "run: make man"


def test_the_script_for_a_shell_calls_the_program_and_bash_loads_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "fish", "bash"):
        assert errors.run(cli, ["completion", shell]) == 0
        script = capsys.readouterr().out
        assert f"{completion.VARIABLE}={shell}_complete" in script
    loading = ["bash", "-c", script + "complete -p leasehold"]
    done = subprocess.run(loading, capture_output=True, text=True, timeout=MINUTE, check=True)
    assert "_leasehold_completion" in done.stdout
    assert errors.run(cli, ["completion", "tcsh"]) == 2


def test_help_lists_topics_shows_pages_and_commands_and_names_both(capsys: pytest.CaptureFixture[str]) -> None:
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


# Imports


#: The database, the server and its metrics. A new child process for each command would take half a second each.
SERVERS = {"sqlalchemy", "psycopg", "alembic", "fastapi", "starlette", "uvicorn", "prometheus_client", "httpx"}
RUN = """
import json, sys
from assigner.cli import errors
from assigner.cli.main import cli
found = []
for arguments in json.loads(sys.argv[1]):
    code = errors.run(cli, arguments)
    found.append((code, sorted({name.partition(".")[0] for name in sys.modules})))
sys.stdout.write("\\n" + json.dumps(found))
"""


def imported(*commands: list[str], **environ: str) -> list[tuple[int, set[str]]]:
    """Run commands one after the other in one new process; return exit codes, and the modules imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        env={**os.environ, "LEASEHOLD_TOKEN": "lh_submitter_x", **environ},
        capture_output=True,
        text=True,
        timeout=5 * MINUTE,  # it may have to compile every module first
        check=True,
    )
    return [(code, set(names)) for code, names in json.loads(done.stdout.splitlines()[-1])]


def answers(asked: ReceivedRequest) -> Answer:
    match asked.path.removeprefix("/v1/jobs"):
        case "":
            if asked.method == "GET":
                return Answer({"jobs": [], "next": None})
            return Answer({"jobs": [{"id": JOB_COMMANDING, "created": True}]})
        case "/cancel":
            return Answer({"jobs": [{"id": JOB_COMMANDING, "state": "cancelled", "changed": True}], "next": None})
        case "/wait":
            return Answer({"jobs": [{"id": JOB_COMMANDING, "state": "succeeded"}]})
        case output if output.endswith("/output"):
            return Answer({"start": 0, "data": "", "next": 0, "state": "succeeded", "attempt": 1, "final": True})
        case "/v1/bots" | "/v1/rates":
            return Answer({"bots": [], "rates": []})
        case _:
            return Answer({"id": JOB_COMMANDING, "state": "succeeded", "has_result": False})


def test_commands_that_call_a_gateway_import_nothing_of_the_servers_side() -> None:
    with gateway(answers) as stands:
        where = ["--url", stands.url, "--json"]
        without_models = [
            ["explain", *where, JOB_COMMANDING],
            ["show", *where, JOB_COMMANDING],
            ["wait", *where, JOB_COMMANDING],
            ["logs", *where, JOB_COMMANDING],
            ["status", *where],
            ["bots", "list", *where],
        ]
        found = imported(
            *without_models,
            ["list", *where],
            ["cancel", *where, JOB_COMMANDING],
            ["submit", *where, "true"],
            ["submit", "--priority", "high", "true"],
            ["rate", "list", *where],
        )
    *found, of_operators = found
    assert [code for code, _ in found] == [0] * (len(found) - 1) + [2]
    assert (of_operators[0], of_operators[1] & {"fastapi", "uvicorn"}) == (0, set())
    assert found[len(without_models) - 1][1] & {"pydantic", "annotated_types"} == set()
    assert found[-1][1] & SERVERS == set()
    assert "rich" not in found[-1][1], "only what prints a table imports it"


def test_processes_of_the_pool_import_only_the_servers_and_clients_that_they_use(tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    bot, assign, gateway = imported(
        [*data, "bot"],
        [*data, "assign"],
        [*data, "gateway"],
        LEASEHOLD_URL="",
        LEASEHOLD_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none",
        LEASEHOLD_DATABASE_OUTAGE_SECONDS="0",
    )
    assert (bot[0], assign[0], gateway[0]) == (2, 3, 3), "they stop where they ask for a gateway or a database"
    assert (bot[1] | assign[1]) & {"fastapi", "starlette", "uvicorn", "httpx", "alembic"} == set()
    assert (bot[1] | assign[1] | gateway[1]) & {"alembic", "sqlalchemy"} == set(), "the tables are for upgrades"
    assert "uvicorn" in gateway[1]
    assert gateway[1] & {"httpx", "alembic"} == set()


def test_help_version_and_mistakes_import_no_command() -> None:
    done = imported(["--help"], ["--version"], ["sbmit"], ["--bogus"])
    assert [code for code, _ in done] == [0, 0, 2, 2]
    assert done[-1][1] & (SERVERS | {"pydantic", "rich", "bots"}) == set()


def test_help_has_each_command_in_one_group_and_names_only_commands_that_are_there() -> None:
    context = click.Context(cli)
    grouped = [name for group in names.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(cli.list_commands(context))
    for said, meant in [*names.RENAMED.items(), *names.MEANT.items()]:
        found: click.Command | None = cli
        for word in meant.split():
            if not isinstance(found, click.Group):
                break  # what follows are the options and arguments of the command
            found = found.get_command(context, word)
        assert found is not None, f"{said}: there is no command '{meant}'"


def test_the_help_of_a_command_tells_the_short_form_that_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for command, form in (
        ("rate set", "`leasehold rate set api 5/s` is `--per-second 5`"),
        ("pause set", "label:nightly"),
    ):
        assert errors.run(cli, [*command.split(), "--help"]) == 0
        assert form in " ".join(capsys.readouterr().out.split())


def test_help_and_completion_tell_of_each_command_what_its_own_help_tells() -> None:
    context = click.Context(cli)
    own = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    table = {name: completion.entry(name) for name in own}
    assert {name: each["help"] for name, each in table.items() if each} == {
        name: each.get_short_help_str(300) for name, each in own.items() if each
    }
    assert {name for name, each in table.items() if each and not each["place"]} == {*cli.commands, *operations.names()}
    assert set(own) >= LOCAL
    completed = ShellComplete(cli, {}, "leasehold", "_LEASEHOLD_COMPLETE").get_completions([], "ca")
    assert [(item.value, item.help) for item in completed] == [("cancel", own["cancel"].get_short_help_str())]  # type: ignore[union-attr]
