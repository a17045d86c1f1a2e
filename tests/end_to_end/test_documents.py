"""The documents: what they show is run on a real pool, what they link to exists, and the README stays short.

In a block ```console a line that begins with `$ ` is a command, one that begins with `> ` continues it, and any other
line is output that the command must print, where `…` stands for anything. A command is expected to exit with 0, unless
it ends with a comment such as `# exit 1`. The comment `<!-- not run: reason -->` above a block keeps it from being run.
The comment `<!-- file: NAME -->` above a block puts it into a file, which the commands of the document find.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from leasehold.errors import BadInput

from assigner.cli.main import sections
from assigner.config import loading
from assigner.simulation.generated import Spec
from schema.postgres import embedded
from schema.postgres.engine import libpq_url
from tests.support.patience import eventually
from tests.support.servers import processes_of

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "ops" / "docs"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bots/sdk/README.md", *FOLDER.glob("*.md")])
#: Those whose commands `make test` runs; those of the others are of the long tests.
READ_FIRST = ("README.md", "python.md", "tasks.md")
#: Languages of fenced blocks. `console` is run, `toml` is checked as a configuration, `sql` is run, `json` is parsed. A
#: block of `python` is a file, which a command runs.
LANGUAGES = {"console", "toml", "sql", "json", "python", "text"}
README_BYTES = 9000
#: Seconds that the pool gets to start, and all commands of one document to run, on a busy machine.
STARTS_WITHIN, RUNS_WITHIN = 180.0, 900.0

FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run:(.*)-->\s*\Z")
FILE = re.compile(r"<!-- file:(.*)-->\s*\Z")
EXIT = re.compile(r"#.*\bexit (\d+)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


@dataclass
class Command:
    """One command of a document, the output shown for it, and the exit status that it is to have."""

    text: str
    line: int
    shown: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        found = EXIT.search(self.text)
        return int(found[1]) if found else 0


@dataclass
class Block:
    """One fenced block. `excuse`: why it is not run, None if it is. `file`: the file that holds it, if one does."""

    language: str
    body: str
    line: int
    excuse: str | None
    file: str | None

    def commands(self) -> list[Command]:
        found: list[Command] = []
        for number, line in enumerate(self.body.splitlines(), self.line + 1):
            if line.startswith("$ "):
                found.append(Command(line[2:], number))
            elif line.startswith("> "):
                found[-1].text += "\n" + line[2:]
            elif line.strip():
                assert found, f"line {number} is output of no command"
                found[-1].shown.append(line)
        return found


def blocks(document: Path) -> list[Block]:
    text, found = document.read_text(), []
    for fence in FENCE.finditer(text):
        excuse = NOT_RUN.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 1
        file = FILE.search(text[: fence.start()])
        found.append(
            Block(
                fence[1],
                fence[2],
                line,
                excuse=excuse[1].strip() if excuse else None,
                file=file[1].strip() if file else None,
            )
        )
    return found


def runnable(language: str) -> list[tuple[Path, Block]]:
    """All blocks of the language that are not excused."""
    return [
        (document, block)
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language == language and block.excuse is None
    ]


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@dataclass
class Pool:
    """A running `leasehold up`, and the environment in which commands find it, by the program of a fork server."""

    data: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def pool(leasehold: Path) -> Iterator[Pool]:
    data = embedded.scratch("leasehold-documents-")
    programs = Path(sys.executable).parent
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD_")}
    environment = {
        **kept,
        "PATH": f"{programs}:{kept['PATH']}",
        "LEASEHOLD_DATA": str(data),
        "LEASEHOLD_TIMING_SYNC": "1",
        "LEASEHOLD_BOT_DRAIN_SECONDS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    up = subprocess.Popen(
        [leasehold, "up", "--json", "--port", "0", "--bots", "2", "--assigners", "1"],
        cwd=data,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stdout is not None
        assert up.stdout.readline(), f"`leasehold up` ended with {up.wait()}"
        yield Pool(data, {**environment, "PATH": f"{leasehold.parent}:{environment['PATH']}"})
        up.send_signal(signal.SIGINT)
        assert up.wait(STARTS_WITHIN) == 130
    finally:
        up.kill()
        up.wait()
        for pid in processes_of(data):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not processes_of(data), 60.0)
        shutil.rmtree(data)


def workplace(directory: Path) -> Path:
    """A directory that looks like the repository with its virtual environment, in which commands may leave files."""
    for entry in ("ops", "Makefile", "README.md"):
        (directory / entry).symlink_to(ROOT / entry)
    (directory / ".venv").mkdir()
    (directory / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return directory


def run_all(commands: list[Command], environment: dict[str, str], directory: Path) -> list[str]:
    """Run the commands one after another in one shell; returns what is wrong."""
    notes = directory / ".notes"
    notes.mkdir()
    lines = ["set -o pipefail"]
    for number, command in enumerate(commands):
        (notes / f"{number}.sh").write_text(command.text + "\n")
        lines.append(
            f". {notes}/{number}.sh > {notes}/{number}.out 2>&1 < /dev/null; echo $? > {notes}/{number}.status"
        )
    (notes / "all.sh").write_text("\n".join(lines) + "\n")
    subprocess.run(["bash", notes / "all.sh"], cwd=directory, env=environment, check=False, timeout=RUNS_WITHIN)
    wrong = []
    for number, command in enumerate(commands):
        status, output = notes / f"{number}.status", (notes / f"{number}.out").read_text(errors="replace")
        if not status.exists() or int(status.read_text()) != command.status:
            ended = status.read_text().strip() if status.exists() else "nothing"
            wrong.append(f"line {command.line}: exit {ended}, not {command.status}: {command.text}\n{output}")
            continue
        printed = " ".join(output.split())
        for line in command.shown:
            pattern = ".*?".join(re.escape(part) for part in " ".join(line.split()).split("…"))
            if not re.search(pattern, printed):
                wrong.append(f"line {command.line}: {command.text}\ndoes not print {line!r}:\n{output}")
    return wrong


@pytest.mark.timeout(RUNS_WITHIN + STARTS_WITHIN)
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(each, marks=[] if each.name in READ_FIRST else pytest.mark.long, id=name(each))
        for each in DOCUMENTS
    ],
)
def test_every_command_that_a_document_shows_does_what_it_shows(document: Path, pool: Pool, tmp_path: Path) -> None:
    commands = [
        command
        for block in blocks(document)
        if block.language == "console" and block.excuse is None
        for command in block.commands()
    ]
    directory = workplace(tmp_path)
    for block in blocks(document):
        if block.file is not None:
            (directory / block.file).write_text(block.body)
    wrong = run_all(commands, pool.environment, directory) if commands else []
    assert not wrong, f"{name(document)}:\n" + "\n\n".join(wrong)


#: Appended to the app of the page: the process of the first attempt dies between its two effects.
DYING = """
import signal

_step = step


def step(connection, number):
    if number == 2 and leasehold.current().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(connection, number)
"""


@pytest.mark.timeout(RUNS_WITHIN + STARTS_WITHIN)
def test_effects_that_happen_once_do_so_although_an_attempt_dies_between_them(pool: Pool, tmp_path: Path) -> None:
    found, directory = blocks(FOLDER / "tasks.md"), workplace(tmp_path)
    for block in found:
        if block.file is not None:
            (directory / block.file).write_text(block.body + (DYING if block.file == "till.py" else ""))
    (shown,) = [block for block in found if block.language == "console" and "till:pool" in block.body]
    with embedded.serve(pool.data) as server:
        with psycopg.connect(libpq_url(server.url), autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS public.payments, public.receipts, public.task_steps")
            wrong = run_all(shown.commands(), pool.environment, directory)
            assert not wrong, "\n\n".join(wrong)
            effects = [
                connection.execute(f"SELECT * FROM public.{table}").fetchall() for table in ("payments", "receipts")
            ]
            steps = connection.execute(
                "SELECT s.done, j.state, j.attempts"
                " FROM public.task_steps s JOIN leasehold.jobs j ON j.public_id = s.job"
            ).fetchall()
            connection.execute("DROP TABLE public.payments, public.receipts, public.task_steps")
    assert effects == [[(7, 1250)], [(7,)]]
    assert steps == [(2, "succeeded", 2)]


def test_every_configuration_that_a_document_shows_passes_the_check(tmp_path: Path) -> None:
    found = runnable("toml")
    assert found
    for number, (document, block) in enumerate(found):
        (file := tmp_path / f"{number}.toml").write_text(block.body)
        try:
            loading.load(file, Spec if "[[load]]" in block.body else sections(), {})
        except BadInput as error:
            pytest.fail(f"{name(document)}, line {block.line}: {error}")


@pytest.mark.timeout(STARTS_WITHIN + 60.0)
def test_every_statement_that_a_document_shows_runs(pool: Pool) -> None:
    found = runnable("sql")
    assert found
    with embedded.serve(pool.data) as server:
        for document, block in found:
            with psycopg.connect(libpq_url(server.url), autocommit=True) as connection:
                try:
                    connection.execute(block.body.encode())
                except psycopg.Error as error:
                    pytest.fail(f"{name(document)}, line {block.line}: {error}")


def test_every_json_that_a_document_shows_can_be_read() -> None:
    for document, block in runnable("json"):
        try:
            json.loads(block.body)
        except ValueError as error:
            pytest.fail(f"{name(document)}, line {block.line}: {error}")


def test_every_block_of_a_document_has_a_known_language_and_every_excuse_a_reason() -> None:
    for document in DOCUMENTS:
        assert document.read_text().count("\n```") % 2 == 0, f"{name(document)}: a block does not end"
        for block in blocks(document):
            where = f"{name(document)}, line {block.line}"
            assert block.language in LANGUAGES, f"{where}: ```{block.language} is none of {sorted(LANGUAGES)}"
            assert block.language != "text" or "\n$ " not in f"\n{block.body}", (
                f"{where}: commands belong in ```console"
            )
            assert block.excuse is None or len(block.excuse.split()) > 2, f"{where}: say why the block is not run"
            assert block.language != "python" or block.file or block.excuse, f"{where}: say which file holds the block"


def test_every_link_between_documents_leads_to_a_file() -> None:
    for document in DOCUMENTS:
        for target in LINK.findall(document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{name(document)}: {target} is not there"


def test_the_readme_is_short_and_links_every_document() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_bytes()) <= README_BYTES
    linked = {(ROOT / target).resolve() for target in LINK.findall(readme.read_text()) if "://" not in target}
    missing = [name(document) for document in FOLDER.glob("*.md") if document.resolve() not in linked]
    assert not missing, f"README.md links none of {missing}"
