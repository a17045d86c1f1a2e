"""What commands that call a gateway import: nothing of the server's side, and nothing that they do not use."""

import json
import os
import subprocess
import sys
from pathlib import Path

from click.shell_completion import ShellComplete

from assigner.cli import completion, operations
from assigner.cli.main import LOCAL, cli
from tests.support.http import JOB_COMMANDING, Answer, ReceivedRequest, gateway
from tests.support.patience import MINUTE

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
        case "/v1/bots":
            return Answer({"bots": []})
        case _:
            return Answer({"id": JOB_COMMANDING, "state": "succeeded"})


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
        )
    assert [code for code, _ in found] == [0] * (len(found) - 1) + [2]
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
    assert "uvicorn" in gateway[1]
    assert gateway[1] & {"httpx", "alembic"} == set()


def test_help_version_and_mistakes_import_no_command() -> None:
    done = imported(["--help"], ["--version"], ["sbmit"], ["--bogus"])
    assert [code for code, _ in done] == [0, 0, 2, 2]
    assert done[-1][1] & (SERVERS | {"pydantic", "rich", "bots"}) == set()


def test_help_and_completion_tell_of_each_command_what_its_own_help_tells() -> None:
    import click

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
